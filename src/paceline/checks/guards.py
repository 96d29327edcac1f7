"""Which ranks run a piece of code: what its conditions say of ranks and of world sizes."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Literal

from paceline.checks.program import Program, Site, Value
from paceline.checks.ranks import RANK_VARIABLES, Ranks, Scope
from paceline.checks.source import (
    Function,
    Source,
    always_leaves,
    constant_of,
    is_function,
    last_word,
    parameters_of,
)

_DISTRIBUTED = re.compile(
    r"^_?(is_|use_|using_|enable_|do_|has_)?(ddp|dist|distribut(ed|ion)|multi_?(gpus?|nodes?|process(ing)?)"
    r"|multiprocessing_distributed|initialized|dist_(avail|on|init|enabled)\w*|distributed_\w*|ddp_\w*|torchrun)$",
    re.I,
)
_MAIN = re.compile(
    r"^_?(is_|on_|am_)?(global_|world_|local_)?"
    r"((main|master|primary|chief)(_?(process|rank|node|gpu|worker|proc))|rank_?(zero|0)|(process_|global_|local_)zero)$"
    r"|^_?(is|on|am)_(main|master|primary|chief|rank_?(zero|0)|global_zero|local_zero|world_process_zero)$"
    r"|^((should|is|do)_(save|saver|log)(_\w+)?|save_to_disk)$",
    re.I,
)
_WRITER = re.compile(r"logger|writer|saver|wandb|tensorboard|(^|_)tb($|_)", re.I)
"""What most often only the first rank has."""
_OPTIONS = re.compile(r"arg|opt|cfg|conf|hparam|hps|flags|params", re.I)
_HOST = re.compile(r"(node|machine|host|group)_?(id|idx|index|rank)$", re.I)
_FIRST = re.compile(r"(zero|main|master|rank0|process|local)\w*_first$", re.I)
_MAIN_DECORATOR = re.compile(r"(rank_?zero|rank_?0|(main|master|primary)(_?process)?)(_(only|first))?$", re.I)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Who:
    """The ranks that pass a condition."""

    kind: Literal["one", "others", "single", "many"]
    """One rank; all but that one; all ranks, but only in a run of one process (or nobody ever); all, in any other."""
    scope: Scope = "run"
    """Of the whole run, or of each host."""
    is_sure: bool = True
    """The condition says so, and not only its name."""
    where: Value | None = None
    """What is compared or called there."""


_OPPOSITE: dict[str, Literal["one", "others", "single", "many"]] = {
    "one": "others",
    "others": "one",
    "single": "many",
    "many": "single",
}


class Guards(Ranks):
    """Answers for one program."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._asked: set[ast.AST] = set()
        self._known: dict[tuple[ast.AST, bool], Who | None] = {}
        self._callers: dict[ast.AST, Who | None] = {}

    # Conditions

    def who(self, source: Source, test: ast.expr, *, truth: bool = True) -> Who | None:
        """Who goes on where this condition is true, or where it is false."""
        key = (test, truth)
        if key not in self._known:
            if test in self._asked:
                return None
            self._asked.add(test)
            self._known[key] = self._who(source, test, truth)
            self._asked.discard(test)
        return self._known[key]

    def _who(self, source: Source, test: ast.expr, truth: bool) -> Who | None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.who(source, test.operand, truth=not truth)
        if isinstance(test, ast.BoolOp):
            parts = [self.who(source, part, truth=truth) for part in test.values]
            if isinstance(test.op, ast.And) is not truth:
                return _any_of(parts)
            found = _all_of(parts)
            is_on_first_host = any(isinstance(part, ast.Compare) and _is_first_host(part) for part in test.values)
            return dataclasses.replace(found, scope="run") if found is not None and is_on_first_host else found
        found = self._who_compares(source, test) if isinstance(test, ast.Compare) else self._who_is(source, test)
        return found if truth or found is None else dataclasses.replace(found, kind=_OPPOSITE[found.kind])

    def _who_compares(self, source: Source, test: ast.Compare) -> Who | None:
        if len(test.ops) != 1:
            return None
        left, operator, right = test.left, test.ops[0], test.comparators[0]
        if isinstance(operator, ast.In | ast.NotIn) and isinstance(constant_of(left), str):
            is_there = isinstance(operator, ast.In)
            if source.resolve(right) == "os.environ" and constant_of(left) in (*RANK_VARIABLES, "WORLD_SIZE"):
                return Who(kind="many" if is_there else "single")
            return None
        if constant_of(left) is not None:
            left, right = right, left
        if isinstance(operator, ast.Is | ast.IsNot):
            return self._who_is_none(source, left, is_none=isinstance(operator, ast.Is))
        scope = self.rank_scope(source, left)
        if scope is not None:
            kind = self._compared_rank(source, operator, right)
            return Who(kind=kind, scope=scope, where=Value(source, left)) if kind else None
        compared = left.left if isinstance(left, ast.BinOp) else left
        if last_word(compared).lower().endswith("rank") and isinstance(operator, ast.Eq):
            return Who(kind="one", is_sure=False)  # of a group, as in tensor parallel training
        number = constant_of(right)
        if self.is_count(source, left) and number in (0, 1, 2):
            is_one = isinstance(operator, ast.Eq | ast.LtE | ast.Lt)
            return Who(kind="single" if is_one else "many")
        return None

    def _compared_rank(
        self, source: Source, operator: ast.cmpop, right: ast.expr
    ) -> Literal["one", "others", "single", "many"] | None:
        if isinstance(operator, ast.In | ast.NotIn):
            values = [constant_of(part) for part in getattr(right, "elts", [])]
            is_first = bool(values) and set(values) <= {-1, 0, None} and 0 in values
            return None if not is_first else "one" if isinstance(operator, ast.In) else "others"
        number = constant_of(right)
        if number is None:
            numbers = [constant_of(node) for _, node in self.program.origins(source, right)]
            number = numbers[0] if numbers else None
        if number == -1 or (number == 0 and isinstance(operator, ast.Lt | ast.GtE)):
            return "single" if isinstance(operator, ast.Eq | ast.Lt | ast.LtE) else "many"
        if isinstance(operator, ast.Eq) or (number, type(operator)) in ((1, ast.Lt), (0, ast.LtE)):
            return "one"
        is_other = isinstance(operator, ast.NotEq) or (number, type(operator)) in ((0, ast.Gt), (1, ast.GtE))
        return "others" if is_other else None

    def _who_is_none(self, source: Source, name: ast.expr, *, is_none: bool) -> Who | None:
        if self.rank_scope(source, name) is not None:
            return Who(kind="single" if is_none else "many")
        if all(_is_none(node) for _, node in self.program.origins(source, name)):
            return Who(kind="many" if is_none else "single")
        who = self._who_has(source, name)
        if who is None and _WRITER.search(last_word(name)):
            who = Who(kind="one", is_sure=False)
        return who if who is None or not is_none else dataclasses.replace(who, kind=_OPPOSITE[who.kind])

    def _who_has(self, source: Source, name: ast.expr, depth: int = 4) -> Who | None:
        """Who has a value in a name that is None elsewhere, as a log writer that only rank 0 makes."""
        if not isinstance(name, ast.Name | ast.Attribute) or not depth:
            return None
        found: list[Who | None] = []
        for home, value in self.program.first_origins(source, name):
            if isinstance(value, ast.IfExp):
                found.append(self.who(home, value.test, truth=not _is_none(value.body)))
            elif isinstance(value, ast.Name | ast.Attribute):
                found.append(self._who_has(home, value, depth - 1))
            elif not _is_none(value):
                found.append(self.own_guard(home, value))
        who = _any_of(found)
        return who and dataclasses.replace(who, is_sure=False)

    def _who_is(self, source: Source, test: ast.expr) -> Who | None:
        """Of a name, an attribute or a call."""
        if isinstance(test, ast.Name) and (constant := self._constant_given(source, test)) is not None:
            return Who(kind="many" if constant else "single")
        if isinstance(test, ast.Call | ast.Name | ast.Attribute):
            others = [origin for origin in self.program.origins(source, test) if origin.node is not test]
            whos = [who for origin in others if (who := self.who(origin.source, origin.node)) is not None]
            if whos:
                found = min(whos, key=lambda who: who.scope == "host")
                # What is called is found where it is called, a variable where it is made.
                return dataclasses.replace(found, where=Value(source, test)) if isinstance(test, ast.Call) else found
        word = last_word(test)
        if not word:
            return None
        scope = self.rank_scope(source, test)
        if scope is not None and "rank" in word.lower():
            return Who(kind="others", scope=scope, where=Value(source, test))  # `if rank:`
        if _MAIN.match(word):
            is_sure = not word.lower().startswith(("should", "do", "is_save", "is_log"))
            scope = "host" if "local" in word.lower() else "run"
            return Who(kind="one", scope=scope, is_sure=is_sure, where=Value(source, test))
        if _DISTRIBUTED.match(word):
            return Who(kind="many")
        return self._who_has(source, test)

    def _constant_given(self, source: Source, name: ast.Name) -> bool | None:
        """What a name always is in a function, where all that give it something are seen to give the same."""
        function = source.function_of(name)
        if function is None:
            return None
        is_given = name.id in parameters_of(function) and bool(self.program.sites_of(function))
        nodes = (node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name.id)
        stores = [node for node in nodes if isinstance(node.ctx, ast.Store)]
        if len(stores) != len(source.assigned.get((function, name.id), [])) or not (stores or is_given):
            return None  # a loop or `+=` gives it values, too; or it isn't the function's
        origins = [node for _, node in self.program.origins(source, name)]
        sides = {bool(node.value) for node in origins if isinstance(node, ast.Constant)}
        return sides.pop() if len(sides) == 1 and all(isinstance(node, ast.Constant) for node in origins) else None

    # Places

    def conditions(self, source: Source, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
        """The conditions under which a node runs, inside its function: each with the value that it must have."""
        child = node
        for parent in source.ancestors(node):
            if isinstance(parent, ast.If | ast.IfExp | ast.While):
                if child is not parent.test:
                    body = parent.body if isinstance(parent.body, list) else [parent.body]
                    yield parent.test, child in body
            elif isinstance(parent, ast.BoolOp) and child in parent.values:
                earlier = parent.values[: parent.values.index(child)]  # type: ignore[arg-type]
                yield from ((part, isinstance(parent.op, ast.And)) for part in earlier)
            yield from _left_before(source, child)
            if is_function(parent) or isinstance(parent, ast.Lambda):
                return
            child = parent

    def kinds(self, source: Source, node: ast.AST) -> set[str]:
        """All that the conditions of a node, inside its function, say of ranks."""
        whos = [self.who(source, test, truth=truth) for test, truth in self.conditions(source, node)]
        return {who.kind for who in whos if who is not None}

    def own_guard(self, source: Source, node: ast.AST) -> Who | None:
        """Who runs a node, by the conditions inside its function."""
        return _all_of([self.who(source, test, truth=truth) for test, truth in self.conditions(source, node)])

    def guard(self, source: Source, node: ast.AST) -> Who | None:
        """Who runs a node, by its own conditions, or by those of all the places that call its function."""
        own = self.own_guard(source, node)
        if own is not None and own.kind != "many":
            return own
        blocks = (parent for parent in source.ancestors(node) if isinstance(parent, ast.With))
        if any(_FIRST.search(last_word(item.context_expr)) for block in blocks for item in block.items):
            return Who(kind="one", is_sure=False)  # the others come later, and find what the first has left
        function = source.function_of(node)
        if function is None:
            return own
        if function not in self._callers:
            self._callers[function] = None  # while it is asked: functions may call each other
            self._callers[function] = self._who_calls(function)
        return self._callers[function] or own

    def _who_calls(self, function: Function) -> Who | None:
        """Who runs a function, if none of the known places that call it is for all ranks."""
        if any(_MAIN_DECORATOR.search(last_word(one)) for one in function.decorator_list):
            return Who(kind="one")
        sites = [
            site for site in self.program.callers_of(function) if site.source.function_of(site.node) is not function
        ]
        found = [self.guard(site.source, site.node) or self._who_made(site, function) for site in sites]
        return _any_of(found) if found and all(who and who.kind != "many" for who in found) else None

    def _who_made(self, site: Site, function: Function) -> Who | None:
        """Who has an object with this method, where others have one that does nothing."""
        call = site.node.func if isinstance(site.node, ast.Call) else None
        if not isinstance(call, ast.Attribute) or not isinstance(call.value, ast.Name | ast.Attribute):
            return None
        owners: list[Value] = []
        for source, node in self.program.first_origins(site.source, call.value):
            found = self.program.find_definition(source, node.func) if isinstance(node, ast.Call) else None
            if found is not None and function in found[1].body:
                owners.append(Value(source, node))
        who = _any_of([self.own_guard(*owner) for owner in owners])
        return who and dataclasses.replace(who, is_sure=False)

    def _is_option(self, flag: ast.Name | ast.Attribute) -> bool:
        """The command line or a configuration sets it."""
        holder = last_word(flag.value) if isinstance(flag, ast.Attribute) else ""
        return last_word(flag) in self.program.arguments or bool(_OPTIONS.search(holder))

    def hangs_on_flag(self, source: Source, node: ast.AST, depth: int = 2) -> bool:
        """Whether a node, or the places that call its function, depend on a flag that may well be about ranks.

        What the command line sets is not: it is the same on all ranks.
        """
        for test, truth in self.conditions(source, node):
            parts = test.values if isinstance(test, ast.BoolOp) else [test]
            parts = [part.operand if isinstance(part, ast.UnaryOp) else part for part in parts]
            flags = [part for part in parts if isinstance(part, ast.Name | ast.Attribute)]
            unknown = [flag for flag in flags if not self._is_option(flag)]
            if unknown and self.who(source, test, truth=truth) is None:
                return True
        function = source.function_of(node)
        sites = self.program.callers_of(function) if function is not None and depth else []
        return any(self.hangs_on_flag(site.source, site.node, depth - 1) for site in sites)

    def is_called(self, source: Source, node: ast.AST) -> bool:
        """Whether it is known who calls the function around a node, and that this is called, too."""
        function = source.function_of(node)
        return function is None or any(
            self._is_reached(*site[:2], {function}) for site in self.program.callers_of(function)
        )

    def _is_reached(self, source: Source, node: ast.AST, seen: set[Function]) -> bool:
        function = source.function_of(node)
        if function is None:
            return True
        if function.decorator_list and not isinstance(source.parents[function], ast.ClassDef):
            return True  # it may be registered somewhere
        if function in seen:
            return False
        sites = self.program.callers_of(function)
        return any(self._is_reached(site.source, site.node, {*seen, function}) for site in sites)


@functools.lru_cache(maxsize=1)
def guards_of(program: Program) -> Guards:
    """One for all rules, as they ask the same questions."""
    return Guards(program)


def _is_first_host(test: ast.Compare) -> bool:
    """`node_rank == 0`"""
    is_zero = isinstance(test.ops[0], ast.Eq) and constant_of(test.comparators[0]) == 0
    return is_zero and bool(_HOST.search(last_word(test.left)))


def _left_before(source: Source, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """The conditions that other ranks left this block by, above this statement."""
    block = source.block_of(node)
    for statement in block[: block.index(node)] if block and isinstance(node, ast.stmt) else []:
        if isinstance(statement, ast.If) and always_leaves(source, statement.body):
            yield statement.test, False
        elif isinstance(statement, ast.Assert) or (
            isinstance(statement, ast.If) and always_leaves(source, statement.orelse)
        ):
            yield statement.test, True


def _all_of(parts: list[Who | None]) -> Who | None:
    """Who passes all conditions: the one that says most."""
    found = [part for part in parts if part is not None]
    order = ("one", "single", "others", "many")
    return min(found, key=lambda who: (order.index(who.kind), not who.is_sure, who.scope == "host"), default=None)


def _any_of(parts: list[Who | None]) -> Who | None:
    """Who passes one of several conditions; a run of one process is left out, as it is not what is asked about."""
    several = [part for part in parts if part is None or part.kind != "single"]
    if not several:
        return parts[0] if parts else None
    ones = [part for part in several if part is not None and part.kind == "one"]
    if ones:
        widest = next((one for one in ones if one.scope == "host"), ones[0])
        is_sure = len(ones) == len(several) and all(one.is_sure for one in ones)
        return dataclasses.replace(widest, is_sure=is_sure)
    kinds = {part.kind if part is not None else None for part in several}
    return several[0] if len(kinds) == 1 else None


def _is_none(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Constant) and expression.value is None
