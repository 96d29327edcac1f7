"""An explanation as text for people, or as JSON for programs. Pure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from paceline.explain.cause import Explanation
from paceline.explain.lines import Line, clock
from paceline.explain.signatures import Signature

_LABEL_WIDTH = 11
_LONGEST_TEXT = 300
_MOST_NAMED = 8
_MOST_EXAMPLES = 3

_ASK = (
    "Give it the whole stderr of every rank and host, to the end: paceline explain *.log. What helps most: the first "
    "NCCL WARN (run with NCCL_DEBUG=INFO), each rank's traceback (torchrun --tee 3 or --log-dir), the kernel's log "
    "(journalctl -k, dmesg). If it hangs and says nothing, py-spy dump --pid PID shows where each rank waits."
)
_LEAST_WIDTH = 40
_MOST_OF_CAUSE = 800
"""Characters: exceptions of the user's own may hold a whole tensor."""
_HEADINGS = {"certain": "The cause", "likely": "The likely cause", "possible": "A possible cause"}


def to_text(explanation: Explanation, width: int) -> list[str]:
    """Lines of at most `width` columns, of which 40 are needed."""
    width = max(width, _LEAST_WIDTH)
    lines = [*_wrap(_summary(explanation), width), ""]
    if explanation.verdict == "nothing":
        return [*lines, *_wrap("Nothing in it is known to be a failure.", width), *_wrap(_ASK, width)]
    heading = _HEADINGS[explanation.confidence] + ": " if explanation.confidence else ""
    is_long = len(explanation.cause) > _MOST_OF_CAUSE
    cause = f"{explanation.cause[:_MOST_OF_CAUSE]} …" if is_long else explanation.cause
    lines += [*_wrap(heading + cause, width), ""]
    is_only = len(explanation.logs) == 1
    for line in explanation.evidence:
        lines += _labelled("evidence", f"{_place(line, is_only=is_only)}:", width)
        lines += _wrap(_shown(line.text), width, indent=_LABEL_WIDTH + 4)
    crash = explanation.crash
    if crash is not None and crash.frame is not None and explanation.entry is not None:
        lines += _labelled("raised in", str(crash.frame), width)
    lines += _labelled("remedy", explanation.remedy, width)
    source = explanation.source
    if explanation.entry is not None:
        source += f" (entry {explanation.entry})"
    lines += _labelled("source", source, width)
    for needed in explanation.needed:
        lines += _labelled("needed" if explanation.verdict == "consequences" else "would help", needed, width)
    for other in explanation.others:
        lines += _labelled("also", f"{_shown(other.what)} ({_place(other.line, is_only=is_only)})", width)
    return lines


def to_json(explanation: Explanation) -> str:
    """The same for programs."""
    crash = explanation.crash
    record = {
        "verdict": explanation.verdict,
        "confidence": explanation.confidence,
        "cause": explanation.cause,
        "remedy": explanation.remedy,
        "source": explanation.source,
        "entry": explanation.entry,
        "raised_in": None if crash is None or crash.frame is None else str(crash.frame),
        "evidence": [_record(line) for line in explanation.evidence],
        "needed": list(explanation.needed),
        "others": [{"what": other.what, **_record(other.line)} for other in explanation.others],
        "num_consequences": explanation.num_consequences,
        "num_benign": explanation.num_benign,
        "logs": [{"name": log.name, "num_lines": log.num_lines} for log in explanation.logs],
    }
    return json.dumps(record, indent=2)


def short(explanation: Explanation, width: int, more: str) -> list[str]:
    """Five lines at most, for the end of a failed run. `more`: the command that tells the rest."""
    heading = "the cause" if explanation.confidence == "certain" else "likely"
    return [
        *_labelled("explained", f"{heading}: {explanation.cause}", width, max_lines=2),
        *_labelled("remedy", explanation.remedy, width, max_lines=2),
        f"  {'more':<{_LABEL_WIDTH}}{more}",
    ]


def entry_text(signature: Signature, width: int) -> list[str]:
    """An entry of the catalogue."""
    lines = [f"{signature.id} ({signature.area}, {signature.role})", "", *_wrap(signature.cause, width), ""]
    lines += _labelled("remedy", signature.remedy, width)
    lines += _labelled("source", signature.source, width)
    for example in signature.examples[:_MOST_EXAMPLES]:
        lines += _labelled("for lines", example, width)
    return lines


def _summary(explanation: Explanation) -> str:
    """What was read, and what of it was left out."""
    logs = explanation.logs
    parts = [
        logs[0].name if len(logs) == 1 else f"{len(logs)} logs",
        _count(sum(log.num_lines for log in logs), "line"),
    ]
    hosts = sorted({host for log in logs for host in log.hosts})
    if hosts:
        parts.append(("host " if len(hosts) == 1 else "hosts ") + _named(hosts))
    ranks = sorted({rank for log in logs for rank in log.ranks})
    if ranks:
        parts.append(("rank " if len(ranks) == 1 else "ranks ") + _named([str(rank) for rank in ranks]))
    if explanation.num_consequences:
        parts.append(_count(explanation.num_consequences, "line") + " of consequences")
    if explanation.num_benign:
        parts.append(_count(explanation.num_benign, "harmless line"))
    return "read: " + "; ".join(parts)


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (" ..." if len(names) > _MOST_NAMED else "")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _place(line: Line, *, is_only: bool) -> str:
    """`rank 3 on node2 at 12:00:01, node2.log line 88`. `is_only`: there is no other file."""
    who: list[str] = []
    if line.rank is not None:
        who.append(f"rank {line.rank}")
    elif line.local_rank is not None:
        who.append(f"local rank {line.local_rank}")
    if line.host is not None:
        who.append(f"on {line.host}" if who else f"host {line.host}")
    if line.time_s is not None:
        who.append(f"at {clock(line.time_s)}")
    where = f"line {line.number}" if is_only else f"{line.file} line {line.number}"
    return f"{' '.join(who)}, {where}" if who else where


def _shown(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 4] + " ..."


def _record(line: Line) -> dict[str, Any]:
    return {"file": line.file, "line": line.number, "host": line.host, "rank": line.rank, "text": line.text}


def _labelled(label: str, text: str, width: int, max_lines: int | None = None) -> list[str]:
    first, *rest = _wrap(text, width, indent=_LABEL_WIDTH + 2, max_lines=max_lines) or [""]
    return [f"  {label:<{_LABEL_WIDTH}}{first.lstrip()}", *rest]


def _wrap(text: str, width: int, indent: int = 0, max_lines: int | None = None) -> list[str]:
    margin = " " * indent
    wrapper = textwrap.TextWrapper(
        width=width,
        initial_indent=margin,
        subsequent_indent=margin,
        break_on_hyphens=False,
        max_lines=max_lines,
        placeholder=" ...",
    )
    return wrapper.wrap(text)
