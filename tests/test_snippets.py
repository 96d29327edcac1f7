"""The reading of code blocks, and the comparison by shape."""

from __future__ import annotations

import pytest

import snippets

README = """
# x
```console
$ paceline run -H a,b \\
    train.py
[a:0] step 400  loss 2.31
...
done in 1m15s
$ true
```

<!-- run: lab h1, exit 3 -->
```console
$ false
```
<!-- run: no, because it takes a day -->

```console
$ sleep 86400
```

```python
import paceline
```
"""


def test_blocks_and_where_they_run() -> None:
    first, lab, never, python = snippets.find_blocks(README)
    assert (first.language, first.line, first.host, first.exit_code) == ("console", 3, None, 0)
    assert (lab.host, lab.exit_code) == ("h1", 3)
    assert never.not_run_because == "it takes a day"
    assert python.language == "python"


def test_unknown_place_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"line 2: 'run: somewhere'"):
        snippets.find_blocks("<!-- run: somewhere -->\n```console\n$ x\n```\n")


def test_steps() -> None:
    first, second = snippets.split_steps(snippets.find_blocks(README)[0].text)
    assert first.command.split() == ["paceline", "run", "-H", "a,b", "train.py"]
    assert first.expected == ("[a:0] step 400  loss 2.31", "...", "done in 1m15s")
    assert second == snippets.Step(command="true", expected=())


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("step 400  loss 2.31  41.2k tokens/s", "step 1,200 loss 0.98 980 tokens/s"),
        ("took 1m15s", "took 9.8s"),
        ("took 2h03m04s", "took 12s"),
        ("1.9 GB sent", "12 kB sent"),
        ("941 Mb/s", "9.4 Gb/s"),
        ("  alice  computing ███████▌ 97 %", "  alice  computing ██ 5 %"),
        ("logs in ~/.local/state/paceline/runs/7f", "logs in /tmp/x/runs/2026-01-01"),
        ("\x1b[32mok\x1b[0m", "ok"),
        ("─ paceline ─ 4 ranks ──────", "─ paceline ─ 2 ranks ───"),
    ],
)
def test_same_shape(left: str, right: str) -> None:
    assert snippets.shape_of(left) == snippets.shape_of(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [("loss 2.31", "losses 2.31"), ("2 hosts", "2 ranks"), ("loss nan", "loss 2.31"), ("ok", "failed")],
)
def test_other_shape(left: str, right: str) -> None:
    assert snippets.shape_of(left) != snippets.shape_of(right)


@pytest.mark.parametrize(
    ("expected", "actual", "agrees"),
    [
        ((), "whatever", True),
        (("a 1", "b 2"), "a 3\n\nb 4\n", True),
        (("a 1",), "a 1\nb 2", False),
        (("a 1", "b 2"), "a 1", False),
        (("a 1", "..."), "a 1\nx\ny", True),
        (("...", "b 1"), "x\ny\nb 7", True),
        (("...", "b 1"), "x\ny", False),
        (("a", "…", "z 1", "y"), "a\nb\nz 2\ny", True),
        (("saved … in 3s",), "saved step 7 in 12s", True),
        (("saved … in 3s",), "lost step 7 in 12s", False),
    ],
)
def test_mismatch(expected: tuple[str, ...], actual: str, agrees: bool) -> None:
    assert (snippets.find_mismatch(expected, actual) == "") == agrees


def test_python_names() -> None:
    program = "import paceline\nrun = paceline.init()\nrun.prepare(m)\nrun.fly()\npaceline.Trainer\n"
    names = {"public": {"init"}, "run_members": {"prepare"}}
    assert sorted(snippets.find_unknown_names(program, **names)) == ["paceline.Trainer", "run.fly"]
    assert snippets.find_unknown_names("from paceline import init, x", **names) == ["x"]


def test_diff_is_read_as_its_result() -> None:
    text = "```diff\n+import paceline\n model = f()\n-old(model)\n+new(model)\n```\n"
    assert snippets.python_of(snippets.find_blocks(text)[0]) == "import paceline\nmodel = f()\nnew(model)\n"
