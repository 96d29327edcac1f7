"""PyTorch's texts drift: those that the catalogue says are PyTorch's own must stand in the wheel that is installed."""

from __future__ import annotations

import importlib.util
import mmap
import pathlib
import struct
from collections.abc import Iterator

import pytest

from paceline.explain import signatures


def torch_folder() -> pathlib.Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("needs PyTorch")
    return pathlib.Path(spec.origin).parent


def find_constants(data: mmap.mmap) -> tuple[int, int]:
    """Where a 64-bit ELF file has its constants (the section .rodata), from and to: the code is of no interest."""
    (headers_at,) = struct.unpack_from("<Q", data, 40)
    size, count, names_index = struct.unpack_from("<HHH", data, 58)
    sections = [struct.unpack_from("<IIQQQQ", data, headers_at + size * index) for index in range(count)]
    names_at = sections[names_index][4]
    for name, _, _, _, offset, length in sections:
        if data[names_at + name : names_at + name + 8] == b".rodata\0":
            return offset, offset + length
    return 0, 0


def read_texts(folder: pathlib.Path) -> Iterator[bytes]:
    """Each file's, once: the sources, and the constants of the compiled libraries."""
    for path in folder.rglob("*.py"):
        if "testing" not in path.parts:
            yield path.read_bytes()
    for path in (folder / "lib").glob("*.so"):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            begin, end = find_constants(data)
            yield data[begin:end]


def test_pytorchs_own_texts_are_still_there() -> None:
    missing = {
        fragment: entry.id
        for entry in signatures.load().signatures
        if entry.found_in == "torch"
        for fragment in entry.fragments
    }
    assert len(missing) > 60
    for text in read_texts(torch_folder()):
        for fragment in [fragment for fragment in missing if fragment.encode() in text]:
            del missing[fragment]
    assert not missing, "PyTorch has other words for it now"
