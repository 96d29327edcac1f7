"""Work in stages: while one message is decoded, the next one travels and the one after it is encoded."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch

_CLOSE_LIMIT_S = 5.0


class Work(Protocol):
    """What `torch.distributed` returns for a collective that is under way."""

    def wait(self) -> bool: ...


Job = Iterator[list[Work]]
"""Starts a collective or several, and yields them; what comes after a `yield` runs when they have ended. The n-th
stretch of every job runs on the n-th thread of its pipeline, in the order in which the jobs were submitted: a process
group that only the n-th stretches use sees the same order on every rank."""


@dataclasses.dataclass
class _Submitted:
    job: Job
    future: torch.futures.Future[Any] | None
    result: object
    ready: torch.Event | None
    """On a GPU: the caller's kernels have written what the job reads."""
    works: list[Work] = dataclasses.field(default_factory=list)


class Pipeline:
    """Advances jobs on `num_stages` daemon threads, which start with the first job. After an error every later job
    fails with the same one, because the ranks are no longer in step.

    On a GPU all stages enqueue on one stream beside the caller's (untested on real hardware so far).
    """

    def __init__(self, num_stages: int, device: torch.device) -> None:
        self._queues: list[queue.SimpleQueue[_Submitted | None]] = [queue.SimpleQueue() for _ in range(num_stages)]
        self._threads: list[threading.Thread] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._error: Exception | None = None
        self._is_closed = False

    def submit(self, job: Job, future: torch.futures.Future[Any] | None = None, result: object = None) -> None:
        """Returns at once. `future` gets `result` when the job has ended, unless the job has set it before, or the
        exception that ended this job or one before it. Call it from one thread."""
        if self._is_closed:
            raise RuntimeError("this pipeline is closed")
        if not self._threads:
            self._start()
        self._queues[0].put(_Submitted(job, future, result, self._record()))

    def close(self) -> None:
        """Ends the threads after the jobs that are under way; gives up on those that don't end within seconds."""
        self._is_closed = True
        if self._threads:
            self._queues[0].put(None)
        for thread in self._threads:
            thread.join(_CLOSE_LIMIT_S)
        self._threads = []

    def _start(self) -> None:
        for stage in range(len(self._queues)):
            thread = threading.Thread(target=self._serve, args=(stage,), name=f"paceline-sync-{stage}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _record(self) -> torch.Event | None:
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()

    def _serve(self, stage: int) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream):  # pyright: ignore[reportArgumentType]  # None is none
            while (submitted := self._queues[stage].get()) is not None:
                if self._stream is not None and stage == 0 and submitted.ready is not None:
                    self._stream.wait_event(submitted.ready)
                if self._advance(submitted):
                    self._queues[stage + 1].put(submitted)
                del submitted  # or this thread would keep its tensors until the next one comes
        if stage + 1 < len(self._queues):
            self._queues[stage + 1].put(None)

    def _advance(self, submitted: _Submitted) -> bool:
        """Runs the job's next stretch; whether there is another one."""
        future = submitted.future
        try:
            if self._error is not None:
                raise self._error
            for work in submitted.works:
                work.wait()
            submitted.works = next(submitted.job)
        except StopIteration:
            if future is not None and not future.done():
                future.set_result(submitted.result)
            return False
        except Exception as error:  # noqa: BLE001  # whoever waits for the future gets it
            self._error = error
            if future is not None and not future.done():
                future.set_exception(error)
            return False
        return True


class Scratch:
    """Memory that is used again: fresh pages cost a processor as much as coding what is written to them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, rows: int, width: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Of shape [rows, width], with anything in it."""
        num_bytes = rows * width * dtype.itemsize
        try:
            raw = self._free.setdefault(num_bytes, []).pop()  # atomic: several threads take and give
        except IndexError:
            raw = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return raw.view(dtype).view(rows, width)

    def give(self, *taken: torch.Tensor) -> None:
        for tensor in taken:
            raw = tensor.view(-1).view(torch.uint8)
            self._free.setdefault(raw.numel(), []).append(raw)
