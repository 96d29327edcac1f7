import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codec import (
    CHUNK_VALUES,
    CODEC_NAMES,
    PLAIN,
    Codec,
    CodecName,
    chunk_slices,
    exact_bytes,
    lane_slice,
    part_values,
    piece_slices,
    powersgd_values,
    reduced_bytes,
    require_number,
    require_whole,
    worthwhile,
)
from paceline.errors import InputError

BLOCKWISE: tuple[CodecName, ...] = ("fp16", "int8", "int4", "topk")
few = settings(max_examples=30)
block_codecs = st.sampled_from([Codec(name=name) for name in BLOCKWISE])


@pytest.mark.parametrize(
    ("codec", "num_bytes"),
    [
        (Codec(name="fp16"), 2 * 8192 + 2 * 8),
        (Codec(name="int8"), 8192 + 2 * 64),
        (Codec(name="int4"), 8192 // 2 + 2 * 128),
        (Codec(name="topk"), 2 * (2 + 64 + 96)),
        (Codec(name="topk", density=2 / 4096), 2 * (2 + 2 + 3)),
        (Codec(name="topk", density=0.5), 2 * (2 + 2048 + 3072)),
    ],
    ids=str,
)
def test_the_bytes_of_two_times_4096_values(codec: Codec, num_bytes: int) -> None:
    assert codec.encoded_bytes(8192) == num_bytes


@given(st.floats(1e-6, 0.5))
def test_topk_keeps_an_even_number_close_to_its_share(density: float) -> None:
    kept = Codec(name="topk", density=density).kept_values
    assert kept % 2 == 0 and 2 <= kept <= 2048
    assert abs(kept - density * 4096) <= max(1, 2 - density * 4096)


def test_a_codec_prints_as_it_is_typed() -> None:
    assert [str(Codec(name=name)) for name in CODEC_NAMES] == [
        "none",
        "bf16",
        "fp16",
        "int8",
        "int4",
        "powersgd=4",
        "topk=0.015625",
    ]
    assert str(Codec(name="powersgd", rank=2)) == "powersgd=2"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "int3"}, "codec 'int3' is not known\n  one of none, bf16, fp16, int8, int4, powersgd, topk"),
        ({"rank": 0}, "powersgd's rank is 0; expected a whole number, at least 1"),
        ({"rank": 1.5}, "powersgd's rank is 1.5; expected a whole number, at least 1"),
        ({"rank": True}, "powersgd's rank is True; expected a whole number, at least 1"),
        ({"density": 0.0}, "topk's density is 0.0; expected a number above 0 and at most 0.5"),
        ({"density": 0.6}, "topk's density is 0.6; expected a number above 0 and at most 0.5"),
        ({"density": math.nan}, "topk's density is nan; expected a number above 0 and at most 0.5"),
        ({"density": "1"}, "topk's density is '1'; expected a number above 0 and at most 0.5"),
    ],
)
def test_what_a_codec_can_not_be(wrong: dict, message: str) -> None:
    with pytest.raises(InputError) as raised:
        Codec(**wrong)
    assert str(raised.value) == message


def test_bounds_are_told() -> None:
    with pytest.raises(InputError, match=r"^H is 9; expected a whole number, at least 1, at most 8$"):
        require_whole("H", 9, at_least=1, at_most=8, because="at most 8")
    with pytest.raises(InputError, match=r"^mix is 1\.0; expected a number at least 0 and below 1$"):
        require_number("mix", 1.0, at_least=0.0, below=1.0)
    with pytest.raises(InputError, match=r"^lr is inf; expected a number above 0$"):
        require_number("lr", math.inf, above=0.0)
    require_whole("H", 8, at_least=1, at_most=8)
    require_number("mix", 0, at_least=0.0, below=1.0)


@few
@given(st.integers(0, 10**6), st.integers(1, 16))
def test_lanes_share_out_all_values_evenly(num_values: int, lanes: int) -> None:
    parts = [lane_slice(lane, num_values, lanes) for lane in range(lanes)]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])] and parts[-1].stop == num_values
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1


@few
@given(block_codecs, st.integers(0, 5 * CHUNK_VALUES), st.integers(2, 32))
def test_chunks_cover_all_values_in_whole_blocks(codec: Codec, num_values: int, num_hosts: int) -> None:
    chunks = chunk_slices(codec, num_values, num_hosts)
    edges = [0, *(chunk.stop for chunk in chunks)]
    assert [chunk.start for chunk in chunks] == edges[:-1] and edges[-1] == num_values
    for chunk in chunks:
        size = chunk.stop - chunk.start
        part = part_values(codec, size, num_hosts)
        assert 0 < size <= CHUNK_VALUES and part % codec.block_values == 0 and part * num_hosts >= size
        if chunk is not chunks[-1]:  # nothing is padded
            assert part * num_hosts == size


@few
@given(block_codecs, st.integers(0, 3 * CHUNK_VALUES), st.integers(2, 8), st.integers(1, 4))
def test_bytes_are_those_of_two_hops_and_little_more(codec: Codec, num_values: int, num_hosts: int, lanes: int) -> None:
    sent = reduced_bytes(codec, num_values, num_hosts=num_hosts, lanes=lanes)
    share = (num_hosts - 1) if codec.name == "topk" else 2 * (num_hosts - 1) / num_hosts
    per_value = codec.encoded_bytes(codec.block_values) / codec.block_values
    least = share * per_value * num_values
    padding = 2 * num_hosts * lanes * num_hosts * codec.encoded_bytes(codec.block_values)
    assert least - 1e-6 <= sent <= least + padding


def test_plain_values_are_sent_as_in_an_all_reduce() -> None:
    assert exact_bytes(400, 4) == 600 == reduced_bytes(PLAIN, 100, num_hosts=4, lanes=3)
    assert reduced_bytes(PLAIN, 100, num_hosts=4, lanes=1, value_bytes=2) == 300
    assert reduced_bytes(Codec(name="int8"), 100, num_hosts=1, lanes=1) == 0


@few
@given(block_codecs, st.integers(0, 20_000), st.integers(2, 8), st.integers(1, 4))
def test_no_codec_sends_more_than_the_values_weigh(codec: Codec, num_values: int, num_hosts: int, lanes: int) -> None:
    plain = exact_bytes(4 * num_values, num_hosts)
    sent = reduced_bytes(codec, num_values, num_hosts=num_hosts, lanes=lanes)
    is_coded = worthwhile(codec, num_values, num_hosts=num_hosts, lanes=lanes) == codec
    assert sent < plain if is_coded else sent == plain
    if codec.name in ("int8", "int4"):
        assert worthwhile(codec, 21, num_hosts=2, lanes=1) == PLAIN  # a layer of twenty weights and a bias
        assert worthwhile(codec, 100_000, num_hosts=num_hosts, lanes=lanes) == codec


def test_powersgd_sends_factors_of_matrices_all_of_the_rest_and_one_number() -> None:
    matrix, image_filter, bias = (100, 50), (16, 8, 3, 3), (100,)
    assert powersgd_values([matrix], 4) == 1 + 4 * (100 + 50)
    assert powersgd_values([image_filter], 2) == 1 + 2 * (16 + 8 * 3 * 3)
    assert powersgd_values([bias], 4) == 1 + 100
    assert powersgd_values([matrix, image_filter, bias], 2) == 1 + 2 * 150 + 2 * 88 + 100
    assert powersgd_values([(8, 8)], 2) == 1 + 32 and powersgd_values([(8, 8)], 3) == 1 + 64  # half as many, or all


@few
@given(block_codecs, st.integers(0, 9 * CHUNK_VALUES), st.integers(2, 8), st.integers(1, 4))
def test_pieces_of_an_outer_round_are_one_message_for_each_lane(
    codec: Codec, num_values: int, num_hosts: int, lanes: int
) -> None:
    pieces = piece_slices(codec, num_values, num_hosts=num_hosts, lanes=lanes)
    edges = [0, *(piece.stop for piece in pieces)]
    assert [piece.start for piece in pieces] == edges[:-1] and edges[-1] == num_values
    for piece in pieces:
        size = piece.stop - piece.start
        for lane in range(lanes):
            part = lane_slice(lane, size, lanes)
            assert len(chunk_slices(codec, part.stop - part.start, num_hosts)) <= 1
