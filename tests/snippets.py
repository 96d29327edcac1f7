"""The README's code blocks: finding them, saying where each runs, and comparing output by shape.

A console block holds lines `$ command`, each followed by the output that is expected. An HTML comment before
it says where it runs; without one it runs here, in a copy of the repository:

    <!-- run: here -->                              the default
    <!-- run: here, exit 1 -->                      the last command ends with this code
    <!-- run: lab h1 -->                            on host h1 of the lab; skipped where there is none
    <!-- run: no, because it downloads a lot -->    not run; the reason is printed

Figures, units and paths may differ. A line `...` or `…` stands for any number of lines, and `…` within a line
for anything.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
import shutil
import subprocess
import textwrap
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parents[1]

FENCE = re.compile(
    r"(?:^<!-- run: (?P<run>[^\n]*?) -->\n+)?^```(?P<language>[\w-]+)[^\n]*\n(?P<text>.*?)^```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
RUN = re.compile(r"(?P<where>here|lab (?P<host>\w+))(?:, exit (?P<code>\d+))?|no, because (?P<reason>.+)")

SHAPES = (
    (re.compile(r"\x1b\[[0-9;]*[A-Za-z]"), ""),  # colours
    (re.compile(r"[▏▎▍▌▋▊▉█░▒▓]+"), "▒"),  # bars
    (re.compile(r"(?<![\w./])~?/[\w./+-]+"), "PATH"),
    (re.compile(r"\b(?:\d+h)?(?:\d+m)?\d+(?:\.\d+)?s\b"), "#"),  # 1h02m03s
    (re.compile(r"\d[\d.,:]*(?: ?(?:[kMGT]?B|[kMG]b/s|[µm]?s|[kMG]|%)(?![\w/]))?"), "#"),
    (re.compile(r"[-─=━]{3,}"), "---"),
    (re.compile(r"\s+"), " "),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block."""

    language: str
    text: str
    line: int
    """Where the block begins in its file."""
    host: str | None = None
    """The lab's host that it runs on; None for here."""
    exit_code: int = 0
    """How the last command ends."""
    not_run_because: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One command of a console block and the output that should follow; without any, all output will do."""

    command: str
    expected: tuple[str, ...]


def find_blocks(markdown: str) -> list[Block]:
    """All fenced blocks that name their language; ValueError for a `run:` comment of another form."""
    blocks: list[Block] = []
    for match in FENCE.finditer(markdown):
        line = markdown.count("\n", 0, match.start("language")) + 1
        run = RUN.fullmatch(match["run"] or "here")
        if run is None:
            raise ValueError(f"line {line}: 'run: {match['run']}', expected here, lab HOST or no, because …")
        block = Block(
            language=match["language"],
            text=match["text"],
            line=line,
            host=run["host"],
            exit_code=int(run["code"] or 0),
            not_run_because=run["reason"] or "",
        )
        blocks.append(block)
    return blocks


def split_steps(text: str) -> list[Step]:
    """The commands of a console block; a command goes on after a line that ends with a backslash."""
    steps: list[Step] = []
    for part in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, *expected = part.rstrip().splitlines()
        steps.append(Step(command=command, expected=tuple(line for line in expected if line.strip())))
    return steps


def shape_of(line: str) -> str:
    """The line with figures, units, paths, bars and colours made alike."""
    for pattern, placeholder in SHAPES:
        line = pattern.sub(placeholder, line)
    return line.strip()


def find_mismatch(expected: tuple[str, ...], actual: str) -> str:
    """What the output lacks or has too much, in a sentence; empty if the shapes agree."""
    if not expected:
        return ""
    got = [shape_of(line) for line in actual.splitlines()]
    got = [line for line in got if line]
    position, skipping = 0, False
    for line in expected:
        if line.strip() in ("...", "…"):
            skipping = True
            continue
        pattern = ".*".join(re.escape(part) for part in shape_of(line).split("…"))
        candidates = range(position, len(got) if skipping else min(position + 1, len(got)))
        hit = next((index for index in candidates if re.fullmatch(pattern, got[index])), None)
        if hit is None:
            found = got[position] if position < len(got) else "the end"
            return f"expected the shape of {line!r}, found {found!r}"
        position, skipping = hit + 1, False
    if position < len(got) and not skipping:
        return f"expected the end, found {got[position]!r}"
    return ""


def python_of(block: Block) -> str:
    """The program in a python block, or what a diff block makes of it."""
    if block.language == "diff":
        lines = [line[1:] for line in block.text.splitlines() if not line.startswith(("-", "@"))]
        return textwrap.dedent("\n".join(lines)) + "\n"
    return textwrap.dedent(block.text)


def find_unknown_names(program: str, *, public: set[str], run_members: set[str]) -> list[str]:
    """Names of paceline that a program uses and that aren't there; SyntaxError if it is no Python."""
    tree = ast.parse(program)
    unknown: list[str] = []
    runs = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("paceline.init(")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "paceline":
            unknown += [alias.name for alias in node.names if alias.name not in public]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            known = public if node.value.id == "paceline" else run_members if node.value.id in runs else None
            if known is not None and node.attr not in known:
                unknown.append(f"{node.value.id}.{node.attr}")
    return unknown


def check_block(block: Block, shell: Callable[[str], tuple[int, str]]) -> None:
    """Run the commands of a console block with `shell`, command -> (exit code, output), and compare."""
    steps = split_steps(block.text)
    assert steps, f"README line {block.line}: no line begins with '$ '"
    for step in steps:
        exit_code, output = shell(step.command)
        assert exit_code == (block.exit_code if step is steps[-1] else 0), f"$ {step.command}\n{output}"
        mismatch = find_mismatch(step.expected, output)
        assert not mismatch, f"$ {step.command}\n{mismatch}\n{output}"


def copy_repository(target: pathlib.Path) -> None:
    """What git tracks or would track, so that nobody's own checkpoints are read or written."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
