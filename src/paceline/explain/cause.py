"""Several logs in, one explanation out: what came first, how sure that is, and which log would tell more. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from paceline.explain import peers, timeouts
from paceline.explain.lines import Line
from paceline.explain.reading import Hit, Log
from paceline.explain.signatures import Confidence, Role, Signature
from paceline.explain.tracebacks import Crash

_BOTTOM_LINES = 1000
"""What is followed by so many lines without a word of failure did not end the run."""
_HANG_LINES = 60
_NEAR_LINES = 15
"""So close, a consequence says what a vague symptom is."""
_SOON_S = 60.0
_SOON_LINES = 200
"""So close after a symptom, an exception that nobody knows is most likely of it."""
_HALF_YEAR_S = 183 * 86_400.0
_YEAR_S = 366 * 86_400.0
_MOST_EVIDENCE = 3
_MOST_OTHERS = 4

Verdict = Literal["cause", "consequences", "nothing"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Other:
    """Something else that was found, which may or may not have to do with it."""

    what: str
    line: Line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `paceline explain` says, before it is put into lines."""

    verdict: Verdict
    confidence: Confidence | None = None
    cause: str = ""
    remedy: str = ""
    source: str = ""
    entry: str | None = None
    """The entry of the catalogue; None for an exception of the user's own."""
    crash: Crash | None = None
    """The traceback that goes with it."""
    evidence: tuple[Line, ...] = ()
    others: tuple[Other, ...] = ()
    needed: tuple[str, ...] = ()
    """The logs to give as well."""
    num_consequences: int = 0
    num_benign: int = 0
    logs: tuple[Log, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
    """A candidate: an entry of the catalogue, or an exception that it doesn't know."""

    line: Line
    signature: Signature | None
    crash: Crash | None
    is_fresh: bool
    """It stands near the end of its log."""
    order: tuple[bool, float, int, int]

    @property
    def what(self) -> str:
        """What to call it."""
        return self.signature.id if self.signature is not None else self.line.text

    @property
    def name(self) -> str:
        """To tell one from another; what differs in numbers only is the same."""
        return self.signature.id if self.signature is not None else _shape(self.line.text)


def explain(logs: Sequence[Log]) -> Explanation:
    """The first cause in the logs of one run; their order counts where lines have no time."""
    logs = _unwrap_year(logs)
    found = sorted((*_from_hits(logs), *_from_crashes(logs)), key=lambda one: one.order)
    cascades = _with_role("cascade", found)
    symptoms = _with_role("symptom", found)
    symptoms = [one for one in symptoms if not (_is_vague(one) and any(_is_near(one, other) for other in cascades))]
    roots = [one for one in found if one.signature is None or one.signature.role == "root"]
    roots = [one for one in roots if not any(_is_behind(one, other) for other in (*symptoms, *cascades))]
    # What stands far from the end of its log did not end the run; it is named only where nothing else is.
    explanation = _of_first(roots, symptoms, cascades, found, logs, is_fresh=True)
    explanation = explanation or _of_first(roots, symptoms, cascades, found, logs, is_fresh=False)
    explanation = explanation or _from_silence(found, logs)
    return _completed(explanation, roots + symptoms, cascades, logs)


def _of_first(
    roots: list[_Found],
    symptoms: list[_Found],
    cascades: list[_Found],
    found: list[_Found],
    logs: Sequence[Log],
    *,
    is_fresh: bool,
) -> Explanation | None:
    roots, symptoms, cascades = (
        [one for one in group if one.is_fresh is is_fresh] for group in (roots, symptoms, cascades)
    )
    if roots:
        return _from_root(roots)
    if symptoms:
        return _from_symptom(next((one for one in symptoms if not _is_vague(one)), symptoms[0]), found, logs)
    return _from_cascades(cascades) if cascades else None


# Candidates


def _from_hits(logs: Sequence[Log]) -> Iterable[_Found]:
    for index, log in enumerate(logs):
        bottom = _bottom(log)
        for hit in log.hits:
            is_fresh = hit.last.number >= bottom
            line = hit.first if hit.first.number >= bottom or not is_fresh else hit.last
            yield _Found(
                line=line,
                signature=hit.signature,
                crash=_crash_of(line, log),
                is_fresh=is_fresh,
                order=_order(index, line),
            )


def _from_crashes(logs: Sequence[Log]) -> Iterable[_Found]:
    """Uncaught exceptions of which the catalogue knows nothing: causes of their own."""
    for index, log in enumerate(logs):
        bottom = _bottom(log)
        last = {crash.line.stream: crash for crash in log.crashes}
        for printed in log.crashes:
            if printed.line.stream and printed is not last[printed.line.stream]:
                continue  # a process dies once
            crash = printed.cause
            if crash.signature is None:
                is_fresh = printed.last_number >= bottom
                line = dataclasses.replace(crash.line, host=printed.line.host, rank=printed.line.rank)
                yield _Found(
                    line=line, signature=None, crash=crash, is_fresh=is_fresh, order=_order(index, printed.line)
                )


def _bottom(log: Log) -> int:
    """The line where the end of a log begins: all that tells of failures up to its last line, without long gaps."""
    spans = [(crash.last_number, crash.first_number) for crash in log.crashes]
    for hit in log.hits:
        if hit.signature.role in ("root", "symptom", "cascade"):
            first, last = hit.first.number, hit.last.number
            spans.append((last, first if last - first <= _BOTTOM_LINES * (hit.count - 1) else last))
    start = log.num_lines
    for last, first in sorted(spans, reverse=True):
        if start - last > _BOTTOM_LINES:
            break
        start = min(start, first)
    return start


def _crash_of(line: Line, log: Log) -> Crash | None:
    for crash in log.crashes:
        if crash.line.stream == line.stream and crash.first_number <= line.number <= crash.last_number:
            return crash
    return None


def _order(file_index: int, line: Line) -> tuple[bool, float, int, int]:
    """By time; then what has none, file by file."""
    return (line.time_s is None, line.time_s or 0.0, file_index, line.number)


def _is_comparable(one: _Found, other: _Found) -> bool:
    """Whether it is known which came first."""
    return one.line.file == other.line.file or (one.line.time_s is not None and other.line.time_s is not None)


def _unwrap_year(logs: Sequence[Log]) -> Sequence[Log]:
    """Lines of January come after those of December."""
    times = [line.time_s for log in logs for line in _all_lines(log) if line.time_s is not None]
    if not times or max(times) - min(times) < _HALF_YEAR_S:
        return logs

    def later(line: Line) -> Line:
        is_early = line.time_s is not None and line.time_s < _HALF_YEAR_S
        return dataclasses.replace(line, time_s=(line.time_s or 0.0) + _YEAR_S) if is_early else line

    def shifted(hit: Hit) -> Hit:
        return dataclasses.replace(hit, first=later(hit.first), last=later(hit.last))

    return [
        dataclasses.replace(
            log,
            hits=tuple(shifted(hit) for hit in log.hits),
            crashes=tuple(dataclasses.replace(crash, line=later(crash.line)) for crash in log.crashes),
        )
        for log in logs
    ]


def _all_lines(log: Log) -> Iterable[Line]:
    for hit in log.hits:
        yield from (hit.first, hit.last)
    yield from (crash.line for crash in log.crashes)


# Which of them counts


def _with_role(role: Role, found: list[_Found]) -> list[_Found]:
    return [one for one in found if one.signature is not None and one.signature.role == role]


def _is_behind(crash: _Found, other: _Found) -> bool:
    """Whether an exception that nobody knows comes of something that is known and came shortly before it.

    A library's may; what the user's own code raises is a cause of its own.
    """
    if crash.crash is None or crash.signature is not None or crash.crash.is_raised_by_own:
        return False
    if other.order >= crash.order or _is_vague(other):
        return False
    is_same_file = other.line.file == crash.line.file
    if _is_cascade(other) and not (is_same_file and other.line.stream == crash.line.stream):
        return False  # clocks differ between hosts, and what a rank dies of is told by others within moments
    if other.line.time_s is not None and crash.line.time_s is not None:
        return crash.line.time_s - other.line.time_s <= _SOON_S
    return is_same_file and crash.line.number - other.line.number <= _SOON_LINES


def _is_cascade(found: _Found) -> bool:
    return found.signature is not None and found.signature.role == "cascade"


def _shape(text: str) -> str:
    """A text without its numbers."""
    return re.sub(r"\d+", "0", text)


def _is_vague(found: _Found) -> bool:
    return found.signature is not None and found.signature.is_vague


def _is_near(one: _Found, other: _Found) -> bool:
    is_same = one.line.file == other.line.file and one.line.stream == other.line.stream
    return is_same and abs(one.line.number - other.line.number) <= _NEAR_LINES


# What is said


def _from_root(roots: list[_Found]) -> Explanation:
    first = roots[0]
    said: dict[tuple[int | None, str], Line] = {}  # torchrun's summary repeats what a rank has said
    for one in roots:
        if one.name == first.name:
            said.setdefault((one.line.rank, one.line.text), one.line)
    same = list(said.values())
    rivals = [one for one in roots if one.name != first.name and not _is_comparable(first, one)]
    confidence: Confidence = "possible" if not first.is_fresh else "likely" if rivals else "certain"
    explanation = (
        _of_own(first, same, confidence)
        if first.signature is None
        else _of_signature(first.signature, first, same, confidence)
    )
    if not rivals:
        return explanation
    doubt = "Another log has a cause, too, and without times it is not known which came first."
    return dataclasses.replace(explanation, cause=f"{explanation.cause} {doubt}")


def _of_own(found: _Found, lines: list[Line], confidence: Confidence) -> Explanation:
    """An exception that the catalogue doesn't know."""
    assert found.crash is not None
    frame = found.crash.frame or found.crash.last_frame
    place = f", raised in {frame}" if frame else ""
    return Explanation(
        verdict="cause",
        confidence=confidence,
        cause=f"The script itself failed: {found.line.text}{place}.",
        remedy="Mend it there. The other ranks' errors come from this one.",
        source="the traceback",
        crash=found.crash,
        evidence=tuple(lines[:_MOST_EVIDENCE]),
    )


def _from_symptom(symptom: _Found, found: list[_Found], logs: Sequence[Log]) -> Explanation:
    assert symptom.signature is not None
    same = [one.line for one in found if one.signature is symptom.signature]
    behind = [one for one in found if one.signature is not None and one.signature.is_behind(symptom.signature)]
    if behind:
        best = min(behind, key=lambda one: one.signature is not None and one.signature.confidence == "possible")
        assert best.signature is not None
        return _of_signature(best.signature, best, [best.line, *same], best.signature.confidence)
    confidence = symptom.signature.confidence if symptom.is_fresh else "possible"
    explanation = _of_signature(symptom.signature, symptom, same, confidence)
    if symptom.signature.id == "pgnccl-watchdog-timeout":
        ranks = {rank for log in logs for rank in log.ranks}
        compared = timeouts.compare((line for log in logs for line in _all_lines(log)), num_known_ranks=len(ranks))
        if compared is None:
            return dataclasses.replace(explanation, confidence="possible")
        text, lines = compared
        cause = f"{symptom.signature.cause} Here {text}"
        return dataclasses.replace(explanation, cause=cause, evidence=tuple(lines))
    return explanation


def _of_signature(signature: Signature, found: _Found, lines: list[Line], confidence: Confidence) -> Explanation:
    return Explanation(
        verdict="cause",
        confidence=confidence,
        cause=signature.cause,
        remedy=signature.remedy,
        source=signature.source,
        entry=signature.id,
        crash=found.crash,
        evidence=tuple(lines[:_MOST_EVIDENCE]),
    )


def _from_cascades(cascades: list[_Found]) -> Explanation:
    assert cascades[0].signature is not None
    return Explanation(
        verdict="consequences",
        cause=f"Only consequences are here, so another rank failed first. {cascades[0].signature.cause}",
        remedy=cascades[0].signature.remedy,
        source=cascades[0].signature.source,
        entry=cascades[0].signature.id,
        crash=cascades[0].crash,
        evidence=tuple(one.line for one in cascades[:_MOST_EVIDENCE]),
    )


def _from_silence(found: list[_Found], logs: Sequence[Log]) -> Explanation:
    """Nothing failed that is known; but a log may end where jobs are known to hang."""
    lengths = {log.name: log.num_lines for log in logs}
    for one in found:
        if one.signature is not None and one.signature.hang:
            last = max(hit.last.number for log in logs for hit in log.hits if hit.signature is one.signature)
            if lengths[one.line.file] - last <= _HANG_LINES:
                return _of_signature(one.signature, one, [one.line], one.signature.confidence)
    return Explanation(verdict="nothing")


def _completed(
    explanation: Explanation, causes: list[_Found], cascades: list[_Found], logs: Sequence[Log]
) -> Explanation:
    """With what else was found, what was left out, and which logs are missing."""
    told = {_shape(line.text) for line in explanation.evidence}
    others: dict[str, Other] = {}
    for one in causes:
        is_told = _is_vague(one) or (one.signature is not None and one.signature.id == explanation.entry)
        if not is_told and _shape(one.line.text) not in told:
            others.setdefault(one.name, Other(what=one.what, line=one.line))
    needed: tuple[str, ...] = ()
    if explanation.confidence != "certain":
        lines = (*explanation.evidence, *(one.line for one in cascades))
        needed = tuple(peers.missing_logs(logs, lines, is_all=explanation.verdict == "consequences"))
    counts = {"cascade": 0, "benign": 0}
    for log in logs:
        for hit in log.hits:
            if hit.signature.role in counts:
                counts[hit.signature.role] += hit.count
    return dataclasses.replace(
        explanation,
        others=tuple(others.values())[:_MOST_OTHERS],
        needed=needed,
        num_consequences=counts["cascade"],
        num_benign=counts["benign"],
        logs=tuple(logs),
    )
