"""A parsed file: its syntax tree with parents, names resolved through imports, lines with a part of them changed."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard, TypeVar

from paceline.checks.findings import Finding, Status

if TYPE_CHECKING:
    from paceline.checks.program import Program

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
NodeT = TypeVar("NodeT", bound=ast.AST)
Loop = ast.For | ast.AsyncFor | ast.While

# One object each for all places: they have no parent of their own.
_SHARED = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
_IGNORE = re.compile(r"#\s*paceline:\s*ignore(?:\[(?P<names>[\w\-, ]*)\])?")
_LEAVING_CALLS = {"exit", "quit", "sys.exit", "os._exit", "os.abort"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """A value that a name or an attribute is given somewhere."""

    value: ast.expr
    statement: ast.stmt
    index: int | None = None
    """Which part of the value, where several names are assigned at once."""


class Source:
    """One file of the script's. `program` is set when all files have been read."""

    program: Program

    def __init__(self, *, name: str, module: str, text: str, tree: ast.Module) -> None:
        """`name`: as findings write it; `module`: dotted, and unique among the script's files."""
        self.name = name
        self.module = module
        self.tree = tree
        self.lines = text.splitlines()
        self.names: dict[str, str] = {}
        """What import statements bind, with the full dotted name."""
        self.stars: list[str] = []
        """The project's modules of which everything is imported."""
        self.parents: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = list(self._walk_in_order())
        self._resolved: dict[ast.AST, str] = {}
        self.live: set[ast.AST] = set()
        """The nodes that can be reached from the script's start."""

    def _walk_in_order(self) -> Iterator[ast.AST]:
        stack: list[ast.AST] = [self.tree]
        while stack:
            node = stack.pop()
            yield node
            children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, _SHARED)]
            self.parents.update(dict.fromkeys(children, node))
            stack.extend(reversed(children))

    # What is where

    def find(self, *kinds: type[NodeT]) -> Iterator[NodeT]:
        """The live nodes of these kinds, from top to bottom."""
        return (node for node in self.nodes if isinstance(node, kinds) and node in self.live)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """From the parent upward to the module."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def function_of(self, node: ast.AST) -> Function | None:
        """The innermost function around a node."""
        return next((parent for parent in self.ancestors(node) if is_function(parent)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The innermost class around a node."""
        return next((parent for parent in self.ancestors(node) if isinstance(parent, ast.ClassDef)), None)

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that holds a node, which may be the node itself."""
        if isinstance(node, ast.stmt):
            return node
        return next(parent for parent in self.ancestors(node) if isinstance(parent, ast.stmt))

    def block_of(self, statement: ast.AST) -> list[ast.stmt]:
        """The statements among which this one stands; empty for what is none."""
        parent = self.parents.get(statement)
        if parent is None or not isinstance(statement, ast.stmt):
            return []
        for field in ("body", "orelse", "finalbody"):
            block: list[ast.stmt] = getattr(parent, field, [])
            if statement in block:
                return block
        return []

    def resolve(self, expression: ast.AST) -> str:
        """The dotted name, with imports replaced by what they import: `dist.barrier` is `torch.distributed.barrier`.

        Empty for what is no chain of names.
        """
        if expression not in self._resolved:
            parts: list[str] = []
            base = expression
            while isinstance(base, ast.Attribute):
                parts.append(base.attr)
                base = base.value
            dotted = ""
            if isinstance(base, ast.Name):
                dotted = self.program.follow(".".join([self.names.get(base.id, base.id), *reversed(parts)]))
            self._resolved[expression] = dotted
        return self._resolved[expression]

    @functools.cached_property
    def assigned(self) -> dict[tuple[ast.AST | None, str], list[Assignment]]:
        """What each name is given, by the function that assigns it (None: the module)."""
        found: dict[tuple[ast.AST | None, str], list[Assignment]] = {}
        for target, assignment in self.all_assignments:
            if isinstance(target, ast.Name):
                found.setdefault((self.function_of(target), target.id), []).append(assignment)
        return found

    @functools.cached_property
    def inner_functions(self) -> dict[tuple[Function, str], Function]:
        """The functions that stand in others, by the one around them and their name."""
        inner = [node for node in self.nodes if is_function(node) and not isinstance(self.parents[node], ast.ClassDef)]
        return {(around, node.name): node for node in inner if (around := self.function_of(node)) is not None}

    @functools.cached_property
    def _counters(self) -> set[tuple[ast.AST | None, str]]:
        loops = (node for node in self.nodes if isinstance(node, ast.For) and "range(" in ast.unparse(node.iter))
        return {(self.function_of(loop), loop.target.id) for loop in loops if isinstance(loop.target, ast.Name)}

    def is_counter(self, node: ast.AST) -> bool:
        """Whether this is the name of a loop over a range, in its function."""
        return isinstance(node, ast.Name) and (self.function_of(node), node.id) in self._counters

    def names_given(self, name: str) -> list[Assignment]:
        """All that a name is given, in any function."""
        return [one for (_, given), found in self.assigned.items() if given == name for one in found]

    @functools.cached_property
    def all_assignments(self) -> list[tuple[ast.expr, Assignment]]:
        """Every target with what it is given, from top to bottom."""
        return [pair for node in self.nodes for pair in self._assignments_of(node)]

    def _assignments_of(self, node: ast.AST) -> Iterator[tuple[ast.expr, Assignment]]:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            return
        statement = self.statement_of(node)
        for target in targets:
            if not isinstance(target, ast.Tuple | ast.List):
                yield target, Assignment(value=value, statement=statement)
                continue
            parts = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            for index, inner in enumerate(target.elts):
                if len(parts) == len(target.elts):
                    yield inner, Assignment(value=parts[index], statement=statement)
                else:
                    yield inner, Assignment(value=value, statement=statement, index=index)

    # What is written in findings

    def line_of(self, node: ast.AST) -> int:
        return getattr(node, "lineno", 1)

    def at(self, node: ast.AST) -> str:
        """`train.py:41`"""
        return f"{self.name}:{self.line_of(node)}"

    def replaced(self, *changes: tuple[ast.expr, str]) -> str:
        """The lines from the first of these nodes to the last, with each replaced by a text.

        The nodes must not overlap.
        """
        in_order = sorted(changes, key=lambda change: (change[0].lineno, change[0].col_offset))
        first, last = in_order[0][0], max((node for node, _ in in_order), key=lambda node: node.end_lineno or 0)
        lines = [line.encode() for line in self.lines[first.lineno - 1 : last.end_lineno]]
        for node, text in reversed(in_order):
            # Columns are counted in bytes of UTF-8.
            start, end = node.lineno - first.lineno, (node.end_lineno or 0) - first.lineno
            lines[start : end + 1] = [
                lines[start][: node.col_offset] + text.encode() + lines[end][node.end_col_offset :],
            ] + [b""] * (end - start)
        return " ".join(line.decode(errors="replace").strip() for line in lines if line.strip())

    def with_keyword(self, call: ast.Call, name: str, value: str) -> str:
        """The call's line with one more argument, or with this one changed."""
        present = next((keyword for keyword in call.keywords if keyword.arg == name), None)
        if present is not None:
            return self.replaced((present.value, value))
        inside = ast.unparse(call)[:-1]
        return self.replaced((call, f"{inside}{'' if inside.endswith('(') else ', '}{name}={value})"))

    def only_if(self, condition: str, node: ast.AST) -> str:
        """The node's statement, on one line, under a condition."""
        return f"if {condition}: {ast.unparse(self.statement_of(node))}"

    def finding(self, check: str, status: Status, node: ast.AST, text: str, remedy: str = "") -> Finding:
        """A finding on the line where the node begins."""
        needed = [name for name in ("os.environ", "torch.") if re.search(rf"(?<![\w.]){re.escape(name)}", remedy)]
        missing = [module for name in needed if (module := name.partition(".")[0]) not in self.names]
        if missing:
            remedy += f"  # with import {', '.join(missing)}"
        return Finding(check=check, status=status, where=self.at(node), text=text, remedy=remedy)

    @functools.cached_property
    def ignored(self) -> dict[int, set[str] | None]:
        """By line, the checks that a comment turns off; None: all. A comment counts for its whole statement."""
        comments = {number: match for number, line in enumerate(self.lines, 1) if (match := _IGNORE.search(line))}
        if not comments:
            return {}
        found: dict[int, set[str] | None] = {}
        spans = [_own_lines(node) for node in self.nodes if isinstance(node, ast.stmt)]
        for number, match in comments.items():
            names = None if match["names"] is None else {name.strip() for name in match["names"].split(",")}
            around = [span for span in spans if number in span]
            for line in min(around, key=len, default=range(number, number + 1)):
                found[line] = names
        return found

    def ignores(self, line: int, check: str) -> bool:
        return line in self.ignored and ((names := self.ignored[line]) is None or check in names)


def _own_lines(statement: ast.stmt) -> range:
    """The lines of a statement, without those of the block below it."""
    body: list[ast.stmt] = getattr(statement, "body", [])
    end = body[0].lineno if body else (statement.end_lineno or statement.lineno) + 1
    return range(statement.lineno, max(end, statement.lineno + 1))


def is_function(node: ast.AST) -> TypeGuard[Function]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def is_definition(node: ast.AST) -> TypeGuard[Definition]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def parameters_of(function: Function) -> list[str]:
    """Those that can be given by position, in order, then the others."""
    arguments = function.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def argument_of(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """What a call passes under this name, or at this position."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    before = call.args[: (position or 0) + 1]
    if position is None or len(before) <= position or any(isinstance(given, ast.Starred) for given in before):
        return None
    return call.args[position]


def constant_of(expression: ast.AST | None) -> object:
    """The value of a literal; a negative number counts as one. None for everything else."""
    if isinstance(expression, ast.Constant):
        return expression.value
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub):
        value = constant_of(expression.operand)
        return -value if isinstance(value, int | float) else None
    return None


def last_word(expression: ast.AST) -> str:
    """The name by which a person calls it: `rank` of `args.rank`, `rank`, `get.rank()` and `options["rank"]`; else
    empty."""
    if isinstance(expression, ast.Call):
        expression = expression.func
    if isinstance(expression, ast.Subscript):
        key = constant_of(expression.slice)
        return key if isinstance(key, str) else ""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def environment_variable(source: Source, expression: ast.expr) -> str | None:
    """`RANK` of `os.environ["RANK"]`, of `os.environ.get("RANK", 0)` and of `os.getenv("RANK")`."""
    if isinstance(expression, ast.Subscript) and source.resolve(expression.value) == "os.environ":
        name = constant_of(expression.slice)
    elif isinstance(expression, ast.Call) and source.resolve(expression.func) in ("os.environ.get", "os.getenv"):
        name = constant_of(argument_of(expression, "key", 0))
    else:
        return None
    return name if isinstance(name, str) else None


def always_leaves(source: Source, block: list[ast.stmt]) -> bool:
    """Nothing below this block is reached once it has been entered."""
    last = block[-1] if block else None
    if isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break):
        return True
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return source.resolve(last.value.func) in _LEAVING_CALLS
    return isinstance(last, ast.If) and always_leaves(source, last.body) and always_leaves(source, last.orelse)
