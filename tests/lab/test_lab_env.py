"""One host's environment made on hosts that have nothing but Debian's Python: really sent, over real ssh."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lab_runs import PACELINE, run, write

from paceline.lab import Lab

pytestmark = [pytest.mark.lab]

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENTS = ".local/state/paceline/environments"
QUICK_S = 15.0
"""For a sync that has nothing to do; it takes one or two on a machine of its own."""


def env(lab: Lab, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """`paceline env ARGUMENTS` on h1."""
    return lab.run("h1", [PACELINE, "env", *arguments], cwd=lab.spec.home, timeout_s=timeout_s, env=os.environ)


@pytest.mark.timeout(90)
def test_a_run_with_an_environment_that_was_sent(lab: Lab) -> None:
    """From the interpreter of h1 to h2, whose own is Debian's; then both use what only that environment has."""
    there = install_hello(lab, "h1", "few")
    made = env(lab, "sync", "-H", "h1,h2", "--python", f"{there}/bin/python", "--offline")
    assert made.returncode == 0, made.stdout + made.stderr
    lines = made.stdout.splitlines()
    [python] = [line.partition("h2 python=")[2] for line in lines if "h2 python=" in line]
    assert f"    h1 python={there}/bin/python" in lines and python.startswith(f"{lab.spec.home}/{ENVIRONMENTS}/")
    folder = write(lab, "h1", "env/hosts.txt", "".join(line.strip() + "\n" for line in lines if " python=" in line))
    assert env(lab, "diff", "--hostfile", f"{folder}/hosts.txt").returncode == 0
    write(lab, "h1", "env/say.sh", 'python -c "import hello, sys; print(hello.text, sys.prefix)"\n')
    done = run(lab, "--hostfile", "hosts.txt", "--", "sh", "say.sh", cwd=folder)
    assert done.process.returncode == 0, done.stderr
    assert f"[h1:0] hello {there}" in done.stdout
    assert f"[h2:1] hello {python.removesuffix('/bin/python')}" in done.stdout

    began_s = time.monotonic()
    again = env(lab, "sync", "-H", "h1,h2", "--python", f"{there}/bin/python", "--offline")
    print(f"found again in {time.monotonic() - began_s:.1f} s")
    assert again.returncode == 0 and "✓ h2: is there already" in again.stdout
    assert time.monotonic() - began_s < QUICK_S


def install_hello(lab: Lab, host: str, name: str) -> str:
    """An environment with one package in the host's home; its folder, as the host sees it."""
    there = f"{lab.spec.home}/{name}"
    assert lab.run(host, [sys.executable, "-m", "venv", "--without-pip", there]).returncode == 0
    [found] = (lab.home(host) / name / "lib").glob("python3*/site-packages")
    site = found.relative_to(lab.home(host))
    info = f"{site}/hello-1.0.dist-info"
    write(lab, host, f"{site}/hello.py", "text = 'hello'\n")
    write(lab, host, f"{info}/METADATA", "Metadata-Version: 2.1\nName: hello\nVersion: 1.0\n")
    write(lab, host, f"{info}/RECORD", "hello.py,,\nhello-1.0.dist-info/METADATA,,\nhello-1.0.dist-info/RECORD,,\n")
    return there


@pytest.mark.large
@pytest.mark.timeout(120)
def test_from_another_host_to_the_same_path(lab: Lab) -> None:
    """h1 has the environment of h3 made on h4, at the path where h3 has it."""
    there = install_hello(lab, "h3", "small")
    made = env(lab, "sync", "-H", "h4", "--from", "h3", "--python", f"{there}/bin/python", "--offline", "--to", there)
    assert made.returncode == 0, made.stdout + made.stderr
    assert made.stdout.splitlines()[-1] == f"To use it:  paceline run --python {there}/bin/python ..."
    said = lab.run("h4", [f"{there}/bin/python", "-c", "import hello; print(hello.text)"])
    assert said.stdout == "hello\n", said.stderr
    assert not list((lab.home("h1") / ENVIRONMENTS).glob("from-*")), "what came through h1 is gone again"


@pytest.mark.large
@pytest.mark.timeout(400)
def test_torch_for_a_host_that_has_none(lab: Lab) -> None:
    """All of this interpreter's packages, a gigabyte; then a training on both hosts, each with its own."""
    bare = lab.run("h2", ["python3", "-c", "import torch"])
    assert "No module named 'torch'" in bare.stderr
    began_s = time.monotonic()
    made = env(lab, "sync", "-H", "h1,h2", "--offline", timeout_s=300)
    took_s = time.monotonic() - began_s
    assert made.returncode == 0, made.stdout + made.stderr
    [python] = [line.partition("h2 python=")[2] for line in made.stdout.splitlines() if "h2 python=" in line]
    assert "GB sent" in made.stdout

    began_s = time.monotonic()
    again = env(lab, "sync", "-H", "h1,h2", "--offline")
    print(f"made in {took_s:.1f} s, found again in {time.monotonic() - began_s:.1f} s")
    assert again.returncode == 0 and "✓ h2: is there already" in again.stdout
    assert time.monotonic() - began_s < QUICK_S

    folder = write(lab, "h1", "env/digits.py", (REPOSITORY / "examples/digits.py").read_text())
    write(lab, "h1", "env/hosts.txt", f"h1 slots=1\nh2 slots=1 python={python}\n")
    assert env(lab, "diff", "--hostfile", f"{folder}/hosts.txt").returncode == 0
    done = run(lab, "--hostfile", "hosts.txt", "digits.py", cwd=folder, timeout_s=150)
    assert done.process.returncode == 0, done.stderr
    assert "epoch 9" in done.stdout and "2 ranks on h1, h2" in done.stderr
