"""Hostfiles in the forms people have: Open MPI, DeepSpeed, Horovod, bare names; and our own keys.

    # comment
    alice slots=4
    carol@bob:2  ip=10.0.0.7 python=/opt/venv/bin/python gpus=0,2 env.NCCL_DEBUG="INFO" port=2222
    [fe80::1]:4

`max_slots=` (Open MPI) is checked and then has no effect: no more than `slots` ranks are ever started.
"""

from __future__ import annotations

import os
import shlex

from paceline.cluster.spec import Host, parse_number, refuse_duplicates, split_host
from paceline.errors import InputError

_KEYS = "slots, max_slots, ip, port, python, gpus, env.NAME"
_BLANKS = " \t\r"


_MOST_CHARS = 1_000_000


def read_hostfile(path: str | os.PathLike[str]) -> tuple[Host, ...]:
    """The hosts in a file. Raises InputError, naming the line, for whatever is wrong with it."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(_MOST_CHARS + 1)
    except UnicodeDecodeError:
        raise InputError(f"hostfile {path}: not a text file: expected one host per line") from None
    except OSError as error:
        what = (error.strerror or str(error)).lower()
        raise InputError(f"hostfile {path}: {what}: expected a file with one host per line") from None
    if len(text) > _MOST_CHARS:
        raise InputError(f"hostfile {path}: over {_MOST_CHARS} characters: expected a file with one host per line")
    return parse_hostfile(text, path)


def parse_hostfile(text: str, path: str | os.PathLike[str]) -> tuple[Host, ...]:
    """The hosts in a hostfile's text, in order; `path` is for messages. Raises InputError."""
    hosts: list[Host] = []
    for number, line in enumerate(text.split("\n"), start=1):
        bare = _strip_comment(line).strip()
        if bare:
            hosts.append(_parse_line(bare, f"{path}:{number}"))
    if not hosts:
        raise InputError(f"hostfile {path}: no host in it: expected one per line, as in `alice slots=2`")
    refuse_duplicates(hosts)
    return tuple(hosts)


def _strip_comment(line: str) -> str:
    """Up to a `#` that begins a word. shlex can't: it stumbles over an apostrophe in the comment."""
    quote, i = "", 0
    while i < len(line):
        char = line[i]
        if char == "\\" and quote != "'":
            i += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (i == 0 or line[i - 1] in _BLANKS):
            return line[:i]
        i += 1
    return line


def _parse_line(line: str, origin: str) -> Host:
    try:
        first, *pairs = shlex.split(line)
    except ValueError as error:
        raise InputError(f"{origin}: {line!r}: {str(error).lower()}: expected quotes in pairs") from None
    user, name, slots = split_host(first, origin=origin)
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise InputError(f"{origin}: found {pair!r}: expected KEY=VALUE, KEY one of {_KEYS}")
        if key in values or (key == "slots" and slots is not None):
            raise InputError(f"{origin}: {key} is given twice: expected it once")
        values[key] = value
    env = tuple((key[4:], values.pop(key)) for key in tuple(values) if key.startswith("env."))
    numbers = {
        key: parse_number(values.pop(key), key, origin=origin)
        for key in ("slots", "max_slots", "port")
        if key in values
    }
    slots = numbers.get("slots", slots)
    gpus = _parse_gpus(values.pop("gpus"), origin) if "gpus" in values else None
    ip, python = values.pop("ip", None), values.pop("python", None)
    if values:
        raise InputError(f"{origin}: unknown key {min(values)!r}: expected one of {_KEYS}")
    host = Host(
        name=name, user=user, port=numbers.get("port"), slots=slots, ip=ip, python=python, gpus=gpus, env=env,
        origin=origin,
    )  # fmt: skip
    if numbers.get("max_slots", slots or 1) < (slots or 1):
        found = f"max_slots={numbers['max_slots']} with {slots or 1} slots"
        raise InputError(f"{origin}: {found}: expected no fewer than slots")
    return host


def _parse_gpus(text: str, origin: str) -> tuple[int, ...]:
    return tuple(parse_number(word, f"gpus={text}", origin=origin) for word in text.split(","))
