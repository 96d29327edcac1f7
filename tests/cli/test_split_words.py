"""Where the options of paceline end and the words of the script begin."""

from __future__ import annotations

import pytest

from paceline.cli.run import split_words

VALUED = {"-H", "--hosts", "--env", "--python"}


@pytest.mark.parametrize(
    ("typed", "own", "kind", "words"),
    [
        ("train.py", "", "script", "train.py"),
        ("-H a:2 train.py -H b --env X", "-H a:2", "script", "train.py -H b --env X"),
        ("--hosts=a --no-ship train.py", "--hosts=a --no-ship", "script", "train.py"),
        ("-Ha:2 train.py", "-Ha:2", "script", "train.py"),
        ("-H a -m pkg.train --env FOO=1 --python x", "-H a", "module", "pkg.train --env FOO=1 --python x"),
        ("--module=pkg.train -H b", "", "module", "pkg.train -H b"),
        ("--env -m train.py", "--env -m", "script", "train.py"),
        ("-H a -- ./run.sh -m --env", "-H a", "command", "./run.sh -m --env"),
        ("-- -m x", "", "command", "-m x"),
        ("train.py -- x", "", "script", "train.py -- x"),
        ("-H a", "-H a", "script", ""),
        ("-m", "", "module", ""),
    ],
)
def test_split(typed: str, own: str, kind: str, words: str) -> None:
    assert split_words(typed.split(), VALUED) == (own.split(), kind, tuple(words.split()))
