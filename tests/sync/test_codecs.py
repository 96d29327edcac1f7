import warnings
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from paceline.codec import Codec
from paceline.sync import codecs

DENSE = [Codec(name="fp16"), Codec(name="int8"), Codec(name="int4")]
ALL = [*DENSE, Codec(name="topk"), Codec(name="topk", density=2 / 4096), Codec(name="topk", density=6 / 4096)]
CPU = torch.device("cpu")
LARGE = 1.5 * 2.0**127
"""Within a percent of where float32 ends, the scale's rounding and bfloat16's range can make a value infinite."""

each = pytest.mark.parametrize("codec", ALL, ids=str)
each_dense = pytest.mark.parametrize("codec", DENSE, ids=str)


def encoded_of(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(values), codec.encoded_bytes(values.shape[1])), 0xAA, dtype=torch.uint8)
    codecs.encode(codec, values, out)
    return out


def round_trip(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(values, torch.nan)
    codecs.decode(codec, encoded_of(codec, values), out)
    return out


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error_bound(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Half a step of the codes, and what rounding the scale up costs."""
    groups = values.unflatten(-1, (-1, codec.group_values))
    largest = groups.abs().amax(-1, keepdim=True).expand_as(groups).flatten(-2)
    if codec.name == "fp16":  # 11 bits of each value, or the step of float16's smallest ones
        return values.abs() * 2**-11 + largest * 2**-38
    return largest / {"int8": 127, "int4": 7}[codec.name] * (1 + 2**-6) / 2


@each_dense
@pytest.mark.parametrize("size", [1e-30, 1e-8, 1.0, 1e4, 1e30])
def test_values_come_back_within_half_a_step(codec: Codec, size: float) -> None:
    values = normal(3, 4 * codec.block_values) * size
    assert ((round_trip(codec, values) - values).abs() <= error_bound(codec, values)).all()


@each_dense
@settings(max_examples=25)
@given(st.lists(st.floats(-LARGE, LARGE, width=32), min_size=1, max_size=40))
def test_no_finite_value_overflows(codec: Codec, some: list[float]) -> None:
    values = torch.zeros(1, codec.block_values)
    values[0, : len(some)] = torch.tensor(some)
    back = round_trip(codec, values)
    assert back.isfinite().all()
    floor = 2.0**-126  # what is smaller than the least scale may become 0
    assert ((back - values).abs() <= error_bound(codec, values) + floor).all()


@each
def test_zeros_stay_zeros(codec: Codec) -> None:
    assert (round_trip(codec, torch.zeros(2, 2 * codec.block_values)) == 0).all()


@each
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_value_that_is_not_finite_spoils_those_that_share_its_scale_and_no_other(codec: Codec, bad: float) -> None:
    values = normal(1, 4 * codec.block_values)
    values[0, codec.group_values + codec.group_values // 3] = bad
    before, hit, *after = round_trip(codec, values).view(-1, codec.group_values)
    assert before.isfinite().all() and all(group.isfinite().all() for group in after)
    if codec.name == "topk":  # what is kept of the block
        assert (~hit.isfinite()).sum() == codec.kept_values
    else:
        assert not hit.isfinite().any()


@each
def test_rows_are_independent(codec: Codec) -> None:
    values = normal(4, 3 * codec.block_values)
    together = encoded_of(codec, values)
    assert all(torch.equal(together[row], encoded_of(codec, values[row : row + 1])[0]) for row in range(4))


@each
def test_a_weighted_sum_of_rows(codec: Codec) -> None:
    values, weights = normal(4, 3 * codec.block_values), torch.tensor([0.1, 0.2, 0.3, 0.4])
    out = torch.full((values.shape[1],), torch.nan)
    codecs.decode_sum(codec, encoded_of(codec, values), weights, out)
    assert torch.allclose(out, weights @ round_trip(codec, values), atol=1e-6)


@pytest.mark.parametrize(("name", "bits", "words"), [("int8", 8, 32), ("int4", 4, 8)])
def test_a_word_holds_a_value_of_each_part_of_its_group(name: Literal["int8", "int4"], bits: int, words: int) -> None:
    parts, top = 32 // bits, 2 ** (bits - 1) - 1
    first_of_each = [top, -top, *range(2 - parts, 0)]
    group = torch.tensor(first_of_each, dtype=torch.float32).repeat_interleave(words)
    encoded = encoded_of(Codec(name=name), group.repeat(2)[None])  # both groups of a block
    scales = encoded[0, 2 * words * 4 :].view(torch.bfloat16).float()
    assert len(scales) == 2 and (scales >= 1).all() and (scales < 1.01).all()
    codes = [round(value / scales[0].item()) for value in first_of_each]
    word = sum((code % 2**bits) << bits * place for place, code in enumerate(codes))
    assert (encoded[0, : 2 * words * 4].view(torch.int32).long() % 2**32 == word).all()


@pytest.mark.parametrize("codec", ALL[3:], ids=str)
def test_topk_keeps_the_largest_of_each_block(codec: Codec) -> None:
    values = normal(2, 3 * codec.block_values)
    blocks, back = values.view(6, -1), round_trip(codec, values).view(6, -1)
    least = blocks.abs().topk(codec.kept_values).values[:, -1:]
    assert ((blocks.abs() >= least) | (back == 0)).all()
    kept = torch.where(blocks.abs() >= least, blocks, 0)
    step = blocks.abs().amax(-1, keepdim=True) / 127 * (1 + 2**-6)
    assert ((back - kept).abs() <= step / 2).all()


@pytest.mark.parametrize("codec", ALL[3:], ids=str)
def test_topk_of_equal_values_keeps_as_many_as_promised(codec: Codec) -> None:
    back = round_trip(codec, torch.ones(1, codec.block_values))
    assert (back != 0).sum() == codec.kept_values


def test_without_a_compiler_the_kernels_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(kernel: object, **_options: object) -> object:
        raise RuntimeError("backend raised:\nno C++ compiler found\nmore")

    monkeypatch.setattr(torch, "compile", no_compiler)
    monkeypatch.setattr(codecs, "_prepared", {})
    line = codecs.prepare(Codec(name="int8"), CPU, 2)
    assert line is not None and "uncompiled" in line and "no C++ compiler found" in line and "more" not in line
    values = normal(1, 1 << 16)
    assert torch.allclose(round_trip(Codec(name="int8"), values), values, atol=0.03)


def test_there_is_nothing_to_compile_for_some() -> None:
    assert [codecs.prepare(Codec(name=name), CPU, 2) for name in ("none", "powersgd", "topk")] == [None] * 3


@pytest.mark.ranks  # it starts a compiler
@pytest.mark.timeout(300)  # which may take long beside other work
def test_compiled_and_uncompiled_kernels_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_prepared", {})
    monkeypatch.setattr(codecs, "_compiled", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # PyTorch's compiler sets these two
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    codec = Codec(name="int4")
    values = normal(3, 1 << 16)
    values[1, 100], values[2, 300] = torch.nan, torch.inf
    plain, plain_back = encoded_of(codec, values), round_trip(codec, values)
    plain_sum = torch.empty(values.shape[1])
    codecs.decode_sum(codec, plain, torch.tensor([0.5, 0.25, 0.25]), plain_sum)
    line = codecs.prepare(codec, CPU, 3)
    if line is None or "uncompiled" in line:
        pytest.skip(f"nothing is compiled here: {line}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert codecs.prepare(codec, CPU, 3) == line  # once per process
    finite = plain_back.isfinite()
    assert torch.equal(round_trip(codec, values)[finite], plain_back[finite])
    assert torch.equal(round_trip(codec, values).isfinite(), finite)
    assert torch.equal(encoded_of(codec, values[:1]), plain[:1])
    out = torch.empty_like(plain_sum)
    codecs.decode_sum(codec, plain, torch.tensor([0.5, 0.25, 0.25]), out)
    assert torch.equal(out.isfinite(), plain_sum.isfinite())
    assert torch.allclose(out[out.isfinite()], plain_sum[out.isfinite()], atol=1e-6)
