"""What the codecs cost on one core, against copying the values in memory: speed, error and bytes.

    .venv/bin/python benchmarks/codecs.py [--values 62.5M] [--json FILE] [CODEC ...]

Values are normally distributed float32. They are encoded and decoded in pieces of the size that travels as one message,
as in a training; the sum is that of four hosts' rows. All figures come from one run, in turns, and are medians; "of
copy" is the time of copying the float32 values over that of the work on them, so that 1.00 is as fast as memory. Time
is that of the processor, so that other programs disturb little; the memory that they use at the same time does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline import Codec
from paceline.codec import CHUNK_VALUES
from paceline.sync.codecs import decode, decode_sum, encode, prepare

NUM_ROUNDS = 7
NUM_HOSTS = 4
CODECS = ("fp16", "int8", "int4", "topk")
CPU = torch.device("cpu")
UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}


def seconds_of(work: Callable[[], object]) -> float:
    """Processor time of one call: all work is done in this thread."""
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


def in_pieces(work: Callable[..., None], codec: Codec, *columns: Tensor) -> Callable[[], None]:
    """`work` on all pieces of tensors [pieces, ...], one after the other, as messages are."""

    def run() -> None:
        for piece in zip(*columns, strict=True):
            work(codec, *piece)

    return run


def measure(codec: Codec, values: Tensor, out: Tensor) -> dict[str, Any]:
    """One row of the table. `values` and `out` are [pieces, NUM_HOSTS, width]; the sum reads rows as if each host had
    sent one, and writes a quarter as many values as are in a piece."""
    told = prepare(codec, CPU, NUM_HOSTS) or f"{codec} needs no compiling"
    pieces, rows, width = values.shape
    encoded = torch.empty(pieces, rows, codec.encoded_bytes(width), dtype=torch.uint8)
    sums, weights = out[:, 0], torch.full((pieces, rows), 1 / rows)
    work = {
        "copy": lambda: out.copy_(values),
        "encode": in_pieces(encode, codec, values, encoded),
        "decode": in_pieces(decode, codec, encoded, out),
        "sum": in_pieces(decode_sum, codec, encoded, weights, sums),
    }
    times_s: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(NUM_ROUNDS + 1):
        for name, run in work.items():
            elapsed_s = seconds_of(run)
            if turn:  # the first touches the memory
                times_s[name].append(elapsed_s)
    medians_s = {name: statistics.median(each) for name, each in times_s.items()}
    work["decode"]()
    error = sum(float((got - want).square().sum()) for got, want in zip(out, values, strict=True))
    return {
        "codec": str(codec),
        "encode_of_copy": medians_s["copy"] / medians_s["encode"],
        "decode_of_copy": medians_s["copy"] / medians_s["decode"],
        "sum_of_copy": medians_s["copy"] / medians_s["sum"],
        "copy_bytes_per_s": 4 * values.numel() / medians_s["copy"],
        "relative_error": (error / float(sum(piece.square().sum() for piece in values))) ** 0.5,
        "bytes_per_value": encoded.numel() / values.numel(),
        "prepared": told,
    }


def number_of_values(text: str) -> int:
    """62.5M as 62,500,000."""
    unit = UNITS.get(text[-1:].upper())
    return int(float(text[:-1]) * unit) if unit else int(text)


def main() -> None:
    """Print the table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("codecs", nargs="*", metavar="CODEC", help=f"of {', '.join(CODECS)} (all)")
    parser.add_argument(
        "--values", type=number_of_values, default=62_500_000, help="how many (62.5M, which are 250 MB)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args()
    if unknown := set(options.codecs) - set(CODECS):
        parser.error(f"{', '.join(sorted(unknown))}: not of {', '.join(CODECS)}")

    torch.set_num_threads(1)
    pieces = max(1, round(options.values / CHUNK_VALUES))
    values = torch.randn(pieces, NUM_HOSTS, CHUNK_VALUES // NUM_HOSTS, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(values)
    print(f"{values.numel() / 1e6:.1f} M values ({4 * values.numel() / 1e6:.0f} MB) in {pieces} pieces, one core")
    print(f"\n{'':>8}  {'speed, of copying 4 bytes a value':^35}  {'rms':>9}  {'bytes per':>9}")
    print(
        f"{'codec':>8}  {'encode':>8} {'decode':>8} {f'sum of {NUM_HOSTS}':>9} {'copy':>8}  {'error':>9}  {'value':>9}"
    )
    rows = []
    for name in options.codecs or CODECS:
        row = measure(Codec(name=name), values, out)
        rows.append(row)
        print(
            f"{name:>8}  {row['encode_of_copy']:8.2f} {row['decode_of_copy']:8.2f} {row['sum_of_copy']:9.2f} "
            f"{row['copy_bytes_per_s'] / 1e9:4.1f} GB/s {row['relative_error']:9.2%}  {row['bytes_per_value']:9.3f}",
            flush=True,
        )
    print("\n" + "\n".join(row["prepared"] for row in rows))
    if options.json:
        options.json.write_text(json.dumps({"values": values.numel(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
