"""Which files are read, what can't be read, and what is left alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from script_cases import SETUP, look

from paceline.checks import reading, rules_saving
from paceline.checks.findings import CHECKS, Check
from paceline.checks.script import check_script

SAVE = 'torch.save(model, "model.pt")\n'
BAD_SAVE = "import torch\n" + SAVE


def told(folder: Path, content: bytes, name: str = "train.py") -> list[tuple[str, str, str]]:
    (folder / name).write_bytes(content)
    return [(one.status, one.where, one.text) for one in check_script(folder / name, folder)]


@pytest.mark.parametrize(
    ("content", "where", "text"),
    [
        (b"x = 1\nif x\n    y\n", "train.py:2", "not valid Python: expected ':'"),
        (b"x = 1\nprint 'loss', x\n", "train.py:2", "this line is Python 2: print 'loss', x"),
        (b"try:\n    pass\nexcept IOError, e:\n    pass\n", "train.py:3", "this line is Python 2: except IOError, e:"),
        (b"x = '\xe4'\n", "train.py:1", "not valid Python: "),
    ],
)
def test_a_syntax_error_is_a_failure_with_its_line(tmp_path: Path, content: bytes, where: str, text: str) -> None:
    ((status, found_where, found_text),) = told(tmp_path, content)
    assert status == "failure" and found_where == where and found_text.startswith(text)


def test_what_is_no_text_is_a_failure(tmp_path: Path) -> None:
    for content in (b"\0\0\0", b"\x89PNG\r\n\x1a\n\0\0"):
        ((status, where, _),) = told(tmp_path, content)
        assert status == "failure" and where.startswith("train.py")


def test_a_notebook_is_told_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "train.ipynb").write_text('{"cells": []}')
    (found,) = check_script(tmp_path / "train.ipynb", tmp_path)
    assert found.text == "train.ipynb is a notebook, which no launcher starts"
    assert found.remedy == "jupyter nbconvert --to script train.ipynb"


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    for name in ("absent.py", "loop.py", "folder.py", "pipe.py"):
        (found,) = check_script(tmp_path / name, tmp_path)
        assert (found.status, found.text) == ("failure", f"there is no file {name}")


def test_a_file_of_data_is_left_out(tmp_path: Path) -> None:
    content = b"x = [" + b"1, " * (reading.MAX_FILE_BYTES // 3) + b"]\n"
    assert told(tmp_path, content) == [("skipped", "train.py", "train.py has over 2 MiB and is not read")]


def test_another_encoding_is_read_if_it_is_declared(tmp_path: Path) -> None:
    content = "# -*- coding: latin-1 -*-\nimport torch\nname = 'ä'; torch.cuda.set_device(0)\n".encode("latin-1")
    (tmp_path / "train.py").write_bytes(content)
    (found,) = check_script(tmp_path / "train.py", tmp_path)
    assert found.where == "train.py:3"
    assert found.remedy.startswith("name = 'ä'; torch.cuda.set_device(int(os.environ")


def test_deep_nesting_is_no_crash(tmp_path: Path) -> None:
    for content in (b"x = " + b"(" * 500 + b"1" + b")" * 500, b"x = " + b"-" * 50000 + b"1\n", b"x" + b".a" * 3000):
        assert {status for status, _, _ in told(tmp_path, content + b"\n")} <= {"failure"}


@pytest.mark.parametrize(
    "statement",
    [
        "import tools",
        "import tools as t",
        "from tools import save",
        "from tools import *",
        "from pkg import inner",
        "from pkg.inner import save",
        "import pkg.inner",
        "def late():\n    import tools\nlate()",
    ],
)
def test_imports_are_followed_in_the_project(tmp_path: Path, statement: str) -> None:
    content = "import torch\ndef save(model):\n    torch.save(model, 'm.pt')\nsave(1)\n"
    modules = {"tools.py": content, "pkg/__init__.py": "", "pkg/inner.py": "from ..tools import save\n" + content}
    found = look(tmp_path, SETUP + statement + "\n", modules=modules)
    assert {one.check for one in found} == {"save-on-every-rank"}


def test_other_folders_are_not_read(tmp_path: Path) -> None:
    project, outside = tmp_path / "project", tmp_path / "outside"
    outside.mkdir()
    (outside / "tools.py").write_text(BAD_SAVE)
    installed = {"venv/lib/site-packages/other.py": BAD_SAVE, "torch/__init__.py": BAD_SAVE}
    text = SETUP + "import tools, torch, venv.lib.site_packages\nfrom venv.lib import other\n"
    assert look(project, text, modules=installed) == []
    (project / "tools.py").symlink_to(outside / "tools.py")
    assert look(project, text, modules=installed) == []


def test_a_script_alone_and_one_outside_its_project(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "train.py").write_text(SETUP + "import absent\n" + SAVE)
    for project in (tmp_path, tmp_path / "here"):
        assert [one.where for one in check_script(tmp_path / "train.py", project)] == ["train.py:10"]


def test_a_circle_of_imports_and_links_comes_to_an_end(tmp_path: Path) -> None:
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "loop.py").symlink_to("loop.py")
    modules = {"a.py": "import b", "b.py": "import a, train, loop, again.a, again.again.b\n"}
    assert look(tmp_path, "import a\n", modules=modules) == []


def test_not_more_than_so_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_FILES", 3)
    modules = {f"m{number}.py": f"import m{number + 1}\n" for number in range(5)}
    (found,) = look(tmp_path, "import m0\n", modules=modules)
    assert (found.status, found.where) == ("skipped", "m2.py")


def test_a_module_that_cannot_be_parsed_is_named(tmp_path: Path) -> None:
    found = look(tmp_path, "import tools\n", modules={"tools.py": "def\n"})
    assert [(one.check, one.where) for one in found] == [("unreadable-script", "tools.py:1")]


@pytest.mark.parametrize(
    ("comment", "is_found"),
    [
        ("", True),
        ("  # paceline: ignore", False),
        ("  #paceline:ignore[save-on-every-rank]", False),
        ("  # paceline: ignore[print-on-every-rank, save-on-every-rank]", False),
        ("  # paceline: ignore[print-on-every-rank]", True),
    ],
)
def test_a_comment_turns_checks_off(tmp_path: Path, comment: str, is_found: bool) -> None:
    text = SETUP + SAVE.rstrip() + comment + "\nprint(1)\n"
    assert bool(look(tmp_path, text)) is is_found
    several = SETUP + 'torch.save(\n    model, "model.pt"\n)' + comment + "\nprint(1)\n"
    assert bool(look(tmp_path, several)) is is_found


def test_a_comment_counts_for_its_own_statement_only(tmp_path: Path) -> None:
    text = SETUP + "if args.save:  # paceline: ignore\n    " + SAVE
    assert [one.where for one in look(tmp_path, text)] == ["train.py:10"]


@pytest.mark.parametrize(
    ("module", "is_found"),
    [
        ("def unused():\n    {save}", False),
        ("def used():\n    {save}", True),
        ("def other():\n    {save}", False),
        ("class Used:\n    def used(self):\n        {save}", True),
        ("class Unused:\n    def used(self):\n        {save}", False),
        ("if __name__ == '__main__':\n    {save}", False),
        ("if TYPE_CHECKING:\n    {save}", False),
        ("{save}", True),
    ],
)
def test_what_is_never_reached_is_left_alone(tmp_path: Path, module: str, is_found: bool) -> None:
    modules = {"tools.py": "import torch\n" + module.format(save=SAVE)}
    text = SETUP + "import tools\ntools.used()\ntools.Used().used()\ndef other(): pass\nother()\n"
    assert bool(look(tmp_path, text, modules=modules)) is is_found


def test_names_in_quotes_are_reached(tmp_path: Path) -> None:
    modules = {"tools.py": "import torch\ndef fit():\n    torch.cuda.set_device(0)\n"}
    assert look(tmp_path, 'import tools\ngetattr(tools, "fit")()\n', modules=modules) != []
    assert look(tmp_path, "import tools\n", modules=modules) == []


def test_a_function_called_as_its_module(tmp_path: Path) -> None:
    launch = "import torch\ndef launch():\n    " + SAVE
    modules = {"engine/__init__.py": "from .launch import *\n", "engine/launch.py": launch}
    found = look(tmp_path, SETUP + "from engine import launch\nlaunch()\n", modules=modules)
    assert [one.where for one in found] == ["engine/launch.py:3"]


def test_a_rule_that_fails_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> list[object]:
        raise LookupError("lost")

    fail.__module__ = rules_saving.__name__
    monkeypatch.setitem(CHECKS, "failing", Check(name="failing", title="", sections={}, function=fail))
    found = look(tmp_path, SETUP + SAVE)
    assert [(one.check, one.status) for one in found] == [("save-on-every-rank", "warning"), ("failing", "crashed")]
    assert found[1].text == "this rule failed on the file: LookupError: lost"


def test_a_long_chain_of_calls_takes_no_minute(tmp_path: Path) -> None:
    """4,000 functions took over a minute when every round looked at all that were left; now it is three seconds."""
    functions = "".join(f"def f{i}(x):\n    return f{i + 1}(x)\n" for i in range(1000))
    script = tmp_path / "chain.py"
    script.write_text(f"{functions}def f1000(x):\n    return x\nf0(1)\n")
    began_s = time.process_time()
    assert check_script(script, tmp_path) == []
    assert time.process_time() - began_s < 5
