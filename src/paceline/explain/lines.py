"""One line of a log: its text without what a launcher put before it, and whose it is and when, as far as it tells."""

from __future__ import annotations

import dataclasses
import datetime
import re

# Before a rank's own text. Each is taken off, and they may follow one another: `[default0]:[rank0]: ...`.
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\[(?:[^\]@\s]*@)?\d+,(?P<rank>\d+)\]<std(?:out|err)>: ?",  # mpirun
        r"\[rank(?P<rank>\d+)\]: ?",  # PyTorch itself
        r"\[[a-zA-Z_]+(?P<local_rank>\d+)\]: ?",  # torchrun: the role and the local rank
        r"\[(?P<local_rank>\d+)\]:(?=\S)",  # torchrun before it had roles
        r"\[(?=[^\]:]*[A-Za-z.])(?P<host>[\w.-]+):(?P<rank>\d{1,4})\] ",  # paceline; Open MPI's pids have five digits
        r"\(\w+ pid=\d+(?:, ip=(?P<host>[\d.]+))?\) ",  # Ray
    )
)
SLURM = re.compile(r" *(?P<rank>\d+): ")
"""srun --label; too plain to be believed of a single line."""
COLLECTORS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]? ",
        r"\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]? ",
        r"[A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d [\w.-]+ [\w./-]+(?:\[\d+\])?: ",  # journalctl, syslog
        r"[\w.-]+ +\| ",  # docker compose
    )
)
"""What stands before every line where somebody has collected them; in other logs it is the line's own."""

_NCCL_HEADER = re.compile(
    r"(?:\[[^\]]*\] )?(?P<host>[A-Za-z0-9][\w.-]*):\d+:\d+ \[-?\d+\] (?:\S+:\d+ )?(?:NCCL|INFO|WARN) "
)
_SYSLOG_HEADER = re.compile(r"(?P<month>[A-Z][a-z]{2}) +(?P<day>\d+) (?P<clock>\d\d:\d\d:\d\d) (?P<host>[\w.-]+) ")
_GLOG_TIME = re.compile(r"\[?[IWEF](?P<month>\d{1,2})(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d(?:\.\d+)?)")
_DATE_TIME = re.compile(r"\d{4}[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T_ ](?P<clock>\d\d:\d\d:\d\d(?:[.,]\d+)?)")
_OF_TRACEBACK = re.compile(
    r"\s|Traceback |During handling|The above exception|[\w.]*(?:Error|Exception|Exit|Interrupt)\b"
)
_LEVEL = re.compile(r"\[?(?:INFO|WARNING|ERROR|DEBUG|CRITICAL|FATAL)\b")
_OWN_RANK = (
    re.compile(r"\[(?:PG [^\]]*)?[Rr]ank ?(?P<rank>\d+)\]"),
    re.compile(r"\(rank=(?P<rank>\d+), size="),
    re.compile(r"comm 0x[0-9a-f]+ rank (?P<rank>\d+) nranks"),
)
_OWN_LOCAL_RANK = re.compile(r"\(exitcode: -?\d+\) local_rank: (\d+)")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_TIME_WITHIN = 120
"""Characters from the start of a line in which its time must begin."""

# Colours and other orders to a terminal; what no text needs.
ESCAPES = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a log."""

    file: str
    number: int
    """From 1, as editors count."""
    text: str
    stream: str = ""
    """What a launcher put before it: lines of one file with the same belong together."""
    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    time_s: float | None = None
    """Since the beginning of the year, for the logs of glog don't name it; by the clock of the line's own host."""
    is_stamped: bool = False
    """It begins with a time, a level or a host of its own, so it continues no line before it."""

    def lend_to(self, line: Line) -> Line:
        """The other line, with what only this one of the same message says of rank, host and time."""
        return dataclasses.replace(
            line,
            rank=line.rank if line.rank is not None else self.rank,
            host=line.host or self.host,
            time_s=line.time_s if line.time_s is not None else self.time_s,
        )


def read_line(
    raw: bytes, *, file: str, number: int, is_slurm: bool = False, collector: re.Pattern[str] | None = None
) -> Line:
    """Take a line apart. `collector`: one of COLLECTORS, where it stands before every line of the log."""
    whole = text = _CONTROLS.sub("", raw.decode("utf-8", "replace")).rstrip()
    rank, local_rank, host = None, None, None
    collected = collector.match(text) if collector is not None else None
    start, stream = collected.end() if collected else 0, ""
    while match := _match_prefix(text, start, is_slurm=is_slurm and start == 0):
        found = match.groupdict()
        rank = rank if found.get("rank") is None else int(found["rank"])
        local_rank = local_rank if found.get("local_rank") is None else int(found["local_rank"])
        host = host or found.get("host")
        stream = stream or match[0].strip()
        start = match.end()
    text = text[start:]
    if local_rank is None and (match := _OWN_LOCAL_RANK.search(text)):
        local_rank = int(match[1])
    label = whole if collected else text
    header = _NCCL_HEADER.match(text) or _SYSLOG_HEADER.match(label)
    is_stamped = bool(header or _GLOG_TIME.match(label) or _DATE_TIME.match(label.lstrip("[")) or _LEVEL.match(text))
    return Line(
        file=file,
        number=number,
        text=text,
        stream=stream,
        rank=rank if rank is not None else _own_rank(text),
        local_rank=local_rank,
        host=host or (header["host"] if header else None),
        time_s=find_time(label),
        is_stamped=is_stamped and not (collected and _OF_TRACEBACK.match(text)),
    )


def _match_prefix(text: str, start: int, *, is_slurm: bool) -> re.Match[str] | None:
    if text[start : start + 1] in ("[", "("):
        for prefix in _PREFIXES:
            if match := prefix.match(text, start):
                return match
    return SLURM.match(text) if is_slurm else None


def _own_rank(text: str) -> int | None:
    for pattern in _OWN_RANK:
        if match := pattern.search(text):
            return int(match["rank"])
    return None


def find_time(text: str) -> float | None:
    """The time that stands near the start of a line, in seconds since the beginning of the year."""
    head = text[: _TIME_WITHIN + 40]
    match = _GLOG_TIME.match(head) or _DATE_TIME.search(head)
    if match is not None and match.start() <= _TIME_WITHIN:
        return _seconds(int(match["month"]), int(match["day"]), match["clock"])
    match = _SYSLOG_HEADER.match(head)
    if match is not None and match["month"] in _MONTHS:
        return _seconds(_MONTHS.index(match["month"]) + 1, int(match["day"]), match["clock"])
    return None


def local_time(epoch_s: float) -> float:
    """A time of `time.time()` as this machine's logs write it, in seconds since the beginning of the year."""
    moment = datetime.datetime.fromtimestamp(epoch_s)
    return _seconds(moment.month, moment.day, moment.strftime("%H:%M:%S.%f")) or 0.0


def _seconds(month: int, day: int, clock: str) -> float | None:
    hours, minutes, seconds = clock.replace(",", ".").split(":")
    try:
        # In a leap year, so that 29 February is a day.
        days = datetime.date(2000, month, day).timetuple().tm_yday
    except ValueError:
        return None
    return days * 86_400.0 + int(hours) * 3_600 + int(minutes) * 60 + float(seconds)


def clock(time_s: float) -> str:
    """The time of the day, for people."""
    seconds = int(time_s) % 86_400
    return f"{seconds // 3_600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
