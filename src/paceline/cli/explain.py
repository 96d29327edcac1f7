"""`paceline explain`: why a run failed, from its logs."""

from __future__ import annotations

import difflib
import shutil
import sys
from pathlib import Path

import click

from paceline.checks import reference
from paceline.errors import InputError
from paceline.explain import explain_logs, explain_name, report, signatures, sources
from paceline.explain.reading import Log
from paceline.launch.facts import state_folder

_WIDTH = 80


@click.command()
@click.option("--json", is_flag=True, help="For programs.")
@click.argument("words", nargs=-1, metavar="[FILE|FOLDER|RUN|-]... | NAME")
def explain(words: tuple[str, ...], json: bool) -> None:
    """Name the first cause in the logs of a failed run.

    Takes logs of any launcher, folders of them, and - for standard input; without arguments, the newest failed run of
    paceline's. A RUN is one of paceline's by its name (20261130-120000-aaaa); a NAME is an entry that an explanation
    has mentioned, or a check of `paceline check`.

    Exit codes: 0 a cause was named, 1 none was found, 2 there is no such log.
    """
    if len(words) == 1 and words[0] != "-" and not Path(words[0]).exists():
        text = explain_name(words[0]) or reference.describe(words[0])
        if text is not None:
            print(text)
            return
    explanation = explain_logs(_read(words))
    if json:
        print(report.to_json(explanation))
    else:
        print("\n".join(report.to_text(explanation, min(_WIDTH, shutil.get_terminal_size().columns))))
    sys.exit(0 if explanation.verdict == "cause" else 1)


def _read(words: tuple[str, ...]) -> list[Log]:
    catalogue = signatures.load()
    if not words:
        return sources.read_folder(_newest_run(), catalogue)
    logs: list[Log] = []
    for word in words:
        path = Path(word)
        if word == "-":
            logs.append(sources.read_stream(sys.stdin.buffer, catalogue))
        elif path.is_dir():
            logs += sources.read_folder(path, catalogue)
        elif (run := _runs_folder() / word).is_dir():
            logs += sources.read_folder(run, catalogue)
        elif path.exists():
            logs.append(sources.read_file(path, catalogue))
        else:
            raise InputError(f"there is no file, folder or entry {word}", hint=_nearest(word))
    return logs


def _runs_folder() -> Path:
    return Path(state_folder()) / "runs"


def _newest_run() -> Path:
    runs = _runs_folder()
    folder, stopped = sources.newest_failed_run(runs)
    if folder is None:
        files = "paceline explain FILE, or ... | paceline explain -"
        hint = files if stopped is None else f"one was stopped: paceline explain {stopped}"
        raise InputError(f"no run of paceline's in {runs} has failed", hint=hint)
    print(f"paceline: {folder}", file=sys.stderr)
    if stopped is not None:
        print(f"  a later one was stopped: paceline explain {stopped}", file=sys.stderr)
    return folder


def _nearest(word: str) -> str:
    nearest = difflib.get_close_matches(word, signatures.load().by_id, n=3)
    return f"entries with names like it: {', '.join(nearest)}" if nearest else "paceline explain FILE"
