"""Training whose hosts synchronise as they are told to: stopped in the middle of a period, it goes on to the bit."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import paceline
from paceline import CheckpointError, InputError
from rank_pool import RankPool

pytestmark = pytest.mark.ranks

LIMIT_S = 20.0


def make_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(23, 6, generator=generator)
    return list(zip(x, x.sin().sum(dim=1, keepdim=True), strict=True))


class Training:
    """A small model with BatchNorm and dropout, on as many hosts as there are ranks unless `num_hosts` says so."""

    def __init__(self, sync: str, precision: str = "fp32", momentum: bool = False) -> None:
        self.run = paceline.init(sync=paceline.parse_sync(sync), precision=precision, timeout_s=LIMIT_S)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Dropout(0.2),
            torch.nn.Linear(32, 1),
        )  # fmt: skip
        self.plain = model
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.model, self.optimizer = self.run.prepare(model, optimizer)
        self.batches = self.run.batches(make_data(), 3)
        self.losses: list[float] = []

    def train(self, num_steps: int) -> None:
        """Over the ends of epochs, whose last step is uneven."""
        end = len(self.losses) + num_steps
        while len(self.losses) < end:
            for x, y in self.batches:
                self.step(x, y)
                if len(self.losses) == end:
                    break

    def step(self, x: torch.Tensor, y: torch.Tensor, overflows: bool = False) -> None:
        with self.run.autocast():
            loss = torch.nn.functional.mse_loss(self.model(x), y) / 100  # small enough for the first scale of fp16
        self.run.backward(loss * torch.inf if overflows else loss)
        self.run.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def own_weights(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.plain.parameters()]).tolist()

    def shared_weights(self) -> list[float]:
        return torch.cat([value.double().flatten() for value in self.plain.state_dict().values()]).tolist()

    def result(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "own": self.own_weights(),
            "shared": self.shared_weights(),
            "scaler": self.run._precision.state_dict(),
        }


def host_index(num_hosts: int) -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return rank * (num_hosts or size) // size


@contextlib.contextmanager
def training(sync: str, *, num_hosts: int = 0, precision: str = "fp32") -> Iterator[Training]:
    """Every rank is a host of its own, or neighbours share one of `num_hosts`."""
    with mock.patch.dict(os.environ, PACELINE_HOST=f"host-{host_index(num_hosts)}"):
        one = Training(sync, precision)
    yield one
    one.run._leave()


def go_on(sync: str, folder: str, before: int, after: int, precision: str, num_hosts: int) -> dict[str, Any]:
    with training(sync, precision=precision, num_hosts=num_hosts) as calm:
        calm.train(before)
        calm.run.checkpoint(on_disk(folder, num_hosts), step=before)
        calm.losses.clear()
        calm.train(after)
        return calm.result()


def come_back(sync: str, folder: str, after: int, precision: str, num_hosts: int) -> dict[str, Any]:
    output = io.StringIO()
    with training(sync, precision=precision, num_hosts=num_hosts) as again:
        with torch.no_grad():
            next(again.plain.parameters()).fill_(4.0)
        with contextlib.redirect_stdout(output):
            assert again.run.resume(on_disk(folder, 2)) is not None
        again.train(after)
        return {**again.result(), "said": output.getvalue().splitlines()}


def on_disk(folder: str, num_hosts: int = 0) -> str:
    """Each host has a disk of its own."""
    return f"{folder}/disk-{host_index(num_hosts)}"


STRATEGIES = [
    ("local:H=4", 7, "fp32"),
    ("local:H=4", 7, "fp16"),
    ("diloco:H=4:int8", 7, "bf16"),
    ("post-local:H=3:warmup=4", 2, "fp32"),
    ("post-local:H=3:warmup=4", 8, "fp32"),
    ("streaming:H=6:P=2:tau=2:int4", 4, "fp32"),
    ("streaming:H=6:P=2:tau=2:mix=0.5", 7, "fp32"),
    ("eager:H=4:int8", 6, "fp32"),
    ("sparseloco:H=3", 7, "fp32"),
    ("every:int8", 5, "fp32"),
    ("every:topk=0.1", 5, "fp32"),
    ("every:powersgd=1", 5, "fp32"),
    ("every:accumulate=3", 5, "fp32"),
    ("every:int8:accumulate=3", 5, "fp16"),
]


@pytest.mark.parametrize(("sync", "before", "precision"), STRATEGIES)
def test_stopped_in_the_middle_it_goes_on_bit_for_bit(
    sync: str, before: int, precision: str, two_ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    """In the middle of a period, an epoch and a window, from disks of their own."""
    calm = two_ranks.run(go_on, sync, str(tmp_path), before, 10, precision, 2)
    again = two_ranks.run(come_back, sync, str(tmp_path), 10, precision, 2)
    said = [rank.pop("said") for rank in again]
    assert [len(lines) for lines in said] == [1, 0], said
    if "int8" in sync and sync.startswith("every"):  # DDP arranges its buckets anew after the first step
        for left, right in zip(calm, again, strict=True):
            assert left["losses"] == pytest.approx(right["losses"], rel=1e-2)
    else:
        assert calm == again
    assert calm[0]["losses"] != calm[1]["losses"]
    if sync.startswith("every"):
        assert calm[0]["own"] == calm[1]["own"]
    else:
        assert calm[0]["own"] != calm[1]["own"] and calm[0]["shared"] == calm[1]["shared"]


@pytest.mark.parametrize("sync", ["local:H=4", "sparseloco:H=3"])
def test_two_ranks_per_host_resume_from_what_the_first_has_written(
    sync: str, four_ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    calm = four_ranks.run(go_on, sync, str(tmp_path), 7, 10, "fp32", 2)
    assert calm[0]["own"] == calm[1]["own"] != calm[2]["own"] == calm[3]["own"]
    sizes = [path.stat().st_size for path in sorted(tmp_path.rglob("rank-*.safetensors"))]
    assert sizes[1] < sizes[0] < sizes[2]  # ... its weights, and those with its optimizer's state
    again = four_ranks.run(come_back, sync, str(tmp_path), 10, "fp32", 2)
    assert [len(rank.pop("said")) for rank in again] == [1, 0, 0, 0]
    assert calm == again


def lose(folder: pathlib.Path, what: str) -> None:
    part = next(folder.glob("disk-1/parts/*/*/rank-1.safetensors"))
    if what == "the part":
        shutil.rmtree(folder / "disk-1")
    if what == "a bit":
        content = bytearray(part.read_bytes())
        content[-1] ^= 1
        part.write_bytes(content)


@pytest.mark.parametrize(
    ("what", "sync", "num_hosts", "reason"),
    [
        ("the part", "diloco:H=4", 2, r"\(on rank 1: .*rank-1\.safetensors: No such file or directory\)"),
        ("a bit", "diloco:H=4", 2, r"\(on rank 1: .*rank-1\.safetensors has other content than was written\)"),
        ("strategy", "local:H=3", 2, r"\(diloco:H=4 then, local:H=3 now\)"),
        ("hosts", "diloco:H=4", 1, r"\(2 ranks on 2 hosts then, 2 ranks on 1 hosts now\)"),
    ],
)
def test_without_its_parts_it_goes_on_from_what_all_share_and_says_so(
    what: str, sync: str, num_hosts: int, reason: str, two_ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    calm = two_ranks.run(go_on, "diloco:H=4", str(tmp_path), 6, 0, "fp32", 2)
    lose(tmp_path, what)
    on_0, on_1 = two_ranks.run(come_back, sync, str(tmp_path), 0, "fp32", num_hosts)
    assert on_0["own"] == on_1["own"] != calm[0]["own"]
    assert on_0["shared"] == on_1["shared"] == calm[0]["shared"]
    line = on_0["said"][-1]
    assert re.fullmatch(
        rf"paceline: all hosts continue from the weights they share, without what each alone knew {reason}", line
    ), line
    two_ranks.run(come_back, sync, str(tmp_path), 5, "fp32", num_hosts)


def keep_one(folder: str) -> list[str]:
    with training("local:H=2") as one:
        for step in (1, 2, 3):
            one.train(1)
            one.run.checkpoint(on_disk(folder), step=step, keep=1)
        return sorted(path.name for path in pathlib.Path(on_disk(folder)).glob("parts/*/*"))


def test_parts_go_with_their_checkpoints(two_ranks: RankPool, tmp_path: pathlib.Path) -> None:
    assert two_ranks.run(keep_one, str(tmp_path)) == [["000003-step-3"]] * 2


def part_on_a_full_disk(folder: str) -> None:
    with training("local:H=2") as one:
        if one.run.rank == 1:
            pathlib.Path(on_disk(folder)).write_text("")
        one.run.checkpoint(on_disk(folder), step=1)


def test_a_part_that_can_not_be_written_is_the_same_kind_of_error_on_all(
    two_ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    on_0, on_1 = two_ranks.call(part_on_a_full_disk, str(tmp_path))
    for result in (on_0, on_1):
        with pytest.raises(CheckpointError, match=r"no checkpoint could be written into .*disk-1"):
            raise result.error
    assert "failed on rank 1" in str(on_0.error)
    assert not list(tmp_path.glob("disk-0/0*")), "a checkpoint that names parts which are not there"


def fail_again_and_again(folder: str) -> list[str]:
    with training("local:H=2") as one:
        for step in (1, 2, 3):
            one.train(1)
            refusal = OSError(errno.ENOSPC, "No space left on device")
            with mock.patch("paceline.train.checkpoint.save_file", side_effect=refusal), pytest.raises(CheckpointError):
                one.run.checkpoint(on_disk(folder), step=step)
        return sorted(path.name for path in pathlib.Path(on_disk(folder)).glob("parts/*/*"))


def test_parts_of_checkpoints_that_failed_do_not_pile_up(two_ranks: RankPool, tmp_path: pathlib.Path) -> None:
    """They would fill one disk after the other while rank 0's is full."""
    assert two_ranks.run(fail_again_and_again, str(tmp_path)) == [["000001-step-3"]] * 2


def synchronised(sync: str) -> tuple[list[float], list[float], list[float]]:
    with training(sync) as one:
        one.train(5)
        before = one.own_weights()
        one.run.synchronize()
        after = one.own_weights()
        one.train(5)
        return before, after, one.own_weights()


@pytest.mark.parametrize("sync", ["local:H=4", "streaming:H=6:P=2:tau=2", "eager:H=4", "every"])
def test_synchronize_makes_all_ranks_equal(sync: str, two_ranks: RankPool) -> None:
    on_0, on_1 = two_ranks.run(synchronised, sync)
    is_exact = sync == "every"
    assert (on_0[0] == on_1[0]) == is_exact
    assert on_0[1] == on_1[1]
    assert (on_0[0] == on_0[1]) == is_exact
    assert (on_0[2] == on_1[2]) == is_exact


def overflow_on_rank_1(sync: str, num_hosts: int) -> dict[str, Any]:
    with training(sync, precision="fp16", num_hosts=num_hosts) as one:
        skipped = []
        for index, (x, y) in enumerate(make_data()[:8]):
            before = one.own_weights()
            one.step(x.expand(2, 6), y.expand(2, 1), overflows=one.run.rank == 1 and index == 4)
            if one.own_weights() == before:
                skipped.append(index)
        scale = one.run._precision.state_dict()["scale"]
        return {"skipped": skipped, "scale": scale, "shared": one.shared_weights()[:200]}


def test_an_overflow_skips_the_step_on_its_host_and_leaves_hosts_in_phase(four_ranks: RankPool) -> None:
    """Two ranks on each of two hosts; after 8 steps with period 4 all have had their second round."""
    results = four_ranks.run(overflow_on_rank_1, "local:H=4", 2)
    assert [rank["skipped"] for rank in results] == [[4], [4], [], []]
    assert [rank["scale"] for rank in results] == [32768, 32768, 65536, 65536]
    assert all(rank["shared"] == results[0]["shared"] for rank in results)


def test_a_window_that_overflowed_is_skipped_as_a_whole(two_ranks: RankPool) -> None:
    """Windows of two: of the batches 4 and 5 one overflows, and 0, 2, 4 and 6 move nothing in any case."""
    on_0, on_1 = two_ranks.run(overflow_on_rank_1, "every:accumulate=2", 2)
    assert on_0 == on_1
    assert (on_0["skipped"], on_0["scale"]) == ([0, 2, 4, 5, 6], 32768)


def start(text: str | None, sync: Any) -> list[str]:
    output = io.StringIO()
    environ = {"PACELINE_HOST": f"host-{os.environ['RANK']}", **({} if text is None else {"PACELINE_SYNC": text})}
    with mock.patch.dict(os.environ, environ), contextlib.redirect_stdout(output):
        run = paceline.init(sync=sync, timeout_s=LIMIT_S)
        model = torch.nn.Linear(2, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run._leave()
    return [line for line in output.getvalue().splitlines() if "sync " in line]


def test_what_run_says_comes_before_what_the_script_says(two_ranks: RankPool) -> None:
    local, every = paceline.Outer(period_steps=4), paceline.EveryStep()
    for text, sync, expected in (
        (None, every, []),
        (None, local, ["paceline: sync local:H=4 between 2 hosts (from paceline.init)"]),
        ("diloco:H=5", every, ["paceline: sync diloco:H=5 between 2 hosts (from --sync)"]),
        (
            "diloco:H=5",
            local,
            ["paceline: sync diloco:H=5 between 2 hosts (from --sync, instead of paceline.init's local:H=4)"],
        ),
    ):
        assert two_ranks.run(start, text, sync) == [expected, []]


def test_a_text_is_refused_with_what_makes_a_strategy_of_it() -> None:
    for value, told in (("local:H=8", "'local:H=8'"), (None, "None"), (8, "8")):
        with pytest.raises(InputError, match=f"^sync is {told}; expected an EveryStep or an Outer") as caught:
            paceline.init(sync=value)  # type: ignore[arg-type]
        is_text = isinstance(value, str)
        assert caught.value.hint == ("from text: sync=paceline.parse_sync('local:H=8')" if is_text else None)


def end_early() -> tuple[list[float], float]:
    with training("local:H=4:momentum=0.5") as one:
        one.train(11 if one.run.rank == 0 else 6)
    return one.own_weights(), one.run._meter.traffic[0].sent_bytes


def test_a_host_that_ends_early_takes_part_until_all_have_ended(two_ranks: RankPool) -> None:
    (weights_0, bytes_0), (weights_1, bytes_1) = two_ranks.run(end_early)
    assert weights_0 == weights_1
    assert bytes_0 == bytes_1
