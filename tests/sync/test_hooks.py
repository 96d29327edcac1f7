"""A strategy on a DDP model that is trained as anyone trains one: who moves when, and what is seen in between."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import InputError
from paceline.events import Event, Progress
from paceline.strategy import Outer, parse_sync
from paceline.sync import codecs
from paceline.sync.collectives import Mesh
from paceline.sync.hooks import attach, describe, fit
from paceline.sync.meter import Meter
from rank_pool import RankPool

pytestmark = pytest.mark.ranks

TWO_HOSTS, TWO_BY_TWO = "ab", "aabb"


class Net(nn.Module):
    """With running statistics, and a branch that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.extra = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, *, with_extra: bool = True) -> torch.Tensor:
        if x.isinf().any():
            raise ValueError("no such data")
        return self.body(x) + self.extra(x) if with_extra else self.body(x)


class Trained:
    """A model over pretended hosts, and what its script would do."""

    def __init__(self, hosts: str, text: str, module: nn.Module | None = None, **options: Any) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        self.mesh = Mesh.connect(hosts, torch.device("cpu"))
        self.told: list[Event] = []
        self.meter = Meter(clock_s=time.monotonic, tell=self.told.append, measures_wait=True)
        strategy = fit(parse_sync(text), self.mesh)
        group = self.mesh.host_group if isinstance(strategy, Outer) else None
        self.ddp = DistributedDataParallel(module or Net(), process_group=group, **options)
        self.module: nn.Module = self.ddp.module
        self.sync = attach(self.ddp, strategy, self.mesh, self.meter)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.generator = torch.Generator().manual_seed(100 + self.rank)

    def batch(self, size: int = 6) -> torch.Tensor:
        return torch.randn(size, 4, generator=self.generator)

    def backward(self, **named: Any) -> None:
        self.ddp(self.batch(), **named).square().mean().backward()

    def step(self, num_steps: int = 1, *, skips: bool = False, **named: Any) -> None:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.backward(**named)
            if not skips:
                self.optimizer.step()

    @property
    def engine_steps(self) -> int:
        return self.sync.shared_state()["steps"]

    def own(self) -> torch.Tensor:
        return flat(dict(self.module.named_parameters()))

    def shared(self) -> torch.Tensor:
        return flat(self.module.state_dict())


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in state.values()])


def same_everywhere(tensor: torch.Tensor) -> bool:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return all(part.equal(parts[0]) for part in parts)


def a_period() -> None:
    script = Trained(TWO_HOSTS, "local:H=2")
    script.step()
    assert not same_everywhere(script.own())
    assert same_everywhere(script.shared()), "what is saved is what all share"
    script.step()
    expected = script.own().clone()
    dist.all_reduce(expected)
    script.ddp(script.batch())
    assert same_everywhere(script.own()) and torch.allclose(script.own(), expected / 2, atol=1e-6)
    script.sync.finish()
    assert script.engine_steps == 2


def test_weights_move_before_the_next_training_forward(two_ranks: RankPool) -> None:
    two_ranks.run(a_period)


def attempts() -> None:
    script = Trained(TWO_HOSTS, "local:H=2")
    script.step()
    script.step(skips=script.rank == 1)  # as a gradient scaler does
    for _ in range(3):
        with script.ddp.no_sync():
            script.backward()
    script.step()
    with torch.no_grad():
        script.ddp(script.batch())
    assert script.engine_steps == 2, "the third is over when training goes on"
    script.ddp(script.batch())
    assert script.engine_steps == 3
    script.meter.tell()
    (progress,) = [event for event in script.told if isinstance(event, Progress)]
    assert (progress.steps, progress.samples) == (3, 6 * 6)
    assert progress.sync_wait_s is not None and progress.sync_wait_s > 0
    script.sync.finish()
    assert same_everywhere(script.own())


def test_steps_are_counted_by_attempt(two_ranks: RankPool) -> None:
    two_ranks.run(attempts)


def two_by_two() -> bool:
    script = Trained(TWO_BY_TWO, "post-local:H=3:warmup=1")
    script.step()
    assert same_everywhere(script.own()), "gradients of the warm-up are averaged over all"
    script.step()
    neighbours = [torch.empty_like(script.own()) for _ in range(2)]
    dist.all_gather(neighbours, script.own(), group=script.mesh.host_group)
    assert neighbours[0].equal(neighbours[1]), "ranks of a host stay in step"
    assert not same_everywhere(script.own())
    script.sync.finish()
    return same_everywhere(script.own())


def test_two_levels(four_ranks: RankPool) -> None:
    assert four_ranks.run(two_by_two) == [True] * 4


def hosts_of_one_and_three() -> list[torch.Tensor]:
    weights = []
    for text in ("every", "local:H=1"):
        torch.manual_seed(0)
        script = Trained("abbb", text, nn.Linear(4, 1))
        script.step(3)
        script.sync.finish()
        weights.append(script.own())
    return weights


def test_a_host_counts_as_much_as_its_ranks(four_ranks: RankPool) -> None:
    for every, local in four_ranks.run(hosts_of_one_and_three):
        assert torch.allclose(every, local, atol=1e-6)


def evaluation() -> None:
    script = Trained(TWO_HOSTS, "local:H=4")
    script.step(5)
    own, buffers = script.own(), flat(dict(script.module.named_buffers()))
    if script.rank == 0:  # alone: nobody waits for it
        x = torch.ones(3, 4)
        state = script.module.state_dict()
        twin = Net()
        twin.load_state_dict(state)
        assert not flat(state)[:10].equal(own[:10])
        for mode, model in ((torch.no_grad, script.module), (torch.inference_mode, script.ddp)):
            script.ddp.eval()
            with mode():
                assert model(x).equal(twin.eval()(x)), "evaluated on what all share, running statistics included"
        assert script.module(x).equal(twin(x)), "also where the script forgets no_grad"
        with pytest.raises(ValueError, match="no such data"), torch.no_grad():
            script.module(x / 0)
        script.ddp.train()
        part = script.module.body[0].state_dict()
        assert part["weight"].equal(state["body.0.weight"])
        assert script.ddp.state_dict()["module.body.0.weight"].equal(state["body.0.weight"])
    assert script.own().equal(own) and flat(dict(script.module.named_buffers())).equal(buffers)
    script.step(4)
    script.sync.finish()
    assert same_everywhere(flat(script.module.state_dict()))


def test_evaluation_and_state_dict_give_what_all_share_without_communication(two_ranks: RankPool) -> None:
    two_ranks.run(evaluation)


def copies() -> None:
    script = Trained(TWO_HOSTS, "local:H=4")
    script.step(2)
    twin = copy.deepcopy(script.module)
    assert flat(twin.state_dict())[:10].equal(flat(dict(twin.named_parameters()))[:10]), "a copy is left alone"
    with torch.no_grad():
        twin.eval()(torch.ones(2, 4))
    file = io.BytesIO()
    torch.save(script.module, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert flat(again.state_dict()).equal(flat(twin.state_dict()))
    assert b"paceline" not in file.getvalue(), "it can be read where there is no paceline"
    script.sync.finish()
    script = Trained(TWO_HOSTS, "every")
    script.step()
    copy.deepcopy(script.ddp)(script.batch()).sum().backward()
    torch.save(script.ddp, io.BytesIO())
    script.sync.finish()


def test_a_copied_or_pickled_model_is_left_alone(two_ranks: RankPool) -> None:
    two_ranks.run(copies)


def loading() -> None:
    script = Trained(TWO_HOSTS, "diloco:H=2")
    start = copy.deepcopy(script.module.state_dict())
    script.step(5)
    script.module.load_state_dict(start)
    with torch.no_grad():
        assert script.shared().equal(flat(start)), "what was loaded, at once"
    script.step(2)
    script.step()
    assert same_everywhere(script.shared())
    if script.rank == 0:  # "the best one", for a last evaluation: the others need not know
        script.module.load_state_dict(start)
    script.sync.finish()
    if script.rank == 0:
        assert flat(dict(script.module.state_dict())).equal(flat(start)) and script.module.training
        assert all(parameter.equal(start[name]) for name, parameter in script.module.named_parameters())


def test_weights_that_the_script_loads_are_shared_from_then_on(two_ranks: RankPool) -> None:
    two_ranks.run(loading)


def uneven(text: str) -> torch.Tensor:
    script = Trained(TWO_HOSTS, text)
    script.step(3 + 4 * script.rank)
    script.sync.finish()
    return script.shared()


@pytest.mark.parametrize("text", ["local:H=2", "streaming:H=4:P=2:tau=1:none"])
def test_a_rank_that_ends_early_goes_on_taking_part(two_ranks: RankPool, text: str) -> None:
    one, other = two_ranks.run(uneven, text)
    assert one.equal(other)


def options() -> None:
    for text in ("local:H=2", "every"):
        script = Trained(TWO_HOSTS, text, find_unused_parameters=True)
        script.step(with_extra=False)
        script.step(2)
        script.sync.finish()
        assert same_everywhere(script.own())
        script = Trained(TWO_HOSTS, text, static_graph=True, gradient_as_bucket_view=True)
        script.step(4)
        script.sync.finish()
        assert same_everywhere(script.own())


def test_options_of_ddp(two_ranks: RankPool) -> None:
    two_ranks.run(options)


def in_eval_mode() -> None:
    script = Trained(TWO_HOSTS, "local:H=2")
    script.ddp.eval()
    script.step(3)
    assert script.engine_steps == 2 and not same_everywhere(script.own())
    script.sync.finish()
    assert same_everywhere(script.own())


def test_a_script_that_trains_in_eval_mode(two_ranks: RankPool) -> None:
    two_ranks.run(in_eval_mode)


def refusals() -> list[str]:
    script = Trained(TWO_HOSTS, "local:H=2")
    told = []
    synced = DistributedDataParallel(Net(), process_group=script.mesh.host_group)
    synced.module.norm = nn.SyncBatchNorm(4)
    for ask in (
        lambda: script.ddp.register_comm_hook(None, lambda state, bucket: None),
        lambda: attach(synced, script.sync.strategy, script.mesh, script.meter),
    ):
        with pytest.raises(InputError) as raised:
            ask()
        told.append(str(raised.value))
    script.sync.finish()
    return told


def test_what_can_not_be_attached_is_refused_with_the_reason(two_ranks: RankPool) -> None:
    hook, batch_norm = two_ranks.run(refusals)[0]
    assert "registers a communication hook of its own, and --sync local:H=2 has taken its place" in hook
    assert "SyncBatchNorm averages over all ranks in every forward pass" in batch_norm


def joining(hosts: str, text: str) -> bool:
    script = Trained(hosts, text)
    with script.ddp.join():
        script.step(3 + 2 * script.rank)
    script.sync.finish()
    return same_everywhere(script.own())


@pytest.mark.parametrize("text", ["every", "every:accumulate=2", "local:H=2"])
def test_join(two_ranks: RankPool, text: str) -> None:
    assert two_ranks.run(joining, TWO_HOSTS, text) == [True, True]


def test_join_within_a_host_is_refused(four_ranks: RankPool) -> None:
    for result in four_ranks.call(joining, TWO_BY_TWO, "local:H=2"):
        with pytest.raises(InputError, match="can't be used with several ranks on a host"):
            raise result.error


def one_host() -> list[str]:
    lines = []
    for text in ("diloco:H=100", "every:accumulate=2"):
        script = Trained("aa", text)
        lines.append(describe(parse_sync(text), script.mesh))
        script.step(4)
        assert same_everywhere(script.own())
        script.sync.finish()
        assert script.mesh.traffic.sent_bytes == 0
    return lines


def test_on_one_host_nothing_crosses(two_ranks: RankPool) -> None:
    outer, _ = two_ranks.run(one_host)[0]
    assert outer.endswith("one host, so nothing crosses hosts, and ranks average exactly at every step")


def every_step() -> None:
    script = Trained(TWO_HOSTS, "every:accumulate=2")
    script.step(4)
    assert same_everywhere(script.own())
    num_bytes = 2 * 4 * script.own().numel()  # of four passes, two were averaged
    assert script.mesh.traffic.sent_bytes == num_bytes
    script.sync.finish()


def test_every_step(two_ranks: RankPool) -> None:
    two_ranks.run(every_step)


def buffers_of_neighbours() -> torch.Tensor:
    script = Trained(TWO_BY_TWO, "local:H=1", nn.BatchNorm1d(4), broadcast_buffers=False)
    script.ddp(torch.full((2, 4), float(script.rank))).sum().backward()
    script.optimizer.step()
    script.sync.synchronize()
    return script.module.running_mean.clone()


def test_buffers_are_averaged_over_the_ranks_of_a_host_too(four_ranks: RankPool) -> None:
    expected = torch.full((4,), 0.1 * (0 + 1 + 2 + 3) / 4)  # BatchNorm moves its mean by a tenth of the way
    assert all(torch.allclose(found, expected) for found in four_ranks.run(buffers_of_neighbours))


def compilations() -> list[int]:
    """How often kernels are prepared for models whose trained values make rows of 100, of 99, and of 50 per lane."""
    module = nn.Linear(199, 1)
    frozen = nn.Sequential(nn.Linear(198, 1), nn.Linear(300, 300).requires_grad_(False))
    with (
        mock.patch.object(codecs, "COMPILED_FROM_VALUES", 100),
        mock.patch.object(codecs, "prepare", return_value=None) as prepare,
    ):
        counts = []
        for hosts, model in ((TWO_HOSTS, module), (TWO_HOSTS, frozen), (TWO_BY_TWO, module)):
            if len(hosts) == int(os.environ["WORLD_SIZE"]):
                Trained(hosts, "every:int8", copy.deepcopy(model))
                counts.append(prepare.call_count)
    return counts


def test_kernels_are_compiled_for_what_is_trained_and_long_enough(two_ranks: RankPool, four_ranks: RankPool) -> None:
    assert two_ranks.run(compilations) == [[1, 1]] * 2
    assert four_ranks.run(compilations) == [[0]] * 4


def warned() -> str:
    script = Trained(TWO_HOSTS, "post-local:H=4:warmup=2")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        script.module.state_dict()
        script.step(2)
        script.module.state_dict()  # all weights are shared so far
        script.step(2)
        script.module.state_dict()
        script.module.state_dict()
    script.sync.finish()
    return said.getvalue()


def test_what_is_saved_in_mid_period_is_said_once(two_ranks: RankPool) -> None:
    told = "paceline: state_dict at step 4 gives what hosts share, the weights of step 2: they share every 4 steps"
    first, second = two_ranks.run(warned)
    assert first == f"{told} (said once)\n" and second == ""
