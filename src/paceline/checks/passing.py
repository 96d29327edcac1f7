"""What a call passes to a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from paceline.checks.source import Function, Source, argument_of, parameters_of


def bind(
    source: Source, function: Function, arguments: Sequence[ast.expr | None], keywords: Sequence[ast.keyword] = ()
) -> dict[str, ast.expr]:
    """What each parameter of a function is given; a method's first one is its object."""
    names = parameters_of(function)
    if isinstance(source.parents.get(function), ast.ClassDef):
        is_static = any(source.resolve(one) == "staticmethod" for one in function.decorator_list)
        names = names if is_static else names[1:]
    given = {name: value for name, value in zip(names, arguments, strict=False) if value is not None}
    return {**given, **{keyword.arg: keyword.value for keyword in keywords if keyword.arg in names and keyword.arg}}


def may_give_more(node: ast.expr) -> bool:
    """The function is handed on, or called with `*` or `**`."""
    if not isinstance(node, ast.Call):
        return True
    return any(keyword.arg is None for keyword in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args)


def handed_over(source: Source, call: ast.Call) -> Iterator[tuple[ast.expr, list[ast.expr | None]]]:
    """Functions that a call runs in other processes, with what they are given there (None: the process's index)."""
    name = source.resolve(call.func)
    arguments = argument_of(call, "args", 1)
    parts: list[ast.expr | None] = [*arguments.elts] if isinstance(arguments, ast.Tuple) else []
    if name.endswith((".spawn", ".start_processes")) or name == "spawn":
        target = argument_of(call, "fn", 0)
        if target is not None:
            yield target, [None, *parts]
    elif name.endswith(("Process", "Thread")):
        target, arguments = argument_of(call, "target"), argument_of(call, "args")
        if target is not None:
            yield target, [*arguments.elts] if isinstance(arguments, ast.Tuple) else []
