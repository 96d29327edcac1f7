"""Which code of a script can be reached from its start: by name, and rather too much than too little.

What is found only at run time, as a function in a module's `__dict__`, is not seen.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import re
from collections.abc import Sequence

from paceline.checks.source import Definition, Source, is_definition

_REGISTERING = re.compile(r"regist|command|hydra|main|fire|click|route|hook|plugin|task|^(?-i:[A-Z][A-Z_]+)\b", re.I)
"""Decorators of imported modules after which a definition may be called by a name that isn't seen."""
_NEVER = {"TYPE_CHECKING", "typing.TYPE_CHECKING", "sys.platform == 'win32'", "os.name == 'nt'"}


@dataclasses.dataclass
class _Unit:
    """A module's or a definition's own code, without that of the definitions inside it."""

    source: Source
    definition: Definition | None
    outer: _Unit | None
    nodes: list[ast.AST] = dataclasses.field(default_factory=list[ast.AST])
    mentions: set[str] = dataclasses.field(default_factory=set[str])
    is_live: bool = False


def find_live(sources: Sequence[Source]) -> None:
    """Fills `live` of each source. `sources`: the script first; only its own `__main__` block runs."""
    units = [unit for index, source in enumerate(sources) for unit in _split(source, is_main=index == 0)]
    inside: dict[int, list[_Unit]] = collections.defaultdict(list)
    called: dict[str, list[_Unit]] = collections.defaultdict(list)
    for unit in units:
        if unit.outer is not None:
            inside[id(unit.outer)].append(unit)
        for key in _keys(unit):
            called[key].append(unit)
    mentioned: set[str] = set()
    reached = [unit for unit in units if unit.definition is None]
    while reached:
        unit = reached.pop()
        if unit.is_live:
            continue
        unit.is_live = True
        unit.source.live.update(unit.nodes)
        new = unit.mentions - mentioned
        mentioned |= new
        candidates = [*inside[id(unit)], *(other for key in new for other in called.get(key, ()))]
        reached += [other for other in candidates if not other.is_live and _is_reached(other, mentioned)]


def _split(source: Source, *, is_main: bool) -> list[_Unit]:
    top = _Unit(source, None, None)
    units = [top]
    unit_of: dict[ast.AST, _Unit | None] = {source.tree: top}
    for node in source.nodes:
        outer = unit_of[node] if node is source.tree else unit_of[source.parents[node]]
        parent = source.parents.get(node)
        if outer is not None and isinstance(parent, ast.If) and node in parent.body and _is_dead(parent.test, is_main):
            outer = None
        if outer is None:
            unit_of[node] = None
            continue
        # Decorators and bases run where the definition stands, but say nothing without it.
        unit = outer
        if is_definition(node):
            unit = _Unit(source, node, outer)
            units.append(unit)
        unit_of[node] = unit
        unit.nodes.append(node)
        unit.mentions |= _mentions(source, node)
    return units


def _is_dead(test: ast.expr, is_main: bool) -> bool:
    """A block for the type checker, for Windows, or for a module that is started instead of imported."""
    text = ast.unparse(test)
    return text in _NEVER or (not is_main and text == "__name__ == '__main__'")


def _mentions(source: Source, node: ast.AST) -> set[str]:
    """What a node may mean: a name of this file, a dotted name, an object's attribute, or a name in quotes."""
    dotted = source.resolve(node)
    same = f"{dotted}.{dotted.rpartition('.')[2]}"  # a module and a function in it are often called the same
    if isinstance(node, ast.Name):
        starred = {source.program.follow(f"{star}.{node.id}") for star in source.stars}
        return {f"{source.module}:{node.id}", dotted, same, *starred}
    if isinstance(node, ast.Attribute):
        return {f".{node.attr}", dotted, same}
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        statement = source.statement_of(node)
        is_export = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__"
        return set() if is_export else {f"'{node.value}"}  # getattr(trainer, "fit")
    return set()


def _keys(unit: _Unit) -> set[str]:
    """The mentions that reach a definition, once the code around it runs."""
    if unit.definition is None or unit.outer is None:
        return set()
    name = unit.definition.name
    if isinstance(unit.outer.definition, ast.ClassDef):
        return {f"'{name}", f".{name}"}
    return {f"'{name}", f"{unit.source.module}:{name}", f"{unit.source.module}.{name}"}


def _is_reached(unit: _Unit, mentioned: set[str]) -> bool:
    definition, outer = unit.definition, unit.outer
    if definition is None or outer is None:
        return True
    if not outer.is_live:
        return False
    if not mentioned.isdisjoint(_keys(unit)):
        return True
    if isinstance(outer.definition, ast.ClassDef):
        # What a class inherits from elsewhere may call any of its methods.
        return definition.name.startswith("__") or bool(outer.definition.bases)
    is_main = unit.source is unit.source.program.main
    return any(is_main or _REGISTERING.search(ast.unparse(one)) for one in definition.decorator_list)
