"""The script and the modules of its project that it imports, read and parsed, never run."""

from __future__ import annotations

import ast
import collections
import io
import os
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.checks.findings import Finding, Status, check
from paceline.checks.source import Source

MAX_FILES = 200
MAX_FILE_BYTES = 2 << 20
"""No person wrote a longer file; what is longer holds data."""
# Known by what they do: even in a project that holds one of them, its insides are not the script's.
_FOREIGN_PACKAGES = {
    *("torch", "torchvision", "torchaudio", "apex", "horovod", "accelerate", "deepspeed", "transformers", "trl"),
    *("lightning", "pytorch_lightning", "lightning_fabric", "paceline", "tqdm", "numpy", "torchft"),
}
_FOREIGN_FOLDERS = {"site-packages", "dist-packages", "node_modules"}
_PYTHON_2 = re.compile(
    r"^\s*(print\s+[\"'\w]|print\s*$|exec\s+[\"'\w]|raise\s+\w+\s*,|except\s+[\w.]+\s*,\s*\w+\s*:)|<>|\b0\d+\b"
)


class Reader:
    """Follows imports inside the project, breadth first, so that what is nearest to the script is read first."""

    def __init__(self, script: Path, project: Path) -> None:
        folder = Path(os.path.realpath(script.parent))
        self.script = folder / script.name  # a link keeps its own name, and the place where it stands
        self.project = Path(os.path.realpath(project))
        self.roots = [folder, self.project, self.project / "src"]
        self.sources: list[Source] = []
        """The script, then its modules."""
        self.findings: list[Finding] = []
        """What could not be read."""

    def read(self) -> None:
        queue = collections.deque([self.script])
        seen = set(queue)
        while queue:
            path = queue.popleft()
            if len(self.sources) == MAX_FILES:
                text = (
                    f"the script imports more than {MAX_FILES} files; {self._name(path)} and what follows is not read"
                )
                self.findings.append(unreadable("skipped", self._name(path), text))
                return
            source = self._parse(path)
            if source is None:
                continue
            self.sources.append(source)
            for imported in self._follow_imports(source, path):
                if imported not in seen:
                    seen.add(imported)
                    queue.append(imported)

    def holds(self, dotted: str) -> bool:
        """Whether the project has a module of this name, read or not."""
        return any(self._file_of(root, dotted.split(".")) for root in self.roots)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.project).as_posix() if path.is_relative_to(self.project) else path.name

    def _module(self, path: Path) -> str:
        """The beginning of the dotted names of all that is defined there; unique among the files."""
        parts = Path(self._name(path)).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)

    def _parse(self, path: Path) -> Source | None:
        name = self._name(path)
        if path.suffix == ".ipynb":
            remedy = f"jupyter nbconvert --to script {name}"
            self.findings.append(unreadable("failure", name, f"{name} is a notebook, which no launcher starts", remedy))
            return None
        if not path.is_file():
            self.findings.append(unreadable("failure", name, f"there is no file {name}"))
            return None
        content = b""
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                text = f"{name} has over {MAX_FILE_BYTES >> 20} MiB and is not read"
                self.findings.append(unreadable("skipped", name, text))
                return None
            content = path.read_bytes()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the script's own syntax, as "\d"
                tree = ast.parse(content, filename=str(path))
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            text = content.decode(encoding)
        except OSError as error:
            self.findings.append(unreadable("failure", name, f"{name} can't be read: {error.strerror}"))
        except SyntaxError as error:
            self.findings.append(_syntax_problem(name, error, content))
        except (ValueError, RecursionError, MemoryError) as error:
            text = f"{name} can't be parsed: {error or 'it is nested too deeply'}"
            self.findings.append(unreadable("failure", name, text))
        else:
            return Source(name=name, module=self._module(path), text=text, tree=tree)
        return None

    def _follow_imports(self, source: Source, path: Path) -> Iterator[Path]:
        """The project's files that a source imports; fills its `names` and `stars` on the way."""
        for node in source.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._follow_import(source, alias)
            elif isinstance(node, ast.ImportFrom):
                yield from self._follow_from(source, path, node)

    def _follow_import(self, source: Source, alias: ast.alias) -> Iterator[Path]:
        found = self._find_module(self.roots, alias.name)
        yield from found
        full = self._module(found[-1]) if found else alias.name
        head, _, rest = alias.name.partition(".")
        if alias.asname:
            source.names[alias.asname] = full
        else:
            source.names[head] = full.removesuffix(f".{rest}") if rest else full

    def _follow_from(self, source: Source, path: Path, node: ast.ImportFrom) -> Iterator[Path]:
        roots = [path.parents[min(node.level, len(path.parents)) - 1]] if node.level else self.roots
        base = self._find_module(roots, node.module or "")
        yield from base
        module = self._module(base[-1]) if base else node.module or ""
        for alias in node.names:
            inner = self._find_module(roots, f"{node.module}.{alias.name}" if node.module else alias.name)
            yield from inner
            if alias.name == "*":
                source.stars.append(module)
            else:
                source.names[alias.asname or alias.name] = (
                    self._module(inner[-1]) if inner else f"{module}.{alias.name}"
                )

    def _find_module(self, roots: Sequence[Path], dotted: str) -> list[Path]:
        """The project's files that importing a dotted name runs: of the packages around it, then its own."""
        parts = dotted.split(".") if dotted else []
        if parts and parts[0] in _FOREIGN_PACKAGES:
            return []
        for root in roots:
            own = self._file_of(root, parts)
            if own is not None:
                packages = (self._file_of(root, parts[:depth]) for depth in range(1, len(parts)))
                return [*filter(None, packages), own]
        return []

    def _file_of(self, root: Path, parts: Sequence[str]) -> Path | None:
        base = root.joinpath(*parts)
        candidates = [base / "__init__.py", *([base.with_name(f"{parts[-1]}.py")] if parts else [])]
        return next((path for path in candidates if self._is_ours(path)), None)

    def _is_ours(self, path: Path) -> bool:
        if not path.is_file():  # nor is a loop of symbolic links
            return False
        real = Path(os.path.realpath(path))
        return real.is_relative_to(self.project) and not _FOREIGN_FOLDERS & set(real.relative_to(self.project).parts)


@check("unreadable-script")
def unreadable(status: Status, where: str, text: str, remedy: str = "") -> Finding:
    """The script, and what it imports of the project, can be parsed.

    What it looks at
        The script's file and the project's modules that it imports, at most 200 files of 2 MiB. They are parsed by
        the Python that runs paceline, and never executed.

    Why it matters
        A syntax error stops every rank on every host. Notebooks can't be started by a launcher at all.

    How to mend it
        Correct the line that is named; convert a notebook to a script; convert Python 2 with 2to3.
    """
    return Finding(check="unreadable-script", status=status, where=where, text=text, remedy=remedy)


def _syntax_problem(name: str, error: SyntaxError, content: bytes) -> Finding:
    where = f"{name}:{error.lineno}" if error.lineno else name
    lines = content.decode(errors="replace").splitlines()
    line = lines[error.lineno - 1] if error.lineno and error.lineno <= len(lines) else ""
    if _PYTHON_2.search(line):
        return unreadable("failure", where, f"this line is Python 2: {line.strip()}", f"2to3 --write {name}")
    return unreadable("failure", where, f"not valid Python: {error.msg}")
