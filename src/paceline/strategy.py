"""How hosts synchronise, as frozen records that know their bytes on the wire.

`EveryStep` averages gradients at each step; `Outer` lets hosts train on their own and averages how far they have come.
The planner prices the same object that `paceline.sync` executes and that `--sync` names. Ranks of one host always
reduce exactly at every step; what is said here is about what crosses hosts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.bounds import MOST_STEPS, require_number, require_whole, short, shown
from paceline.codec import (
    CODEC_NAMES,
    HEADER_BYTES,
    PLAIN,
    Codec,
    Shape,
    exact_bytes,
    piece_slices,
    powersgd_values,
    reduced_bytes,
)
from paceline.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryStep:
    """Gradients are averaged over all hosts at each step (`DistributedDataParallel`), carried by a codec."""

    codec: Codec = PLAIN
    accumulate_steps: int = 1
    """Batches whose gradients are added up before they are averaged and the optimizer takes one step, at least 1."""

    def __post_init__(self) -> None:
        _require_codec(self.codec)
        require_whole("accumulate", self.accumulate_steps, at_least=1, at_most=MOST_STEPS)

    def wire_bytes(
        self, buckets: Sequence[Sequence[Shape]], *, num_hosts: int, lanes: int = 1, value_bytes: int = 4
    ) -> float:
        """Bytes that a host sends to other hosts per batch, on average.

        buckets      shapes of the gradients, grouped as they are sent together; one group for an estimate
        lanes        ranks per host that share the work: the smallest number of ranks on a host
        value_bytes  of a gradient's value; matters to codec none alone
        """
        sent = sum(self._bucket_bytes(bucket, num_hosts, lanes, value_bytes) for bucket in buckets)
        return sent / self.accumulate_steps

    def _bucket_bytes(self, bucket: Sequence[Shape], num_hosts: int, lanes: int, value_bytes: int) -> float:
        if self.codec.name == "powersgd":
            return exact_bytes(4 * powersgd_values(bucket, self.codec.rank), num_hosts)
        num_values = sum(math.prod(shape) for shape in bucket)
        return reduced_bytes(self.codec, num_values, num_hosts=num_hosts, lanes=lanes, value_bytes=value_bytes)

    def __str__(self) -> str:
        words = ["every"]
        if self.codec.name != "none":
            words.append(str(self.codec))
        if self.accumulate_steps > 1:
            words.append(f"accumulate={self.accumulate_steps}")
        return ":".join(words)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    """Each host trains on its own; every `period_steps` steps the hosts average how far they have come, and an outer
    optimizer moves the weights that all share by this average.

    Local SGD, SlowMo, DiLoCo, Streaming DiLoCo, eager updates and SparseLoCo are settings of it: see `NAMED`.
    """

    period_steps: int
    """H: steps between two rounds, at least 1."""
    fragments: int = 1
    """P: the weights are cut into so many parts of equal size, which take turns within a period; at most
    `period_steps`."""
    delay_steps: int = 0
    """τ: steps during which a round travels while training goes on; 0 waits for it. A delay of `period_steps` is
    the eager method: a host's own progress counts at once, that of the others when it has arrived."""
    mix: float = 0.0
    """α: the share of its own weights that a host keeps after a round; 0 takes the shared ones."""
    codec: Codec = PLAIN
    error_feedback: float = 0.0
    """The share of what the codec lost that is added to the next round; 0 for none, 1 for all."""
    lr: float = 1.0
    """Of the outer optimizer, above 0."""
    momentum: float = 0.0
    """Of the outer optimizer, at least 0 and below 1."""
    nesterov: bool = True
    """The kind of momentum."""
    warmup_steps: int = 0
    """Steps at the start in which gradients are averaged exactly at every step."""

    def __post_init__(self) -> None:
        _require_codec(self.codec)
        require_whole("H", self.period_steps, at_least=1, at_most=MOST_STEPS)
        require_whole("P", self.fragments, at_least=1, at_most=self.period_steps, because="at most H")
        require_whole("tau", self.delay_steps, at_least=0, at_most=self.period_steps, because="at most H")
        require_number("mix", self.mix, at_least=0.0, below=1.0)
        require_number("ef", self.error_feedback, at_least=0.0, at_most=1.0)
        require_number("lr", self.lr, above=0.0)
        require_number("momentum", self.momentum, at_least=0.0, below=1.0)
        require_whole("warmup", self.warmup_steps, at_least=0, at_most=MOST_STEPS)
        if self.nesterov not in (True, False):
            raise InputError(f"nesterov is {self.nesterov!r}; expected True or False")
        if self.codec.name == "powersgd":
            raise InputError(
                "powersgd compresses one matrix at a time, and an outer round sends slices of all weights",
                hint="every:powersgd, or int4 or topk for outer rounds",
            )
        if self.is_eager and self.mix:
            raise InputError("tau=H (eager) and mix exclude each other: an eager host already keeps its own progress")

    @property
    def is_eager(self) -> bool:
        """Whether a host goes on from its own progress at once."""
        return self.delay_steps == self.period_steps

    def due_fragment(self, step: int) -> int | None:
        """The fragment whose round begins after `step` steps (counted from 1, after the warm-up), or None."""
        turn = step % self.period_steps or self.period_steps
        due = [p for p in range(self.fragments) if (p + 1) * self.period_steps // self.fragments == turn]
        return due[0] if due else None  # one at most: there are no more fragments than steps

    def fragment_slice(self, fragment: int, num_values: int) -> slice:
        """Which of the `num_values` values of all weights, laid end to end, make up a fragment."""
        return slice(fragment * num_values // self.fragments, (fragment + 1) * num_values // self.fragments)

    def wire_bytes(
        self, buckets: Sequence[Sequence[Shape]], *, num_hosts: int, lanes: int = 1, num_buffer_values: int = 0
    ) -> float:
        """Bytes that a host sends to other hosts per step after the warm-up, on average.

        buckets            shapes of the weights; how they are grouped makes no difference here
        lanes              ranks per host that share the work: the smallest number of ranks on a host
        num_buffer_values  values in buffers that are averaged once per period, above all BatchNorm's statistics
        """
        if num_hosts == 1:
            return 0.0
        num_values = sum(math.prod(shape) for bucket in buckets for shape in bucket)
        sent = exact_bytes(4 * num_buffer_values, num_hosts)
        for fragment in range(self.fragments):
            part = self.fragment_slice(fragment, num_values)
            for piece in piece_slices(self.codec, part.stop - part.start, num_hosts=num_hosts, lanes=lanes):
                sent += reduced_bytes(self.codec, piece.stop - piece.start, num_hosts=num_hosts, lanes=lanes)
            sent += lanes * (num_hosts - 1) * HEADER_BYTES
        return sent / self.period_steps

    def __str__(self) -> str:
        def unlike(named: tuple[str, Outer]) -> tuple[int, bool]:
            return len(self._differing(named[1])), bool(named[1].warmup_steps) != bool(self.warmup_steps)

        name, defaults = min(NAMED.items(), key=unlike)
        return ":".join([name, f"H={self.period_steps}", *self._words(self._differing(defaults))])

    def _differing(self, defaults: Outer) -> list[str]:
        fields = [field.name for field in dataclasses.fields(self) if field.name != "period_steps"]
        return [name for name in fields if self._differs(name, defaults)]

    def _differs(self, name: str, defaults: Outer) -> bool:
        if name == "delay_steps" and (self.is_eager or defaults.is_eager):
            return self.is_eager != defaults.is_eager  # a whole period, whatever its steps are
        return getattr(self, name) != getattr(defaults, name)

    def _words(self, names: list[str]) -> Iterator[str]:
        for name in names:
            value = getattr(self, name)
            yield str(value) if name == "codec" else f"{_SHORT[name]}={short(value)}"


def _require_codec(codec: object) -> None:
    if not isinstance(codec, Codec):
        raise InputError(f"codec is {codec!r}; expected a Codec", hint='from text: paceline.parse_sync("every:int4")')


Strategy = EveryStep | Outer

NAMED: dict[str, Outer] = {
    "local": Outer(period_steps=8),
    "post-local": Outer(period_steps=8, warmup_steps=500),
    "slowmo": Outer(period_steps=12, momentum=0.5, nesterov=False),
    "diloco": Outer(period_steps=100, lr=0.7, momentum=0.9),
    "streaming": Outer(
        period_steps=100, fragments=8, delay_steps=2, mix=0.5, codec=Codec(name="int4"), lr=0.4, momentum=0.9
    ),
    "eager": Outer(period_steps=100, delay_steps=100, codec=Codec(name="int4"), lr=0.7, momentum=0.9),
    "sparseloco": Outer(period_steps=30, codec=Codec(name="topk"), error_feedback=0.95),
}
"""What people know by name. Sources: SlowMo arXiv 1910.00643, DiLoCo 2311.08105, Streaming DiLoCo 2501.18512, eager
updates 2502.12996, SparseLoCo 2508.15706."""

_SHORT = {
    "fragments": "P",
    "delay_steps": "tau",
    "mix": "mix",
    "error_feedback": "ef",
    "lr": "lr",
    "momentum": "momentum",
    "nesterov": "nesterov",
    "warmup_steps": "warmup",
}
_FIELDS = {"H": "period_steps"} | {word: field for field, word in _SHORT.items()}
_WHOLE = {field.name for field in dataclasses.fields(Outer) if field.type == "int"}


def spell_out(strategy: Strategy) -> str:
    """What the strategy does, for whoever reads its name for the first time: every setting, also those that the name
    brings along."""
    codec = "" if strategy.codec == PLAIN else f" as {strategy.codec}"
    if isinstance(strategy, EveryStep):
        often = f"of {strategy.accumulate_steps} batches" if strategy.accumulate_steps > 1 else "at every step"
        return f"gradients {often}{codec}"
    words = [f"what changed in {strategy.period_steps} steps{codec}"]
    if strategy.fragments > 1:
        words.append(f"in {strategy.fragments} parts that take turns")
    if strategy.is_eager:
        words.append("a period late, a host's own share at once")
    elif strategy.delay_steps:
        words.append(f"{strategy.delay_steps} steps late")
    if strategy.mix:
        words.append(f"of which {short(1 - strategy.mix)} is taken over")
    if strategy.error_feedback:
        words.append(f"{short(strategy.error_feedback)} of what the codec loses sent later")
    if strategy.momentum or strategy.lr != 1.0:
        momentum = f", {'Nesterov ' if strategy.nesterov else ''}momentum {short(strategy.momentum)}"
        words.append(f"outer lr {short(strategy.lr)}{momentum if strategy.momentum else ''}")
    if strategy.warmup_steps:
        words.append(f"gradients at every step in the first {strategy.warmup_steps}")
    return ", ".join(words)


def parse_sync(text: str) -> Strategy:
    """The strategy that a `--sync` text names: a name, then fields after colons; a bare word is the codec.

        every  every:int4:accumulate=4  every:powersgd=2  local:H=8  post-local:H=16:warmup=500  diloco:H=100:int8
        diloco:H=30:lr=0.6:momentum=0.9  streaming:H=30:P=8:tau=5:mix=0.5:int4  eager:H=100:int4  sparseloco:H=30

    Raises InputError that names the word that can't be used and what could stand there.
    """
    try:
        return _parse(text)
    except InputError as error:
        raise InputError(f"--sync {shown(text)}: {error.message}", hint=error.hint) from None


def _parse(text: str) -> Strategy:
    name, *words = text.split(":")
    if name != "every" and name not in NAMED:
        if name.partition("=")[0] in CODEC_NAMES:
            raise InputError(f"{shown(name)} is a codec", hint=f"at every step: every:{shown(text)}")
        raise InputError(f"{shown(repr(name))} is no way to synchronise", hint=f"one of every, {', '.join(NAMED)}")
    known = ["accumulate"] if name == "every" else list(_FIELDS)
    values: dict[str, str] = {}
    codec: Codec | None = None
    for word in words:
        field, has_value, value = word.partition("=")
        if field in CODEC_NAMES:
            if codec is not None:
                raise InputError(f"two codecs, {codec} and {shown(word)}")
            codec = _parse_codec(field, value if has_value else None)
        elif not has_value or field not in known:
            expected = f"a codec ({', '.join(CODEC_NAMES)}) or one of {', '.join(f'{field}=' for field in known)}"
            raise InputError(f"{shown(repr(word))} is not known to {name}", hint=f"expected {expected}")
        elif field in values:
            raise InputError(f"{field} is given twice")
        else:
            values[field] = value
    return _make(name, codec, values)


def _make(name: str, codec: Codec | None, values: dict[str, str]) -> Strategy:
    if name == "every":
        steps = _number("accumulate", values["accumulate"], whole=True) if values else 1
        return EveryStep(codec=codec or Codec(), accumulate_steps=int(steps))
    changes: dict[str, Any] = {} if codec is None else {"codec": codec}
    for word, value in values.items():
        field = _FIELDS[word]
        number = _number(word, value, whole=field in _WHOLE)
        if field == "nesterov" and number not in (0, 1):
            raise InputError(f"nesterov is {value}; expected 0 or 1")
        changes[field] = bool(number) if field == "nesterov" else number
    default = NAMED[name]
    if (period_steps := changes.get("period_steps")) is not None:  # what is a share of the period stays one
        changes.setdefault("fragments", min(default.fragments, max(1, period_steps)))
        delay_steps = period_steps if default.is_eager else min(default.delay_steps, period_steps - 1)
        changes.setdefault("delay_steps", delay_steps)
    return dataclasses.replace(default, **changes)


def _parse_codec(name: str, value: str | None) -> Codec:
    if value is None:
        return Codec(name=name)  # type: ignore[arg-type]
    if name == "powersgd":
        return Codec(name="powersgd", rank=int(_number(name, value, whole=True)))
    if name == "topk":
        return Codec(name="topk", density=float(_number(name, value, whole=False)))
    raise InputError(f"{name} takes no value", hint=f"only powersgd=RANK and topk=DENSITY do; say {name}")


def _number(field: str, value: str, *, whole: bool) -> float:
    try:
        if value != value.strip() or "_" in value or not value.isascii():
            raise ValueError
        return int(value) if whole else float(value)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise InputError(f"{field} is {shown(repr(value))}; expected {kind}") from None
