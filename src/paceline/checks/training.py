"""What a script trains with: its framework, its wrapped models and the loops in which it learns."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from typing import Literal

from paceline.checks.guards import guards_of
from paceline.checks.program import MAX_DEPTH, Program, Value
from paceline.checks.source import Function, Loop, Source, is_function, parameters_of

Wrapper = Literal["ddp", "fsdp"]

_FRAMEWORKS = {
    "accelerate": ("accelerate.Accelerator",),
    "lightning": ("lightning.", "pytorch_lightning.", "lightning_fabric."),
    "deepspeed": ("deepspeed.initialize", "deepspeed.init_distributed"),
    "horovod": ("horovod.",),
    "transformers": ("transformers.Trainer", "transformers.Seq2SeqTrainer", "trl."),
    "paceline": ("paceline.init",),
    "other": (
        *("composer.", "ray.train.", "colossalai.", "mmengine.", "mmcv.", "detectron2.", "ignite.", "fairseq."),
        *("fastai.", "torchft.", "megatron.", "catalyst.", "torchtitan.", "nanotron."),
    ),
}
"""What a script that uses one names, as the beginnings of dotted names."""
_DISTRIBUTED = (
    *("torch.distributed.init_process_group", "torch.distributed.device_mesh", "torch.distributed.init_device_mesh"),
    *("horovod.torch.init", "deepspeed.init", "torch.distributed.rpc"),
)
_GPU_COUNTS = ("torch.cuda.device_count", "torch.accelerator.device_count")
_UNCHANGED = {"to", "cuda", "cpu", "train", "eval", "half", "float", "bfloat16", "requires_grad_"}
"""Methods of a model that return it."""


def wrapper_named(name: str) -> Wrapper | None:
    """DistributedDataParallel in any of its places, apex's too; or FullyShardedDataParallel."""
    if not name.startswith(("torch.", "apex.", "fairscale.")):
        return None
    last = name.rpartition(".")[2]
    if last in ("FullyShardedDataParallel", "fully_shard"):
        return "fsdp"
    return "ddp" if last == "DistributedDataParallel" else None


def is_sampler(name: str) -> bool:
    return name.startswith("torch.utils.data") and name.endswith(".DistributedSampler")


def is_loader(name: str) -> bool:
    return name.startswith("torch.utils.data") and name.endswith(".DataLoader")


class Training:
    """Answers for one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        names = program.dotted_names
        self.frameworks = {
            framework for framework, marks in _FRAMEWORKS.items() if any(name.startswith(marks) for name in names)
        }
        self.wrappers = {wrapper for name in names if (wrapper := wrapper_named(name))}
        self.is_distributed = bool(
            self.frameworks or self.wrappers or any(name.startswith(_DISTRIBUTED) for name in names)
        )

    @property
    def is_plain(self) -> bool:
        """Distributed, and by PyTorch's own means: no framework does the rest."""
        return self.is_distributed and not self.frameworks

    @functools.cached_property
    def backwards(self) -> list[tuple[Source, ast.Call]]:
        """The live calls of `.backward()`."""
        return [
            (source, call)
            for source in self.program.sources
            for call in source.find(ast.Call)
            if isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
        ]

    @functools.cached_property
    def learning(self) -> set[ast.AST]:
        """The functions that call `.backward()`, themselves or through others."""
        found: set[ast.AST] = set()
        waiting = [(source, call) for source, call in self.backwards]
        while waiting:
            source, node = waiting.pop()
            function = source.function_of(node)
            if function is not None and function not in found:
                found.add(function)
                waiting += [(site.source, site.node) for site in self.program.sites_of(function)]
        return found

    def loops(self, source: Source) -> Iterator[Loop]:
        """The outermost live loops of each function in which the script learns."""
        for node in source.nodes:
            if not isinstance(node, ast.For | ast.AsyncFor | ast.While) or node not in source.live:
                continue
            if not self._is_in_loop(source, node) and self.learns_in(source, node):
                yield node

    def _is_in_loop(self, source: Source, node: ast.AST) -> bool:
        for parent in source.ancestors(node):
            if is_function(parent):
                return False
            if isinstance(parent, ast.For | ast.AsyncFor | ast.While):
                return True
        return False

    def learns_in(self, source: Source, node: ast.AST) -> bool:
        for call in ast.walk(node):
            if not isinstance(call, ast.Call):
                continue
            if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
                return True
            owned = self.program.find_function(source, call)
            if owned is not None and owned.function in self.learning:
                return True
        return False

    # Wrapped models

    def wrapper_of(self, source: Source, model: ast.expr, depth: int = MAX_DEPTH) -> Wrapper | None:
        """What a model is wrapped in, where this expression stands."""
        if depth < 0:
            return None
        if isinstance(model, ast.IfExp):
            branches = (model.body, model.orelse)
            if any(isinstance(branch, ast.Attribute) and branch.attr == "module" for branch in branches):
                return None
            return self._first_wrapper([Value(source, branch) for branch in branches], depth)
        if isinstance(model, ast.Call):
            return self._wrapper_of_call(source, model, depth)
        if isinstance(model, ast.Name | ast.Attribute):
            return self._first_wrapper(self._given_before(source, model), depth)
        return None

    def _wrapper_of_call(self, source: Source, call: ast.Call, depth: int) -> Wrapper | None:
        name = source.resolve(call.func)
        if (wrapper := wrapper_named(name)) is not None:
            return wrapper
        if name == "torch.compile" and call.args:
            return self.wrapper_of(source, call.args[0], depth - 1)
        if isinstance(call.func, ast.Attribute) and call.func.attr in _UNCHANGED:
            return self.wrapper_of(source, call.func.value, depth - 1)
        owned = self.program.find_function(source, call)
        if owned is None or owned.function.name == "__init__":
            return None
        return self._first_wrapper(self.program.returns_of(owned), depth)

    def _first_wrapper(self, values: Iterable[Value], depth: int) -> Wrapper | None:
        for source, node in values:
            if (wrapper := self.wrapper_of(source, node, depth - 1)) is not None:
                return wrapper
        return None

    def _given_before(self, source: Source, model: ast.Name | ast.Attribute) -> Iterator[Value]:
        """What a name may have been given when it is used here: in its own function, only by lines above."""
        if isinstance(model, ast.Attribute):
            yield from (v for v in self.program.first_origins(source, model) if v.node is not model)
            return
        scope: Function | None = source.function_of(model)
        here = scope
        while True:
            assigned = source.assigned.get((scope, model.id), [])
            if scope is here:
                assigned = [one for one in assigned if source.line_of(one.statement) < model.lineno]
            if assigned or scope is None or model.id in parameters_of(scope):
                break
            scope = source.function_of(scope)
        above = {model, *source.ancestors(model)}
        for one in reversed(assigned):
            if isinstance(one.value, ast.Attribute) and one.value.attr == "module":
                return
            yield Value(source, one.value)
            if scope is here and any(statement in above for statement in source.block_of(one.statement)):
                return  # whatever it was before, here it is this
        if scope is not None and model.id in parameters_of(scope):
            yield from self.program.given(source, scope, model.id)


@functools.lru_cache(maxsize=1)
def training_of(program: Program) -> Training:
    """One for all rules, as they ask the same questions."""
    return Training(program)


def rank_text(source: Source) -> str:
    """How this file can ask for the rank in the run, whoever has started it; also where it runs alone."""
    return _ask_group(source, "rank()", "get_rank()", alone=0)


def count_text(source: Source) -> str:
    """How this file can ask for the number of ranks, whoever has started it; also where it runs alone."""
    return _ask_group(source, "size()", "get_world_size()", alone=1)


def _ask_group(source: Source, of_horovod: str, of_torch: str, *, alone: int) -> str:
    """By whatever name the file has for Horovod or `torch.distributed`.

    The environment would not do: processes that a script starts itself have no RANK.
    """
    names = {full: alias for alias, full in source.names.items() if full in ("torch.distributed", "horovod.torch")}
    if "horovod.torch" in names:
        return f"{names['horovod.torch']}.{of_horovod}"
    module = names.get("torch.distributed", "torch.distributed")
    asked = f"{module}.{of_torch}"
    return asked if makes_group_always(source.program) else f"({asked} if {module}.is_initialized() else {alone})"


@functools.lru_cache(maxsize=1)
def makes_group_always(program: Program) -> bool:
    """Some call of `init_process_group` hangs on no condition, nor do the calls of the functions around it."""
    return any(
        source.resolve(call.func) == "torch.distributed.init_process_group" and _runs_always(source, call)
        for source in program.sources
        for call in source.find(ast.Call)
    )


def _runs_always(source: Source, node: ast.AST, depth: int = MAX_DEPTH) -> bool:
    conditions = [test for test, _ in guards_of(source.program).conditions(source, node)]
    if depth < 0 or any(not ast.unparse(test).startswith("__name__ ==") for test in conditions):
        return False
    function = source.function_of(node)
    sites = source.program.sites_of(function) if function is not None else []
    return function is None or (bool(sites) and all(_runs_always(one.source, one.node, depth - 1) for one in sites))


def main_text(source: Source, *, is_main: bool = True) -> str:
    """How this file can ask whether it is the first rank, or whether it isn't."""
    for target, one in source.all_assignments:
        is_made = isinstance(one.value, ast.Call) and source.resolve(one.value.func) == "accelerate.Accelerator"
        if is_made and isinstance(target, ast.Name):
            return f"{'' if is_main else 'not '}{target.id}.is_main_process"
    return f"{rank_text(source)} {'==' if is_main else '!='} 0"


LOCAL_RANK_TEXT = 'int(os.environ.get("LOCAL_RANK", 0))'


def gpu_count(source: Source, size: ast.expr) -> Value | None:
    """Where a number was read from this host's GPUs."""
    for origin in source.program.origins(source, size):
        if isinstance(origin.node, ast.Call) and origin.source.resolve(origin.node.func) in _GPU_COUNTS:
            return origin
    return None


def is_one_process_only(source: Source, node: ast.AST) -> bool:
    """Only a run of one process comes here."""
    who = guards_of(source.program).guard(source, node)
    return who is not None and who.kind == "single"
