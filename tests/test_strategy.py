import contextlib
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codec import CODEC_NAMES, HEADER_BYTES, PLAIN, Codec, exact_bytes, powersgd_values, reduced_bytes
from paceline.errors import InputError
from paceline.strategy import NAMED, EveryStep, Outer, Strategy, parse_sync, spell_out

SHAPES = [[(256, 128), (256,)], [(1000, 64)]]
NUM_VALUES = 256 * 128 + 256 + 1000 * 64


def codecs(*, without: str = "") -> st.SearchStrategy[Codec]:
    plain = [Codec(name=name) for name in CODEC_NAMES if name not in ("powersgd", "topk")]
    low_rank = st.integers(1, 64).map(lambda rank: Codec(name="powersgd", rank=rank))
    sparse = st.sampled_from([Codec(name="topk", density=density) for density in (0.5, 1 / 64, 0.03, 1e-6)])
    return st.one_of(st.sampled_from(plain), low_rank, sparse).filter(lambda codec: codec.name != without)


few = settings(max_examples=30)
rounded = st.floats(0.0, 0.99).map(lambda value: round(value, 3))


@st.composite
def outers(draw: st.DrawFn) -> Outer:
    period_steps = draw(st.integers(1, 100))
    delay_steps = draw(st.integers(0, period_steps))
    return Outer(
        period_steps=period_steps,
        fragments=draw(st.integers(1, period_steps)),
        delay_steps=delay_steps,
        mix=0.0 if delay_steps == period_steps else draw(rounded),
        codec=draw(codecs(without="powersgd")),
        error_feedback=draw(rounded),
        lr=round(draw(rounded) + 0.001, 3),
        momentum=draw(rounded),
        nesterov=draw(st.booleans()),
        warmup_steps=draw(st.integers(0, 10**5)),
    )


def changed(name: str, **changes: Any) -> Outer:
    return dataclasses.replace(NAMED[name], **changes)


everys = st.builds(EveryStep, codec=codecs(), accumulate_steps=st.integers(1, 1000))


@few
@given(st.one_of(everys, outers()))
def test_what_is_printed_is_parsed_to_the_same(strategy: Strategy) -> None:
    assert parse_sync(str(strategy)) == strategy


@pytest.mark.parametrize(
    "strategy",
    [Outer(period_steps=8, lr=1 / 3), EveryStep(codec=Codec(name="topk", density=1 / 3))],
    ids=str,
)
def test_no_digit_is_lost_in_print(strategy: Strategy) -> None:
    assert parse_sync(str(strategy)) == strategy


@pytest.mark.parametrize(
    "strategy",
    [
        dataclasses.replace(NAMED["eager"], period_steps=200),
        dataclasses.replace(NAMED["streaming"], period_steps=2, fragments=2, mix=0.0),
        dataclasses.replace(NAMED["streaming"], period_steps=2, fragments=2, delay_steps=1),
    ],
    ids=str,
)
def test_a_delay_that_a_name_has_by_chance_is_not_lost_in_print(strategy: Strategy) -> None:
    assert parse_sync(str(strategy)) == strategy


@pytest.mark.parametrize("name", NAMED)
def test_each_name_stands_for_its_setting(name: str) -> None:
    assert parse_sync(name) == NAMED[name]
    assert str(NAMED[name]) == f"{name}:H={NAMED[name].period_steps}"


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("every", EveryStep()),
        ("every:none", EveryStep()),
        ("every:int4:accumulate=4", EveryStep(codec=Codec(name="int4"), accumulate_steps=4)),
        ("every:powersgd=2", EveryStep(codec=Codec(name="powersgd", rank=2))),
        ("every:topk=0.01", EveryStep(codec=Codec(name="topk", density=0.01))),
        ("local:H=4", Outer(period_steps=4)),
        ("post-local:H=16:warmup=100", Outer(period_steps=16, warmup_steps=100)),
        ("diloco:H=30:lr=0.6:int8", changed("diloco", period_steps=30, lr=0.6, codec=Codec(name="int8"))),
        ("diloco:nesterov=0", changed("diloco", nesterov=False)),
        (
            "streaming:H=30:P=6:tau=5:none",
            changed("streaming", period_steps=30, fragments=6, delay_steps=5, codec=PLAIN),
        ),
        ("streaming:H=4", changed("streaming", period_steps=4, fragments=4)),
        ("streaming:H=2", changed("streaming", period_steps=2, fragments=2, delay_steps=1)),
        ("eager:H=7", changed("eager", period_steps=7, delay_steps=7)),
        ("sparseloco:ef=0.5", changed("sparseloco", error_feedback=0.5)),
    ],
)
def test_texts_that_people_type(text: str, strategy: Strategy) -> None:
    assert parse_sync(text) == strategy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is no way to synchronise\n  one of every, local,"),
        ("ever", "'ever' is no way to synchronise\n  one of every, local, post-local, slowmo, diloco"),
        ("Every", "'Every' is no way to synchronise"),
        ("every:int3", "'int3' is not known to every\n  expected a codec (none, bf16, fp16"),
        ("every:H=3", "'H=3' is not known to every"),
        ("every:", "'' is not known to every"),
        ("local:H", "'H' is not known to local"),
        ("local:steps=3", "'steps=3' is not known to local\n  expected a codec"),
        ("every:int8:int4", "two codecs, int8 and int4"),
        ("every:int8=3", "int8 takes no value\n  only powersgd=RANK and topk=DENSITY do; say int8"),
        ("local:H=3:H=4", "H is given twice"),
        ("local:H=", "H is ''; expected a whole number"),
        ("local:H=1e3", "H is '1e3'; expected a whole number"),
        ("local:H=1_0", "H is '1_0'; expected a whole number"),
        ("local:H= 3", "H is ' 3'; expected a whole number"),
        ("local:H=٣", "H is '٣'; expected a whole number"),
        ("local:H=0", "H is 0; expected a whole number, at least 1"),
        ("local:H=-4", "H is -4; expected a whole number, at least 1"),
        ("diloco:lr=fast", "lr is 'fast'; expected a number"),
        ("diloco:lr=nan", "lr is nan; expected a number above 0"),
        ("diloco:lr=0", "lr is 0.0; expected a number above 0"),
        ("diloco:momentum=1", "momentum is 1.0; expected a number at least 0 and below 1"),
        ("diloco:nesterov=2", "nesterov is 2; expected 0 or 1"),
        ("diloco:warmup=-1", "warmup is -1; expected a whole number, at least 0"),
        ("diloco:ef=2", "ef is 2.0; expected a number at least 0 and at most 1"),
        ("streaming:H=8:P=9", "P is 9; expected a whole number, at least 1, at most H"),
        ("streaming:H=8:tau=9", "tau is 9; expected a whole number, at least 0, at most H"),
        ("eager:H=8:mix=0.5", "tau=H (eager) and mix exclude each other"),
        ("diloco:powersgd", "powersgd compresses one matrix at a time"),
        ("every:accumulate=0", "accumulate is 0; expected a whole number, at least 1"),
        ("every:topk=0.9", "topk's density is 0.9; expected a number above 0 and at most 0.5"),
        ("every:powersgd=two", "powersgd is 'two'; expected a whole number"),
    ],
)
def test_what_can_not_be_used_is_named(text: str, says: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_sync(text)
    assert str(raised.value).startswith(f"--sync {text}: ")
    assert says in str(raised.value)


@given(st.text(alphabet="everylocadim:=0123456789.-H_ ", max_size=40))
def test_any_other_text_is_an_input_error(text: str) -> None:
    with contextlib.suppress(InputError):
        assert parse_sync(text) == parse_sync(str(parse_sync(text)))


@few
@given(outers())
def test_each_fragment_begins_once_in_a_period(outer: Outer) -> None:
    due = [outer.due_fragment(step) for step in range(1, outer.period_steps + 1)]
    assert [fragment for fragment in due if fragment is not None] == list(range(outer.fragments))
    assert due[-1] == outer.fragments - 1  # the last at the end of the period
    assert outer.due_fragment(outer.period_steps + 1) == due[0]


@few
@given(outers(), st.integers(0, 10**6))
def test_fragments_cover_all_values_evenly(outer: Outer, num_values: int) -> None:
    parts = [outer.fragment_slice(fragment, num_values) for fragment in range(outer.fragments)]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])] and parts[-1].stop == num_values
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_bytes_of_every_step() -> None:
    plain = EveryStep().wire_bytes(SHAPES, num_hosts=4)
    assert plain == exact_bytes(4 * NUM_VALUES, 4) == EveryStep().wire_bytes(SHAPES, num_hosts=4, lanes=2)
    assert EveryStep().wire_bytes(SHAPES, num_hosts=4, value_bytes=2) == plain / 2
    assert EveryStep(accumulate_steps=4).wire_bytes(SHAPES, num_hosts=4) == plain / 4
    int8 = EveryStep(codec=Codec(name="int8")).wire_bytes(SHAPES, num_hosts=4)
    assert plain / 4 < int8 < 1.03 * plain / 4
    low_rank = EveryStep(codec=Codec(name="powersgd", rank=2)).wire_bytes(SHAPES, num_hosts=2)
    assert low_rank == 4 * sum(powersgd_values(bucket, 2) for bucket in SHAPES)


def test_bytes_of_an_outer_round_are_spread_over_its_steps() -> None:
    int4 = Codec(name="int4")
    parts = [NUM_VALUES // 2, NUM_VALUES - NUM_VALUES // 2]
    outer = Outer(period_steps=10, fragments=2, codec=int4)
    sent = sum(reduced_bytes(int4, part, num_hosts=4, lanes=2) for part in parts) + 2 * 2 * 3 * HEADER_BYTES
    assert outer.wire_bytes(SHAPES, num_hosts=4, lanes=2) == pytest.approx(sent / 10)
    with_buffers = outer.wire_bytes(SHAPES, num_hosts=4, lanes=2, num_buffer_values=100)
    assert with_buffers == pytest.approx((sent + exact_bytes(400, 4)) / 10)


@few
@given(st.one_of(everys, outers()), st.integers(1, 4))
def test_one_host_sends_nothing(strategy: Strategy, lanes: int) -> None:
    assert strategy.wire_bytes(SHAPES, num_hosts=1, lanes=lanes) == 0


def test_strategies_can_not_be_changed_and_take_names_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        NAMED["local"].period_steps = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Outer(8)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EveryStep(codec="int4"), "codec is 'int4'; expected a Codec"),  # type: ignore[arg-type]
        (lambda: Outer(period_steps=8, codec=None), "codec is None; expected a Codec"),  # type: ignore[arg-type]
        (lambda: Outer(period_steps=8, nesterov="no"), "nesterov is 'no'; expected"),  # type: ignore[arg-type]
        (lambda: Outer(period_steps=8, lr=10**400), "lr is 1000"),
        (lambda: parse_sync(f"every:accumulate={'9' * 24}"), "at least 1 and at most 1000000000"),
        (lambda: parse_sync(f"every:accumulate={'9' * 5000}"), r"'9{59}\.\.\.; expected a whole number"),
        (lambda: parse_sync("every:\n\u202e"), r"--sync every:\\n\\u202e: "),
        (lambda: parse_sync("int4"), "every:int4"),
        (lambda: parse_sync("topk=0.1"), "every:topk=0.1"),
    ],
)
def test_what_can_not_be_used_is_said_in_a_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError) as raised:
        make()
    assert re.search(message, str(raised.value)) and all(len(line) < 200 for line in str(raised.value).splitlines())


def test_every_setting_is_spelled_out() -> None:
    assert spell_out(parse_sync("every:int8:accumulate=4")) == "gradients of 4 batches as int8"
    assert spell_out(parse_sync("local:H=8")) == "what changed in 8 steps"
    assert spell_out(parse_sync("streaming:H=30")) == (
        "what changed in 30 steps as int4, in 8 parts that take turns, 2 steps late, of which 0.5 is taken over, "
        "outer lr 0.4, Nesterov momentum 0.9"
    )
    assert spell_out(parse_sync("post-local:H=8:warmup=5")) == (
        "what changed in 8 steps, gradients at every step in the first 5"
    )
    assert str(parse_sync("post-local:H=8:warmup=5")) == "post-local:H=8:warmup=5"
