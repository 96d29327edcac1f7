"""The files of a distribution by its RECORD: which travel, where they belong, and which hash is believed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from pathlib import Path

import pytest
from made_up_packages import info_of, install

from paceline.envs import listing
from paceline.envs.inventory import describe, find_distributions
from paceline.envs.listing import find_files, place_file, read_record


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only site-packages."""
    folder = tmp_path / "env/lib/python3.11/site-packages"
    folder.mkdir(parents=True)
    monkeypatch.setattr(listing, "find_distributions", lambda: find_distributions([str(folder)]))
    return folder


def the_only(site: Path) -> importlib.metadata.Distribution:
    [found] = find_distributions([str(site)])
    return found


def test_compiled_files_commands_and_addresses_stay(site: Path) -> None:
    commands = {f"{info_of('a')}/entry_points.txt": "[console_scripts]\na-run = a:main\n"}
    stay = ["a/__pycache__/__init__.cpython-311.pyc", "../../../bin/a-run", f"{info_of('a')}/direct_url.json"]
    more = "".join(f"{path},,\n" for path in [*stay, "../../../bin/raw"])
    install(site, "a", files=commands, more=more)
    paths = [path for path, _ in read_record(the_only(site))]
    expected = ["METADATA", "INSTALLER", "entry_points.txt", "RECORD"]
    assert sorted(paths) == sorted(
        ["a/__init__.py", "../../../bin/raw", *(f"{info_of('a')}/{name}" for name in expected)]
    )


def test_everything_is_placed_or_named(site: Path) -> None:
    install(site, "a", more="../../../share/man/a.1,,\n../../../../outside,,\na/gone.py,,\n")
    install(site, "b")
    (site / "../../../share/man").mkdir(parents=True)
    (site / "../../../share/man/a.1").write_text("manual")
    found = find_files(["a"])
    kinds = {file.path: found.roots[file.root][0] for file in found.files}
    assert kinds["a/__init__.py"] == "site" and kinds["share/man/a.1"] == "prefix"
    assert not [path for path in kinds if path.startswith("b")]
    assert found.left_out == [
        "../../../../outside of a lies outside the environment",
        "1 files of a are in its RECORD, but not there",
    ]


def test_hash_of_a_changed_file_is_read_from_the_file(site: Path) -> None:
    install(site, "a")
    record = site / info_of("a") / "RECORD"
    os.utime(record, (2e9, 2e9))
    [kept] = [file for file in find_files(["a"]).files if file.path == "a/__init__.py"]
    assert kept.sha256 == hashlib.sha256(b"version = '1.0'\n").hexdigest()
    os.utime(record, (1e9, 1e9))
    (site / "a/__init__.py").write_text("patched")
    entries = listing.main({"names": ["a"], "is_packed": False})["entries"]
    [changed] = [entry for entry in entries if entry[1] == "a/__init__.py"]
    assert changed[2:] == [0o644, 7, hashlib.sha256(b"patched").hexdigest()]


def test_paths_that_leave_the_environment() -> None:
    assert place_file("/e/lib/python3.11/site-packages", "a/b.py") == (
        "site",
        "/e/lib/python3.11/site-packages",
        "a/b.py",
    )
    assert place_file("/e/lib/python3.11/site-packages", "../../../bin/x") == ("prefix", "/e", "bin/x")
    assert place_file("/e/lib/python3.11/site-packages", "../../../../etc/passwd") is None
    assert place_file("/e/lib/python3.11/site-packages", "/etc/passwd") is None


def test_description_tells_size_and_content(site: Path) -> None:
    install(site, "Some_Thing")
    plain = describe(the_only(site))
    assert (plain.name, plain.origin, plain.content) == ("some-thing", "index", "")
    assert plain.num_bytes == sum(
        path.stat().st_size for path in site.rglob("*") if path.is_file() and path.name != "RECORD"
    )
    (site / info_of("Some_Thing") / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {}}')
    folder = describe(the_only(site))
    (site / info_of("Some_Thing") / "RECORD").write_text("other\n")
    assert folder.content and describe(the_only(site)).content != folder.content
