"""What is a rank, and what is a number of ranks: by where a value comes from or, failing that, by its name."""

from __future__ import annotations

import ast
import re
from typing import Literal

from paceline.checks.program import Program
from paceline.checks.source import Source, environment_variable, last_word

Scope = Literal["run", "host"]

RANK_VARIABLES: dict[str, Scope] = {
    **dict.fromkeys(("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "GLOBAL_RANK"), "run"),
    **dict.fromkeys(("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"), "host"),
}
_RANK_OF_HOST = re.compile(r"^_?(get_)?(node_)?(\w*local_?rank|local_process_index|gpu_?(id|idx|index|no)?)$", re.I)
_RANK_OF_RUN = re.compile(
    r"^_?(get_)?((global|world|ddp|dist|my|cur|current|proc|process|mpi|worker)_)?(rank|rank_id|process_index)$", re.I
)
_COUNT = re.compile(
    r"^_?(get_)?((\w*_)?world_?size|n(um)?_?gpus?(_per_node)?|ngpus_per_node|gpu_num|num_processes|num_replicas|n?procs"
    r"|device_count|num_tasks|(n|num)_?(nodes?|machines?|hosts?))$",
    re.I,
)

_HOST_SIZE = re.compile(r"per_?(node|host|machine)|local|device_count|gpus?$", re.I)


class Ranks:
    """Answers for one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._scopes: dict[ast.AST, Scope | None] = {}

    def rank_scope(self, source: Source, expression: ast.expr) -> Scope | None:
        """Whether this is the rank in the whole run, the one on its host, or neither."""
        if expression not in self._scopes:
            self._scopes[expression] = None  # while it is asked: a value may be made from itself
            self._scopes[expression] = self._find_rank_scope(source, expression)
        return self._scopes[expression]

    def _find_rank_scope(self, source: Source, expression: ast.expr) -> Scope | None:
        if source.is_counter(expression):
            return None
        origins = self.program.origins(source, expression)
        found = {scope for origin in origins if (scope := self._rank_scope_of(*origin)) is not None}
        givers = (origin.source.function_of(origin.node) for origin in origins)
        if found and any(giver is not None and _RANK_OF_HOST.match(giver.name) for giver in givers):
            return "host"  # `get_local_rank()`, which falls back to the rank in the run
        if found == {"host"} or any(self.program.is_index(*origin) for origin in origins):
            return "host"
        word = last_word(expression)
        is_certain = all(self._rank_scope_of(*origin) for origin in origins)
        if found == {"run"} and (is_certain or not _RANK_OF_HOST.match(word)):
            return "run"
        if isinstance(expression, ast.Name | ast.Attribute | ast.Call | ast.Subscript) and word:
            if _RANK_OF_HOST.match(word):
                return "host"
            if _RANK_OF_RUN.match(word) and "group" not in word:
                return "run"
        return "run" if found else None

    def is_local_rank(self, source: Source, expression: ast.expr) -> bool:
        """It comes from the environment as the rank on the host."""
        return "host" in {self._rank_scope_of(*origin) for origin in self.program.origins(source, expression)}

    def is_surely_rank_of_run(self, source: Source, expression: ast.expr) -> bool:
        """By where it comes from, which is known everywhere."""
        return {self._rank_scope_of(*origin) for origin in self.program.origins(source, expression)} == {"run"}

    def _rank_scope_of(self, source: Source, node: ast.expr) -> Scope | None:
        """By what an expression does, not by what it is called."""
        if isinstance(node, ast.Call):
            name = source.resolve(node.func)
            if name in ("int", "str") and node.args:
                return self.rank_scope(source, node.args[0])
            variable = environment_variable(source, node)
            if variable is not None:
                return RANK_VARIABLES.get(variable)
            if name in ("torch.distributed.get_rank", "horovod.torch.rank") and not node.args and not node.keywords:
                return "run"
            if name in ("torch.distributed.get_node_local_rank", "horovod.torch.local_rank"):
                return "host"
        elif isinstance(node, ast.Subscript):
            return RANK_VARIABLES.get(environment_variable(source, node) or "")
        elif isinstance(node, ast.BinOp):
            sides = [self.rank_scope(source, side) for side in (node.left, node.right)]
            if isinstance(node.op, ast.Mod):
                return "host" if sides[0] and self._is_of_host(source, node.right) else None
            if isinstance(node.op, ast.Add) and any(isinstance(side, ast.BinOp) for side in (node.left, node.right)):
                return "run" if any(sides) else None  # node * gpus_per_node + gpu
        return None

    def _is_of_host(self, source: Source, number: ast.expr) -> bool:
        """Whether this is the number of GPUs, or of ranks, of one host."""
        origins = self.program.origins(source, number)
        return isinstance(number, ast.Constant) or any(_HOST_SIZE.search(last_word(node)) for _, node in origins)

    def is_count(self, source: Source, expression: ast.expr) -> bool:
        """Whether this is the number of ranks, or of GPUs."""
        if isinstance(expression, ast.Call) and source.resolve(expression.func) == "int" and expression.args:
            expression = expression.args[0]
        if environment_variable(source, expression) in ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
            return True
        if isinstance(expression, ast.Call) and source.resolve(expression.func) == "horovod.torch.size":
            return True
        return bool(_COUNT.match(last_word(expression)))
