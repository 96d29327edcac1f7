"""The way of the files: parcels, the spool for another host's, and who may get them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up_packages import installed, inventory

from paceline.envs import parcels as cutting
from paceline.envs.fetching import Spool
from paceline.envs.listed import ListedFile, read_listing
from paceline.envs.lock import Lock, make_lock
from paceline.envs.looking import Look
from paceline.envs.making import compare, last_words
from paceline.envs.parcels import make_parcels
from paceline.envs.sending import Piece, keep_alive
from paceline.envs.verdict import judge_host
from paceline.errors import HostError
from paceline.launch import protocol
from paceline.launch.facts import Facts

GB = 10**9


def entry(path: str, data: bytes, root: int = 0) -> ListedFile:
    return ListedFile(root, path, 0o644, len(data), hashlib.sha256(data).hexdigest())


def test_parcels_are_bounded_and_always_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PARCEL_BYTES", 10)
    entries = [entry("a", b"x" * 6), entry("b", b"x" * 4), entry("c", b"x" * 25), entry("d", b""), entry("e", b"y", 1)]
    roots = [("site", Path("/s")), ("prefix", Path("/p"))]
    made = make_parcels("abc", roots, entries)
    assert [[path for path, *_ in parcel.cargo.entries] for parcel in made] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [parcel.kind for parcel in made] == ["site", "site", "site", "prefix"]
    assert len({parcel.cargo.name for parcel in made}) == 4 and made == make_parcels("abc", roots, entries)


def test_spool_takes_bytes_however_they_are_cut(tmp_path: Path) -> None:
    contents = {"a/one.py": b"first", "empty": b"", "two": b"second one", "last": b""}
    stream = b"".join(contents.values())
    entries = [entry(path, data) for path, data in contents.items()]
    for size in (1, 3, 100):
        spool = Spool(tmp_path / str(size), entries)
        for start in range(0, len(stream), size):
            spool.feed(stream[start : start + size])
        assert spool.is_complete
        assert {path: (spool.root(0) / path).read_bytes() for path in contents} == contents


def test_spool_goes_on_where_an_earlier_one_stopped(tmp_path: Path) -> None:
    entries = [entry("one", b"11"), entry("two", b"22"), entry("three", b"33")]
    first = Spool(tmp_path, entries)
    first.feed(b"112")
    first.close()
    second = Spool(tmp_path, entries)
    assert second.start == 1 and not second.is_complete
    second.feed(b"2233")
    assert second.is_complete and Spool(tmp_path, entries).is_complete


def test_spool_refuses_other_bytes(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="one was changed while it was fetched"):
        Spool(tmp_path, [entry("one", b"11")]).feed(b"12")


def reply(*file: object) -> dict[str, object]:
    """Of a host with two roots and this file."""
    return {"roots": [["site", "/s"], ["prefix", "/p"]], "entries": [list(file)], "left_out": []}


def test_modes_say_only_whether_a_file_can_be_run() -> None:
    for said, mode in ((0o644, 0o644), (0o755, 0o755), (0o4755, 0o755), (0o666, 0o644), (0o100, 0o755)):
        [file] = read_listing("bob", reply(1, "bin/a..b", said, 3, "ab")).files
        assert file == (1, "bin/a..b", mode, 3, "ab")


@pytest.mark.parametrize(
    "file",
    [
        ("../..", "a", 0o644, 0, "ab"),
        (2, "a", 0o644, 0, "ab"),
        (-1, "a", 0o644, 0, "ab"),
        (True, "a", 0o644, 0, "ab"),
        (0, "../a", 0o644, 0, "ab"),
        (0, "a/../../b", 0o644, 0, "ab"),
        (0, "/etc/passwd", 0o644, 0, "ab"),
        (0, "", 0o644, 0, "ab"),
        (0, "a\0b", 0o644, 0, "ab"),
        (0, 7, 0o644, 0, "ab"),
        (0, "a", "0o644", 0, "ab"),
        (0, "a", 0o644, -1, "ab"),
        (0, "a", 0o644, 0, None),
        (0, "a", 0o644, 0),
    ],
)
def test_a_host_has_no_say_in_where_its_files_lie_here(file: tuple[object, ...]) -> None:
    with pytest.raises(HostError, match="bob: its list of files is none that paceline makes: ") as refused:
        read_listing("bob", reply(*file))
    assert refused.value.hint is not None and refused.value.hint.endswith("ssh bob")


def test_a_listing_of_another_form_is_refused() -> None:
    good = reply(0, "a", 0o644, 0, "ab")
    assert read_listing("bob", good).roots == (("site", "/s"), ("prefix", "/p"))
    for wrong in (None, [], {}, {**good, "roots": [["wheel", "/w"]]}, {**good, "roots": 1}, {**good, "entries": [7]}):
        with pytest.raises(HostError, match="none that paceline makes"):
            read_listing("bob", wrong)


def piece(path: str) -> Piece:
    return protocol.FileData(project="p", path=path, last_of_file=True, last_of_all=False), path.encode()


def test_a_slow_disk_lets_heartbeats_through() -> None:
    is_there = threading.Event()

    def read() -> Iterator[Piece]:
        yield piece("one")
        assert is_there.wait(10)
        yield piece("two")

    sent = keep_alive(read(), beat_s=0.01)
    assert next(sent) == piece("one")
    assert next(sent) is None and next(sent) is None
    is_there.set()
    assert [each for each in sent if each is not None] == [piece("two")]


def test_reading_ahead_ends_with_the_channel() -> None:
    read: list[int] = []

    def pieces() -> Iterator[Piece]:
        for number in range(1000):
            read.append(number)
            yield piece(str(number))

    sent = keep_alive(pieces())
    assert next(sent) == piece("0")
    sent.close()  # type: ignore[attr-defined]  # as the collector does with a generator that is let go
    [reader] = [thread for thread in threading.enumerate() if thread.name == "read-ahead"] or [None]
    if reader is not None:
        reader.join(5)
    assert len(read) < 10


def facts(**changes: object) -> Facts:
    values = dict.fromkeys(Facts.field_names, None) | {
        "python_version": "3.11.2",
        "python_path": "/usr/bin/python3",
        "machine": "x86_64",
        "state_folder": "/home/me/.local/state/paceline",
        "free_bytes": 10 * GB,
    }
    return Facts(**{**values, **changes})


def look(**changes: object) -> Look:
    values = {"folder": "/e", "state": "absent", "free_bytes": 10 * GB, "is_apart": False, "libc": "glibc"}
    return Look(**{"arrived_bytes": 0, **values, **changes})


FOUND = inventory(installed("torch", num_bytes=2 * GB))
LOCK = make_lock(FOUND, offline=True)


@pytest.mark.parametrize(
    ("host", "there", "text", "remedy"),
    [
        (facts(python_version="3.12.1"), look(), "Python 3.12 at /usr/bin/python3", "python=PATH in the hostfile"),
        (facts(machine="aarch64"), look(), "aarch64", "paceline env diff"),
        (facts(), look(libc=""), "C library", "by hand"),
        (facts(), look(state="foreign"), "was not made by paceline", "--to another folder"),
        (facts(free_bytes=GB), look(), "1.0 GB free for /home/me", "make room"),
        (facts(), look(is_apart=True, free_bytes=GB), "1.0 GB free for /e", "make room"),
    ],
)
def test_a_host_that_cannot_have_it_learns_why(host: Facts, there: Look, text: str, remedy: str) -> None:
    judged = judge_host(host, there, FOUND, LOCK)
    assert judged is not None and text in judged[0] and remedy in judged[1]


@pytest.mark.parametrize(
    ("host", "there"),
    [
        (facts(), look()),
        (facts(), look(state="unfinished")),
        (facts(), look(state="other")),
        (facts(), look(free_bytes=GB)),
        (facts(free_bytes=GB), look(arrived_bytes=int(1.9 * GB))),
    ],
)
def test_a_host_that_can(host: Facts, there: Look) -> None:
    assert judge_host(host, there, FOUND, LOCK) is None


def test_a_packed_environment_has_its_own_python() -> None:
    packed = Lock(text="", packages={}, num_bytes=0, wheels=(), left_out=(), is_packed=True)
    assert judge_host(facts(python_version="3.13.0"), look(), FOUND, packed) is None


def test_what_was_made_is_compared() -> None:
    wanted = {"python": "3.11", "machine": "x86_64", "packages": {"a-b": "1", "c": "2"}}
    made = {"python": "3.11", "machine": "x86_64", "packages": [["A_b", "1"], ["c", "2"], ["pip", "25"], [None, "0"]]}
    assert compare(made, wanted) == ""
    assert compare({**made, "packages": [["c", "3"]]}, wanted) == "a-b missing instead of 1, c 3 instead of 2"
    assert compare({**made, "python": "3.12"}, wanted) == "it is Python 3.12 on x86_64"


def test_last_words_keep_no_secret() -> None:
    said = "Looking at https://me:secret@x.org\nERROR: no match at https://me:secret@x.org/simple\nnotice: pip 99\n"
    assert last_words(said) == "ERROR: no match at https://x.org/simple"
    assert last_words("") == "no word"
