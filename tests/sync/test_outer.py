"""The outer engine on hosts that are threads: its algebra, its phases, its state."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch._inductor.codecache
from thread_mesh import ThreadMesh, on_hosts
from torch import nn

from paceline.errors import WorldError
from paceline.strategy import Outer, parse_sync
from paceline.sync.outer import OuterEngine

os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)  # set by the first import of the compiler, which optimizers do

STRATEGIES = [
    "local:H=4", "post-local:H=3:warmup=4", "slowmo:H=3", "diloco:H=4", "streaming:H=6:P=3:tau=2",
    "streaming:H=6:P=2:tau=4", "eager:H=3", "eager:H=4:P=2", "sparseloco:H=3",
]  # fmt: skip


with torch.random.fork_rng():
    torch.manual_seed(0)
    MODEL = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def make_model(*, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same on every host; the threads share one generator, so drawing it there would not be."""
    return copy.deepcopy(MODEL).to(dtype)


class Host:
    """One host's training: its own data, plain SGD with momentum, the engine."""

    def __init__(self, mesh: ThreadMesh, sync: str, *, lr: float = 0.05, momentum: float = 0.9) -> None:
        strategy = parse_sync(sync)
        assert isinstance(strategy, Outer)
        self.mesh, self.model = mesh, make_model()
        self.engine = OuterEngine(self.model, strategy, mesh)  # type: ignore[arg-type]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)

    def step(self, step: int, *, samples: int = 8, skip: bool = False) -> None:
        self.engine.begin()
        generator = torch.Generator().manual_seed(1000 * step + self.mesh.host)
        x = torch.randn(samples, 5, generator=generator)
        self.model(x).square().mean().backward()
        if self.engine.averages_gradients:
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                self.mesh.mean(parameter.grad.view(-1), codec=parse_sync("every").codec, sum_local=True).wait()
        if not skip:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.engine.step_ended(samples)

    def own(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def shared(self) -> torch.Tensor:
        with self.engine.shared(with_buffers=True):
            return torch.cat([t.detach().reshape(-1).float() for t in self.model.state_dict().values()])

    def state(self) -> dict[str, Any]:
        """All that a checkpoint keeps of this host, as independent copies."""
        with self.engine.shared(with_buffers=True):
            model = copy.deepcopy(self.model.state_dict())
        parts = (model, self.optimizer.state_dict(), self.engine.shared_state(), self.engine.own_state())
        return dict(zip(("model", "optimizer", "shared", "own"), copy.deepcopy(parts), strict=True))

    def load(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.engine.load_state(state["shared"], state["own"])


@pytest.mark.parametrize("sync", STRATEGIES)
def test_all_hosts_share_the_same_bits_at_every_step(sync: str) -> None:
    def train(mesh: ThreadMesh) -> list[torch.Tensor]:
        host = Host(mesh, sync)
        shared = []
        for step in range(20):
            host.step(step)
            shared.append(host.shared())
        return shared

    first, *others = on_hosts(3, train)
    assert len({tuple(values.tolist()) for values in first}) > 3, "the shared weights moved"
    start = 7 if sync.startswith("post-local") else 0  # until its first round buffers are each host's own
    for other in others:
        assert all(a.equal(b) for a, b in zip(first[start:], other[start:], strict=True))


@pytest.mark.parametrize("sync", STRATEGIES)
@pytest.mark.parametrize("saved_after", [7, 8, 9])
def test_a_resume_in_mid_period_continues_bit_for_bit(sync: str, saved_after: int) -> None:
    def undisturbed(mesh: ThreadMesh) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        host = Host(mesh, sync)
        for step in range(saved_after):
            host.step(step)
        state = host.state()
        for step in range(saved_after, saved_after + 10):
            host.step(step)
        return state, host.own(), host.shared()

    before = on_hosts(2, undisturbed)

    def resumed(mesh: ThreadMesh) -> tuple[torch.Tensor, torch.Tensor]:
        host = Host(mesh, sync)
        host.load(before[mesh.host][0])
        for step in range(saved_after, saved_after + 10):
            host.step(step)
        return host.own(), host.shared()

    for (_, own, shared), (own_again, shared_again) in zip(before, on_hosts(2, resumed), strict=True):
        assert own.equal(own_again)
        assert shared.equal(shared_again)


def test_period_one_with_plain_averaging_is_every_step_for_sgd() -> None:
    """The mean of weights after one step each is one step with the mean gradient. BatchNorm is left out: it sees
    each host's own batch in both."""

    def local(mesh: ThreadMesh) -> torch.Tensor:
        host = Host(mesh, "local:H=1", momentum=0)
        for step in range(10):
            host.step(step)
        return host.own()

    def every(mesh: ThreadMesh) -> torch.Tensor:
        host = Host(mesh, "local:H=1:warmup=100", momentum=0)
        for step in range(10):
            host.step(step)
        return host.own()

    torch.testing.assert_close(on_hosts(2, local)[0], on_hosts(2, every)[0], rtol=1e-5, atol=1e-6)


def test_an_outer_sgd_of_lr_1_without_momentum_is_averaging() -> None:
    def train(mesh: ThreadMesh) -> tuple[torch.Tensor, torch.Tensor]:
        host = Host(mesh, "diloco:H=5:lr=1:momentum=0")
        for step in range(4):
            host.step(step)
        alone = Host(mesh, "local:H=1000")
        for step in range(5):
            alone.step(step)
        host.step(4)
        return alone.own(), host.own()

    (own_0, averaged_0), (own_1, averaged_1) = on_hosts(2, train)
    assert averaged_0.equal(averaged_1)
    torch.testing.assert_close(averaged_0, (own_0 + own_1) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("sync", "nesterov"), [("diloco:H=1:lr=0.3:momentum=0.8", True), ("slowmo:H=1:lr=0.3", False)])
def test_the_outer_step_is_that_of_torch(sync: str, nesterov: bool) -> None:
    def train(mesh: ThreadMesh) -> tuple[torch.Tensor, torch.Tensor]:
        host = Host(mesh, sync)
        expected = nn.Parameter(host.own())
        momentum = host.engine.strategy.momentum
        reference = torch.optim.SGD([expected], lr=0.3, momentum=momentum, nesterov=nesterov)
        host.engine.begin()
        for step in range(6):
            progress = torch.linspace(-1, 1, expected.numel()) * (step + 1)
            host.engine._weights.write(slice(0, expected.numel()), host.own() - progress * (1 + mesh.host))
            host.engine.step_ended(1)
            expected.grad = progress * 1.5  # the mean over two hosts
            reference.step()
        return expected.detach(), host.own()

    for expected, found in on_hosts(2, train):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_weight_of_a_host_is_the_samples_that_it_has_seen() -> None:
    def train(mesh: ThreadMesh) -> tuple[torch.Tensor, torch.Tensor]:
        host, alone = Host(mesh, "local:H=2"), Host(mesh, "local:H=1000")
        for step in range(2):
            for each in (host, alone):
                each.step(step, samples=4 if mesh.host else 12)
        return alone.own(), host.own()

    (own_0, mean), (own_1, _) = on_hosts(2, train)
    torch.testing.assert_close(mean, 0.75 * own_0 + 0.25 * own_1, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sync", ["local:H=3", "diloco:H=4", "streaming:H=6:P=3:tau=2", "eager:H=3"])
def test_a_step_that_one_host_skips_counts_there_too(sync: str) -> None:
    def train(mesh: ThreadMesh) -> tuple[int, torch.Tensor]:
        host = Host(mesh, sync)
        for step in range(14):
            host.step(step, skip=mesh.host == 0 and step in (2, 3, 7))
        return host.engine.steps, host.shared()

    (steps_0, shared_0), (steps_1, shared_1) = on_hosts(2, train)
    assert steps_0 == steps_1 == 14
    assert shared_0.equal(shared_1)


def test_batchnorm_statistics_are_the_same_everywhere_after_a_round_and_masks_never_travel() -> None:
    def train(mesh: ThreadMesh) -> tuple[list[torch.Tensor], int]:
        host = Host(mesh, "local:H=3")
        host.model.register_buffer("mask", torch.ones(70_000))
        host.engine = OuterEngine(host.model, host.engine.strategy, mesh)  # type: ignore[arg-type]
        sizes = []
        mean = mesh.mean
        mesh.mean = lambda flat, **options: (sizes.append(flat.numel()), mean(flat, **options))[1]  # type: ignore[method-assign]
        for step in range(3):
            host.step(step)
        return [buffer.clone() for buffer in host.model.buffers()], max(sizes)

    (here, largest), (there, _) = on_hosts(2, train)
    assert all(a.equal(b) for a, b in zip(here, there, strict=True))
    assert largest < 70_000
    assert here[3].item() == 3  # num_batches_tracked is a count, not an average of fractions


# In a warm-up each step waits for all, as in DDP: it takes even data.
@pytest.mark.parametrize("sync", [sync for sync in STRATEGIES if not sync.startswith("post-local")])
def test_hosts_that_end_early_take_part_until_all_have_ended(sync: str) -> None:
    def train(mesh: ThreadMesh) -> tuple[torch.Tensor, torch.Tensor]:
        host = Host(mesh, sync)
        for step in range((0, 17, 21)[mesh.host]):
            host.step(step)
        host.engine.finish()
        return host.shared(), host.own()

    first, *others = on_hosts(3, train)
    for shared, own in others:
        assert shared.equal(first[0])
        assert own.equal(first[1])


def test_what_a_host_learned_before_it_ended_is_not_lost() -> None:
    def train(mesh: ThreadMesh) -> tuple[torch.Tensor, torch.Tensor]:
        host = Host(mesh, "local:H=4", momentum=0)
        for step in range(2 if mesh.host else 6):
            host.step(step)
        host.engine.finish()
        return host.own(), make_model_row()

    (ended, start), _ = on_hosts(2, train)
    assert not ended.equal(start)

    def alone(mesh: ThreadMesh) -> torch.Tensor:
        host = Host(mesh, "local:H=1000", momentum=0)
        for step in range(2 if mesh.host else 6):
            host.step(step)
        return host.own()

    after_6, after_2 = on_hosts(2, alone)
    # Host 1's progress of two steps has weight 2, host 0's last two steps weight 2; its first four count alone.
    progress = after_2 - start
    assert torch.nn.functional.cosine_similarity(ended - (after_6 + start) / 2, progress, dim=0) > 0


def make_model_row() -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in make_model().parameters()])


def test_synchronize_makes_all_ranks_equal_and_is_harmless_twice() -> None:
    def train(mesh: ThreadMesh) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        host = Host(mesh, "diloco:H=100")
        for step in range(5):
            host.step(step)
        host.engine.synchronize()
        once = host.own().clone()
        host.engine.synchronize()
        return once, host.own(), host.shared()[: once.numel()]

    (once, twice, _), (other, _, _) = on_hosts(2, train)
    assert once.equal(other)
    assert once.equal(twice), "without training in between not even momentum moves the weights"


def test_evaluation_and_saving_see_the_shared_weights_and_leave_the_own_ones() -> None:
    def train(mesh: ThreadMesh) -> bool:
        host = Host(mesh, "local:H=4")
        for step in range(6):
            host.step(step)
        own = host.own().clone()
        parameter = next(host.model.parameters())
        shared = host.engine.shared_value(parameter)
        assert shared is not None and not shared.equal(parameter)
        with host.engine.shared(with_buffers=True):
            assert parameter.equal(shared)
        with pytest.raises(RuntimeError), host.engine.shared(with_buffers=True):
            raise RuntimeError
        assert host.own().equal(own)
        return host.engine.shared_value(nn.Parameter(torch.zeros(1))) is None

    assert all(on_hosts(2, train))


def test_weights_that_are_loaded_are_what_all_share() -> None:
    def train(mesh: ThreadMesh) -> tuple[torch.Tensor, torch.Tensor]:
        host = Host(mesh, "diloco:H=4")
        for step in range(6):
            host.step(step)
        host.model.load_state_dict(make_model().state_dict())
        host.engine.weights_loaded()
        loaded = host.engine.shared_state()["weights"].clone()
        for step in range(6, 12):
            host.step(step)
        return loaded, host.shared()

    (loaded, after), (_, other) = on_hosts(2, train)
    assert loaded.equal(make_model_row())
    assert after.equal(other)


class _Arriving:
    """A round that notes when it was waited for."""

    arrives_step = 1000

    def __init__(self, waited: list[int]) -> None:
        self.waited = waited

    def wait(self) -> None:
        self.waited.append(1)


@pytest.mark.parametrize("sync", ["local:H=4", "post-local:H=3:warmup=20"])
def test_a_resume_while_rounds_are_under_way_waits_for_them_and_forgets_them(sync: str) -> None:
    def train(mesh: ThreadMesh) -> list[int]:
        host, waited = Host(mesh, sync), list[int]()
        for step in range(6):
            host.step(step)
        state = host.state()
        host.engine._rounds = [_Arriving(waited), _Arriving(waited)]  # type: ignore[list-item]
        host.load(state)
        assert host.engine._rounds == []
        return waited

    assert on_hosts(2, train) == [[1, 1], [1, 1]]


@pytest.mark.parametrize("sync", ["local:H=4", "streaming:H=6:P=3:tau=2"])
def test_weights_that_one_rank_alone_loads_are_an_error_that_names_the_hosts(sync: str) -> None:
    def train(mesh: ThreadMesh) -> None:
        host = Host(mesh, sync)
        for step in range(12):
            host.step(step)
            if step == 5 and mesh.host == 1:
                host.engine.weights_loaded()

    with pytest.raises(WorldError, match="h0 has loaded weights 0 times and h1 1 times"):
        on_hosts(2, train)


def test_shared_weights_that_differ_are_an_error_that_names_the_hosts() -> None:
    def train(mesh: ThreadMesh) -> None:
        host = Host(mesh, "local:H=2")
        if mesh.host == 1:
            with torch.no_grad():
                next(host.model.parameters()).add_(1e-7)
        for step in range(4):
            host.step(step)

    with pytest.raises(
        WorldError, match="after 2 steps the weights that all hosts share differ: h1 holds others than h0"
    ):
        on_hosts(2, train)


def test_a_host_that_is_out_of_step_is_named() -> None:
    def train(mesh: ThreadMesh) -> None:
        host = Host(mesh, "local:H=2")
        host.engine.begin()
        if mesh.host == 1:
            host.engine.steps = 2
        for step in range(2):
            host.step(step)

    with pytest.raises(WorldError, match="h0 is at step 2 and h1 at step 4"):
        on_hosts(2, train)


def test_bfloat16_weights_are_shared_in_float32() -> None:
    def train(mesh: ThreadMesh) -> torch.Tensor:
        model = make_model(dtype=torch.bfloat16)
        engine = OuterEngine(model, Outer(period_steps=1), mesh)  # type: ignore[arg-type]
        engine.begin()
        with torch.no_grad():
            model[0].weight.fill_(1.0 if mesh.host else 1.0 + 2**-7)
        engine.step_ended(1)
        value = engine.shared_state()["weights"][0]
        shared = engine.shared_value(model[0].weight)
        assert shared is not None and shared.dtype == torch.bfloat16
        return value

    assert on_hosts(2, train)[0].item() == 1.0 + 2**-8  # bfloat16 would round it


def test_memory_in_channels_last_order_is_read_and_written_in_place() -> None:
    def train(mesh: ThreadMesh) -> torch.Tensor:
        model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
        engine = OuterEngine(model, Outer(period_steps=1), mesh)  # type: ignore[arg-type]
        engine.begin()
        with torch.no_grad():
            model.weight.copy_(torch.arange(216.0).view(6, 4, 3, 3) * (1 + mesh.host))
        engine.step_ended(1)
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        return model.weight.detach()

    torch.testing.assert_close(on_hosts(2, train)[0], torch.arange(216.0).view(6, 4, 3, 3) * 1.5)


def test_a_round_without_training_keeps_what_the_codec_has_lost() -> None:
    def train(mesh: ThreadMesh) -> tuple[torch.Tensor, torch.Tensor]:
        host = Host(mesh, "sparseloco:H=3")
        for step in range(3):
            host.step(step)
        before = host.engine.own_state()["residual"].clone()
        host.engine.synchronize()
        return before, host.engine.own_state()["residual"]

    for before, after in on_hosts(2, train):
        assert before.any() and before.equal(after)


@pytest.mark.parametrize("sync", ["local:H=4", "streaming:H=4:P=2:tau=1", "eager:H=4:none"])
def test_nothing_is_sent_at_the_end_where_all_is_shared(sync: str) -> None:
    def train(mesh: ThreadMesh) -> tuple[int, int, torch.Tensor]:
        host = Host(mesh, sync)
        for step in range(8):
            host.step(step)
        host.engine.synchronize()
        before = mesh.num_means
        host.engine.synchronize()
        host.engine.finish()
        host.engine.finish()
        return before, mesh.num_means, host.own()

    (before, after, own), (_, _, other) = on_hosts(2, train)
    assert after == before and own.equal(other)


def test_the_last_round_leaves_nothing_out() -> None:
    def train(mesh: ThreadMesh) -> tuple[torch.Tensor, torch.Tensor]:
        host = Host(mesh, "sparseloco:H=100:ef=0", momentum=0)
        codecs = []
        mean = mesh.mean
        mesh.mean = lambda *args, **named: codecs.append(named["codec"].name) or mean(*args, **named)  # type: ignore
        for step in range(3):
            host.step(step)
        alone = host.own().clone()
        host.engine.synchronize()
        assert set(codecs) == {"none"}, "what topk leaves out would never be sent"
        return alone, host.own()

    (first, own), (second, other) = on_hosts(2, train)
    assert own.equal(other) and torch.allclose(own, (first + second) / 2, atol=1e-6)
