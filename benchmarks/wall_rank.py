"""What each rank of `wall.py` does: every row in turns, several times, and the figures to a file.

Started by `paceline run`, with the file of the plan as its only argument.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated import EmulatedModel, train
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.codec import Codec, chunk_slices, part_values
from paceline.strategy import parse_sync
from paceline.sync.codecs import decode, decode_sum, encode, prepare

CODEC = "codec:"
OTHERS = {"compute", "ddp", "ddp-fp16"}
TIMEOUT_S = 300.0
NUM_STEPS = 3
"""Measured steps per repetition of what does the same at each step."""


@dataclasses.dataclass
class Trial:
    """A model, ready to be measured in one way of synchronising it."""

    model: torch.nn.Module
    warmup_steps: int = 2  # DDP rebuilds its buckets after the first
    num_steps: int = NUM_STEPS
    sent_bytes: Callable[[], int] | None = None
    """Counted where they are sent; None for what is not ours."""


@dataclasses.dataclass
class Sample:
    """One repetition of one row, on one rank."""

    elapsed_s: float
    sent_bytes: int | None
    interface_bytes: int
    num_steps: int


class Bench:
    """The world that all rows share."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.rank = dist.get_rank()
        self.alone, _ = dist.new_subgroups(group_size=1)
        self._codecs = {row: parse_codec(row) for row in plan["rows"] if row not in OTHERS}
        self.notes = self._compile()

    def _compile(self) -> list[str]:
        """Rank 0 first, alone; then the others, from its cache. What rank 0's took."""
        notes: list[str] = []
        for compiles in (self.rank == 0, self.rank != 0):
            if compiles:
                codecs = dict.fromkeys(self._codecs.values())
                notes = [line for codec in codecs if (line := prepare(codec, torch.device("cpu"))) is not None]
            dist.barrier()
        return notes

    @contextmanager
    def trial(self, row: str, emulated: EmulatedModel) -> Iterator[Trial]:
        # Equal from the start: sending the weights around first would take longer than all that is measured.
        options = {"gradient_as_bucket_view": True, "init_sync": False}
        if row == "compute":
            yield Trial(DistributedDataParallel(emulated, process_group=self.alone, **options))
        elif row in ("ddp", "ddp-fp16"):
            model = DistributedDataParallel(emulated, **options)
            if row == "ddp-fp16":
                model.register_comm_hook(None, fp16_compress_hook)
            yield Trial(model)
        else:
            raise ValueError(row)

    def measure(self, row: str) -> Sample:
        """One repetition of a row."""
        if not row.startswith(CODEC):
            return self._measure_steps(row)
        elapsed_s = codec_s(self._codecs[row], self.plan["model_bytes"] // 4) if self.rank == 0 else 0.0
        dist.barrier()
        return Sample(elapsed_s, 0, 0, 1)

    def _measure_steps(self, row: str) -> Sample:
        """A warm-up, then a window of steps between two points where all ranks meet."""
        torch.manual_seed(1 + self.rank)
        emulated = EmulatedModel(self.plan["model_bytes"], 0.0)
        with self.trial(row, emulated) as trial:
            train(trial.model, emulated, trial.warmup_steps)
            emulated.set_compute(self.plan["compute_s"])
            count = trial.sent_bytes or (lambda: 0)
            dist.barrier()
            began_s, sent, seen = time.perf_counter(), count(), interface_bytes()
            train(trial.model, emulated, trial.num_steps)
            elapsed_s, sent, seen = time.perf_counter() - began_s, count() - sent, interface_bytes() - seen
            dist.barrier()
        return Sample(elapsed_s, sent if trial.sent_bytes else None, seen, trial.num_steps)


def parse_codec(row: str) -> Codec:
    """The codec of a strategy, or of a row that is about one alone."""
    return parse_sync(f"every:{row.removeprefix(CODEC)}" if row.startswith(CODEC) else row).codec


def codec_s(codec: Codec, num_values: int) -> float:
    """Seconds of one host's work on one step's gradients: encode all of them, add up its part of all hosts', encode
    that, decode the parts of all; in the pieces in which they would be sent."""
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


def interface_bytes() -> int:
    """What this host has sent so far on everything but its loopback, headers and acknowledgements included."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(fields.split()[8]) for name, fields in lines if name.strip() != "lo")


def gather(sample: Sample) -> list[Sample]:
    """All ranks' samples."""
    samples: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(samples, sample)
    return samples


def summarise(row: str, repetitions: list[list[Sample]]) -> dict[str, Any]:
    """The medians over repetitions; of each the slowest rank's time, and the bytes of the mean host."""
    steps_s = [max(sample.elapsed_s / sample.num_steps for sample in samples) for samples in repetitions]
    flat = [sample for samples in repetitions for sample in samples]
    counted = [sample.sent_bytes / sample.num_steps for sample in flat if sample.sent_bytes is not None]
    interface = statistics.fmean(sample.interface_bytes / sample.num_steps for sample in flat)
    return {
        "strategy": row,
        "step_s": statistics.median(steps_s),
        "bytes_per_step": statistics.fmean(counted) if counted else interface,
        "counted_by": "the sender" if counted else "the interface",
        "interface_bytes_per_step": interface,
        "repetitions_s": steps_s,
    }


def main() -> None:
    """Measure all rows of the plan."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    bench = Bench(plan)
    samples: dict[str, list[list[Sample]]] = {row: [] for row in plan["rows"]}
    for number in range(plan["repetitions"]):
        for row in plan["rows"]:
            samples[row].append(gather(bench.measure(row)))
            gc.collect()
            if bench.rank == 0:
                step_s = summarise(row, samples[row][-1:])["step_s"]
                print(f"{number + 1} of {plan['repetitions']}: {row} {step_s:.3f} s a step", flush=True)
    if bench.rank == 0:
        result = {"rows": [summarise(row, repetitions) for row, repetitions in samples.items()], "notes": bench.notes}
        Path(plan["result"]).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
