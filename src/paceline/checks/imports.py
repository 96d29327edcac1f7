"""Which packages a script can't start without: what it, and what it imports of its project, imports for certain."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from paceline.checks.source import Source

# paceline brings itself and, where a host lacks it, safetensors; torch has checks of its own.
_BROUGHT = {"paceline", "safetensors", "torch"}


def find_required(sources: Sequence[Source], is_own: Callable[[str], bool]) -> tuple[str, ...]:
    """Names of modules that are neither the project's nor Python's own. `sources`: the script, then its modules as far
    as they were read. `is_own`: whether a dotted name lies in the project, also where it was not read.

    What stands in a function, in a `try` or under a condition may never be imported, and is left out.
    """
    own = {source.module: source for source in sources}
    todo, seen = list(sources[:1]), set[str]()
    required: set[str] = set()
    while todo:
        source = todo.pop()
        if source.module in seen:
            continue
        seen.add(source.module)
        for written, full in _certain_imports(source):
            members = [own[name] for name in own if full == name or full.startswith(f"{name}.")]
            todo += members
            if not members and written and not (is_own(written) or is_own(full)):
                required.add(written.partition(".")[0])
    return tuple(sorted(required - _BROUGHT - sys.stdlib_module_names))


def _certain_imports(source: Source) -> Iterator[tuple[str, str]]:
    """(as it is written, in full from the project's folder on); nothing is written of a relative import."""
    for node in _certain(source.tree.body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head = alias.name.partition(".")[0]
                yield alias.name, source.names.get(alias.asname or head, alias.name)
        elif isinstance(node, ast.ImportFrom):
            written = "" if node.level else node.module or ""
            for alias in node.names:
                yield written, source.names.get(alias.asname or alias.name, written)


def _certain(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.With) or (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)):
            yield from _certain(node.body)
        else:
            yield node
