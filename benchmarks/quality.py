"""What it costs in loss to synchronise less, or more compactly; and what it gains in time on a slow link.

    python benchmarks/quality.py --quick                             a few minutes: does it work at all
    python benchmarks/quality.py --json quality.json --svg quality.svg       hours
    python benchmarks/quality.py every:int4 diloco:H=30@2 --json FILE        these only, the second on two hosts
    python benchmarks/quality.py every:int4 --task gpt --lrs 0.008 --seeds 8 --json FILE                a wider model
    sudo .venv/bin/python benchmarks/quality.py --wall --json wall.json --svg wall.svg

Real training, from nothing: the model of examples/gpt.py, narrow, on the source text of Python's standard library, less
than one epoch of it and 21 bytes for each parameter; and a digits network with BatchNorm. Whatever the number of hosts,
a step takes the same samples in the same order. The learning rate (and the outer one) of each way to synchronise is
the best of the same small grid at seed 0; what is compared is then the held-out loss of the weights that all hosts
share, seed by seed. Each host is a process of its own, all hosts of one training share a core, and there are as many
trainings at a time as cores.

--wall does the same in small for four hosts, and then trains each at its best once more in a lab with slow links:
how long until the loss is reached that PyTorch's own averaging ends with?

What is in the JSON file already is not trained again, so a run can be stopped and go on later.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quality_report import Curve, Row, gap_chart, gap_table, time_to_loss, wall_chart, wall_table
from quality_trials import NUM_SEEDS, NUM_STEPS, Entry, Results, Trial, entry_of

from paceline.errors import PacelineError
from paceline.lab import Lab, format_rate
from paceline.strategy import parse_sync

LIMIT_S = 3600.0
ROOT = Path(__file__).resolve().parents[1]
SYNCHRONOUS = "every"
TASKS = ("small-gpt", "digits")
MEASURED = ("every:int8", "every:int4", "diloco:H=30@2", "diloco:H=30")
GLANCED_AT = (  # one seed, and the outer learning rate that goes with the name
    *("every:bf16", "every:powersgd=4", "every:topk", "local:H=8", "diloco:H=30:int4"),
    *("streaming:H=30", "eager:H=30", "sparseloco:H=30"),
)
REFERENCE = "ddp"  # whose loss the others are to come to
WALL = ("every:int8", "every:int4", "diloco:H=30:int8", "streaming:H=30")
WALL_BITS_PER_S = 100_000_000
WALL_STRETCH = 1.5  # how many more steps than ddp the others may take to come to its loss
WALL_EVALUATIONS = 40

Popen = Callable[[int, list[str], Mapping[str, str], Any], subprocess.Popen[str]]
"""Starts rank, command, environment, and where its errors go."""


def train_all(entries: list[Entry], results: Results) -> None:
    """Trains what is due, one training per core at a time."""
    changed, running = threading.Condition(), set[Trial]()
    stop = threading.Event()

    def next_trial() -> Trial | None:
        while not stop.is_set():
            due = [trial for entry in entries for trial in entry.due(results) if trial not in running]
            if due or not running:
                return due[0] if due else None
            changed.wait()
        return None

    def work(core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread, and so of the processes that it starts
        while True:
            with changed:
                trial = next_trial()
                if trial is None:
                    return
                running.add(trial)
            found = None
            try:
                found = run_ranks(trial, popen_here, address="127.0.0.1", port=free_port())
            finally:
                with changed:
                    running.discard(trial)
                    changed.notify_all()
                    if not stop.is_set():
                        results.add(trial, found)

    with ThreadPoolExecutor() as pool:
        try:
            list(pool.map(work, sorted(os.sched_getaffinity(0))))
        finally:
            stop.set()


def popen_here(rank: int, argv: list[str], env: Mapping[str, str], errors: Any) -> subprocess.Popen[str]:
    """A rank on this machine, as a host of its own in its own eyes."""
    env = {**os.environ, **env, "PACELINE_HOST": f"h{rank + 1}"}
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_ranks(trial: Trial, popen: Popen, *, address: str, port: int) -> dict[str, Any] | None:
    """One training, to its end; None if it failed, which is said."""
    argv = [sys.executable, str(ROOT / "benchmarks/quality_rank.py"), json.dumps(dataclasses.asdict(trial))]
    shared = {"WORLD_SIZE": str(trial.num_hosts), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    shared |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as errors, contextlib.ExitStack() as stack:
        ranks: list[subprocess.Popen[str]] = []
        for rank in range(trial.num_hosts):
            ranks.append(stack.enter_context(popen(rank, argv, shared | {"RANK": str(rank)}, errors)))
            stack.callback(ranks[-1].kill)
        with contextlib.suppress(subprocess.TimeoutExpired):
            lines = ranks[0].communicate(timeout=LIMIT_S)[0].splitlines()
            if ranks[0].returncode == 0:
                found = json.loads(lines[-1])
                print(f"  {named(trial)}: {found['held_out_loss']:.4f}, {found['curve'][-1][1]:.0f} s", flush=True)
                return found
        errors.seek(0)
        print(f"  {named(trial)} failed:\n{errors.read()[-2000:]}", flush=True)
    return None


def named(trial: Trial) -> str:
    words = f"{trial.task} {trial.sync} on {trial.num_hosts} hosts, lr {trial.lr:g}, seed {trial.seed}"
    return f"{words}, {trial.rate}" if trial.rate else words


def entries_of(args: argparse.Namespace, task: str) -> list[Entry]:
    """What is measured of a task, the synchronous one first."""
    measured = args.strategies or (("every:int4", "diloco:H=30") if args.quick else MEASURED)
    size = size_of(args, task) | ({"num_seeds": args.seeds} if args.seeds else {})
    chosen = [entry_of(text, **size) for text in (SYNCHRONOUS, *measured)]
    if not args.strategies and not args.quick:
        chosen += [entry_of(text, **size | {"outer_lrs": (), "num_seeds": 1}) for text in GLANCED_AT]
    return chosen


def size_of(args: argparse.Namespace, task: str) -> dict[str, Any]:
    """What `entry` is told of the options."""
    size = {"task": task, "is_quick": args.quick, "num_steps": args.steps, "batch": args.batch}
    return size | ({"lrs": tuple(args.lrs)} if args.lrs else {})


def report_gaps(entries: list[Entry], results: Results, svg: Path | None) -> None:
    """Of one task: the table, and the chart where one is asked for."""
    synchronous = [results.loss(trial) for trial in entries[0].seeds(results)]
    if math.inf in synchronous:
        raise PacelineError("the synchronous training failed, so there is nothing to compare with")
    rows: list[Row] = []
    for measured in entries:
        losses = [results.loss(trial) for trial in measured.seeds(results)]
        best = measured.best(results)
        rows.append(
            Row(
                label=best.sync,
                num_hosts=best.num_hosts,
                lr=best.lr,
                lr_is_at_edge=measured.is_at_edge(results),
                losses=losses,
                gaps=[loss / reference - 1 for loss, reference in zip(losses, synchronous, strict=False)],
            )
        )
    num_parameters = results.found[entries[0].best(results)]["num_parameters"]
    title = f"{best.task}, {num_parameters:,} parameters, {best.num_steps} steps of {best.batch} samples"
    print(f"\n{gap_table(title, rows, synchronous)}")
    if svg is not None:
        svg.write_text(gap_chart(title, rows, synchronous))


def measure_gaps(args: argparse.Namespace, results: Results) -> None:
    """The tasks, side by side."""
    by_task = {task: entries_of(args, task) for task in args.task or TASKS}
    train_all([entry for entries in by_task.values() for entry in entries], results)
    for task, entries in by_task.items():
        report_gaps(entries, results, args.svg if task == next(iter(by_task)) else None)


def wall_entries(args: argparse.Namespace) -> list[Entry]:
    """The reference first. One sample per host and step, so that a step is short beside what crosses the links."""
    entries = []
    for text in (REFERENCE, *(text for text in args.strategies or WALL if text != REFERENCE)):
        plain = entry_of(text, num_seeds=1, **size_of(args, "gpt"))
        stretch = 1.0 if text == REFERENCE else WALL_STRETCH
        entries.append(dataclasses.replace(plain, num_steps=round(plain.num_steps * stretch), batch=plain.num_hosts))
    return entries


def measure_wall(args: argparse.Namespace, results: Results) -> None:
    """Tuned as fast as this machine can, then trained once more over slow links, each alone on the machine."""
    entries = wall_entries(args)
    train_all(entries, results)
    rate = format_rate(WALL_BITS_PER_S)
    trials = [
        dataclasses.replace(entry.best(results), rate=rate, num_evaluations=WALL_EVALUATIONS) for entry in entries
    ]
    with tempfile.TemporaryDirectory(dir=ROOT / "benchmarks", prefix=".quality-") as compiled:  # seen by all hosts
        with Lab.up(
            f"quality-{os.getpid()}", num_hosts=4, rate_bits_per_s=WALL_BITS_PER_S, keep=[str(ROOT)], tied=True
        ) as lab:
            for trial in trials:
                if trial not in results.found:
                    popen = popen_in(lab, compiled)
                    results.add(trial, run_ranks(trial, popen, address=lab.address(lab.hosts[0]), port=29500))
    report_wall(trials, results, args.svg)


def popen_in(lab: Lab, compiled: str) -> Popen:
    """Starts ranks on the hosts of a lab, which share the folder of what has been compiled."""
    fixed = {"GLOO_SOCKET_IFNAME": "eth0", "TORCHINDUCTOR_CACHE_DIR": compiled}

    def popen(rank: int, argv: list[str], env: Mapping[str, str], errors: Any) -> subprocess.Popen[str]:
        host = lab.hosts[rank]
        env = {**os.environ, **env, **fixed, "PACELINE_HOST": host}
        return lab.popen(host, argv, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)

    return popen


def report_wall(trials: list[Trial], results: Results, svg: Path | None) -> None:
    """The times to the loss that the first of them ends with."""
    target = results.loss(trials[0])
    if target == math.inf:
        raise PacelineError(f"{named(trials[0])} failed, so there is nothing to compare with")
    curves = []
    for trial in trials:
        points = [(s, loss) for _, s, loss in results.found[trial].get("curve", ())]
        if points:
            step_s = points[-1][0] / trial.num_steps
            reached_s = time_to_loss(points, target)
            curves.append(Curve(label=trial.sync, lr=trial.lr, points=points, step_s=step_s, reached_s=reached_s))
    title = f"gpt on {trials[0].num_hosts} hosts with links of {trials[0].rate}, {trials[0].batch} samples per step"
    print(f"\n{wall_table(title, curves, target)}")
    if svg is not None:
        svg.write_text(wall_chart(title, curves, target))


def strategy_text(text: str) -> str:
    """The text as it is, if it can be used."""
    sync, _, hosts = text.partition("@")
    if hosts not in ("", "2", "4"):
        raise argparse.ArgumentTypeError(f"{text}: 2 or 4 hosts, which share the samples of a step evenly")
    try:
        if sync != "ddp":
            parse_sync(sync)
    except PacelineError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "strategies", nargs="*", type=strategy_text, metavar="TEXT[@HOSTS]", help="a --sync text; 2 or 4 hosts, or 4"
    )
    parser.add_argument("--quick", action="store_true", help="few steps, one seed, nothing tuned")
    parser.add_argument("--wall", action="store_true", help="loss against time in a lab with slow links; needs root")
    parser.add_argument("--task", choices=tuple(NUM_STEPS), action="append", help="this one only")
    parser.add_argument("--steps", type=int, help="of each training (as the task has it)")
    parser.add_argument("--batch", type=int, help="samples of each step, of all hosts together (as the task has it)")
    parser.add_argument("--lrs", type=float, nargs="+", metavar="LR", help="in place of the grid")
    parser.add_argument("--seeds", type=int, help=f"of the best of the grid ({NUM_SEEDS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results are kept, and read from")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="a chart, of the first task")
    args = parser.parse_args()
    if args.batch is not None and (args.batch < 1 or args.batch % 4):
        parser.error("--batch: a multiple of 4, because up to four hosts share a step evenly")
    if args.quick and (args.lrs or args.seeds):
        parser.error("--quick takes one learning rate and one seed")
    if args.wall and (args.seeds or args.task):
        parser.error("--wall is of gpt, with one seed")
    try:
        (measure_wall if args.wall else measure_gaps)(args, Results(args.json))
    except PacelineError as error:
        sys.exit(f"quality: {error}")


if __name__ == "__main__":
    main()
