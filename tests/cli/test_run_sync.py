"""`--sync`: a mistake is told before anything starts; what was asked for is shown and reaches the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.run import run
from paceline.errors import InputError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sync evry train.py", "--sync evry: 'evry' is no way to synchronise"),
        ("--sync local:H=0 train.py", "--sync local:H=0: H is 0; expected a whole number, at least 1"),
        ("--sync diloco:int9 -m train", "--sync diloco:int9: 'int9' is not known to diloco"),
        ("--sync every -- torchrun train.py", "--sync goes with a Python script or module"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(words: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        run.main(words.split(), standalone_mode=False)
    assert raised.value.message.startswith(message)


@pytest.mark.launcher
def test_a_dry_run_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run.main(["--sync", "every:accumulate=2:int4", "--dry-run", "train.py"], standalone_mode=False)
    shown = capsys.readouterr().out.splitlines()
    assert "sync: every:int4:accumulate=2, from --sync: hosts exchange gradients of 2 batches as int4" in shown
    assert "  PACELINE_SYNC=every:int4:accumulate=2" in shown
