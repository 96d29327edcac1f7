"""Logs as text in, explanations out."""

from __future__ import annotations

import io
import pathlib

from paceline.explain import signatures
from paceline.explain.cause import Explanation, explain
from paceline.explain.reading import Log, read_log

LOGS = pathlib.Path(__file__).parent / "logs"


def read(text: str | bytes, name: str = "rank.log", piece_bytes: int | None = None) -> Log:
    stream = io.BytesIO(text.encode() if isinstance(text, str) else text)
    return read_log(lambda size: stream.read(piece_bytes or size), name, signatures.load())


def explain_texts(*texts: str | bytes) -> Explanation:
    """Of one log, or of several that are called 0.log, 1.log, ..."""
    return explain([read(text, f"{number}.log") for number, text in enumerate(texts)])


def explain_files(*names: str) -> Explanation:
    return explain([read((LOGS / name).read_bytes(), name) for name in names])
