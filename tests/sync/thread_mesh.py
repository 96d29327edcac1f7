"""Hosts as threads of one process: a stand-in for `Mesh` with which the algebra of the engines is tested in
milliseconds. One rank per host, codec none unless a residual comes along."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from paceline.codec import Codec

_LIMIT_S = 20.0


class Switch:
    """Where the threads meet: the k-th call of every host belongs together."""

    def __init__(self, num_hosts: int) -> None:
        self.num_hosts = num_hosts
        self.lock = threading.Lock()
        self.waiting: dict[tuple[str, int], dict[int, tuple[Any, torch.futures.Future[Any]]]] = defaultdict(dict)

    def join(self, kind: str, turn: int, host: int, value: Any, combine: Callable[[list[Any]], list[Any]]) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        with self.lock:
            here = self.waiting[kind, turn]
            here[host] = (value, future)
            if len(here) < self.num_hosts:
                return future
            results = combine([here[index][0] for index in range(self.num_hosts)])
            for index, result in enumerate(results):
                here[index][1].set_result(result)
        return future


class ThreadMesh:
    """What one host sees of the others."""

    lanes = 1
    device = torch.device("cpu")

    def __init__(self, switch: Switch, host: int) -> None:
        self.switch, self.host = switch, host
        self.num_hosts = switch.num_hosts
        self.hosts = tuple(f"h{index}" for index in range(self.num_hosts))
        self.num_means = self.num_exchanges = 0

    def exchange(self, numbers: list[int]) -> torch.futures.Future[list[list[int]]]:
        self.num_exchanges += 1
        return self.switch.join("exchange", self.num_exchanges, self.host, numbers, lambda rows: [rows] * len(rows))

    def mean(
        self,
        flat: torch.Tensor,
        *,
        codec: Codec,
        sum_local: bool,
        weights: Callable[[], list[float]] | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        self.num_means += 1
        sent = flat.clone()
        if residual is not None:  # a codec that keeps the larger half of the values
            sent += residual
            kept = torch.where(sent.abs() >= sent.abs().median(), sent, torch.zeros_like(sent))
            residual.copy_(sent - kept)
            sent = kept

        def combine(given: list[tuple[torch.Tensor, torch.Tensor, Any]]) -> list[torch.Tensor]:
            shares = weights() if weights is not None else [1 / self.num_hosts] * self.num_hosts
            mean = sum(share * sent for share, (_, sent) in zip(shares, given, strict=True))
            for out, _ in given:
                out.copy_(mean)
            return [out for out, _ in given]

        return self.switch.join("mean", self.num_means, self.host, (flat, sent), combine)


def on_hosts(num_hosts: int, work: Callable[[ThreadMesh], Any]) -> list[Any]:
    """What `work` returned on each host; raises what it raised on the first that did."""
    switch = Switch(num_hosts)
    results: list[Any] = [None] * num_hosts
    errors: list[BaseException] = []

    def run(host: int) -> None:
        try:
            results[host] = work(ThreadMesh(switch, host))
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(host,), daemon=True) for host in range(num_hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=_LIMIT_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a host waits for ever"
    return results
