"""The wall: what a step costs on a slow wire, for each way of synchronising, on several hosts of a lab of its own.

    sudo .venv/bin/python benchmarks/wall.py --hosts 4 --rate 1gbit --model-bytes 250MB --compute-s 0.5 --json FILE

One rank per host trains a model whose layers sleep (`emulated.py`): weights, gradients, codecs and messages are real,
the arithmetic is not. All rows are measured in one run, in turns, and the medians are shown:

- `compute` is the same script on one host: DDP in a group of one, which copies gradients there as well.
- `ddp` and `ddp-fp16` are PyTorch's own; every other row is a `--sync` text.
- `codec:int8` and `codec:int4` are one step's encoding and decoding, by one host alone on one core, nothing overlapped.

Figures are of whole periods, in the steady state: a row of H=30 is 30 steps and what they send.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emulated import NUM_LAYERS, layer_shape

from paceline.errors import PacelineError
from paceline.lab import Lab, parse_rate
from paceline.strategy import EveryStep, parse_sync

HERE = Path(__file__).resolve().parent
ROWS = (
    "compute,ddp,ddp-fp16,every,every:bf16,every:int8,every:int4,every:topk=0.01,every:powersgd=4,local:H=8,"
    "diloco:H=30:int8,diloco:H=100:int8,streaming:H=30,eager:H=30,sparseloco:H=30,codec:int8,codec:int4"
)
NO_STRATEGY = {"compute", "ddp", "ddp-fp16", "codec:int8", "codec:int4"}
"""What is no `--sync` text."""
PEERS = {"accelerate:H=8": "accelerate", "torchft:H=8": "torchft", "horovod": "horovod.torch"}
"""Other projects' rows, as in `wall_peer.py`, and what they import."""
PAYLOAD = 1448 / 1514
"""TCP's payload, as a share of what the lab's links count of a full Ethernet frame."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="hosts of the lab, one rank on each  [4]")
    parser.add_argument("--rate", default="1gbit", help="of each link  [1gbit]")
    parser.add_argument("--model-bytes", type=parse_bytes, default="250MB", help="of float32 weights  [250MB]")
    parser.add_argument("--compute-s", type=float, default=0.5, help="emulated seconds a step  [0.5]")
    parser.add_argument("--rows", default=ROWS, help="which, with commas; compute is always measured  [all]")
    parser.add_argument("--repetitions", type=int, default=3, help="of every row, in turns  [3]")
    parser.add_argument("--peer-python", type=Path, metavar="PATH", help="measure what it can import of other projects")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    return parser.parse_args()


def choose_rows(text: str) -> list[str]:
    """Those asked for, compute first. Raises InputError."""
    rows = ["compute", *(row for row in text.split(",") if row != "compute")]
    for row in rows:
        if row not in NO_STRATEGY:
            parse_sync(row)
    return rows


def parse_bytes(text: str) -> int:
    """'250MB' -> 250000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kB|MB|GB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text}: expected a number with kB, MB or GB")
    return round(float(match[1]) * {"kB": 10**3, "MB": 10**6, "GB": 10**9}[match[2]])


def measure(arguments: argparse.Namespace, rows: list[str]) -> dict[str, Any]:
    """Run all rows in a lab that ends with this process. Raises PacelineError, SystemExit when the run fails."""
    rate_bits_per_s = parse_rate(arguments.rate)
    keep = [str(HERE)] if arguments.peer_python is None else [str(HERE), str(arguments.peer_python.parents[1])]
    name, num_hosts = f"wall-{os.getpid()}", arguments.hosts
    with (
        tempfile.TemporaryDirectory(prefix=".wall-", dir=HERE) as shared,  # each host has a /tmp of its own
        Lab.up(name, num_hosts=num_hosts, rate_bits_per_s=rate_bits_per_s, keep=keep, tied=True) as lab,
    ):
        folder = Path(shared)
        plan = {
            "rows": rows,
            "model_bytes": arguments.model_bytes,
            "compute_s": arguments.compute_s,
            "repetitions": arguments.repetitions,
            "results": str(folder / "results"),
            "notes": str(folder / "notes"),
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        # One cache of compiled kernels for all hosts, made by the first.
        words = ["--env", f"TORCHINDUCTOR_CACHE_DIR={folder}/compiled", "wall_rank.py", f"{folder}/plan.json"]
        if (complaint := run_on(lab, paceline_run(lab, *words))) is not None:
            sys.exit(f"{complaint}\nwall: the run failed")
        notes = json.loads((folder / "notes").read_text())
        if arguments.peer_python is not None:
            notes += measure_peers(lab, arguments.peer_python, f"{folder}/plan.json")
        samples: dict[str, list[list[dict[str, Any]]]] = {}
        for line in map(json.loads, (folder / "results").read_text().splitlines()):
            samples.setdefault(line["row"], []).append(line["samples"])
    return {"rows": [summarise(row, repetitions) for row, repetitions in samples.items()], "notes": notes}


def paceline_run(lab: Lab, *words: str) -> list[str]:
    """The command that starts one rank on each host."""
    return [str(Path(sys.executable).parent / "paceline"), "run", "-H", ",".join(lab.hosts), "--no-ship", *words]


def run_on(lab: Lab, command: list[str]) -> str | None:
    """Run a command on the first host, its output to this one's stderr; returns what it complained of if it fails."""
    with tempfile.TemporaryFile("w+") as stderr:
        process = lab.popen(
            lab.hosts[0], command, cwd=str(HERE), stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=stderr
        )
        if process.wait() == 0:
            return None
        stderr.seek(0)
        return stderr.read()


def measure_peers(lab: Lab, python: Path, plan: str) -> list[str]:
    """Other projects' rows, after all others, not in turns with them. Returns what is to be said of each."""
    notes: list[str] = []
    for row, module in PEERS.items():
        found = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True, check=False)
        if found.returncode != 0:
            notes.append(f"{row}: not measured: cannot be imported ({found.stderr.rstrip().splitlines()[-1]})")
            continue
        command = paceline_run(lab, "--python", str(python), "wall_peer.py", plan, row)
        if row == "horovod":
            slots = ",".join(f"{host}:1" for host in lab.hosts)
            command = [str(python.parent / "horovodrun"), "--gloo", "-np", str(len(lab.hosts)), "-H", slots]
            command += ["--network-interfaces", "eth0", str(python), "wall_peer.py", plan, row]
        if (complaint := run_on(lab, command)) is not None:
            print(complaint, file=sys.stderr)
            notes.append(f"{row}: not measured: it failed ({complaint.rstrip().splitlines()[-1]})")
        else:
            notes.append(f"{row}: another project, measured after all other rows, not in turns with them")
    return notes


def summarise(row: str, repetitions: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Of each repetition the slowest rank's time, and of these the median; bytes of the mean host."""
    steps_s = [max(sample["elapsed_s"] / sample["num_steps"] for sample in samples) for samples in repetitions]
    flat = [sample for samples in repetitions for sample in samples]
    counted = [sample["sent_bytes"] / sample["num_steps"] for sample in flat if sample["sent_bytes"] is not None]
    interface = statistics.fmean(sample["interface_bytes"] / sample["num_steps"] for sample in flat)
    return {
        "strategy": row,
        "step_s": statistics.median(steps_s),
        "bytes_per_step": statistics.fmean(counted) if counted else interface,
        "counted_by": "the sender" if counted else "the interface",
        "interface_bytes_per_step": interface,
        "repetitions_s": steps_s,
    }


def expected_step_s(row: str, arguments: argparse.Namespace, rate_bytes_per_s: float) -> float | None:
    """What the bytes alone ask for: a wire without latency, codecs that cost nothing, gradients that are sent from the
    first layer of the backward pass on, rounds that are waited for or travel while training goes on."""
    if row in ("ddp", "ddp-fp16"):
        row = "every" if row == "ddp" else "every:bf16"
    if row in NO_STRATEGY or row in PEERS:
        return None
    strategy = parse_sync(row)
    layers = [layer_shape(arguments.model_bytes)] * NUM_LAYERS
    wire_s = strategy.wire_bytes([layers], num_hosts=arguments.hosts) / rate_bytes_per_s
    if isinstance(strategy, EveryStep):
        return max(arguments.compute_s, arguments.compute_s / 3 + wire_s)
    return max(arguments.compute_s, wire_s) if strategy.delay_steps else arguments.compute_s + wire_s


def complete(result: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """With what follows from the figures, and the settings."""
    compute_s = next(row["step_s"] for row in result["rows"] if row["strategy"] == "compute")
    rate_bytes_per_s = parse_rate(arguments.rate) / 8 * PAYLOAD
    for row in result["rows"]:
        if not row["strategy"].startswith("codec:"):
            row["busy"] = compute_s / row["step_s"]
            row["wire_mb_per_s"] = row["bytes_per_step"] / row["step_s"] / 1e6
            row["expected_step_s"] = expected_step_s(row["strategy"], arguments, rate_bytes_per_s)
    settings = {
        "hosts": arguments.hosts,
        "rate": arguments.rate,
        "model_bytes": arguments.model_bytes,
        "emulated_compute_s": arguments.compute_s,
        "repetitions": arguments.repetitions,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    return {**result, "compute_s": compute_s, "settings": settings}


def table(result: dict[str, Any]) -> Iterator[str]:
    """At most 80 columns wide."""
    settings = result["settings"]
    cores = f"{settings['cores']} cores (load {settings['load_average']:.1f})"
    yield f"{settings['hosts']} hosts at {settings['rate']} on {cores}, one rank each,"
    yield f"{settings['model_bytes'] / 1e6:g} MB of weights, medians of {settings['repetitions']} repetitions in turns."
    yield f"Compute is emulated: layers that sleep {settings['emulated_compute_s']:g} s a step in all."
    yield ""
    yield f"{'':24} {'step':>9} {'busy':>7} {'of ddp':>7} {'MB per':>9} {'MB/s on':>8} {'bytes':>9}"
    yield f"{'':24} {'s':>9} {'%':>7} {'%':>7} {'step':>9} {'the wire':>8} {'alone, s':>9}"
    ddp_s = next((row["step_s"] for row in result["rows"] if row["strategy"] == "ddp"), None)
    for row in result["rows"]:
        line = f"{row['strategy']:24} {row['step_s']:9.3f}"
        if "busy" in row:
            of_ddp = f"{100 * row['step_s'] / ddp_s:.1f}" if ddp_s else "-"
            expected_s = row["expected_step_s"]
            line += f" {100 * row['busy']:7.1f} {of_ddp:>7} {row['bytes_per_step'] / 1e6:9.2f}"
            line += f" {row['wire_mb_per_s']:8.1f} {'-' if expected_s is None else f'{expected_s:.3f}':>9}"
        yield line
    yield ""
    yield "codec rows: one step's encoding and decoding on one core, nothing overlapped."
    yield "bytes alone: what the same bytes would take at line rate with codecs that cost nothing."
    yield from result["notes"]


def main() -> None:
    """Measure, print the table, write the figures."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("wall: stopped"))  # the lab goes first
    arguments = parse_arguments()
    try:
        rows = choose_rows(arguments.rows)
        result = complete(measure(arguments, rows), arguments)
    except PacelineError as error:
        sys.exit(f"wall: {error}")
    for line in table(result):
        print(line)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
