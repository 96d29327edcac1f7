"""The processes of a run and the few exchanges between them. Tensors only: nothing here pickles."""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import json
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented, not in __all__

from paceline.cluster.detect import Place
from paceline.errors import CheckpointError, InputError, PacelineError, WorldError
from paceline.units import format_duration

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """All ranks of the run as seen from this one. Every method must be called by every rank, in the same
    order."""

    place: Place
    device: torch.device
    """Where this rank computes, and where the tensors of every exchange lie."""
    backend: str | None
    """'gloo' or 'nccl'; None when there is one rank only."""
    device_reason: str

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.world_size

    def sum(self, values: list[float]) -> list[float]:
        """The element-wise sums over all ranks, in double precision. Every rank passes as many values."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites `tensor` (contiguous, any type, same shape everywhere) with rank 0's."""
        if self.size == 1 or tensor.numel() == 0:
            return
        raw = tensor.reshape(-1).view(torch.uint8)
        wire = raw.to(self.device)
        dist.broadcast(wire, src=0)
        if wire.data_ptr() != raw.data_ptr():
            raw.copy_(wire)

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's `data` on every rank."""
        size = torch.tensor([len(data)])
        self.broadcast(size)
        buffer = _to_tensor(data) if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(buffer)
        return bytes(buffer.tolist())

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The `data` of every rank, by rank."""
        if self.size == 1:
            return [data]
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)], device=self.device))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: len(data)] = _to_tensor(data)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [bytes(part[: int(size)].tolist()) for part, size in zip(parts, sizes, strict=True)]

    def host_names(self) -> list[str]:
        """By rank. What `paceline run` calls the hosts, so that one machine may pass for two."""
        name = self.place.host or socket.gethostname()
        return [told.decode() for told in self.gather_bytes(name.encode())]

    def on_rank_0(self, asked: str, work: Callable[[], bytes]) -> bytes:
        """Does `work` on rank 0 alone. Every rank gets its bytes, or raises the same CheckpointError, whatever
        was raised on rank 0; `asked` is what the script called."""
        answer: dict[str, str | None] = {"error": None, "hint": None}
        result, cause = b"", None
        if self.rank == 0:
            try:
                result = work()
            except PacelineError as error:
                answer = {"error": error.message, "hint": error.hint}
            except Exception as error:  # noqa: BLE001  # the others are waiting, and must be told of any
                answer, cause = {"error": f"{asked} failed on rank 0: {_in_a_line(error)}", "hint": None}, error
        answer = json.loads(self.broadcast_bytes(json.dumps(answer).encode()))
        if answer["error"] is not None:
            raise CheckpointError(answer["error"], hint=answer["hint"]) from cause
        return self.broadcast_bytes(result)

    def on_each_rank(self, asked: str, work: Callable[[], T], *, tells: type[PacelineError] = WorldError) -> T:
        """Does `work` on every rank and returns what it gave here. Nobody goes on alone: a rank on which it
        fails raises its own error, and all others one of the kind `tells` that tells of it."""
        try:
            result = work()
        except Exception as error:
            self.gather_bytes(_in_a_line(error).encode())
            raise
        for rank, told in enumerate(self.gather_bytes(b"")):
            if told:
                raise tells(f"{asked} failed on rank {rank}: {told.decode()}")
        return result

    def require_same(self, what: str, value: str) -> None:
        """Raises WorldError on every rank when `value` differs between ranks."""
        values = [part.decode() for part in self.gather_bytes(value.encode())]
        if len(set(values)) > 1:
            told = "; ".join(f"rank {rank}: {found}" for rank, found in enumerate(values) if found != values[0])
            raise WorldError(f"{what} differs between the ranks. rank 0: {values[0]}; {told}")


def connect(place: Place, *, timeout_s: float) -> World:
    """Chooses the device, and joins the process group when there are several ranks.

    Raises InputError when the device or the address of rank 0 can't be used, WorldError when the ranks don't
    meet within `timeout_s`.
    """
    device, reason = choose_device(place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.world_size == 1:
        return World(place=place, device=device, backend=None, device_reason=reason)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    try:
        if place.store_is_hosted:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = _store(place, timeout)
            dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    except RuntimeError as error:
        raise WorldError(
            f"rank {place.rank} did not meet the other {place.world_size - 1} at {place.master_addr} port "
            f"{place.master_port} within {format_duration(timeout_s)}: {str(error).splitlines()[0]}"
        ) from error
    return World(place=place, device=device, backend=backend, device_reason=reason)


def choose_device(place: Place) -> tuple[torch.device, str]:
    """The GPU of this local rank, or the CPU; and why."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus == 0:
        return torch.device("cpu"), "PyTorch sees no GPU"
    if place.local_rank < num_gpus:
        return torch.device("cuda", place.local_rank), f"local rank {place.local_rank} of {num_gpus} GPUs"
    if num_gpus == 1:
        return torch.device("cuda", 0), "the only GPU that this rank is shown"
    raise InputError(
        f"local rank {place.local_rank} has no GPU: this host shows {num_gpus}",
        hint=f"start at most {num_gpus} ranks on this host, or hide the GPUs: CUDA_VISIBLE_DEVICES=",
    )


def start_line(world: World, hosts: list[str], precision: str, timeout_s: float) -> str:
    """What was chosen, and why; the ranks and hosts only where `paceline run` has not just named them."""
    place = world.place
    words = [f"{world.device.type} ({world.device_reason})", precision]
    if place.launcher != "paceline run":
        ranks = f"{world.size} rank{'s' * (world.size > 1)} on {', '.join(hosts)}"
        words.insert(0, f"{ranks}, started by {place.launcher} ({place.reason})")
    if world.backend is not None:
        words.append(f"{world.backend} · timeout {format_duration(timeout_s)}")
    return f"paceline: {' · '.join(words)}"


def _store(place: Place, timeout: timedelta) -> TCPStore:
    """The meeting point. Rank 0 listens on the address of the run only: by itself a TCPStore listens on every
    one."""
    assert place.master_addr is not None and place.master_port is not None
    listener = _listen(place) if place.rank == 0 else None
    return TCPStore(
        place.master_addr,
        place.master_port,
        place.world_size,
        is_master=place.rank == 0,
        timeout=timeout,
        # The store owns the descriptor from here on and closes it.
        master_listen_fd=listener.detach() if listener is not None else None,
    )


def _listen(place: Place) -> socket.socket | None:
    """A listening socket, or None where the name of this host is a loopback address that other hosts can't
    dial."""
    assert place.master_addr is not None and place.master_port is not None
    where = f"MASTER_ADDR={place.master_addr} MASTER_PORT={place.master_port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(place.master_addr, place.master_port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise InputError(f"{where}: this host does not know the name ({error.strerror})") from None
    if ipaddress.ip_address(address[0]).is_loopback and place.local_world_size < place.world_size:
        return None
    listener = socket.socket(family, socket.SOCK_STREAM)
    # The launcher keeps the port with a bound socket that does not listen; with this option both may be
    # bound.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(place.world_size)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"{where}: another process listens there", hint="set another MASTER_PORT") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise InputError(
                f"{where}: rank 0 runs on {socket.gethostname()}, which does not have this address",
                hint="set MASTER_ADDR to an address of the host of rank 0",
            ) from None
        raise InputError(f"{where}: {error.strerror}") from None
    return listener


def _in_a_line(error: Exception) -> str:
    """PyTorch's own errors go on for pages."""
    text = error.message if isinstance(error, PacelineError) else str(error)
    return f"{type(error).__name__}: {next(iter(text.splitlines()), '')}"


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
