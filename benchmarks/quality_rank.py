"""One worker of `quality.py`: trains as the JSON on its command line says; rank 0 prints what it found as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from quality import Trial
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.strategy import parse_sync

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import CONTEXT, GPT  # an example, not a package

HELD_OUT_WINDOWS = 512
EVALUATED_TOGETHER = 64
Batch = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learnt: a model that gives its loss, and what it is fed with."""

    model: nn.Module
    train: Batch
    held_out: Batch

    def inputs(self, part: Batch, index: torch.Tensor) -> Batch:
        """The samples of that index; bytes as the whole numbers that an embedding takes."""
        chosen = (tensor[index] for tensor in part)
        return tuple(tensor.long() if tensor.dtype == torch.uint8 else tensor for tensor in chosen)


def gpt(*, width: int, layers: int, heads: int) -> Task:
    """The language model of examples/gpt.py on the source of Python's standard library."""
    train, held_out = (torch.frombuffer(text, dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT) for text in corpus())
    evenly = torch.arange(HELD_OUT_WINDOWS) * len(held_out) // HELD_OUT_WINDOWS
    return Task(GPT(width=width, layers=layers, heads=heads), (train,), (held_out[evenly],))


def corpus() -> tuple[bytearray, bytearray]:
    """The source text of this Python's standard library: what is learnt from, and the files that are held out."""
    root = Path(sysconfig.get_path("stdlib"))
    parts = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "-packages/" not in name:  # what has been installed differs from machine to machine
            parts[zlib.crc32(name.encode()) % 16 == 0].extend(path.read_bytes())
    return parts


class DigitsModel(nn.Module):
    """A small convolutional network with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
        )

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss. pixels: batch, 1, 8, 8; labels: batch."""
        return functional.cross_entropy(self.layers(pixels), labels)


def digits() -> Task:
    """Handwritten digits: 1,797 pictures of 8 by 8 pixels, one third of them held out."""
    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, train = order[: len(order) // 3], order[len(order) // 3 :]
    return Task(DigitsModel(), (pixels[train], labels[train]), (pixels[held_out], labels[held_out]))


TASKS: dict[str, Callable[[], Task]] = {
    "gpt": partial(gpt, width=128, layers=4, heads=4),
    "small-gpt": partial(gpt, width=64, layers=2, heads=2),
    "digits": digits,
}


def learning_rate(trial: Trial, step: int) -> float:
    """Of step 1 to num_steps: linear warm-up in the first 5 %, then a cosine down to 5 %."""
    warm_up = max(1, trial.num_steps // 20)
    if step <= warm_up:
        return trial.lr * step / warm_up
    done = (step - warm_up) / (trial.num_steps - warm_up)
    return trial.lr * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)


def sample_order(trial: Trial, num_samples: int) -> torch.Tensor:
    """The samples in the order in which all workers together see them, [num_steps, batch]; each once per epoch."""
    generator = torch.Generator().manual_seed(trial.seed)
    needed = trial.num_steps * trial.batch
    epochs = [torch.randperm(num_samples, generator=generator) for _ in range(-(-needed // num_samples))]
    return torch.cat(epochs)[:needed].view(trial.num_steps, trial.batch)


def prepare(
    trial: Trial, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """The model as it is trained, its optimizer, and what brings all hosts to the same weights at the end."""
    if trial.sync == "ddp":
        dist.init_process_group("gloo")
        return DistributedDataParallel(model), optimizer, lambda: None
    run = paceline.init(sync=parse_sync(trial.sync), seed=trial.seed)
    return *run.prepare(model, optimizer), run.synchronize


@torch.no_grad()
def held_out_loss(task: Task, model: nn.Module) -> float:
    """The mean loss on the held-out samples. Each rank computes a share of it; all get the mean."""
    mine = torch.arange(dist.get_rank(), len(task.held_out[0]), dist.get_world_size())
    total = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for index in mine.split(EVALUATED_TOGETHER):
        loss = model(*task.inputs(task.held_out, index))
        total += torch.tensor([loss.item() * len(index), len(index)])
    model.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])


def train(trial: Trial) -> dict[str, object]:
    """Trains, and returns the held-out loss at the end and on the way: [step, seconds of training, loss]."""
    torch.manual_seed(trial.seed)
    task = TASKS[trial.task]()
    num_parameters = sum(parameter.numel() for parameter in task.model.parameters())
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=trial.lr, betas=(0.9, 0.99), fused=True)
    model, optimizer, synchronize = prepare(trial, task.model, optimizer)
    order = sample_order(trial, len(task.train[0])).tensor_split(dist.get_world_size(), dim=1)[dist.get_rank()]
    curve: list[tuple[int, float, float]] = []
    trained_s, began_s = 0.0, time.monotonic()
    for step, index in enumerate(order, 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(trial, step)
        model(*task.inputs(task.train, index)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == trial.num_steps:
            synchronize()
        if step * trial.num_evaluations // trial.num_steps > len(curve):
            dist.barrier()  # the clock of training stands still from here, when the last rank has come so far,
            trained_s += time.monotonic() - began_s
            curve.append((step, trained_s, held_out_loss(task, model)))
            began_s = time.monotonic()  # to here, when all know the loss
    return {"held_out_loss": curve[-1][2], "num_parameters": num_parameters, "curve": curve}


def main() -> None:
    torch.set_num_threads(1)
    found = train(Trial(**json.loads(sys.argv[1])))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
