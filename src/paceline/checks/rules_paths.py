"""Files that other hosts may not have."""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterator

from paceline.checks.findings import Finding, check
from paceline.checks.program import Program
from paceline.checks.source import Source, argument_of, constant_of, last_word

_ABSOLUTE = re.compile(r"^(/[\w.\-]+(/|$)|~/|[A-Za-z]:[\\/])")
_EVERYWHERE = re.compile(r"^/(dev|proc|sys|tmp|etc|usr|bin|run|var/tmp)(/|$)")
_PLACEHOLDER = re.compile(r"path[/_-]?to|your|<|\.\.\.", re.I)
_PATH_NAME = re.compile(
    r"(^|_)(path|paths|dir|dirs|directory|root|folder|file|filename|data|dataset|ckpt|checkpoint|home)(_|s?$)|(dir|path|file|root)$",
    re.I,
)
_OUTPUT_NAME = re.compile(r"(^|[^a-z])(log|out|sav|result|exp|tensorboard|cache|tmp|temp|work_?dir)", re.I)
"""What is written there may be missing before."""
_WRITING = {"torch.save", "numpy.save", "os.makedirs"}
_OPENING = re.compile(
    r"^(open|os\.path\.join|pathlib\.Path|torch\.(load|save)|numpy\.(load|save|memmap|loadtxt)|pandas\.read_\w+"
    r"|torchvision\.datasets\.\w+|os\.(makedirs|listdir|chdir)|json\.load)$"
)


@check("path-outside-project")
def find_path_outside_project(source: Source) -> Iterator[Finding]:
    """Files are found on every host.

    What it looks at
        Absolute paths, and relative ones that lead out of the project (`../data`), where they are opened, joined,
        assigned to a name like `data_dir`, or the default of an argument; not where the name speaks of output, nor
        where the data are downloaded to.

    Why it matters
        Only the project's files are copied to the other hosts. A path of this machine exists there only if somebody
        has put the data there, too.

    How to mend it
        Put the data at the same place on every host; or let the environment name it, which may differ by host
        (`env.DATA=/data/pictures` in the hostfile).
    """
    seen = set(_downloaded(source.program))
    for node in source.find(ast.Constant):
        path = node.value
        if not isinstance(path, str) or path in seen or "\n" in path or not _leads_outside(source, path):
            continue
        name = _use_of(source, node)
        if name is None or _OUTPUT_NAME.search(name):
            continue
        seen.add(path)
        text = f"{path} must be there on every host: it is no part of the project, which is all that is copied"
        variable = re.sub(r"\W+", "_", name).strip("_").upper() or "DATA"
        yield source.finding(
            "path-outside-project",
            "warning",
            node,
            text,
            source.replaced((node, f'os.environ.get("{variable}", {node.value!r})')),
        )


@functools.lru_cache(maxsize=1)
def _downloaded(program: Program) -> frozenset[object]:
    """Paths that a call with `download=True` fills on each host, or may fill."""
    found: set[object] = set()
    for source in program.sources:
        for call in source.find(ast.Call):
            asked = argument_of(call, "download")
            if asked is None or constant_of(asked) is False:
                continue
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            parts = [node for one in given for node in ast.walk(one) if isinstance(node, ast.expr)]
            origins = (origin.node for part in parts for origin in program.origins(source, part))
            found.update(node.value for node in origins if isinstance(node, ast.Constant))
    return frozenset(found)


def _leads_outside(source: Source, path: str) -> bool:
    if _ABSOLUTE.match(path):
        return not _EVERYWHERE.match(path) and not _PLACEHOLDER.search(path)
    if not path.startswith("../") or not path.strip("./"):
        return False
    # As seen from the script's folder, where most people start it.
    return os.path.normpath(os.path.join(os.path.dirname(source.program.main.name), path)).startswith("..")


def _use_of(source: Source, node: ast.Constant) -> str | None:
    """What a path is called, where it is used as one; None where that can't be seen."""
    parent = source.parents[node]
    if isinstance(parent, ast.keyword):
        call = source.parents[parent]
        if parent.arg == "default" and isinstance(call, ast.Call):
            if not _is_parsed(source, call) or _OUTPUT_NAME.search(str(constant_of(argument_of(call, "help")))):
                return None
            flag = constant_of(call.args[-1]) if call.args else argument_of(call, "dest")
            return str(flag).lstrip("-") if flag is not None else None
        return parent.arg if parent.arg and _PATH_NAME.search(parent.arg) else None
    if isinstance(parent, ast.Call):
        is_opened = node in parent.args and _OPENING.match(source.resolve(parent.func)) and not _writes(source, parent)
        return "data" if is_opened and "__file__" not in ast.unparse(parent) else None
    if isinstance(parent, ast.Assign | ast.AnnAssign):
        target = parent.targets[0] if isinstance(parent, ast.Assign) else parent.target
        word = last_word(target)
        is_replaced = isinstance(target, ast.Name) and len(source.names_given(target.id)) > 1
        return word if _PATH_NAME.search(word) and not is_replaced else None
    if isinstance(parent, ast.Dict) and node in parent.values:
        key = constant_of(parent.keys[parent.values.index(node)])
        return key if isinstance(key, str) and _PATH_NAME.search(key) else None
    return None


def _writes(source: Source, call: ast.Call) -> bool:
    """What it makes needs to be nowhere before."""
    name = source.resolve(call.func)
    mode = constant_of(argument_of(call, "mode", 1)) if name == "open" else ""
    return name in _WRITING or (isinstance(mode, str) and bool(set(mode) & set("wax")))


def _is_parsed(source: Source, argument: ast.Call) -> bool:
    """The command line is read in this file, or by a function that makes the parser."""
    calls = (last_word(call) for call in source.find(ast.Call))
    return source.function_of(argument) is not None or any(name.startswith("parse_") for name in calls)
