"""All files of a script together: what is defined where, who calls whom, and where a value comes from.

Everything is found by names; nothing is executed. Where a name may mean several things, all of them are given.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.checks.passing import bind, handed_over, may_give_more
from paceline.checks.reach import find_live
from paceline.checks.source import (
    Assignment,
    Definition,
    Function,
    Source,
    argument_of,
    constant_of,
    is_definition,
    is_function,
    last_word,
    parameters_of,
)

MAX_DEPTH = 6
"""How many assignments and calls a value is followed back through."""

# An object's method of one of these names is most often not the script's own.
_COMMON_METHODS = {
    *(name for kind in (dict, list, set, str, bytes) for name in dir(kind)),
    *("step", "backward", "zero_grad", "state_dict", "load_state_dict", "to", "cuda", "cpu", "train", "eval", "item"),
    *("parameters", "forward", "close", "write", "read", "open", "mean", "sum", "reduce", "start", "run", "log", "put"),
}


class Value(NamedTuple):
    """An expression, and the file it stands in."""

    source: Source
    node: ast.expr


class Owned(NamedTuple):
    """A function, and the file it stands in."""

    source: Source
    function: Function


class Site(NamedTuple):
    """A place where a function is called, or handed on to be called."""

    source: Source
    node: ast.expr
    given: dict[str, ast.expr]
    """What is passed, by parameter."""


class Program:
    """The script and its modules."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """`sources`: the script first."""
        self.sources = tuple(sources)
        self.main = self.sources[0]
        self.modules = {source.module: source for source in self.sources}
        self.defined: dict[str, tuple[Source, Definition]] = {}
        """By dotted name: functions and classes of modules, methods of classes."""
        for source in self.sources:
            source.program = self
            for node in source.nodes:
                if is_definition(node):
                    self.defined.setdefault(_dotted(source, node), (source, node))
        self._known_origins: dict[ast.expr, list[Value]] = {}
        self._known_functions: dict[ast.Call, Owned | None] = {}
        find_live(self.sources)

    def follow(self, dotted: str) -> str:
        """A name that a module of the project has only imported itself, as that module knows it."""
        for _ in range(MAX_DEPTH):
            module, _, name = dotted.rpartition(".")
            source = self.modules.get(module)
            if source is None or dotted in self.modules or dotted in self.defined:
                break
            starred = (one for star in source.stars if (one := f"{star}.{name}") in self.defined)
            following = source.names.get(name) or next(starred, None)
            if following is None:
                break
            dotted = following
        return dotted

    @functools.cached_property
    def dotted_names(self) -> set[str]:
        """Every dotted name that live code uses, imports resolved."""
        return {one.resolve(node) for one in self.sources for node in one.find(ast.Attribute, ast.Name)}

    # Definitions and calls

    def find_definition(self, source: Source, name: ast.expr) -> tuple[Source, Definition] | None:
        """The function or class of the project that a name stands for."""
        if isinstance(name, ast.Name):
            scope = source.function_of(name)
            while scope is not None:
                if name.id in parameters_of(scope):
                    return None
                if (inner := source.inner_functions.get((scope, name.id))) is not None:
                    return source, inner
                scope = source.function_of(scope)
        dotted = source.resolve(name)
        if dotted in self.modules:  # a package often has a function of the same name
            dotted = f"{dotted}.{dotted.rpartition('.')[2]}"
        if dotted in self.defined or not isinstance(name, ast.Name) or name.id in source.names:
            return self.defined.get(dotted)
        homes = (source.module, *source.stars)
        return next((self.defined[one] for home in homes if (one := f"{home}.{name.id}") in self.defined), None)

    def _named_function(self, source: Source, name: ast.expr) -> Owned | None:
        found = self.find_definition(source, name)
        return Owned(found[0], found[1]) if found is not None and is_function(found[1]) else None

    def find_function(self, source: Source, call: ast.Call) -> Owned | None:
        """The function of the project that a call runs; of a class, its `__init__`."""
        if call not in self._known_functions:
            self._known_functions[call] = self._find_function(source, call)
        return self._known_functions[call]

    def _find_function(self, source: Source, call: ast.Call) -> Owned | None:
        found = self.find_definition(source, call.func)
        if found is not None:
            owner, node = found
            return self._method(owner, node, "__init__") if isinstance(node, ast.ClassDef) else Owned(owner, node)
        if not isinstance(call.func, ast.Attribute):
            return None
        receiver, around = call.func.value, source.class_of(call)
        if isinstance(receiver, ast.Name) and receiver.id in ("self", "cls"):
            return self._method(source, around, call.func.attr) if around else None
        if isinstance(receiver, ast.Call) and source.resolve(receiver.func) == "super" and around is not None:
            return self._inherited(source, around, call.func.attr)
        if isinstance(receiver, ast.Name) and receiver.id in source.names:
            return None  # a module that is not the project's
        for owner, node in self._classes_of(source, receiver):
            if (method := self._method(owner, node, call.func.attr)) is not None:
                return method
        methods = self._methods_by_name.get(call.func.attr, [])
        return methods[0] if len(methods) == 1 and call.func.attr not in _COMMON_METHODS else None

    def _classes_of(self, source: Source, receiver: ast.expr) -> Iterator[tuple[Source, ast.ClassDef]]:
        """The project's classes that an object was made from, where a name is given it in sight."""
        values: list[Value] = []
        if isinstance(receiver, ast.Name):
            scope = source.function_of(receiver)
            assigned = source.assigned.get((scope, receiver.id)) or source.assigned.get((None, receiver.id), [])
            values = [Value(source, one.value) for one in assigned if one.index is None]
        elif isinstance(receiver, ast.Attribute):
            values = [Value(home, one.value) for home, _, one in self._attributes.get(receiver.attr, [])]
        elif isinstance(receiver, ast.Call):
            values = [Value(source, receiver)]
        for home, value in values:
            found = self.find_definition(home, value.func) if isinstance(value, ast.Call) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                yield found[0], found[1]

    def _method(self, source: Source, around: ast.ClassDef, name: str, depth: int = MAX_DEPTH) -> Owned | None:
        """A method of a class or of those it is derived from."""
        own = next((node for node in around.body if is_function(node) and node.name == name), None)
        return Owned(source, own) if own is not None else self._inherited(source, around, name, depth)

    def _inherited(self, source: Source, around: ast.ClassDef, name: str, depth: int = MAX_DEPTH) -> Owned | None:
        for base in around.bases if depth else ():
            found = self.find_definition(source, base)
            if found is not None and isinstance(found[1], ast.ClassDef):
                return self._method(found[0], found[1], name, depth - 1)
        return None

    @functools.cached_property
    def _methods_by_name(self) -> dict[str, list[Owned]]:
        found: dict[str, list[Owned]] = {}
        for source in self.sources:
            for node in source.nodes:
                if is_function(node) and isinstance(source.parents.get(node), ast.ClassDef):
                    found.setdefault(node.name, []).append(Owned(source, node))
        return found

    @functools.cached_property
    def _sites(self) -> dict[Function, list[Site]]:
        found: dict[Function, list[Site]] = {}
        names = {dotted.rpartition(".")[2] for dotted in self.defined}
        for source in self.sources:
            for call in source.find(ast.Call):
                owned = self.find_function(source, call)
                if owned is not None:
                    given = bind(*owned, call.args, call.keywords)
                    found.setdefault(owned.function, []).append(Site(source, call, given))
                for target, arguments in handed_over(source, call):
                    if (spawned := self._named_function(source, target)) is not None:
                        given = bind(*spawned, arguments)
                        found.setdefault(spawned.function, []).append(Site(source, call, given))
            for node in source.find(ast.Name, ast.Attribute):
                parent = source.parents[node]
                is_part = isinstance(parent, ast.Attribute) or (isinstance(parent, ast.Call) and parent.func is node)
                if is_part or source.resolve(node).rpartition(".")[2] not in names:
                    continue
                if (handed := self._named_function(source, node)) is not None:
                    found.setdefault(handed.function, []).append(Site(source, node, {}))
        return found

    @functools.cached_property
    def _indices(self) -> dict[Function, set[str]]:
        """The parameters in which a function is given the number of the process that it runs in."""
        found: dict[Function, set[str]] = {}
        for source in self.sources:
            for call in source.find(ast.Call):
                for target, arguments in handed_over(source, call):
                    if (owned := self._named_function(source, target)) is not None:
                        named = zip(parameters_of(owned.function), arguments, strict=False)
                        numbers = {name for name, given in named if given is None or source.is_counter(given)}
                        found.setdefault(owned.function, set()).update(numbers)
        return found

    def is_index(self, source: Source, node: ast.expr) -> bool:
        """Whether this parameter is the number of a process that the script has started itself."""
        function = source.function_of(node)
        return isinstance(node, ast.Name) and function is not None and node.id in self._indices.get(function, ())

    def sites_of(self, function: Function) -> list[Site]:
        """The live places that call a function or hand it on, as far as they are known."""
        return self._sites.get(function, [])

    def callers_of(self, function: Function) -> list[Site]:
        """The same; of a method that none is known of, all calls of that name on objects."""
        return self.sites_of(function) or self._possible_sites.get(function, [])

    @functools.cached_property
    def _possible_sites(self) -> dict[Function, list[Site]]:
        found: dict[Function, list[Site]] = {}
        for source in self.sources:
            for call in source.find(ast.Call):
                receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
                is_object = not isinstance(receiver, ast.Name) or receiver.id not in (*source.names, "self", "cls")
                if receiver is not None and is_object and self.find_function(source, call) is None:
                    for owned in self._methods_by_name.get(last_word(call), []):
                        found.setdefault(owned.function, []).append(Site(source, call, {}))
        return found

    # Values

    @functools.cached_property
    def _attributes(self) -> dict[str, list[tuple[Source, ast.expr, Assignment]]]:
        found: dict[str, list[tuple[Source, ast.expr, Assignment]]] = {}
        for source in self.sources:
            for target, assignment in source.all_assignments:
                if isinstance(target, ast.Attribute):
                    found.setdefault(target.attr, []).append((source, target, assignment))
        return found

    @functools.cached_property
    def arguments(self) -> dict[str, list[tuple[Source, ast.Call]]]:
        """The calls of `add_argument`, by the attribute that they fill."""
        found: dict[str, list[tuple[Source, ast.Call]]] = {}
        for source in self.sources:
            for call in source.find(ast.Call):
                if isinstance(call.func, ast.Attribute) and call.func.attr in ("add_argument", "add"):
                    flags = [flag for given in call.args if isinstance(flag := constant_of(given), str)]
                    longest = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
                    name = constant_of(argument_of(call, "dest")) or longest.lstrip("-").replace("-", "_")
                    found.setdefault(str(name), []).append((source, call))
        return found

    def origins(self, source: Source, expression: ast.expr) -> list[Value]:
        """Where a value may come from: the expressions that it is first given by, itself where nothing is seen to."""
        if expression not in self._known_origins:
            self._known_origins[expression] = list(self._origins(Value(source, expression), MAX_DEPTH, set()))
        return self._known_origins[expression]

    def first_origins(self, source: Source, node: ast.Name | ast.Attribute) -> list[Value]:
        """One step back: what a name or an attribute is given, wherever that is seen."""
        if isinstance(node, ast.Name):
            return list(self._origins_of_name(source, node))
        return list(self._origins_of_attribute(source, node))

    def _origins(self, value: Value, depth: int, seen: set[ast.AST]) -> Iterator[Value]:
        source, node = value
        if node in seen or depth < 0:
            return
        seen.add(node)
        steps: list[Value] = []
        if isinstance(node, ast.IfExp):
            steps = [Value(source, node.body), Value(source, node.orelse)]
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            is_condition = any(isinstance(part, ast.Compare | ast.BoolOp | ast.UnaryOp) for part in node.values)
            steps = [] if is_condition else [Value(source, part) for part in node.values]
        elif isinstance(node, ast.NamedExpr):
            steps = [Value(source, node.value)]
        elif isinstance(node, ast.Name | ast.Attribute):
            steps = self.first_origins(source, node)
        elif isinstance(node, ast.Call):
            owned = self.find_function(source, node)
            if owned is not None and owned.function.name != "__init__":
                steps = self.returns_of(owned)
        if not steps or self.is_index(source, node):
            yield value
        for step in steps:
            yield from self._origins(step, depth - 1, seen)

    def returns_of(self, owned: Owned) -> list[Value]:
        """What a function returns."""
        returned = [node for node in ast.walk(owned.function) if isinstance(node, ast.Return)]
        own = [node.value for node in returned if owned.source.function_of(node) is owned.function]
        return [Value(owned.source, value) for value in own if value is not None]

    def _origins_of_name(self, source: Source, node: ast.Name) -> Iterator[Value]:
        scope: Function | None = source.function_of(node)
        while True:
            assigned = source.assigned.get((scope, node.id), [])
            for assignment in assigned:
                yield from self._pick(source, assignment)
            is_parameter = scope is not None and node.id in parameters_of(scope)
            if scope is not None and is_parameter:
                yield from self.given(source, scope, node.id)
            if assigned or is_parameter or scope is None:
                break
            scope = source.function_of(scope)
        module, _, name = source.names.get(node.id, "").rpartition(".")
        home = self.modules.get(module)
        if home is not None:
            for assignment in home.assigned.get((None, name), []):
                yield from self._pick(home, assignment)

    def given(self, source: Source, function: Function, name: str) -> Iterator[Value]:
        """What a parameter is given: its default, and what the known callers pass."""
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        pairs: list[tuple[ast.arg, ast.expr | None]] = [
            *zip(reversed(positional), reversed(arguments.defaults), strict=False),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        yield from (Value(source, default) for parameter, default in pairs if parameter.arg == name and default)
        for site in self.sites_of(function):
            if name in site.given:
                yield Value(site.source, site.given[name])
            elif may_give_more(site.node):
                yield Value(site.source, site.node)  # which stands for what can't be known

    def _origins_of_attribute(self, source: Source, node: ast.Attribute) -> Iterator[Value]:
        if node.attr == "module":
            return  # what is inside a wrapper is not what it was made from
        is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
        around = source.class_of(node)
        for home, target, assignment in self._attributes.get(node.attr, []):
            if not is_own or (home is source and home.class_of(target) is around):
                yield from self._pick(home, assignment)
        if not is_own:
            for home, call in self.arguments.get(node.attr, []):
                default = argument_of(call, "default")
                if default is not None:
                    yield Value(home, default)

    def _pick(self, source: Source, assignment: Assignment) -> Iterator[Value]:
        """The value of an assignment, or the part of it that the name is given."""
        if assignment.index is None:
            yield Value(source, assignment.value)
        elif isinstance(assignment.value, ast.Call):
            owned = self.find_function(source, assignment.value)
            for home, returned in self.returns_of(owned) if owned else []:
                if isinstance(returned, ast.Tuple) and len(returned.elts) > assignment.index:
                    yield Value(home, returned.elts[assignment.index])


def _dotted(source: Source, node: Definition) -> str:
    around = [parent.name for parent in source.ancestors(node) if is_definition(parent)]
    return ".".join([source.module, *reversed(around), node.name])
