"""How long from the command to the last rank's first line: paceline against torchrun over one ssh per host.

    sudo .venv/bin/python benchmarks/start_up.py

Four hosts of a lab of its own at 1 Gb/s, a script that prints its rank, five runs of each, in turns. With torchrun the
hosts, ranks, address and port are given by hand, as its users do, and its line is typed on all hosts at the same time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from paceline.lab import Lab

NUM_RUNS = 5
NUM_HOSTS = 4
LIMIT_S = 60
BIN = Path(sys.executable).parent
SCRIPT = 'import os; print("rank " + os.environ["RANK"], flush=True)\n'


def time_to_last_line(lab: Lab, argv: list[str], folder: str) -> float:
    """Seconds until each rank has printed its line; the command is then waited for."""
    began_s = time.monotonic()
    process = lab.popen(
        "h1", argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdout is not None
    signal.alarm(LIMIT_S)  # the default action ends this program, and with it the lab
    seen = 0
    for line in process.stdout:
        seen += line.count(b"rank ")  # over ssh, lines of two hosts may come as one
        if seen >= NUM_HOSTS:
            break
    elapsed_s = time.monotonic() - began_s
    signal.alarm(0)
    process.stdout.read()
    process.wait(LIMIT_S)
    if seen != NUM_HOSTS:
        raise RuntimeError(f"{seen} of {NUM_HOSTS} lines from {' '.join(argv)}")
    return elapsed_s


def torchrun_command(lab: Lab, folder: str) -> list[str]:
    """A shell line that starts torchrun on every host, each over its own ssh, as people's own scripts do."""
    line = (
        f"cd {folder}; {BIN / 'python'} -m torch.distributed.run --nnodes {NUM_HOSTS} --nproc-per-node 1 "
        f"--node-rank $n --master-addr {lab.address('h1')} --master-port 29500 hello.py"
    )
    starts = "".join(f"ssh {host} 'n={rank}; {line}' & " for rank, host in enumerate(lab.hosts))
    return ["sh", "-c", f"{starts} wait"]


def main() -> None:
    """Print each figure and the medians."""
    with Lab.up(f"start-{os.getpid()}", num_hosts=NUM_HOSTS, rate_bits_per_s=10**9, tied=True) as lab:
        for host in lab.hosts:
            (lab.home(host) / "start").mkdir()
            (lab.home(host) / "start/hello.py").write_text(SCRIPT)
        folder = f"{lab.spec.home}/start"
        commands = {
            "paceline": [str(BIN / "paceline"), "run", "-H", ",".join(lab.hosts), "hello.py"],
            "torchrun over ssh": torchrun_command(lab, folder),
        }
        figures: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(NUM_RUNS + 1):  # the first of each is a warm-up
            for name, argv in commands.items():
                elapsed_s = time_to_last_line(lab, argv, folder)
                if number:
                    figures[name].append(elapsed_s)
    for name, values in figures.items():
        each = " ".join(f"{value:.2f}" for value in values)
        print(f"{name:<20} median {statistics.median(values):.2f} s of {each}")
    with contextlib.suppress(OSError):
        load = os.getloadavg()[0]
        print(f"load average at the end: {load:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
