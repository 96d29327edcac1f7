"""Events in, the picture of a run out. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from paceline.events import CheckpointSaved, Event, Logged, Progress, RankFinished, RunStarted


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunView:
    """What is known of a run so far."""

    hosts: tuple[str, ...] = ()
    num_ranks: int = 0
    progress: Mapping[int, Progress] = dataclasses.field(default_factory=dict[int, Progress])
    """The newest totals of each rank that reports any."""
    checkpoint: CheckpointSaved | None = None
    logged: Logged | None = None
    num_alone: int = 0
    """Ranks that came to their end without ever joining the others."""

    @property
    def samples_per_s(self) -> float | None:
        """Over all ranks, since their first steps."""
        rates = [one.samples / one.since_first_step_s for one in self.progress.values() if one.since_first_step_s > 0]
        return sum(rates) if rates else None

    @property
    def sync_share(self) -> float | None:
        """The share of their time that ranks spent waiting for gradients; None where it was not measured."""
        measured = [one for one in self.progress.values() if one.sync_wait_s is not None and one.since_first_step_s > 0]
        if not measured:
            return None
        waited_s = sum(one.sync_wait_s or 0.0 for one in measured)
        return waited_s / sum(one.since_first_step_s for one in measured)

    @property
    def sent_bytes(self) -> int:
        """Over all ranks."""
        return sum(one.sent_bytes for one in self.progress.values())


def fold(view: RunView, event: Event, rank: int | None) -> RunView:
    """The view after one more event; `rank` is the rank that sent it, if one did."""
    match event:
        case RunStarted():
            return dataclasses.replace(view, hosts=tuple(event.hosts), num_ranks=event.num_ranks)
        case Progress() if rank is not None:
            return dataclasses.replace(view, progress={**view.progress, rank: event})
        case RankFinished(alone=True):
            return dataclasses.replace(view, num_alone=view.num_alone + 1)
        case CheckpointSaved():
            return dataclasses.replace(view, checkpoint=event)
        case Logged():
            return dataclasses.replace(view, logged=event)
        case _:
            return view
