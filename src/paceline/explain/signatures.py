"""The texts that runs die with, read from `signatures.ini`, and which of them a line holds."""

from __future__ import annotations

import configparser
import dataclasses
import fnmatch
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, cast, get_args

Role = Literal["root", "symptom", "cascade", "benign", "context"]
Confidence = Literal["certain", "likely", "possible"]

ROLES: tuple[Role, ...] = get_args(Role)
_CONFIDENCE: dict[Role, Confidence] = {
    "root": "certain",
    "symptom": "likely",
    "cascade": "possible",
    "benign": "possible",
    "context": "possible",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """One entry of the file, under the names that it has there."""

    id: str
    area: str
    role: Role
    confidence: Confidence
    fragments: tuple[str, ...]
    regex: str | None
    explains: tuple[str, ...]
    """Patterns of the ids of symptoms that this may be behind."""
    hang: bool
    found_in: str
    cause: str
    remedy: str
    source: str
    examples: tuple[str, ...]

    @property
    def is_vague(self) -> bool:
        """A symptom that something else must be behind."""
        return self.role == "symptom" and self.confidence == "possible"

    def find(self, text: str) -> tuple[int, int] | None:
        """Where it stands in a line: (start, end), or None."""
        for fragment in self.fragments:
            start = text.find(fragment)
            if start < 0:
                continue
            if self.regex is None:
                return start, start + len(fragment)
            match = re.search(self.regex, text)
            return match.span() if match else None
        return None

    def is_behind(self, symptom: Signature) -> bool:
        """Whether it may be what causes that symptom."""
        return any(fnmatch.fnmatchcase(symptom.id, pattern) for pattern in self.explains)


class Catalogue:
    """All entries, to be asked for a line."""

    def __init__(self, signatures: Iterable[Signature]) -> None:
        self.signatures = tuple(signatures)
        self.by_id = {signature.id: signature for signature in self.signatures}
        fragments = {fragment for signature in self.signatures for fragment in signature.fragments}
        # One that holds another needs no search of its own.
        self.fragments = sorted(one for one in fragments if not any(two in one and two != one for two in fragments))
        self._having = {
            one: [signature for signature in self.signatures if any(one in two for two in signature.fragments)]
            for one in self.fragments
        }

    def match(self, text: str) -> Signature | None:
        """The entry that says most about a line: with a regex before without, the longer match before the shorter."""
        best, best_rank = None, (-1, False, 0)
        candidates = {id(s): s for one in self.fragments if one in text for s in self._having[one]}
        for signature in candidates.values():
            span = signature.find(text)
            if span is None:
                continue
            weight = 0 if signature.role == "context" else 1 if signature.is_vague else 2
            rank = (weight, signature.regex is not None, span[1] - span[0])
            if rank > best_rank:
                best, best_rank = signature, rank
        return best


@functools.cache
def load() -> Catalogue:
    """The catalogue that comes with the package."""
    return parse(Path(__file__).with_name("signatures.ini").read_text(encoding="utf-8"))


def parse(text: str) -> Catalogue:
    """A catalogue from the file's text."""
    parser = configparser.ConfigParser(
        interpolation=None, delimiters=("=",), comment_prefixes=("#",), empty_lines_in_values=False
    )
    parser.read_string(text)
    return Catalogue(_signature(name, parser[name]) for name in parser.sections())


def _signature(name: str, section: configparser.SectionProxy) -> Signature:
    role = cast(Role, section["role"])
    return Signature(
        id=name,
        area=section["area"],
        role=role,
        confidence=cast(Confidence, section.get("confidence", _CONFIDENCE[role])),
        fragments=_lines(section["fragment"]),
        regex=section.get("regex"),
        explains=_lines(section.get("explains", "")),
        hang=section.getboolean("hang", False),
        found_in=section.get("found_in", ""),
        cause=" ".join(_lines(section["cause"])),
        remedy=" ".join(_lines(section["remedy"])),
        source=" ".join(_lines(section["source"])),
        examples=_lines(section["example"]),
    )


def _lines(value: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in value.splitlines() if line.strip())
