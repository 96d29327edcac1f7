"""The catalogue: every entry is whole, is found in its own example, and lets no other take it."""

from __future__ import annotations

import fnmatch
import pathlib
import re
from collections.abc import Iterator

import pytest

from paceline.explain import signatures
from paceline.explain.signatures import ROLES, Signature

KEYS = {
    "area", "role", "fragment", "regex", "confidence", "explains", "hang", "found_in", "cause", "remedy", "source",
    "example",
}  # fmt: skip

ENTRY = """\
[{name}]
area = Test
role = {role}
fragment = {fragment}
{more}
cause = It broke.
remedy = Mend it.
source = nobody
example = {fragment}
"""


def catalogue(*named: tuple[str, str, str, str]) -> signatures.Catalogue:
    """Of (name, role, fragment, more lines)."""
    return signatures.parse("".join(ENTRY.format(name=n, role=r, fragment=f, more=m) for n, r, f, m in named))


def match(text: str, *named: tuple[str, str, str, str]) -> str | None:
    found = catalogue(*named).match(text)
    return found.id if found else None


def test_every_entry_is_found_in_its_examples() -> None:
    found = signatures.load()
    taken = [
        (entry.id, other.id if other else None, example)
        for entry in found.signatures
        for example in entry.examples
        if (other := found.match(example)) is not entry
    ]
    assert not taken


def find_faults(entry: Signature) -> Iterator[str]:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", entry.id):
        yield "its name is not of words with hyphens"
    if entry.role not in ROLES or entry.confidence not in ("certain", "likely", "possible"):
        yield "no such role or confidence"
    if entry.role != "root" and entry.confidence == "certain":
        yield "only a root-cause text makes anything certain"
    if not entry.fragments or min(map(len, entry.fragments)) < 5:
        yield "fragments that short are everywhere"
    if not all(sentence.endswith((".", "?")) and len(sentence) <= 300 for sentence in (entry.cause, entry.remedy)):
        yield "cause and remedy are a few whole sentences"
    if entry.found_in not in ("", "torch") or (entry.hang and entry.role != "context"):
        yield "found_in or hang make no sense there"


def test_every_entry_is_whole() -> None:
    assert len(signatures.load().signatures) > 150
    faults = [(entry.id, fault) for entry in signatures.load().signatures for fault in find_faults(entry)]
    assert not faults


def test_every_fragment_has_an_example() -> None:
    """Or one that is spelt wrongly would hide behind the others."""
    bare = [
        (entry.id, fragment)
        for entry in signatures.load().signatures
        for fragment in entry.fragments
        if not any(fragment in example for example in entry.examples)
    ]
    assert not bare


def test_what_explains_something_names_symptoms_that_exist() -> None:
    found = signatures.load().signatures
    symptoms = [one.id for one in found if one.role == "symptom"]
    assert [one.id for one in found if one.explains and one.role != "context"] == []
    lost = [(one.id, pattern) for one in found for pattern in one.explains if not fnmatch.filter(symptoms, pattern)]
    assert not lost


def test_no_key_is_misspelt() -> None:
    text = pathlib.Path(signatures.__file__).with_name("signatures.ini").read_text(encoding="utf-8")
    keys = set(re.findall(r"^([a-z_]+) =", text, re.MULTILINE))
    assert keys == KEYS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it says: broken pipe 7", "with-regex"),
        ("it says: broken pipe x", "short"),
        ("the connection has a broken pipe x", "long"),
        ("all is well", None),
    ],
)
def test_the_more_specific_entry_wins(text: str, expected: str | None) -> None:
    assert expected == match(
        text,
        ("short", "root", "broken pipe", ""),
        ("with-regex", "root", "broken pipe", r"regex = pipe \d"),
        ("long", "root", "connection has a broken pipe", ""),
    )


def test_what_only_tells_something_yields_to_what_failed() -> None:
    named = ("told", "context", "uses the device eth0", r"regex = uses .*"), ("broke", "root", "eth0 is gone", "")
    assert match("uses the device eth0; eth0 is gone", *named) == "broke"


def test_a_vague_symptom_yields_to_a_consequence_in_the_same_line() -> None:
    named = (
        ("vague", "symptom", "something failed in the library", "confidence = possible"),
        ("lost", "cascade", "peer gone", ""),
    )
    assert match("something failed in the library: peer gone", *named) == "lost"


def test_fragments_that_hold_another_are_not_looked_for_twice() -> None:
    found = catalogue(("one", "root", "broken pipe", ""), ("two", "root", "a broken pipe", ""))
    assert found.fragments == ["broken pipe"]
    two = found.match("a broken pipe")
    assert two is not None and two.id == "two"
