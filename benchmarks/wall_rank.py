"""What each rank of `wall.py` does: every row in turns, several times, and the samples to a file.

Started by `paceline run`, with the file of the plan as its only argument.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated import EmulatedModel, OneInTurn, interface_bytes, train
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.codec import Codec, chunk_slices, part_values
from paceline.strategy import Outer, parse_sync
from paceline.sync.codecs import decode, decode_sum, encode, prepare
from paceline.sync.collectives import Mesh
from paceline.sync.hooks import attach
from paceline.sync.meter import Meter

CODEC = "codec:"
PLAIN_ROWS = {"compute", "ddp", "ddp-fp16"}
FIRST_PORT = 29600
TIMEOUT_S = 300.0
PACED_STEPS = 2
"""At the end of a warm-up, at the real pace."""
NUM_STEPS = 3
"""Measured steps per repetition of what does the same at each step."""


@dataclasses.dataclass
class Trial:
    """A model, ready to be measured in one way of synchronising it."""

    model: torch.nn.Module
    warmup_steps: int = 1  # after which DDP rebuilds its buckets
    num_steps: int = NUM_STEPS
    sent_bytes: Callable[[], float] | None = None
    """Counted where they are sent; None for what is not ours."""


@dataclasses.dataclass
class Sample:
    """One repetition of one row, on one rank."""

    elapsed_s: float
    sent_bytes: float | None
    interface_bytes: int
    num_steps: int


@contextmanager
def trial_of(row: str, emulated: EmulatedModel, mesh: Mesh) -> Iterator[Trial]:
    """The row's way of synchronising, around the model."""
    # Equal from the start: sending the weights around first would take longer than all that is measured.
    options = {"gradient_as_bucket_view": True, "init_sync": False}
    if row == "compute":
        yield Trial(DistributedDataParallel(emulated, process_group=mesh.host_group, **options))
    elif row in PLAIN_ROWS:
        model = DistributedDataParallel(emulated, **options)
        if row == "ddp-fp16":
            model.register_comm_hook(None, fp16_compress_hook)
        yield Trial(model)
    else:
        strategy = parse_sync(row)
        group = mesh.host_group if isinstance(strategy, Outer) else None
        model = DistributedDataParallel(emulated, process_group=group, **options)
        meter = Meter(clock_s=time.monotonic, tell=lambda event: None, measures_wait=True)
        attach(model, strategy, mesh, meter)
        trial = Trial(model, sent_bytes=lambda: mesh.traffic.sent_bytes)
        if isinstance(strategy, Outer):
            trial.warmup_steps, trial.num_steps = strategy.period_steps + 1, strategy.period_steps
        yield trial
        mesh.exchange([]).wait()  # comes after all that is still under way


def measure_steps(row: str, plan: dict[str, Any]) -> Sample:
    """A warm-up, in which compute takes no time but in the last steps, then a window of steps, which all ranks begin
    together. A round begins and ends before a forward pass; those last steps bring the window to where one period has
    one round of each, and what is under way when it begins is what is under way when it ends."""
    mesh = Mesh.connect([f"h{number + 1}" for number in range(dist.get_world_size())], torch.device("cpu"))
    torch.manual_seed(1 + mesh.rank)
    emulated = EmulatedModel(plan["model_bytes"], 0.0)
    optimizer = OneInTurn(emulated.parameters())
    with trial_of(row, emulated, mesh) as trial:
        train(trial.model, optimizer, trial.warmup_steps)
        emulated.set_compute(plan["compute_s"])
        train(trial.model, optimizer, PACED_STEPS)
        count = trial.sent_bytes or (lambda: 0.0)
        dist.barrier()
        began_s, sent, seen = time.perf_counter(), count(), interface_bytes()
        train(trial.model, optimizer, trial.num_steps)
        elapsed_s, sent, seen = time.perf_counter() - began_s, count() - sent, interface_bytes() - seen
        dist.barrier()
    return Sample(elapsed_s, sent if trial.sent_bytes else None, seen, trial.num_steps)


def measure(row: str, plan: dict[str, Any]) -> Sample:
    """One repetition of a row; of a codec, on rank 0 while the others wait."""
    if not row.startswith(CODEC):
        return measure_steps(row, plan)
    elapsed_s = codec_s(parse_codec(row), plan["model_bytes"] // 4) if dist.get_rank() == 0 else 0.0
    dist.barrier()
    return Sample(elapsed_s, 0.0, 0, 1)


def parse_codec(row: str) -> Codec:
    """The codec of a strategy, or of a row that is about one alone."""
    return parse_sync(f"every:{row.removeprefix(CODEC)}" if row.startswith(CODEC) else row).codec


def codec_s(codec: Codec, num_values: int) -> float:
    """Seconds of one host's work on one step's gradients: encode all of them, add up its part of all hosts', encode
    that, decode the parts of all; in the pieces in which they would be sent."""
    torch.set_num_threads(1)
    num_hosts = dist.get_world_size()
    pieces = chunk_slices(codec, num_values, num_hosts)
    width = part_values(codec, pieces[0].stop, num_hosts)
    values = torch.randn(len(pieces), num_hosts, width)
    encoded = torch.zeros(len(pieces), num_hosts, codec.encoded_bytes(width), dtype=torch.uint8)
    weights, mean = torch.full((num_hosts,), 1 / num_hosts), torch.zeros(width)
    began_s = time.perf_counter()
    for piece, message in zip(values, encoded, strict=True):
        encode(codec, piece, message)
        decode_sum(codec, message, weights, mean)
        encode(codec, mean[None], message[:1])
        decode(codec, message, piece)
    return (time.perf_counter() - began_s) * num_values / values.numel()


def run_trial(row: str, number: int, plan: dict[str, Any]) -> None:
    """Meets the other ranks, measures, and has rank 0 add a line with all ranks' samples to the results."""
    # Each time at another port, where nobody of the time before can still be met; all of a lab's ports are free.
    meeting = f"tcp://{os.environ['MASTER_ADDR']}:{FIRST_PORT + number}"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timeout)
    samples: list[Any] = [None] * size
    dist.all_gather_object(samples, measure(row, plan))
    if rank == 0:
        line = {"row": row, "samples": [dataclasses.asdict(sample) for sample in samples]}
        with open(plan["results"], "a") as results:
            results.write(json.dumps(line) + "\n")
        step_s = max(sample.elapsed_s / sample.num_steps for sample in samples)
        print(f"{row} {step_s:.3f} s a step", flush=True)


def in_a_process(work: Callable[[], None]) -> None:
    """Does `work` in a fork of this process, so that nothing of it is left. Ends this process where it fails."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001  # the fork must not go on as its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(1)


def compile_kernels(plan: dict[str, Any]) -> None:
    """Before anything forks: rank 0 first, alone, and the others from its cache. Rank 0 writes down what it took."""
    notes = Path(plan["notes"])
    is_first = os.environ["RANK"] == "0"
    while not is_first and not notes.exists():
        time.sleep(0.1)
    codecs = dict.fromkeys(parse_codec(row) for row in plan["rows"] if row not in PLAIN_ROWS)
    lines = [
        line
        for codec in codecs
        if (line := prepare(codec, torch.device("cpu"), int(os.environ["WORLD_SIZE"]))) is not None
    ]
    if is_first:
        notes.with_suffix(".new").write_text(json.dumps(lines))
        notes.with_suffix(".new").rename(notes)


def main() -> None:
    """Measure all rows of the plan in turns, each time in a process of its own."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    compile_kernels(plan)
    for number, row in enumerate(plan["rows"] * plan["repetitions"]):
        in_a_process(lambda row=row, number=number: run_trial(row, number, plan))


if __name__ == "__main__":
    main()
