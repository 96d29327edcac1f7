"""Notices when nothing moves in this rank any more, and tells the driver where it stands.

What moves is the number of optimizer steps and of collectives that were begun, which PyTorch counts itself. A thread
asks for both once a second or more often; the script's own thread does nothing but count steps. `train/guard.py`
starts it when the script makes its process group.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import linecache
import os
import sys
import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed.distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.events import RankMoved, RankStalled, emit
from paceline.train.standing import Frame, find_standing, script_index

_LONGEST_PERIOD_S = 1.0
_BUSY_SHARE = 0.02
"""Of one core; a thread that waits in Gloo uses nothing."""

_steps: dict[int, int] = {}
"""By optimizer: a script may have several, or one around another."""
_is_compiling = torch.compiler.is_compiling


def start(environ: Mapping[str, str] = os.environ) -> None:
    """Watch this rank from now on; called once or more. Does nothing in a run of one rank, or without a driver."""
    stall_s = float(environ.get("PACELINE_STALL_WARNING_S", "0"))
    is_alone = int(environ.get("PACELINE_WORLD_SIZE", "1")) < 2
    if stall_s <= 0 or is_alone or _steps or "PACELINE_EVENT_FD" not in environ:
        return
    _steps[0] = 0
    register_optimizer_step_post_hook(_count_step)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    # Not threading's: the script's own count of threads, and what it hangs into them, is none of our business.
    _thread.start_new_thread(_watch, (stall_s, os.getcwd(), main_thread))


def count_steps() -> int | None:
    """Optimizer steps done; None where they are not counted."""
    return max(_steps.values()) if _steps else None


def _count_step(optimizer: object, *_: object) -> None:
    if not _is_compiling():  # a compiled step counts nothing: it would be compiled again for each number
        _steps[id(optimizer)] = _steps.get(id(optimizer), 0) + 1


class Stillness:
    """Since when nothing moves. Time comes from outside, and time in which nobody looked does not count: the process
    was stopped, or its machine slept."""

    def __init__(self, *, stall_s: float, period_s: float) -> None:
        self._stall_s = stall_s
        self._longest_s = 2 * period_s
        self._looked_s: float | None = None
        self._seen: Hashable = None
        self._is_told = False
        self.still_s = 0.0

    def look(self, now_s: float, counts: Hashable) -> Literal["moving", "still", "stalled", "moves again"]:
        """`counts`: whatever changes when something moves. `stalled` and `moves again` are said once each."""
        passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        if counts != self._seen:
            self._seen, self.still_s = counts, 0.0
            was_told, self._is_told = self._is_told, False
            return "moves again" if was_told else "moving"
        self.still_s += min(passed_s, self._longest_s)
        if self._is_told or self.still_s < self._stall_s:
            return "still"
        self._is_told = True
        return "stalled"


def _watch(stall_s: float, folder: str, main_thread: int) -> None:
    """The thread: lives as long as the process, and must never be heard of."""
    period_s = min(_LONGEST_PERIOD_S, stall_s / 8)
    stillness = Stillness(stall_s=stall_s, period_s=period_s)
    clock = time.pthread_getcpuclockid(main_thread)
    moved_cpu_s = 0.0
    while True:
        time.sleep(period_s)
        with contextlib.suppress(Exception):  # what this turn stumbled over may be gone by the next
            counts = (count_steps(), tuple(_count_collectives()))
            match stillness.look(time.monotonic(), counts):
                case "moving":
                    moved_cpu_s = time.clock_gettime(clock)
                case "moves again":
                    moved_cpu_s = time.clock_gettime(clock)
                    emit(RankMoved(step=count_steps() or 0))
                case "stalled":
                    used_s = time.clock_gettime(clock) - moved_cpu_s
                    busy = used_s > _BUSY_SHARE * stillness.still_s
                    emit(_describe(folder, main_thread, busy=busy, since_s=stillness.still_s))
                case "still":
                    pass


def _count_collectives() -> Iterator[int]:
    """Of each process group, the world's first; -1 where it can't tell."""
    c10d: Any = torch.distributed.distributed_c10d
    for group in list(c10d._world.pg_map):
        count = -1
        with contextlib.suppress(RuntimeError):
            count = group._get_sequence_number_for_group()
        yield count


def _describe(folder: str, main_thread: int, *, busy: bool, since_s: float) -> RankStalled:
    stack, text = _read_stack(main_thread)
    standing = find_standing(stack, folder=folder, text=text, busy=busy)
    if (name := _find_on_gpu()) is not None and not standing.doing.endswith(name):
        standing = standing.replace(doing=f"{name} (NCCL)", waits=True)
    return RankStalled(
        step=count_steps() or 0,
        collectives=next(_count_collectives(), -1),
        busy=busy,
        since_s=round(since_s, 1),
        **standing.as_dict(),
    )


def _read_stack(main_thread: int) -> tuple[list[Frame], str]:
    """The calls of the main thread, innermost first, and the source line of the script's innermost."""
    main = sys.modules["__main__"].__dict__
    frame, frames = sys._current_frames().get(main_thread), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    stack = [
        Frame(
            path=one.f_code.co_filename,
            function=one.f_code.co_name,
            line=one.f_lineno,
            is_main=one.f_globals is main,
        )
        for one in frames
    ]
    index = script_index(stack)
    text = ""
    if index < len(stack):
        text = linecache.getline(stack[index].path, stack[index].line, frames[index].f_globals).strip()
    return stack, text


def _find_on_gpu() -> str | None:
    """The oldest collective that NCCL has not ended, from its flight recorder: the script's thread runs ahead, and
    waits for it wherever it next needs a value."""
    bindings: Any = torch._C
    dump = getattr(bindings._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None or not torch.cuda.is_initialized():
        return None
    return find_unfinished(json.loads(dump(includeCollectives=True, onlyActive=True)))


def find_unfinished(trace: Mapping[str, Any]) -> str | None:
    """The name of the first entry of a flight recorder's dump that has not ended, without `nccl:`."""
    for entry in trace.get("entries") or ():
        if entry.get("state") != "completed":
            return str(entry.get("profiling_name", "a collective")).removeprefix("nccl:")
    return None
