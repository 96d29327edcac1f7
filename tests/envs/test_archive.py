"""A packed environment comes from another host: nothing in it may reach out of its folder."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from paceline.envs.making import MakingError, extract


def member(name: str, *, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, link, mode
    return made


def unpack(folder: Path, *members: tarfile.TarInfo) -> None:
    """An archive of these, each file with four bytes, as a host would have sent it."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as packed:
        for each in members:
            each.size = 4 if each.isreg() else 0
            packed.addfile(each, io.BytesIO(b"data"))
    data.seek(0)
    folder.mkdir()
    with tarfile.open(fileobj=data) as packed:
        extract(packed, str(folder))


@pytest.fixture(params=["with filters", "without"])
def filters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is a Python that has none yet."""
    if request.param == "without":
        monkeypatch.delattr(tarfile, "tar_filter", raising=False)
        monkeypatch.setattr(tarfile.TarFile, "extraction_filter", staticmethod(lambda each, _: each), raising=False)


@pytest.mark.usefixtures("filters")
def test_an_environment_is_unpacked_with_its_links(tmp_path: Path) -> None:
    unpack(
        tmp_path / "env",
        member(".", kind=tarfile.DIRTYPE, mode=0o755),
        member("bin", kind=tarfile.DIRTYPE, mode=0o755),
        member("bin/python3.11", mode=0o4777),
        member("bin/python", kind=tarfile.SYMTYPE, link="python3.11"),
        member("bin/again", kind=tarfile.LNKTYPE, link="bin/python3.11", mode=0o4777),
        member("ssl", kind=tarfile.SYMTYPE, link="/etc/ssl"),
    )
    found = os.stat(tmp_path / "env/bin/python")
    assert (found.st_mode & 0o7777, found.st_nlink) == (0o755, 2), "nobody else's rights"
    assert os.readlink(tmp_path / "env/ssl") == "/etc/ssl", "a link may lead out, but nothing is written through it"


@pytest.mark.usefixtures("filters")
def test_nothing_is_written_or_named_outside(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    out = tmp_path / "out"
    for number, members in enumerate(
        (
            [member("../out")],
            [member(str(out))],
            [member("a", kind=tarfile.SYMTYPE, link=".."), member("a/out")],
            [member("a", kind=tarfile.SYMTYPE, link="../victim"), member("a")],
            [member("a", kind=tarfile.LNKTYPE, link="../victim"), member("a")],
        )
    ):
        with pytest.raises(MakingError, match="leaves the environment"):
            unpack(tmp_path / f"env{number}", *members)
        assert not out.exists() and victim.read_text() == "mine"
