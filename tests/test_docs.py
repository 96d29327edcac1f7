"""The documents: links lead somewhere, commands exist, and no file names a path of somebody's machine."""

from __future__ import annotations

import functools
import pathlib
import re
import shlex
import subprocess

import click
import pytest

import paceline.cli

ROOT = pathlib.Path(__file__).parents[1]

LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (?P<text>.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# Homes that stand for anybody's are fine.
MACHINE_PATH = re.compile(
    r"(?<![\w.$}~])/(?:work|mnt|Users|root/\.|home/(?!(?:alice|bob|carol|user|me|u)\b))[\w.-]*/[\w.-]+"
)
# `paceline word …`, in code spans, after a prompt and in indented blocks; words in capitals stand for something.
COMMAND = re.compile(r"(?:`|^\$ |^ {4,})(?P<command>paceline [a-z][^`\n]*)", re.MULTILINE)


@functools.cache
def list_files(*patterns: str) -> list[pathlib.Path]:
    """What git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in sorted(set(listed.split("\0")) - {""}) if (ROOT / name).is_file()]


def documents() -> list[object]:
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in list_files("*.md")]


def anchors_of(markdown: str) -> set[str]:
    """As they are made of headings: lower case, hyphens for spaces, punctuation dropped."""
    headings = (match["text"] for match in HEADING.finditer(FENCED.sub("", markdown)))
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def find_broken_links(document: pathlib.Path) -> list[str]:
    broken: list[str] = []
    for match in LINK.finditer(FENCED.sub("", document.read_text())):
        path, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (document.parent / path) if path else document
        if not target.exists() or (anchor and anchor not in anchors_of(target.read_text())):
            broken.append(match["target"])
    return broken


@pytest.mark.parametrize("document", documents())
def test_links_lead_somewhere(document: pathlib.Path) -> None:
    assert not find_broken_links(document)


def test_a_broken_link_is_found(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One & two\n[a](page.md) [b](gone.md) [c](#one--two) [d](#three) [e](https://example.org)\n")
    assert find_broken_links(page) == ["gone.md", "#three"]


def test_no_file_names_a_path_of_a_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in list_files()
        if path != pathlib.Path(__file__)
        for match in MACHINE_PATH.finditer(path.read_text(errors="replace"))
    ]
    assert not found


def find_unknown_words(command: str) -> list[str]:
    """Subcommands and flags of ours that don't exist; what stands after the script belongs to the script."""
    node: click.Command = paceline.cli.app
    unknown: list[str] = []
    _, *words = shlex.split(command, comments=True)
    for word in words:
        if word in ("--", "-m") or word.endswith(".py"):
            break
        if isinstance(node, click.Group) and re.fullmatch(r"[a-z][a-z-]*", word):
            child = node.get_command(click.Context(node), word)
            if child is None:
                return [word]
            node = child
        elif re.match(r"--?[a-zA-Z]", word):
            known = {"--help"}.union(*({*option.opts, *option.secondary_opts} for option in node.params))
            flag = word.partition("=")[0]
            unknown += [flag] if flag not in known else []
    return unknown


@pytest.mark.parametrize("document", documents())
def test_commands_exist(document: pathlib.Path) -> None:
    commands = [match["command"] for match in COMMAND.finditer(document.read_text())]
    unknown = {command: words for command in commands if (words := find_unknown_words(command))}
    assert not unknown
