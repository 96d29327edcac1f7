"""Kills a training process at random moments of writing a checkpoint, again and again, and compares what it saw.

    python kill_writers.py FOLDER KILLS

Children are forked from this process, which has loaded PyTorch, so that a start costs milliseconds.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
import time

import torch

import paceline
from paceline.train import run as _loaded_before_forking  # noqa: F401
from paceline.train.checkpoint import damage, newest_first

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 50, 4, 6


def train(folder: pathlib.Path, seen: int, pipe: int) -> None:
    """Writes a line to `seen` for each step, and to `pipe` a byte before and after each checkpoint."""
    run = paceline.init()
    batches = run.batches(range(NUM_SAMPLES), BATCH_SIZE)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
    model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters()))
    resumed = run.resume(folder)
    step = resumed.step if resumed else 0
    while batches.epoch < EPOCHS:
        for batch in batches:
            loss = model(batch[:, None].float() / NUM_SAMPLES).square().mean()
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            os.write(seen, (json.dumps([step, batch.tolist(), loss.item()]) + "\n").encode())
            os.write(pipe, b"w")
            run.checkpoint(folder, step=step)
            os.write(pipe, b"d")


def start(folder: pathlib.Path, seen: pathlib.Path) -> tuple[int, int]:
    """The process and the reading end of its pipe. Its output goes to a file beside `folder`."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            output = os.open(f"{folder}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            train(folder, os.open(seen, os.O_WRONLY | os.O_CREAT | os.O_APPEND), writing)
            code = 0
        except BaseException as error:  # noqa: BLE001
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(code)
    os.close(writing)
    return pid, reading


def finish(pid: int, reading: int) -> None:
    while os.read(reading, 1000):
        pass
    os.close(reading)
    assert os.waitpid(pid, 0)[1] == 0, "the undisturbed run failed"


def read_steps(seen: pathlib.Path) -> dict[int, set[str]]:
    steps: dict[int, set[str]] = {}
    for line in seen.read_text().splitlines():
        steps.setdefault(json.loads(line)[0], set()).add(line)
    return steps


def main() -> None:
    base, kills = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1)])  # PyTorch loads a second half of itself with the first optimizer
    randomness = random.Random(1)
    start_s = time.monotonic()
    finish(*start(base / "calm", base / "calm.seen"))
    calm = read_steps(base / "calm.seen")
    longest_s = (time.monotonic() - start_s) / len(calm)

    left_half_written, done = 0, 0
    folder = base / "stormy"
    while done < kills:
        pid, reading = start(folder, base / "stormy.seen")
        ended = False
        for _ in range(randomness.randint(1, 2)):
            while (byte := os.read(reading, 1)) == b"d":
                pass
            ended = byte == b""
        if not ended:
            time.sleep(randomness.uniform(0, longest_s))
            os.kill(pid, signal.SIGKILL)
            done += 1
        os.close(reading)
        status = os.waitpid(pid, 0)[1]
        left_half_written += bool(list(folder.glob(".writing-*")))
        assert status in (signal.SIGKILL, 0), (base / "stormy.out").read_text()[-2000:]
        assert all(damage(path) is None for path in newest_first(folder)), "a torn checkpoint under a final name"
        if status == 0 and done < kills:
            # The run came to its end: from the beginning again, so that there is something to kill.
            for path in newest_first(folder):
                path.rename(base / f"{done}-{path.name}")
    finish(*start(folder, base / "stormy.seen"))
    stormy = read_steps(base / "stormy.seen")
    assert stormy == calm, "other batches or losses than in the undisturbed run"
    print(json.dumps({"kills": done, "left_half_written": left_half_written, "longest_s": longest_s}))


if __name__ == "__main__":
    main()
