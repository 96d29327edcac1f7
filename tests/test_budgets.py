"""The size and shape that the house keeps: long functions, wide signatures and tangled imports fail here.

Every test lists all offenders, so that one run shows the whole bill.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import itertools
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "paceline"

MAX_FUNCTION_LINES = 60
MAX_MODULE_LINES = 400
MAX_PARAMETERS = 7
MAX_RUN_FLAGS = 20
# CPU time, so that a busy machine changes nothing; measured 0.15 to 0.25 s.
MAX_IMPORT_CPU_S = 0.6

# (module, what it imports inside a function) -> why it can't be at the top.
LAZY_IMPORTS = {
    ("paceline.checks.examine", "paceline.checks.script"): "a look at hosts alone takes under a second without it",
    ("paceline.cli.run", "paceline.explain"): "a run that goes well has no use for it, and starts sooner without",
    ("paceline.train.guard", "inspect"): "every Python process of a run imports the module, and only some call it",
    ("paceline.train.guard", "paceline.train.unmodified"): "it needs PyTorch, and only a run with --sync calls it",
    ("paceline.train.guard", "paceline.train.progress"): "it needs PyTorch, and only ranks of a world are watched",
    ("paceline", "importlib"): "the public face loads PyTorch's floor when it is first used",
}

# What runs on hosts that have nothing but a Python, with all that these import.
AGENT_ROOTS = {"paceline", "paceline.errors", "paceline.events", "paceline.units", "paceline.launch.agent"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """One parsed file of the package."""

    name: str
    path: pathlib.Path
    text: str
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@functools.cache
def read_modules() -> dict[str, Module]:
    modules: dict[str, Module] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        text = path.read_text()
        modules[name] = Module(name=name, path=path, text=text, tree=ast.parse(text, filename=str(path)))
    return modules


def is_cli(module: Module) -> bool:
    """Where a command's parameters are its flags."""
    return module.name.startswith("paceline.cli")


def find_functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(module.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def count_lines(module: Module, function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` to the end, without the docstring; without the flags, too, of the command line's functions."""
    start = function.body[0].lineno if is_cli(module) else function.lineno
    lines = (function.end_lineno or 0) - start + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= (first.end_lineno or 0) - first.lineno + 1
    return lines


def count_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([argument for argument in named if argument.arg not in ("self", "cls")])


def find_imports(node: ast.AST, name: str) -> Iterator[str]:
    """What an import statement names; `from x import y` is x.y where that is a module of ours, else x."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{name} line {node.lineno}: a relative import"
        for alias in node.names:
            longer = f"{node.module}.{alias.name}"
            yield longer if longer in read_modules() else str(node.module)


def walk_runtime(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from walk_runtime(node)


def runtime_imports(module: Module) -> set[str]:
    return set(itertools.chain.from_iterable(find_imports(n, module.name) for n in walk_runtime(module.tree)))


def test_functions_are_short() -> None:
    long = [
        f"{module.at(function)} {function.name}: {count_lines(module, function)} lines"
        for module in read_modules().values()
        for function in find_functions(module)
        if count_lines(module, function) > MAX_FUNCTION_LINES
    ]
    assert not long


def test_modules_are_short() -> None:
    counts = {name: len(module.text.splitlines()) for name, module in read_modules().items()}
    assert not {name: count for name, count in counts.items() if count > MAX_MODULE_LINES}


def test_signatures_are_narrow() -> None:
    wide = [
        f"{module.at(function)} {function.name}: {count_parameters(function)} parameters"
        for module in read_modules().values()
        if not is_cli(module)
        for function in find_functions(module)
        if count_parameters(function) > MAX_PARAMETERS
    ]
    assert not wide


def test_imports_stand_at_the_top() -> None:
    found = {
        (module.name, imported): module.at(node)
        for module in read_modules().values()
        for function in find_functions(module)
        for node in ast.walk(function)
        for imported in find_imports(node, module.name)
    }
    assert not {key: where for key, where in found.items() if key not in LAZY_IMPORTS}
    assert not LAZY_IMPORTS.keys() - found.keys(), "listed, but not there any more"


def test_imports_make_no_cycle() -> None:
    modules = read_modules()
    graph = {name: runtime_imports(module) & modules.keys() - {name} for name, module in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the modules


def test_what_runs_on_hosts_needs_nothing_but_python() -> None:
    modules = read_modules()
    todo, seen, foreign = sorted(AGENT_ROOTS), set(AGENT_ROOTS), []
    while todo:
        name = todo.pop()
        for imported in sorted(runtime_imports(modules[name]) - seen):
            if imported in modules:
                seen.add(imported)
                todo.append(imported)
            elif imported.partition(".")[0] not in sys.stdlib_module_names:
                foreign.append(f"{name} imports {imported}")
    assert not foreign
    assert not [name for name in seen if name.startswith(("paceline.cli", "paceline.train"))]


def test_grammar_is_that_of_python_3_10() -> None:
    paths = [path for folder in ("src", "tests", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert paths
    for path in paths:
        ast.parse(path.read_text(), filename=str(path), feature_version=(3, 10))


def run_python(code: str) -> list[str]:
    """The words that a fresh interpreter prints."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_run_has_few_flags() -> None:
    flags = run_python(
        "from paceline.cli.run import run;"
        "print(*[parameter.opts[0] for parameter in run.params if parameter.opts[0].startswith('-')])"
    )
    assert 0 < len(flags) <= MAX_RUN_FLAGS, flags


@pytest.mark.parametrize("module", ["paceline", "paceline.cli.run"])
def test_import_is_quick_and_torch_free(module: str) -> None:
    cpu_s, *heavy = run_python(
        f"import sys, time; import {module};"
        "print(time.process_time(), *sorted(sys.modules.keys() & {'torch', 'numpy', 'safetensors'}))"
    )
    assert not heavy
    assert float(cpu_s) < MAX_IMPORT_CPU_S
