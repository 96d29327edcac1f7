from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.spec import Host, parse_hosts, refuse_duplicates, resolve_slots
from paceline.errors import HostError, InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("alice:2,bob:4", [("alice", None, 2), ("bob", None, 4)]),
        ("alice,bob", [("alice", None, None), ("bob", None, None)]),
        (" alice , bob:1 ", [("alice", None, None), ("bob", None, 1)]),
        ("carol@alice:2", [("alice", "carol", 2)]),
        ("carol@example.org@alice", [("alice", "carol@example.org", None)]),
        ("[fe80::1]:4", [("fe80::1", None, 4)]),
        ("[fe80::1%eth0]", [("fe80::1%eth0", None, None)]),
        ("carol@[::1]:2,10.0.0.5", [("::1", "carol", 2), ("10.0.0.5", None, None)]),
        ("gpu_01.lab-2.example:8", [("gpu_01.lab-2.example", None, 8)]),
    ],
)
def test_the_host_flag_in_its_forms(text: str, expected: list[tuple[str, str | None, int | None]]) -> None:
    hosts = parse_hosts(text)
    assert [(host.name, host.user, host.slots) for host in hosts] == expected
    assert all(host.origin == "-H" for host in hosts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["-H: no hosts", "expected HOST[:SLOTS]"]),
        (" , ", ["no hosts"]),
        ("alice,", ["missing next to a comma"]),
        ("alice:0", ["slots=0", "from 1 to 1024"]),
        ("alice:-1", ["slots=-1", "from 1 to 1024"]),
        ("alice:29500", ["slots=29500", "from 1 to 1024"]),
        ("alice:two", ["'two'", "whole number"]),
        ("alice:²", ["whole number"]),
        ("alice:" + "9" * 5000, ["whole number"]),
        ("alice:", ["''", "whole number"]),
        ("fe80::1:4", ["'fe80::1:4'", "[fe80::1]:4"]),
        ("[fe80::1", ["in brackets"]),
        ("[alice]:2", ["in brackets"]),
        ("[::1]2", ["in brackets"]),
        ("-oProxyCommand=x", ["host name"]),
        ("-l@alice", ["user '-l'"]),
        ("@alice", ["user ''"]),
        ("al ice", ["host name 'al ice'"]),
        ("alice:2,alice:2", ["alice is there twice", "alice:2 or alice slots=2"]),
        ("alice,Carol@ALICE", ["ALICE is there twice"]),
    ],
)
def test_mistakes_in_the_host_flag_are_one_line(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_hosts(text)
    message = str(caught.value)
    assert message.startswith("-H: ")
    assert "\n" not in message
    assert all(word in message for word in words), message


@given(st.text(max_size=40))
def test_any_text_gives_hosts_or_one_line(text: str) -> None:
    with contextlib.suppress(InputError):
        assert all(not host.ssh_destination.startswith("-") for host in parse_hosts(text))


def test_what_ssh_is_told() -> None:
    assert Host(name="alice").ssh_destination == "alice"
    assert Host(name="fe80::1", user="carol").ssh_destination == "carol@fe80::1"


def test_ports_tell_containers_behind_one_name_apart() -> None:
    refuse_duplicates([Host(name="alice", port=2201), Host(name="alice", port=2202)])
    with pytest.raises(InputError, match="twice"):
        refuse_duplicates([Host(name="alice", port=2201), Host(name="alice", port=2201)])


@pytest.mark.parametrize(
    ("host", "num_gpus", "slots", "reason"),
    [
        (Host(name="alice", slots=3, origin="h.txt:1"), 8, 3, "3 asked for in h.txt:1"),
        (Host(name="alice"), 4, 4, "one per GPU, 4 found"),
        (Host(name="alice"), 0, 1, "one, as no GPU was found"),
        (Host(name="alice", gpus=(0, 2)), 4, 2, "one per GPU named in -H"),
        (Host(name="alice", gpus=(0, 2), slots=1), 4, 1, "1 asked for in -H"),
    ],
)
def test_slots_and_why(host: Host, num_gpus: int, slots: int, reason: str) -> None:
    assert resolve_slots(host, num_gpus) == (slots, reason)


@pytest.mark.parametrize(("num_gpus", "found"), [(2, "has 2 GPUs, numbered from 0"), (0, "has no GPU")])
def test_a_gpu_that_is_not_there(num_gpus: int, found: str) -> None:
    with pytest.raises(HostError, match=f"gpus=0,2 was asked for, but alice {found}"):
        resolve_slots(Host(name="alice", gpus=(0, 2)), num_gpus)
