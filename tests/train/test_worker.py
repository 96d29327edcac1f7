"""The process of one rank: the script must not see that it was not started by plain Python."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.events import name_descriptor

pytestmark = pytest.mark.launcher

WORKER = "from paceline.train.worker import main; main()"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """How a rank's process ended."""

    exit_code: int
    out: str
    err: str
    events: list[dict[str, Any]]

    @property
    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]


def run_python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=30)


def run_rank(folder: Path, *words: str, events: bool = True) -> Ended:
    """Run `script train.py ...` or `module name ...` as the agent does."""
    read_fd, write_fd = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", WORKER, *words],
            cwd=folder,
            env={**os.environ, "PACELINE_EVENT_FD": name_descriptor(write_fd)} if events else None,
            pass_fds=(write_fd,),
            capture_output=True,
            text=True,
            timeout=30,
        )
    finally:
        os.close(write_fd)
        with open(read_fd, encoding="utf-8") as file:
            lines = file.read().splitlines()
    return Ended(
        exit_code=done.returncode, out=done.stdout, err=done.stderr, events=[json.loads(line) for line in lines]
    )


def run_script(folder: Path, text: str, *arguments: str, events: bool = True) -> Ended:
    (folder / "train.py").write_text(text)
    return run_rank(folder, "script", "train.py", *arguments, events=events)


SELF_PORTRAIT = """
'''A docstring.'''
import json, os, sys
import helper
names = sorted(set(globals()) - {"__cached__", "__annotations__"})
class A:
    x: int
print(json.dumps([__name__, __file__, __doc__, __package__, str(__spec__), type(__loader__).__name__, sys.argv,
    sys.path[0], helper.__file__, names, sys.modules["__main__"].__dict__ is globals(), str(A.__annotations__),
    os.getcwd(), __builtins__.__name__]))
"""


@pytest.mark.parametrize("path", ["train.py", "./train.py", "sub/../train.py", "{}/train.py", "link.py"])
def test_a_script_sees_what_plain_python_shows_it(tmp_path: Path, path: str) -> None:
    (tmp_path / "sub").mkdir()
    home = tmp_path / "real" if path == "link.py" else tmp_path
    home.mkdir(exist_ok=True)
    (home / "train.py").write_text(SELF_PORTRAIT)
    (home / "helper.py").write_text("")
    (tmp_path / "link.py").symlink_to("real/train.py")
    path = path.format(tmp_path)
    plain = run_python(tmp_path, path, "--epochs", "3", "a b")
    rank = run_rank(tmp_path, "script", path, "--epochs", "3", "a b")
    assert rank.err == plain.stderr == ""
    assert json.loads(rank.out) == json.loads(plain.stdout)
    assert (rank.exit_code, rank.kinds) == (0, ["rank_finished"])


PACKAGE_PORTRAIT = """
import sys
from . import sibling
from .sibling import VALUE
print(__name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0], VALUE, sibling.__name__)
"""


@pytest.mark.parametrize("name", ["package.train", "package"])
def test_a_module_sees_what_python_m_shows_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "package").mkdir()
    for file, text in {
        "__init__": "",
        "sibling": "VALUE = 7",
        "train": PACKAGE_PORTRAIT,
        "__main__": PACKAGE_PORTRAIT,
    }.items():
        (tmp_path / "package" / f"{file}.py").write_text(text)
    plain = run_python(tmp_path, "-m", name, "--lr", "1")
    rank = run_rank(tmp_path, "module", name, "--lr", "1")
    assert (rank.out, rank.err, rank.exit_code) == (plain.stdout, "", 0)


@pytest.mark.parametrize("name", ["nowhere", "nowhere.train", "package.nothing", "namespace"])
def test_a_module_that_is_not_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "namespace").mkdir()
    rank = run_rank(tmp_path, "module", name)
    (event,) = rank.events
    assert rank.exit_code == 1 and event["kind"] == "rank_raised"
    assert event["summary"].startswith("ModuleNotFoundError: No module named '")
    assert "worker.py" not in event["traceback"]


SPAWNS = """
import dataclasses, multiprocessing, pickle
print("top", __name__)
@dataclasses.dataclass
class Point:
    x: int
def double(point):
    return Point(point.x * 2)
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Point(3))) == Point(3)
    with multiprocessing.get_context("METHOD").Pool(1) as pool:
        print(pool.map(double, [Point(1), Point(2)]))
        pool.close()
        pool.join()
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_find_what_the_script_defines(tmp_path: Path, method: str) -> None:
    rank = run_script(tmp_path, SPAWNS.replace("METHOD", method))
    assert rank.err == ""
    assert rank.out.splitlines()[-1] == "[Point(x=2), Point(x=4)]"
    assert ("top __mp_main__" in rank.out) == (method != "fork")
    assert (rank.exit_code, rank.kinds) == (0, ["rank_finished"])


def test_children_of_a_module_find_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text(SPAWNS.replace("METHOD", "spawn"))
    rank = run_rank(tmp_path, "module", "package.train")
    assert (rank.out.splitlines()[-1], rank.exit_code) == ("[Point(x=2), Point(x=4)]", 0)


@pytest.mark.parametrize(
    ("call", "exit_code", "err"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit(300)", 300 & 0xFF, ""),
        ("sys.exit(-1)", 255, ""),
        ("sys.exit(True)", 1, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("raise SystemExit(4)", 4, ""),
    ],
)
def test_ways_to_exit(tmp_path: Path, call: str, exit_code: int, err: str) -> None:
    text = f"import sys\nprint('before')\n{call}\nprint('after')\n"
    rank = run_script(tmp_path, text)
    plain = run_python(tmp_path, "train.py")
    assert (rank.exit_code, rank.out, rank.err) == (plain.returncode, plain.stdout, plain.stderr)
    assert (rank.exit_code, rank.out, rank.err) == (exit_code, "before\n", err)
    assert rank.kinds == (["rank_finished"] if exit_code == 0 else [])


def test_os_exit_is_no_finish(tmp_path: Path) -> None:
    rank = run_script(tmp_path, "import os\nos._exit(0)\n")
    assert (rank.exit_code, rank.kinds) == (0, [])


RAISES = "def outer():\n    inner()\n\ndef inner():\n    raise ValueError('first\\nsecond')\n\nouter()\n"


def test_an_exception_is_reported_with_the_scripts_frames_only(tmp_path: Path) -> None:
    rank = run_script(tmp_path, RAISES)
    plain = run_python(tmp_path, "train.py")
    (event,) = rank.events
    assert event["kind"] == "rank_raised"
    assert event["summary"] == "ValueError: first"
    assert event["traceback"].splitlines() == plain.stderr.replace(f"{tmp_path}/", "").splitlines()
    assert (rank.exit_code, rank.err) == (1, ""), "the driver shows it"


def test_without_an_agent_the_traceback_is_on_stderr(tmp_path: Path) -> None:
    rank = run_script(tmp_path, RAISES, events=False)
    plain = run_python(tmp_path, "train.py")
    assert (rank.exit_code, rank.err) == (1, plain.stderr)


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("x = = 1\n", "SyntaxError: invalid syntax"),
        ("def f(:\n", "SyntaxError"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("assert 1 == 2, 'odd'\n", "AssertionError: odd"),
        ("class Mine(Exception): pass\nraise Mine('x' * 1000)\n", "Mine: xxx"),
        ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise OSError('no') from e\n", "OSError: no"),
    ],
)
def test_the_summary_is_the_line_that_says_it(tmp_path: Path, text: str, summary: str) -> None:
    (event,) = run_script(tmp_path, text).events
    assert event["summary"].startswith(summary) and len(event["summary"]) <= 500
    assert "worker.py" not in event["traceback"]


def test_an_error_of_ours_has_no_traceback(tmp_path: Path) -> None:
    text = "from paceline.errors import WorldError\nraise WorldError('two worlds', hint='one')\n"
    (event,) = run_script(tmp_path, text).events
    assert (event["summary"], event["traceback"]) == ("two worlds", "two worlds\n  one\n")


def test_a_hook_for_exceptions_is_called(tmp_path: Path) -> None:
    text = "import sys\nsys.excepthook = lambda kind, error, tb: print('hook', kind.__name__, tb.tb_lineno)\n1 / 0\n"
    rank = run_script(tmp_path, text)
    assert (rank.out, rank.exit_code) == ("hook ZeroDivisionError 3\n", 1)


TAIL = """
import atexit, sys, threading, time
atexit.register(lambda: print("atexit"))
go = threading.Event()
def work():
    go.wait(10)
    print("thread")
threading.Thread(target=work).start()
threading.Thread(target=lambda: time.sleep(1000), daemon=True).start()
threading.Timer(0.1, go.set).start()
sys.stdout.write("no line end ")
left_open = open("log.txt", "w")
left_open.write("text")
left_binary = open("log.bin", "wb")
left_binary.write(b"bytes")
"""


@pytest.mark.parametrize(("end", "exit_code"), [("", 0), ("1 / 0\n", 1)])
def test_what_python_does_at_the_end_is_done(tmp_path: Path, end: str, exit_code: int) -> None:
    rank = run_script(tmp_path, TAIL + end)
    assert (rank.out, rank.exit_code) == ("no line end thread\natexit\n", exit_code)
    assert (tmp_path / "log.txt").read_text() == "text"
    assert (tmp_path / "log.bin").read_bytes() == b"bytes"


def test_the_word_comes_before_the_threads_are_waited_for(tmp_path: Path) -> None:
    """The other ranks must not wait for a rank's background threads to learn that it has failed."""
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=(0.5,)).start()\n1 / 0\n"
    rank = run_script(tmp_path, text)
    assert rank.kinds == ["rank_raised"]


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    (event,) = run_rank(tmp_path, "script", "gone.py").events
    assert event["summary"].startswith("FileNotFoundError: [Errno 2] No such file or directory")


def test_a_closed_event_descriptor_does_no_harm(tmp_path: Path) -> None:
    rank = run_script(
        tmp_path, "import os\nos.close(int(os.environ['PACELINE_EVENT_FD'].split(':')[0]))\nprint('fine')\n"
    )
    assert (rank.exit_code, rank.out, rank.err) == (0, "fine\n", "")
