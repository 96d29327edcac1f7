"""The lock: exact pins, a name that follows from all that matters, and what is refused."""

from __future__ import annotations

import json

import pytest
from made_up_packages import installed, inventory

from paceline.envs.inventory import read_origin
from paceline.envs.lock import make_lock
from paceline.errors import InputError


def test_pins_are_exact_and_paceline_is_left_to_itself() -> None:
    lock = make_lock(
        inventory(
            installed("numpy", "2.4.6"), installed("paceline", origin="editable"), installed("torch", "2.13.0+cpu")
        ),
        offline=False,
    )
    assert lock.text.splitlines()[1:] == ["numpy==2.4.6", "torch==2.13.0+cpu"]
    assert lock.packages == {"numpy": "2.4.6", "torch": "2.13.0+cpu"} and lock.num_bytes == 20


def test_name_follows_from_python_processor_versions_and_content() -> None:
    names = {
        make_lock(found, offline=True).name
        for found in (
            inventory(installed("a")),
            inventory(installed("a", "1.1")),
            inventory(installed("a"), python="3.12"),
            inventory(installed("a"), machine="aarch64"),
            inventory(installed("a", origin="folder", content="01")),
            inventory(installed("a", origin="folder", content="02")),
        )
    }
    assert len(names) == 6 and all(len(name) == 12 for name in names)
    again = make_lock(inventory(installed("a"), python_path="/elsewhere/bin/python"), offline=True)
    assert again.name in names, "where it lies does not matter"


def test_editable_is_refused_in_both_forms() -> None:
    found = inventory(installed("mine", origin="editable", source="/home/me/mine"), installed("numpy"))
    for offline in (True, False):
        with pytest.raises(InputError, match=r"editable.*mine 1\.0") as refused:
            make_lock(found, offline=offline)
        assert refused.value.hint is not None and refused.value.hint.endswith("pip install /home/me/mine")


@pytest.mark.parametrize("origin", ["git", "url", "folder", "archive"])
def test_what_no_index_has_is_only_sent(origin: str) -> None:
    found = inventory(installed("mine", origin=origin, source="/there", content="ab"))
    with pytest.raises(InputError, match=f"mine 1.0 .{origin} /there") as refused:
        make_lock(found, offline=False)
    assert "--offline" in str(refused.value)
    assert make_lock(found, offline=True).packages == {"mine": "1.0"}


def test_wheel_files_stand_in_for_an_index() -> None:
    lock = make_lock(inventory(installed("mine", origin="wheel", source="/w/mine.whl", content="ab")), offline=False)
    assert lock.wheels == ("/w/mine.whl",) and "mine==1.0  # wheel ab\n" in lock.text


def test_what_has_no_record_is_named() -> None:
    lock = make_lock(inventory(installed("apt", "2.6", has_record=False), installed("numpy")), offline=True)
    assert lock.packages == {"numpy": "1.0"} and lock.left_out == ("apt 2.6 has no RECORD of its files",)


def test_conda_travels_whole_where_it_can_be_packed() -> None:
    found = inventory(installed("numpy"), conda_only=["mkl-2023-h1"])
    assert make_lock(found, offline=True).left_out == ("mkl-2023-h1 comes from conda alone",)
    packed = make_lock(found.replace(has_conda_pack=True), offline=True)
    assert packed.is_packed and not packed.left_out and "# conda mkl-2023-h1\n" in packed.text
    assert not make_lock(found.replace(has_conda_pack=True), offline=False).is_packed


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (None, ("index", "")),
        ({"url": "file:///a%20b", "dir_info": {"editable": True}}, ("editable", "/a b")),
        ({"url": "file:///a", "dir_info": {}}, ("folder", "/a")),
        ({"url": "file:///w/a-1.whl", "archive_info": {}}, ("wheel", "/w/a-1.whl")),
        ({"url": "file:///w/a-1.tar.gz", "archive_info": {}}, ("archive", "/w/a-1.tar.gz")),
        (
            {"url": "https://me:secret@git.org/a.git?token=secret", "vcs_info": {"vcs": "git"}},
            ("git", "https://git.org/a.git"),
        ),
        ({"url": "https://me:secret@x.org/a.whl", "archive_info": {}}, ("url", "https://x.org/a.whl")),
        ({"no": "url"}, ("index", "")),
    ],
)
def test_origin_without_secrets(record: object, expected: tuple[str, str]) -> None:
    assert read_origin(None if record is None else json.dumps(record)) == expected
