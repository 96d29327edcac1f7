"""Every sample once, the same number of batches for everybody, and a position that can be resumed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from paceline import CheckpointError, InputError
from paceline.train.batches import Batches, Counts, InHand, Share, rank_share, step_sizes

WORLDS, SIZES = st.integers(1, 9), st.integers(1, 9)


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Dice(Numbers):
    """Augmentation: a random number from each of the two generators beside the sample."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), torch.rand(()).item()


def make(dataset: Any, batch_size: int, *, rank: int = 0, world_size: int = 1, **options: Any) -> Batches:
    share = Share(rank=rank, world_size=world_size, seed=7, device=torch.device("cpu"))
    settings = {"shuffle": True, "collate_fn": list, "num_workers": 0, "in_hand": InHand(), **options}
    return Batches(dataset, batch_size, share=share, **settings)


@given(extra=st.integers(0, 300), world_size=WORLDS, batch_size=SIZES)
def test_steps_give_every_rank_its_share(extra: int, world_size: int, batch_size: int) -> None:
    num_samples = world_size + extra
    sizes = step_sizes(num_samples, world_size, batch_size)
    assert sum(sizes) == num_samples
    most = 2 if batch_size == 1 else batch_size
    for size in sizes:
        shares = [rank_share(size, rank, world_size) for rank in range(world_size)]
        assert [index for share in shares for index in range(size)[share]] == list(range(size))
        assert all(1 <= share.stop - share.start <= most for share in shares)
    assert all(size == world_size * batch_size for size in sizes[:-2])


@given(extra=st.integers(0, 300), world_size=WORLDS, batch_size=SIZES)
def test_steps_of_what_is_left_are_the_steps_left(extra: int, world_size: int, batch_size: int) -> None:
    sizes = step_sizes(world_size + extra, world_size, batch_size)
    for taken in range(len(sizes) + 1):
        assert step_sizes(sum(sizes[taken:]), world_size, batch_size) == sizes[taken:]


@pytest.mark.parametrize(("num_samples", "batch_size"), [(21, 4), (16, 4), (5, 1), (17, 4), (3, 8)])
def test_each_sample_once_per_epoch_over_all_ranks(num_samples: int, batch_size: int) -> None:
    world_size = 3
    everyone = [make(Numbers(num_samples), batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    orders = []
    for epoch in range(3):
        assert {batches.epoch for batches in everyone} == {epoch}
        assert len({len(batches) for batches in everyone}) == 1
        steps = list(zip(*everyone, strict=True))
        seen = [index for step in steps for part in step for index in part]
        assert sorted(seen) == list(range(num_samples))
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]


def test_without_shuffle_the_order_is_that_of_the_data_set() -> None:
    assert [index for batch in make(Numbers(5), 2, shuffle=False) for index in batch] == list(range(5))


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize(("new_world_size", "new_batch_size"), [(2, 3), (3, 3), (1, 5)])
def test_a_resumed_epoch_goes_on_where_it_stood(taken: int, new_world_size: int, new_batch_size: int) -> None:
    old = [make(Numbers(40), 3, rank=rank, world_size=2) for rank in range(2)]
    whole = [index for step in zip(*old, strict=True) for part in step for index in part]
    halted = make(Numbers(40), 3, world_size=2)
    for count, _ in enumerate(halted, 1):
        if count > taken:
            break
    state = halted.state_dict()
    resumed = [
        make(Numbers(40), new_batch_size, rank=rank, world_size=new_world_size) for rank in range(new_world_size)
    ]
    for batches in resumed:
        batches.load_state_dict(state)
    rest = [index for step in zip(*resumed, strict=True) for part in step for index in part]
    assert rest == whole[(taken + 1) * 6 :]
    assert resumed[0].epoch == 1 and resumed[0].position == 0


def test_samples_too_few_for_more_ranks_are_dropped_and_rank_0_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for position, said in (
        (7, "paceline: dropped from epoch 4: the 3 samples that are left of it can't be shared out to 4 ranks\n"),
        (6, ""),
        (10, ""),
    ):
        for rank in (1, 0):
            batches = make(Numbers(10), 2, rank=rank, world_size=4)
            assert capsys.readouterr().out == ""
            batches.load_state_dict({"epoch": 4, "position": position, "num_samples": 10})
        assert capsys.readouterr().out == said
        assert len(list(batches)) == (position == 6) and batches.epoch == 5


def test_position_counts_what_was_handed_out_and_not_what_workers_read_ahead() -> None:
    batches = make(Numbers(40), 2, num_workers=2)
    for count, _ in enumerate(batches, 1):
        assert batches.position == 2 * count
        if count == 3:
            break
    assert (batches.epoch, batches.position) == (0, 6)


def test_augmentation_in_workers_never_repeats_and_can_be_resumed() -> None:
    def run(rank: int, position: int = 0) -> list[Any]:
        batches = make(Dice(16), 2, rank=rank, world_size=2, num_workers=2)
        batches.load_state_dict({"epoch": 0, "position": position, "num_samples": 16})
        return [sample for batch in batches for sample in batch]

    first, other = run(0), run(1)
    for column in (1, 2):
        assert len({sample[column] for sample in first + other}) == 16
    assert run(0, position=8) == first[4:]


def test_a_loop_inside_a_loop_does_not_disturb_the_outer_one() -> None:
    in_hand = InHand()
    train, held_out = make(Numbers(4), 4, in_hand=in_hand), make(Numbers(3), 2, in_hand=in_hand)
    assert in_hand.counts is None
    for _ in train:
        for batch in held_out:
            assert in_hand.counts == Counts(local=len(batch), total=len(batch))
        assert in_hand.counts == Counts(local=4, total=4)
        for _ in held_out:
            break
        assert in_hand.counts == Counts(local=4, total=4)
    assert in_hand.counts is None


def test_tensors_arrive_in_the_shape_they_were_collated() -> None:
    batches = make(Numbers(3), 3, shuffle=False, collate_fn=lambda x: {"x": torch.tensor(x), "y": (x, "a")})
    (batch,) = batches
    assert batch["x"].tolist() == [0, 1, 2] and batch["y"] == ([0, 1, 2], "a")


def test_a_data_set_that_changed_its_size_is_refused_in_mid_epoch() -> None:
    batches = make(Numbers(10), 2)
    batches.load_state_dict({"epoch": 3, "position": 0, "num_samples": 9})
    assert batches.epoch == 3
    with pytest.raises(CheckpointError, match="4 samples into an epoch of 9, and the data set now has 10"):
        batches.load_state_dict({"epoch": 3, "position": 4, "num_samples": 9})


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "batch_size", "message"),
    [
        (Stream(), 2, "needs __len__ and __getitem__, which Stream does not have"),
        (iter([1, 2]), 2, "list_iterator does not have"),
        ({0: "a", 1: "b"}, 1, "samples by their number, from 0, and a dict has keys"),
        (Numbers(3), 1.5, "batch_size is 1.5; expected samples per rank, at least 1"),
        (Numbers(3), True, "batch_size is True; expected"),
        (Numbers(3), "2", "batch_size is '2'; expected"),
        (Numbers(3), 0, "batch_size is 0; expected samples per rank, at least 1"),
        (Numbers(1), 1, "1 samples for 2 ranks; every rank needs at least one"),
        (Numbers(0), 1, "0 samples for 2 ranks"),
    ],
)
def test_what_can_not_be_shared_out_is_refused(dataset: Any, batch_size: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(dataset, batch_size, world_size=2)
