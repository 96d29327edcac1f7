"""What several real ranks compute together: the same as one rank with all the samples."""

from __future__ import annotations

import io
import os
import pathlib
import random
import socket
from contextlib import redirect_stdout
from typing import Any

import numpy
import pytest
import torch

import paceline
from paceline import CheckpointError, InputError, WorldError
from rank_pool import Raised, RankPool

pytestmark = pytest.mark.ranks

NUM_SAMPLES = 23
LIMIT_S = 20.0


def make_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_SAMPLES, 5, generator=generator)
    return list(zip(x, x.sin().sum(dim=1, keepdim=True), strict=True))


def make_model(dropout: float = 0.0) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(5, 300), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(300, 1)
    )


def begin(precision: str = "fp32", dropout: float = 0.0, lr: float = 0.01) -> tuple[Any, Any, Any]:
    """The run, the prepared model and Adam."""
    run = paceline.init(precision=precision, timeout_s=LIMIT_S)
    model = make_model(dropout)
    return run, *run.prepare(model, torch.optim.Adam(model.parameters(), lr=lr))


def weights(model: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def train(run: Any, model: Any, optimizer: Any, batches: Any, num_steps: int) -> list[float]:
    """The losses of the next steps, over the ends of epochs."""
    losses: list[float] = []
    while len(losses) < num_steps:
        for x, y in batches:
            with run.autocast():
                loss = torch.nn.functional.mse_loss(model(x), y)
            run.backward(loss)
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == num_steps:
                break
    return losses


def gradients_of_epoch() -> tuple[list[list[float]], list[list[float]]]:
    """Each step's gradients, and those of the plain model on the samples of all ranks; in float64, so that no rounding
    hides a fault or looks like one."""
    torch.set_default_dtype(torch.float64)
    try:
        return _gradients_of_epoch()
    finally:
        torch.set_default_dtype(torch.float32)


def _gradients_of_epoch() -> tuple[list[list[float]], list[list[float]]]:
    run, model, _ = begin()
    data = make_data()
    indexed = [(torch.tensor(index), *pair) for index, pair in enumerate(data)]
    found, expected = [], []
    for indices, x, y in run.batches(indexed, 2):
        model.zero_grad()
        run.backward(torch.nn.functional.mse_loss(model(x), y))
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]).tolist())
        everyone = run._world.gather_bytes(bytes(indices.tolist()))
        whole = [data[index] for part in everyone for index in part]
        plain = make_model()
        plain.load_state_dict({k.removeprefix("module."): v for k, v in model.state_dict().items()})
        torch.nn.functional.mse_loss(
            plain(torch.stack([x for x, _ in whole])), torch.stack([y for _, y in whole])
        ).backward()
        expected.append(torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).tolist())
    return found, expected


def test_gradients_are_those_of_one_rank_with_all_samples(two_ranks: RankPool, four_ranks: RankPool) -> None:
    """23 samples in batches of 2 per rank: the last steps are uneven."""
    for pool in (two_ranks, four_ranks):
        results = pool.run(gradients_of_epoch)
        assert all(found == results[0][0] for found, _ in results), "gradients differ between ranks"
        found, expected = (torch.tensor(values, dtype=torch.float64) for values in results[0])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def samples_of_epochs() -> list[list[int]]:
    run = paceline.init(timeout_s=LIMIT_S)
    batches = run.batches(range(NUM_SAMPLES), 3)
    return [[index for batch in batches for index in batch.tolist()] for _ in range(3)]


def test_each_sample_is_seen_once_per_epoch(four_ranks: RankPool) -> None:
    results = four_ranks.run(samples_of_epochs)
    for epoch in range(3):
        assert sorted(index for rank in results for index in rank[epoch]) == list(range(NUM_SAMPLES))


def random_numbers() -> tuple[list[float], float, float]:
    _, model, _ = begin()
    return weights(model), random.random(), torch.rand(()).item()


def test_weights_begin_alike_and_randomness_differs(two_ranks: RankPool) -> None:
    (weights_0, *random_0), (weights_1, *random_1) = two_ranks.run(random_numbers)
    assert weights_0 == weights_1
    assert random_0[0] != random_1[0] and random_0[1] != random_1[1]


def overflow_on_rank_1() -> dict[str, Any]:
    run, model, optimizer = begin("fp16")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    data = make_data()[:4]
    told: dict[str, Any] = {}
    for index, (x, y) in enumerate(data):
        before = weights(model)
        with run.autocast():
            loss = torch.nn.functional.mse_loss(model(x[None]), y[None])
        run.backward(loss / 1000)  # small enough not to overflow by itself
        if run.rank == 1 and index == 1:
            next(model.parameters()).grad[0, 0] = torch.inf
        run.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        told[f"skipped {index}"] = weights(model) == before
    return {**told, "scale": run._precision.state_dict()["scale"], "weights": weights(model)}


def test_an_overflow_on_one_rank_skips_the_step_on_all(two_ranks: RankPool) -> None:
    results = two_ranks.run(overflow_on_rank_1)
    assert results[0] == results[1]
    assert [results[0][f"skipped {index}"] for index in range(4)] == [False, True, False, False]
    assert results[0]["scale"] == 65536 / 2


def clipped_norms(precision: str) -> tuple[float, float]:
    run, model, _ = begin(precision)
    x, y = torch.full((2, 5), float(run.rank + 1)), torch.full((2, 1), 9.0)
    with run.autocast():
        loss = torch.nn.functional.mse_loss(model(x), y)
    run.backward(loss / 1000)  # small enough for the first scale of fp16
    norm = run.clip_grad_norm_(0.01)
    after = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    return norm.item(), after.item()


def test_clipping_acts_on_the_true_gradients(two_ranks: RankPool) -> None:
    true, clipped = two_ranks.run(clipped_norms, "fp32")[0]
    assert true > 0.05 and clipped == pytest.approx(0.01, rel=1e-3)
    for precision in ("bf16", "fp16"):
        (norm, after), other = two_ranks.run(clipped_norms, precision)
        assert (norm, after) == other
        assert norm == pytest.approx(true, rel=0.05) and after == pytest.approx(0.01, rel=1e-3)


def go_on(folder: str, precision: str, before: int, after: int) -> dict[str, Any]:
    """Trains, writes a checkpoint, and trains on."""
    run, model, optimizer = begin(precision, dropout=0.3)
    batches = run.batches(make_data(), 2)
    train(run, model, optimizer, batches, before)
    run.checkpoint(folder, step=before, extra={"best": (1.5, torch.tensor([1, 2]))})
    losses = train(run, model, optimizer, batches, after)
    return {"losses": losses, "weights": weights(model), "at": batches.state_dict()}


def come_back(folder: str, precision: str, after: int, has_no_file: bool = False) -> dict[str, Any]:
    if has_no_file and os.environ["RANK"] != "0":
        folder = "/nowhere/at/all"
    run, model, optimizer = begin(precision, dropout=0.3)
    random.seed(99)
    torch.manual_seed(99)
    with torch.no_grad():
        next(model.parameters()).fill_(4.0)
    resumed = run.resume(folder)
    assert resumed is not None
    batches = run.batches(make_data(), 2)  # made after resume, which must not matter
    losses = train(run, model, optimizer, batches, after)
    extra = (resumed.step, resumed.extra["best"][0], resumed.extra["best"][1].tolist())
    return {"losses": losses, "weights": weights(model), "at": batches.state_dict(), "extra": extra}


@pytest.mark.parametrize(("precision", "before"), [("fp32", 9), ("bf16", 1), ("fp16", 8)])
def test_a_resumed_run_goes_on_bit_for_bit(
    precision: str, before: int, two_ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    """In the middle of an epoch (6 steps each), with dropout, and only rank 0 has the file."""
    calm = two_ranks.run(go_on, str(tmp_path), precision, before, 7)
    again = two_ranks.run(come_back, str(tmp_path), precision, 7, True)
    for left, right in zip(calm, again, strict=True):
        assert right.pop("extra") == (before, 1.5, [1, 2])
        assert left == right
    assert calm[0]["losses"] != calm[1]["losses"], "ranks saw the same samples"


def test_four_ranks_resume_too(four_ranks: RankPool, tmp_path: pathlib.Path) -> None:
    calm = four_ranks.run(go_on, str(tmp_path), "fp32", 4, 5)
    again = four_ranks.run(come_back, str(tmp_path), "fp32", 5)
    for left, right in zip(calm, again, strict=True):
        assert left["at"] == right["at"]
        assert left["losses"] == pytest.approx(right["losses"], rel=1e-5)


def count_after_resume(folder: str, num_steps: int | None) -> tuple[list[int], int]:
    """With `num_steps`: trains that many and writes; without: resumes and finishes the epoch."""
    run, _, _ = begin()
    batches = run.batches(range(NUM_SAMPLES), 2)
    if num_steps is None:
        assert run.resume(folder) is not None
        return [index for batch in batches for index in batch.tolist()], batches.epoch
    seen: list[int] = []
    for batch in batches:
        seen += batch.tolist()
        num_steps -= 1
        if num_steps == 0:
            break
    run.checkpoint(folder, step=1)
    return seen, batches.epoch


def test_another_number_of_ranks_takes_the_samples_that_are_left(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    first = two_ranks.run(count_after_resume, str(tmp_path), 3)
    rest = four_ranks.run(count_after_resume, str(tmp_path), None)
    seen = [index for part, _ in [*first, *rest] for index in part]
    assert sorted(seen) == list(range(NUM_SAMPLES))
    assert {epoch for _, epoch in rest} == {1}


def failing_checkpoint(folder: str) -> None:
    run, _, _ = begin()
    run.checkpoint(folder, step=1)


def failing_resume(folder: str) -> None:
    run = paceline.init(timeout_s=LIMIT_S)
    model = torch.nn.Linear(5, 4)
    run.prepare(model, torch.optim.Adam(model.parameters()))
    run.resume(folder)


def test_what_fails_on_rank_0_is_raised_on_all(two_ranks: RankPool, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    two_ranks.run(failing_checkpoint, str(tmp_path / "good"))
    for function, folder, text in (
        (failing_checkpoint, "file", "no checkpoint could be written into"),
        (failing_resume, "good", "belongs to another model: weight is missing there and .* here"),
    ):
        for result in two_ranks.call(function, str(tmp_path / folder)):
            with pytest.raises(CheckpointError, match=text):
                raise result.error


def sparse_buffer(folder: str) -> None:
    """A buffer that safetensors can't write: no error of ours."""
    run = paceline.init(timeout_s=LIMIT_S)
    model = torch.nn.Linear(2, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.register_buffer("mask", torch.eye(2).to_sparse())
    run.checkpoint(folder, step=1)


def unreadable_on_rank_0(folder: str) -> None:
    """What `resume` reads is whole, and then something unforeseen is raised."""
    run, _, _ = begin()
    if run.rank == 0:
        run._prepared.model.state_dict = lambda: [][1]
    run.resume(folder)


def test_an_unforeseen_error_on_rank_0_is_told_to_all(two_ranks: RankPool, tmp_path: pathlib.Path) -> None:
    two_ranks.run(go_on, str(tmp_path / "good"), "fp32", 1, 1)
    for function, text in (
        (sparse_buffer, "run.checkpoint failed on rank 0: [A-Z][A-Za-z]+Error: "),
        (unreadable_on_rank_0, "run.resume failed on rank 0: IndexError: list index out of range"),
    ):
        on_0, on_1 = two_ranks.call(function, str(tmp_path / "good"), limit_s=LIMIT_S / 2)
        for result in (on_0, on_1):
            with pytest.raises(CheckpointError, match=text):
                raise result.error
        assert "was the direct cause" in on_0.text, "the traceback of the cause is lost"
    assert sorted(path.name for path in (tmp_path / "good").iterdir()) == [".lock", "000001-step-1"]


def fail_on_rank_1(where: str, folder: str) -> None:
    is_1 = os.environ["RANK"] == "1"
    run = paceline.init(timeout_s=LIMIT_S, precision="fp64" if is_1 and where == "init" else "fp32")
    if where == "batches":
        run.batches(range(1 if is_1 else 9), 1)
    if where == "log":
        run.log(step=1, loss=torch.ones(2 if is_1 else 1))
    model = torch.nn.Linear(2, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.checkpoint(folder, step=-1 if is_1 and where == "checkpoint" else 1)
    if is_1:
        optimizer.load_state_dict = lambda _: {}["gone"]
    run.resume(folder)


@pytest.mark.parametrize(
    ("where", "error", "text"),
    [
        ("init", InputError, "InputError: precision 'fp64' is not known"),
        ("batches", InputError, "InputError: the data set has 1 samples for 2 ranks"),
        ("log", InputError, "InputError: loss is a float32 tensor of shape [2]; expected one real number"),
        ("checkpoint", InputError, "InputError: run.checkpoint: step is -1; expected a whole number, at least 0"),
        ("resume", KeyError, "KeyError: 'gone'"),
    ],
)
def test_when_one_rank_fails_the_others_do_not_wait(
    where: str, error: type[Exception], text: str, two_ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    on_0, on_1 = two_ranks.call(fail_on_rank_1, where, str(tmp_path), limit_s=LIMIT_S / 2)
    assert isinstance(on_1.error, error), on_1.text
    assert isinstance(on_0.error, WorldError), on_0.text
    call = "paceline.init" if where == "init" else f"run.{where}"
    assert on_0.error.message.startswith(f"{call} failed on rank 1: " if where != "log" else "run.log failed on rank 1")
    assert text in on_0.error.message


def log_losses() -> list[Any]:
    run = paceline.init(timeout_s=LIMIT_S)
    output = io.StringIO()
    with redirect_stdout(output):
        # 5 samples in batches of 4 over 2 ranks: a step of 3 + 2.
        batches = run.batches(range(5), 4, shuffle=False)
        results: list[Any] = [run.log(step=1, mean=x.float().mean(), rank=run.rank) for x in batches]
        results.append(run.log(step=2, weight=float(run.rank), loss=float("nan") if run.rank == 0 else 3.0))
        results.append(run.log(step=3, loss=run.rank))
    return [*results, output.getvalue()]


def test_logged_values_are_weighted_over_the_ranks(two_ranks: RankPool) -> None:
    on_0, on_1 = two_ranks.run(log_losses)
    assert on_0[:3] == on_1[:3] == [{"mean": 2.0, "rank": 0.4}, {"loss": 3.0}, {"loss": 0.5}]
    assert on_0[3] == "step 1  mean 2  rank 0.4\nstep 2  loss 3\nstep 3  loss 0.5\n"
    assert on_1[3] == ""


def log_differently(what: str) -> None:
    run = paceline.init(timeout_s=LIMIT_S)
    if what == "names":
        run.log(step=1, **({"loss": 1.0} if run.rank == 0 else {"loss": 1.0, "accuracy": 0.5}))
    else:
        run.log(step=run.rank, loss=1.0)


def test_different_names_or_steps_fail_on_all_ranks(two_ranks: RankPool) -> None:
    for what, text in (
        ("names", "rank 0: step 1, loss; rank 1: step 1, accuracy, loss"),
        ("steps", "rank 0: step 0, loss; rank 1: step 1, loss"),
    ):
        for result in two_ranks.call(log_differently, what):
            with pytest.raises(WorldError, match=text):
                raise result.error


def differing(what: str) -> None:
    rank = int(os.environ["RANK"])
    run = paceline.init(timeout_s=LIMIT_S, seed=rank if what == "seed" else 0)
    run.batches(range(10 + rank), 2)


def test_ranks_that_disagree_are_told_at_once(two_ranks: RankPool) -> None:
    for what, text in (
        ("seed", "paceline.init differs between the ranks. rank 0: .*seed=0.*; rank 1: .*seed=1"),
        ("data", "run.batches differs between the ranks. rank 0: 10 samples.*; rank 1: 11 samples"),
    ):
        for result in two_ranks.call(differing, what):
            with pytest.raises(WorldError, match=text):
                raise result.error


def count_steps() -> tuple[int, int, float]:
    run, model, optimizer = begin()
    train(run, model, optimizer, run.batches(make_data(), 2), 6)
    meter = run._meter
    return meter.steps, meter.samples, meter.sync_wait_s


def test_steps_samples_and_waiting_are_counted(two_ranks: RankPool) -> None:
    results = two_ranks.run(count_steps)
    assert [samples for _, samples, _ in results] == [12, 11]
    for steps, _, wait_s in results:
        assert steps == 6
        assert 0 < wait_s < 10


def addresses_listened_on() -> list[str]:
    """Of this rank's store and Gloo sockets, while the run is on: what /proc says of our own descriptors."""
    before = set(os.listdir("/proc/self/fd"))  # a test before may have left a store of PyTorch's
    run = paceline.init(timeout_s=LIMIT_S)
    inodes = set()
    for name in set(os.listdir("/proc/self/fd")) - before:
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].partition(":")[0])
    run._world.sum([1.0])
    return found


def test_nothing_listens_on_other_addresses(two_ranks: RankPool) -> None:
    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    results = two_ranks.run(addresses_listened_on)
    assert results[0], "rank 0 has no listening socket: the test looks in the wrong place"
    assert {address for found in results for address in found} == {loopback}


def take_port() -> str:
    if os.environ["RANK"] == "0":
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            other.listen()
            with pytest.raises(InputError, match="another process listens there"):
                paceline.init(timeout_s=LIMIT_S)
            os.environ["MASTER_ADDR"] = "192.0.2.1"
            with pytest.raises(InputError, match="which does not have this address"):
                paceline.init(timeout_s=LIMIT_S)
    return "done"


def test_an_address_that_can_not_be_used_is_one_clear_error(two_ranks: RankPool) -> None:
    assert two_ranks.run(take_port) == ["done", "done"]


def meet_alone() -> None:
    if os.environ["RANK"] == "0":
        paceline.init(timeout_s=1)


def test_ranks_that_do_not_come_are_not_waited_for_for_ever(two_ranks: RankPool) -> None:
    result, _ = two_ranks.call(meet_alone)
    assert isinstance(result, Raised)
    with pytest.raises(WorldError, match=r"rank 0 did not meet the other 1 at 127.0.0.1 port .* within 1.0s"):
        raise result.error


def keep_and_find_extra(folder: str) -> str:
    run, _, _ = begin()
    names = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(3), 1: torch.tensor(5.0), "1": torch.tensor(6.0)}
    run.checkpoint(folder, step=1, extra=names)
    return repr((names, run.resume(folder).extra))


def test_names_in_extra_that_look_alike_stay_apart(two_ranks: RankPool, tmp_path: pathlib.Path) -> None:
    expected = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(3), 1: torch.tensor(5.0), "1": torch.tensor(6.0)}
    assert two_ranks.run(keep_and_find_extra, str(tmp_path)) == [repr((expected, expected))] * 2


def refused_arguments(folder: str) -> list[str]:
    run, _, _ = begin()
    told = []
    for changed in (
        {"step": 1.5},
        {"step": True},
        {"step": "5"},
        {"step": torch.tensor(5)},
        {"keep": 1.5},
        {"keep": 0},
        {"folder": folder + "\0"},
        {"folder": None},
    ):
        with pytest.raises(InputError) as caught:
            run.checkpoint(**{"folder": folder, "step": 1, **changed})
        told.append(caught.value.message.removeprefix("run.checkpoint: "))
    run.checkpoint(folder, step=numpy.int64(7), keep=numpy.int64(1))
    told.append(str(run.resume(folder).step))
    return told


def test_a_checkpoint_with_an_argument_that_is_no_number_writes_nothing(
    two_ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    on_0, on_1 = two_ranks.run(refused_arguments, str(tmp_path / "run"))
    assert on_0 == on_1
    assert on_0[:6] == [
        "step is 1.5; expected a whole number, at least 0",
        "step is True; expected a whole number, at least 0",
        "step is '5'; expected a whole number, at least 0",
        "step is a int64 tensor of shape []; expected a whole number, at least 0",
        "keep is 1.5; expected a whole number, at least 1",
        "keep is 0; expected a whole number, at least 1",
    ]
    assert on_0[6].startswith("folder is '") and on_0[7:] == ["folder is None; expected the path of a folder", "7"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "000001-step-7"]


def newer_adam(parameters: Any) -> torch.optim.Optimizer:
    """Adam as a later PyTorch may have it: with one setting more."""
    optimizer = type("Adam", (torch.optim.Adam,), {})(parameters, lr=0.1)
    optimizer.defaults["fresh"] = optimizer.param_groups[0]["fresh"] = 3
    return optimizer


OPTIMIZERS = {
    "newer": newer_adam,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
}


def change_optimizer(folder: str, name: str, writes: bool) -> float:
    run = paceline.init(timeout_s=LIMIT_S)
    model = torch.nn.Linear(2, 1)
    model, optimizer = run.prepare(model, OPTIMIZERS[name](model.parameters()))
    if not writes:
        run.resume(folder)
        assert name != "newer" or optimizer.param_groups[0]["fresh"] == 3
        return optimizer.param_groups[0]["lr"]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # adds a setting to the groups
    run.backward(model(torch.ones(1, 2)).mean())
    optimizer.step()
    schedule.step()
    run.checkpoint(folder, step=1)
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("there", "here", "is_same"),
    [
        ("SGD", "Adam", False),
        ("Adam", "SGD", False),
        ("momentum", "Adam", False),
        ("newer", "Adam", False),
        ("Adam", "Adam", True),
        ("Adam", "newer", True),
    ],
)
def test_another_optimizer_is_refused_by_name(
    there: str, here: str, is_same: bool, two_ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    rates = two_ranks.run(change_optimizer, str(tmp_path), there, True)
    results = two_ranks.call(change_optimizer, str(tmp_path), here, False)
    if is_same:
        assert results == rates
        return
    first, second = ({"momentum": "SGD", "newer": "Adam"}.get(name, name) for name in (there, here))
    for result in results:
        with pytest.raises(CheckpointError, match=rf"another optimizer: {first} \(.*lr.*\) there and {second} \(.*lr"):
            raise result.error


def log_what_is_no_number() -> list[str]:
    run = paceline.init(timeout_s=LIMIT_S)
    told = []
    bad: list[dict[str, Any]] = [
        {"loss": None},
        {"loss": "3.5"},
        {"loss": torch.ones(3)},
        {"loss": torch.ones((), dtype=torch.complex64)},
        {"loss": 10**5000},
        {"step": torch.tensor(1)},
        {"step": 1.5},
        {"weight": -1.0},
        {"weight": float("inf")},
        {"lo\x1b[2Jss": None},
    ]
    for changed in bad:
        for is_mine in (True, run.rank == 1):
            with pytest.raises((InputError, WorldError)) as caught:
                run.log(**{"step": 1, "loss": 1.0, **(changed if is_mine else {})})
            assert type(caught.value) is (InputError if is_mine else WorldError)
            if is_mine and run.rank == 1:
                told.append(caught.value.message)
            if not is_mine:
                told.append(caught.value.message.removeprefix("run.log failed on rank 1: InputError: "))
    return told[::2] if run.rank == 1 else told


def test_what_can_not_be_logged_is_named_on_every_rank(two_ranks: RankPool) -> None:
    on_0, on_1 = two_ranks.run(log_what_is_no_number)
    assert on_0 == on_1
    assert [message.partition(";")[0] for message in on_0] == [
        "loss is None",
        "loss is '3.5'",
        "loss is a float32 tensor of shape [3]",
        "loss is a complex64 tensor of shape []",
        "loss is an int that is too long to show",
        "step is a int64 tensor of shape []",
        "step is 1.5",
        "weight is -1.0",
        "weight is inf",
        "lo\\x1b[2Jss is None",
    ]


def log_control_characters(differs: bool) -> str:
    run = paceline.init(timeout_s=LIMIT_S)
    output = io.StringIO()
    with redirect_stdout(output):
        run.log(step=run.rank if differs else 1, **{"lo\x1b[2J\nss\ud800": 1.0})
    return output.getvalue()


def test_control_characters_in_a_name_are_not_printed(two_ranks: RankPool) -> None:
    escaped = "lo\\x1b[2J\\nss\\ud800"
    assert two_ranks.run(log_control_characters, False)[0] == f"step 1  {escaped} 1\n"
    for result in two_ranks.call(log_control_characters, True, limit_s=LIMIT_S / 2):
        assert isinstance(result.error, WorldError), result.text
        assert escaped in result.error.message
