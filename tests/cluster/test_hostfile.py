from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shlex
import string
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.hostfile import parse_hostfile, read_hostfile
from paceline.cluster.spec import Host
from paceline.errors import InputError


def parse_one(line: str) -> Host:
    (host,) = parse_hostfile(line, "hosts.txt")
    return host


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("alice", Host(name="alice")),
        ("alice slots=4", Host(name="alice", slots=4)),
        ("alice:4", Host(name="alice", slots=4)),
        ("alice slots=4 max_slots=8", Host(name="alice", slots=4)),
        ("  carol@bob\tslots=2  # bob's machine", Host(name="bob", user="carol", slots=2)),
        ("[fe80::1]:4", Host(name="fe80::1", slots=4)),
        ("alice port=2222 ip=10.0.0.5", Host(name="alice", port=2222, ip="10.0.0.5")),
        ("alice ip=fd00::5 python=/opt/py", Host(name="alice", ip="fd00::5", python="/opt/py")),
        ('alice python="/my envs/bin/python"', Host(name="alice", python="/my envs/bin/python")),
        ("alice gpus=0,2 slots=1", Host(name="alice", gpus=(0, 2), slots=1)),
        ("alice env.A=1 env.B='x # y = z' env.C=", Host(name="alice", env=(("A", "1"), ("B", "x # y = z"), ("C", "")))),
        ("alice env.A=a#b", Host(name="alice", env=(("A", "a#b"),))),
        ('alice env.A="say \\"#1\\" " # note', Host(name="alice", env=(("A", 'say "#1" '),))),
        ("alice env.A='C:\\' # it's ours", Host(name="alice", env=(("A", "C:\\"),))),
        ("alice slots=2\r", Host(name="alice", slots=2)),
    ],
)  # fmt: skip
def test_lines_in_the_forms_people_have(line: str, expected: Host) -> None:
    assert parse_one(line) == dataclasses.replace(expected, origin="hosts.txt:1")


def test_comments_and_blank_lines_count_as_lines() -> None:
    hosts = parse_hostfile("# ours\n\nalice slots=2\n   # don't\n\tbob:4 #x\n", "hosts.txt")
    assert [(host.name, host.slots, host.origin) for host in hosts] == [
        ("alice", 2, "hosts.txt:3"),
        ("bob", 4, "hosts.txt:5"),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("alice slots=0", ["slots=0", "from 1 to 1024"]),
        ("alice slots=-2", ["slots=-2", "from 1 to 1024"]),
        ("alice slots=four", ["slots", "'four'", "whole number"]),
        ("alice slots=", ["slots", "''"]),
        ("alice slots = 4", ["'slots'", "KEY=VALUE", "max_slots"]),
        ("alice 4", ["found '4'", "KEY=VALUE"]),
        ("alice slot=4", ["unknown key 'slot'", "slots, max_slots, ip, port, python, gpus, env.NAME"]),
        ("alice type=A100 slots=1", ["unknown key 'type'"]),
        ("alice:2 slots=2", ["slots is given twice"]),
        ("alice ip=10.0.0.1 ip=10.0.0.2", ["ip is given twice"]),
        ("alice slots=4 max_slots=2", ["max_slots=2 with 4 slots"]),
        ("alice max_slots=0", ["max_slots=0"]),
        ("alice ip=bob", ["ip=bob", "literal"]),
        ("alice port=0", ["port=0", "1 to 65535"]),
        ("alice python=", ["python="]),
        ("alice gpus=", ["gpus=", "whole number"]),
        ("alice gpus=0,0", ["gpus=0,0", "each GPU once"]),
        ("alice gpus=-1", ["gpus=-1", "as in gpus=0,2"]),
        ("alice gpus=0,2 slots=3", ["slots=3 with gpus=0,2", "no more slots than GPUs, here 2"]),
        ("alice env.=1", ["env.", "variable name"]),
        ("alice env.2X=1", ["env.2X"]),
        ("alice env.A='1", ["no closing quotation", "quotes in pairs"]),
        ("alice,bob", ["host name 'alice,bob'"]),
        ("fe80::1 slots=2", ["[fe80::1]:4"]),
    ],
)
def test_mistakes_are_one_line_naming_file_and_line(line: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_hostfile(f"# first\n{line}\n", "my/hosts.txt")
    message = str(caught.value)
    assert message.startswith("my/hosts.txt:2: ")
    assert "expected" in message
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_host_that_is_there_twice_names_both_lines() -> None:
    with pytest.raises(InputError, match=r"^h:3: alice is there twice, first at h:1: .* alice slots=2\)$"):
        parse_hostfile("alice slots=2\nbob\ncarol@alice\n", "h")


def test_files_that_cannot_be_used(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InputError, match=r"none\.txt: no such file or directory: expected a file with one host"):
        read_hostfile(tmp_path / "none.txt")
    with pytest.raises(InputError, match="is a directory"):
        read_hostfile(tmp_path)
    (tmp_path / "hosts").write_text("# nothing\n\n")
    with pytest.raises(InputError, match=r"hosts: no host in it: expected one per line"):
        read_hostfile(tmp_path / "hosts")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a text file"):
        read_hostfile(tmp_path / "binary")


def test_a_file_from_another_editor(tmp_path: pathlib.Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfalice slots=2\r\nbob\r\n")
    assert [(host.name, host.slots) for host in read_hostfile(tmp_path / "hosts")] == [("alice", 2), ("bob", None)]


_names = st.one_of(
    st.text(string.ascii_lowercase + string.digits + "._", min_size=1, max_size=12),
    st.ip_addresses().map(str),
)
_text = st.text(max_size=20).filter(lambda text: not {"\n", "\0"} & set(text))
_env = st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), _text, max_size=3)


@st.composite
def hosts_of_any_form(draw: st.DrawFn) -> Host:
    gpus = draw(st.none() | st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True).map(tuple))
    return Host(
        name=draw(_names),
        user=draw(st.none() | st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)),
        port=draw(st.none() | st.integers(1, 65535)),
        slots=draw(st.none() | st.integers(1, len(gpus) if gpus else 1024)),
        ip=draw(st.none() | st.ip_addresses().map(str)),
        python=draw(st.none() | _text.filter(str.strip)),
        gpus=gpus,
        env=tuple(draw(_env).items()),
    )


def format_hostfile(hosts: Iterable[Host]) -> str:
    """The text that `parse_hostfile` reads back as these hosts (but for their origin)."""
    return "".join(f"{_format_host(host)}\n" for host in hosts)


def _format_host(host: Host) -> str:
    name = f"[{host.name}]" if ":" in host.name else host.name
    words = [name if host.user is None else f"{host.user}@{name}"]
    for key in ("slots", "ip", "port", "python"):
        value = getattr(host, key)
        if value is not None:
            words.append(f"{key}={value}")
    if host.gpus is not None:
        words.append(f"gpus={','.join(map(str, host.gpus))}")
    words += [f"env.{key}={value}" for key, value in host.env]
    return shlex.join(words)


@settings(max_examples=25)
@given(st.lists(hosts_of_any_form(), min_size=1, max_size=5, unique_by=lambda host: host.name))
def test_what_is_written_is_read_back(hosts: list[Host]) -> None:
    read = parse_hostfile(format_hostfile(hosts), "h")
    assert read == tuple(dataclasses.replace(host, origin=f"h:{line}") for line, host in enumerate(hosts, start=1))


@given(st.text(max_size=60))
def test_any_text_gives_hosts_or_one_input_error(text: str) -> None:
    with contextlib.suppress(InputError):
        assert parse_hostfile(text, "h")
