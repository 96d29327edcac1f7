"""Each sample exactly once per epoch over all ranks, in an order that a resumed run continues."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from paceline.errors import CheckpointError, InputError
from paceline.train import checks, seeds


def step_sizes(num_samples: int, world_size: int, batch_size: int) -> list[int]:
    """How many samples all ranks together take in each step, when `num_samples` are left in the epoch.

    Full steps take world_size * batch_size. A remainder of at least world_size is a step of its own. A
    smaller one would leave a rank without a sample, so it is joined with the last full step and the two are
    halved; with a batch size of 1, where halves would be too small, the last step takes both. Any tail of the
    list is what the function gives for the samples in that tail, so that a resumed epoch takes the same
    steps.
    """
    full = world_size * batch_size
    num_full, rest = divmod(num_samples, full)
    if rest == 0:
        return [full] * num_full
    if rest >= world_size:
        return [*[full] * num_full, rest]
    if num_full == 0:
        return []
    joined = full + rest
    last = [joined] if batch_size == 1 else [joined - joined // 2, joined // 2]
    return [*[full] * (num_full - 1), *last]


def rank_share(size: int, rank: int, world_size: int) -> slice:
    """Which of the `size` samples of a step are this rank's: as even as can be, lower ranks one more."""
    each, extra = divmod(size, world_size)
    start = rank * each + min(rank, extra)
    return slice(start, start + each + (rank < extra))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of the samples a rank takes, and with which random numbers."""

    rank: int
    world_size: int
    seed: int
    device: torch.device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """The size of the batch in hand."""

    local: int
    """Samples in this rank's batch."""
    total: int
    """Samples in the batches of all ranks."""

    def weight(self, ranks: Sequence[int], world_size: int) -> float:
        """What this rank's mean loss is multiplied by, so that in the plain average over `ranks` each sample counts
        the same."""
        if self.total % world_size == 0:
            return 1.0  # all ranks hold equal batches
        shares = [rank_share(self.total, rank, world_size) for rank in ranks]
        return self.local * len(ranks) / sum(share.stop - share.start for share in shares)


class InHand:
    """The batch that is being worked on: that of the innermost loop over batches, so that evaluating in the
    middle of training does not disturb what training sees afterwards."""

    def __init__(self) -> None:
        self._loops: list[Batches] = []

    @property
    def counts(self) -> Counts | None:
        """None outside of any loop over batches."""
        return self._loops[-1].counts if self._loops else None

    def enter(self, loop: Batches) -> None:
        self._loops.append(loop)

    def leave(self, loop: Batches) -> None:
        self._loops.remove(loop)


class Batches:
    """One epoch, or what is left of it, per `for` loop. Made by `run.batches`.

    Every rank gets the same number of batches, so that no rank waits for one that has run out. Batches have
    `batch_size` samples but for the last step or two of an epoch, where the ranks share what is left evenly
    (with a batch size of 1 some ranks get 2 samples in the last step). Tensors, also inside lists, tuples and
    dictionaries, arrive on `run.device`.

        while batches.epoch < 3:
            for batch in batches:
                ...
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        share: Share,
        in_hand: InHand,
        shuffle: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
        num_workers: int,
    ) -> None:
        batch_size = _check(dataset, batch_size, share.world_size)
        self.epoch = 0
        """Epochs that are complete."""
        self.position = 0
        """Samples of the current epoch that have been handed out, over all ranks."""
        self.counts: Counts | None = None
        self.num_samples: int = len(dataset)  # type: ignore[arg-type]
        self.batch_size = batch_size
        self._dataset = dataset
        self._share = share
        self._in_hand = in_hand
        self._shuffle = shuffle
        self._collate = collate_fn or default_collate
        self._num_workers = num_workers

    def __len__(self) -> int:
        """Batches per rank that are left in the current epoch."""
        return len(self._step_sizes())

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        self._in_hand.enter(self)
        try:
            for size, batch in zip(self._step_sizes(), self._loader(), strict=True):
                # Counted as it is handed out: what workers have read ahead is not yet seen.
                self.position += size
                share = rank_share(size, self._share.rank, self._share.world_size)
                self.counts = Counts(local=share.stop - share.start, total=size)
                yield _to_device(batch, self._share.device)
        finally:
            self._in_hand.leave(self)
        self.epoch, self.position = epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position, "num_samples": self.num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues where `state` was taken, also with another number of ranks or another batch size.

        With more ranks, fewer samples than ranks may be left of the epoch. They can't be shared out and are
        dropped; rank 0 prints how many. Raises CheckpointError when the data set has changed its size and the
        state is in the middle of an epoch.
        """
        if state["position"] and state["num_samples"] != self.num_samples:
            raise CheckpointError(
                f"the checkpoint is {state['position']} samples into an epoch of {state['num_samples']}, "
                f"and the data set now has {self.num_samples}",
                hint="resume with the same data, or with a checkpoint written at the end of an epoch",
            )
        self.epoch, self.position = state["epoch"], state["position"]
        num_left = self.num_samples - self.position
        if 0 < num_left < self._share.world_size and self._share.rank == 0:
            print(
                f"paceline: dropped from epoch {self.epoch}: the {num_left} samples that are left of it can't be "
                f"shared out to {self._share.world_size} ranks",
                flush=True,
            )

    def _step_sizes(self) -> list[int]:
        return step_sizes(self.num_samples - self.position, self._share.world_size, self.batch_size)

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(seeds.derive(self._share.seed, "order", self.epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def _loader(self) -> DataLoader[Any]:
        share = self._share
        has_workers = self._num_workers > 0
        return DataLoader(
            _BatchReader(self._dataset, self._collate, is_in_worker=has_workers),
            sampler=_Plan(self._order(), self.position, self._step_sizes(), share, self.epoch),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            pin_memory=has_workers and share.device.type == "cuda",
            generator=torch.Generator().manual_seed(
                seeds.derive(share.seed, "workers", share.rank, self.epoch, self.position)
            ),
        )


class _Plan:
    """This rank's batches of an epoch: for each a seed and the indices of its samples."""

    def __init__(self, order: torch.Tensor, position: int, sizes: list[int], share: Share, epoch: int) -> None:
        self._order, self._position, self._sizes, self._share, self._epoch = (
            order,
            position,
            sizes,
            share,
            epoch,
        )

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        starts = itertools.accumulate(self._sizes, initial=self._position)
        for start, size in zip(starts, self._sizes, strict=False):
            step = self._order[start : start + size]
            mine = step[rank_share(size, self._share.rank, self._share.world_size)]
            yield seeds.derive(self._share.seed, "batch", self._epoch, start, self._share.rank), mine.tolist()


class _BatchReader(Dataset[Any]):
    """Reads whole batches. In a worker it seeds the generators per batch, so that augmentation neither
    repeats between ranks and workers nor depends on where a run was resumed."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], *, is_in_worker: bool) -> None:
        self._dataset, self._collate, self._is_in_worker = dataset, collate, is_in_worker

    def __getitem__(self, item: tuple[int, list[int]]) -> Any:
        seed, indices = item
        if self._is_in_worker:
            torch.manual_seed(seed)
            seeds.seed_python(seed)
        read_many = getattr(self._dataset, "__getitems__", None)
        samples = read_many(indices) if read_many else [self._dataset[index] for index in indices]
        return self._collate(samples)


def _as_it_is(batch: Any) -> Any:
    return batch


def _to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to_device(part, device) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_to_device(part, device) for part in batch)
    if isinstance(batch, dict):
        return {key: _to_device(part, device) for key, part in batch.items()}
    return batch


def _check(dataset: Any, batch_size: Any, world_size: int) -> int:
    """The batch size as an int. Raises InputError."""
    if isinstance(dataset, Mapping):
        raise InputError(
            f"run.batches takes samples by their number, from 0, and a {type(dataset).__name__} has keys",
            hint="pass one split of it, or its values: list(data.values())",
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InputError(
            f"run.batches needs __len__ and __getitem__, which {type(dataset).__name__} does not have",
            hint="load it into a list, or index it: class MyData(torch.utils.data.Dataset)",
        )
    batch_size = checks.whole("batch_size", batch_size, "samples per rank, at least 1", at_least=1)
    if len(dataset) < world_size:
        raise InputError(
            f"the data set has {len(dataset)} samples for {world_size} ranks; every rank needs at least one",
            hint=f"start at most {max(1, len(dataset))} ranks",
        )
    return batch_size
