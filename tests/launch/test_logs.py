"""From bytes to lines on a screen: whole, prefixed, never torn."""

from __future__ import annotations

import dataclasses
import errno
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.logs import Line, LineSplitter, RankLogs, Screen

CLEAR = "\r\x1b[2K"


def split(*pieces: bytes) -> list[Line]:
    splitter = LineSplitter()
    return [line for piece in pieces for line in splitter.feed(piece)] + splitter.end()


def texts(*pieces: bytes) -> list[str]:
    return [line.text for line in split(*pieces)]


def bar(text: str, *, live: bool = False) -> Line:
    return Line(text=text, is_bar=True, live=live)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"o", b"ne\ntw", b"o\n"], ["one", "two"]),
        ([b"one\r\ntwo\r\n"], ["one", "two"]),
        ([b"one\r", b"\ntwo\r\n"], ["one", "two"]),
        ([b"no end"], ["no end"]),
        ([b"one\n\n\ntwo"], ["one", "", "", "two"]),
        (["größe ☃\n".encode()[:3], "größe ☃\n".encode()[3:]], ["größe ☃"]),
        ([bytes([byte]) for byte in "☃ größe\n".encode()], ["☃ größe"]),
        ([b"\xff\xfe\n"], ["��"]),
        ([b""], []),
    ],
)
def test_lines_are_whole_however_they_were_cut(pieces: list[bytes], expected: list[str]) -> None:
    assert texts(*pieces) == expected
    assert not any(line.is_bar for line in split(*pieces))


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        # tqdm: the carriage return stands before each state
        (
            [b"\r 10%", b"\r 50%", b"\r100%", b"\n"],
            [bar(" 10%", live=True), bar(" 50%", live=True), bar("100%", live=True), bar("100%")],
        ),
        # others: it stands after
        ([b"10%\r", b"50%\r", b"100%\n"], [bar("50%", live=True), bar("100%")]),
        ([b"\r1\r2\r3\n"], [bar("3")]),
        # a bar that the rank never finished
        ([b"\r 10%"], [bar(" 10%", live=True), bar(" 10%")]),
        # one that is wiped, and a line of a logger in its place
        ([b"\r 10%", b"\r     \r", b"saved\n"], [bar(" 10%", live=True), bar("     ", live=True), Line(text="saved")]),
        ([b"\r 10%\r     \rsaved\n"], [Line(text="saved")]),
    ],
)
def test_progress_bars(pieces: list[bytes], expected: list[Line]) -> None:
    assert split(*pieces) == expected


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\r\n")), st.lists(st.integers(1, 9)))
def test_any_cut_of_plain_text_is_the_same_line(text: str, cuts: list[int]) -> None:
    data, pieces = f"first\n{text}\nlast".encode(), []
    for size in [*cuts, 1000]:
        pieces.append(data[:size])
        data = data[size:]
    pieces.append(data)
    assert texts(*pieces) == ["first", text, "last"]


@given(st.lists(st.sampled_from([b"a", b"\r", b"\n", b" ", "ä".encode()[:1], "ä".encode()[1:]]), max_size=30))
def test_any_bytes_give_lines_without_line_ends(pieces: list[bytes]) -> None:
    for line in split(*pieces):
        assert "\n" not in line.text and "\r" not in line.text


@dataclasses.dataclass
class Sink:
    """A text stream that remembers each write; a terminal or not; one that may break."""

    tty: bool = False
    error: Exception | None = None
    writes: list[str] = dataclasses.field(default_factory=list)

    def write(self, text: str) -> None:
        if self.error is not None:
            raise self.error
        self.writes.append(text)

    def flush(self) -> None:
        return None

    def isatty(self) -> bool:
        return self.tty


def make_screen(stdout: Sink, stderr: Sink | None = None, *, colour: bool = False) -> Screen:
    return Screen(["[a:0]", "[b:1]"], stdout, stderr or Sink(), colour=colour)


def test_each_line_is_one_write_with_its_prefix() -> None:
    out, err = Sink(), Sink()
    screen = make_screen(out, err)
    screen.show(0, "stdout", Line(text="hello"))
    screen.show(1, "stdout", Line(text=""))
    screen.show(1, "stderr", Line(text="oh"))
    screen.say("paceline: so")
    assert out.writes == ["[a:0] hello\n", "[b:1] \n"]
    assert err.writes == ["[b:1] oh\n", "paceline: so\n"]


def test_colours_are_stable_and_differ() -> None:
    out = Sink(tty=True)
    screen = make_screen(out, colour=True)
    for rank in (0, 1, 0):
        screen.show(rank, "stdout", Line(text="x"))
    assert out.writes[0] == out.writes[2] == "\x1b[36m[a:0]\x1b[0m x\n"
    assert out.writes[1] == "\x1b[33m[b:1]\x1b[0m x\n"


def test_a_bar_is_drawn_in_place_and_lines_go_above_it() -> None:
    out = Sink(tty=True)
    screen = make_screen(out)
    screen.show(0, "stdout", bar("10%", live=True))
    screen.show(1, "stdout", Line(text="hello"))
    screen.show(0, "stdout", bar("100%"))
    screen.show(1, "stdout", Line(text="bye"))
    assert out.writes == [
        f"{CLEAR}[a:0] 10%",
        f"{CLEAR}[b:1] hello\n[a:0] 10%",
        f"{CLEAR}[a:0] 100%\n",
        "[b:1] bye\n",
    ]


def test_without_a_terminal_only_the_last_state_of_a_bar_is_shown() -> None:
    out = Sink()
    screen = make_screen(out)
    screen.show(0, "stdout", bar("10%", live=True))
    screen.show(0, "stdout", bar("100%"))
    assert out.writes == ["[a:0] 100%\n"]


@pytest.mark.parametrize("tty", [True, False])
def test_bars_of_other_ranks_are_hidden(tty: bool) -> None:
    out = Sink(tty=tty)
    screen = make_screen(out)
    screen.show(1, "stdout", bar("10%", live=True))
    screen.show(1, "stdout", bar("100%"))
    assert out.writes == []


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.EIO, "Input/output error")])
def test_a_reader_that_has_gone_does_not_end_the_run(error: OSError) -> None:
    out, err = Sink(error=error), Sink()
    screen = make_screen(out, err)
    for _ in range(3):
        screen.show(0, "stdout", Line(text="hello"))
    screen.show(0, "stderr", Line(text="still seen"))
    assert err.writes == ["[a:0] still seen\n"]


def test_a_terminal_that_knows_no_unicode_gets_escapes() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    make_screen(out).show(0, "stdout", Line(text="größe"))  # type: ignore[arg-type]
    out.flush()
    assert raw.getvalue() == b"[a:0] gr\\xf6\\xdfe\n"


def test_files_hold_the_raw_bytes_of_each_rank_and_stream(tmp_path: Path) -> None:
    out = Sink()
    logs = RankLogs(tmp_path, make_screen(out))
    logs.begin_attempt(0)
    data = b"\r 10%\r100%\nhello\xff\nno end"
    for index in range(0, len(data), 5):
        logs.feed(1, "stdout", data[index : index + 5])
    logs.feed(0, "stderr", b"oh\n")
    logs.end(1)
    logs.store(0, "stderr", "Traceback: \udcff\n")
    logs.close()
    assert (tmp_path / "rank-1.stdout.log").read_bytes() == data
    assert (tmp_path / "rank-0.stderr.log").read_bytes() == b"oh\nTraceback: \\udcff\n"
    assert out.writes == ["[b:1] hello�\n", "[b:1] no end\n"]


def test_a_restart_has_files_of_its_own_and_loses_no_last_line(tmp_path: Path) -> None:
    out = Sink()
    logs = RankLogs(tmp_path, make_screen(out))
    logs.begin_attempt(0)
    logs.feed(0, "stdout", b"first")
    logs.begin_attempt(1)
    logs.feed(0, "stdout", b"second\n")
    assert logs.path(0, "stdout") == tmp_path / "rank-0.restart-1.stdout.log"
    logs.close()
    assert out.writes == ["[a:0] first\n", "[a:0] second\n"]
    assert (tmp_path / "rank-0.stdout.log").read_bytes() == b"first"
    assert (tmp_path / "rank-0.restart-1.stdout.log").read_bytes() == b"second\n"


def test_a_full_disk_is_remembered_and_the_screen_has_it_all(tmp_path: Path) -> None:
    out = Sink()
    logs = RankLogs(tmp_path / "gone", make_screen(out))
    logs.feed(0, "stdout", b"one\n")
    logs.feed(0, "stdout", b"two\n")
    logs.close()
    assert out.writes == ["[a:0] one\n", "[a:0] two\n"]
    assert logs.problem == f"No such file or directory: {tmp_path / 'gone'}"
