"""Real ranks that import PyTorch once and then take one task after the other."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

# One process imports PyTorch, and every rank is forked from it.
_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload(["torch", "torch._dynamo", "paceline.train.run"])
_START_LIMIT_S = 60.0
_MOST_THREADS = 64


@dataclasses.dataclass(frozen=True)
class Raised:
    """A rank's exception, as it comes over the pipe."""

    error: BaseException | None
    text: str


class RankPool:
    """`run` calls a function on every rank, with the environment that torchrun would give it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[tuple[Any, Connection]] = []
        self.start()

    def start(self) -> None:
        for rank in range(self.size):
            ours, theirs = _FORK_SERVER.Pipe()
            process = _FORK_SERVER.Process(target=_serve, args=(rank, self.size, theirs))
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        for _, pipe in self._ranks:
            assert pipe.poll(_START_LIMIT_S), "a rank of the pool did not start"
            pipe.recv()

    def stop(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks = []

    @property
    def is_worn(self) -> bool:
        """Whether process groups that somebody still refers to have left many threads, each of which wakes up a hundred
        times a second."""
        return any(len(os.listdir(f"/proc/{process.pid}/task")) > _MOST_THREADS for process, _ in self._ranks)

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float = 30.0) -> list[Any]:
        """What each rank returned, or `Raised`. A rank that does not answer in time is `Raised` too."""
        with socket.socket() as holder:
            # Bound and not listening, as the launcher keeps it.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            for _, pipe in self._ranks:
                pipe.send((function, args, holder.getsockname()[1]))
            return self._collect(limit_s)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returned; fails with the tracebacks of all ranks that raised."""
        results = self.call(function, *args)
        told = [f"rank {rank}:\n{result.text}" for rank, result in enumerate(results) if isinstance(result, Raised)]
        assert not told, "\n".join(told)
        return results

    def _collect(self, limit_s: float) -> list[Any]:
        deadline_s = time.monotonic() + limit_s
        results: list[Any] = [Raised(None, "no answer in time")] * self.size
        open_pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while open_pipes and (left_s := deadline_s - time.monotonic()) > 0:
            for pipe in wait(list(open_pipes), timeout=left_s):
                assert isinstance(pipe, Connection)
                rank = open_pipes.pop(pipe)
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    results[rank] = Raised(None, "the process ended")
        return results


def _serve(rank: int, size: int, pipe: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # what is there by now is not looked at again
    pipe.send("ready")
    while True:
        try:
            function, args, port = pipe.recv()
        except EOFError:
            os._exit(0)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        try:
            result = function(*args)
        except BaseException as error:  # noqa: BLE001
            result = Raised(error, traceback.format_exc())
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(result)
        del function, args, result
        gc.collect()  # a process group in a cycle keeps its threads
