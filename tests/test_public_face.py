"""What `import paceline` offers: exactly what is listed, and what is listed is there."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import types

import pytest

import paceline

ROOT = pathlib.Path(__file__).parents[1]


def test_all_is_sorted() -> None:
    assert paceline.__all__ == sorted(paceline.__all__)


def test_all_is_what_is_exposed() -> None:
    own = {
        name
        for name, value in vars(paceline).items()
        if getattr(value, "__module__", "").startswith("paceline")
        and not name.startswith("_")
        and not isinstance(value, types.ModuleType)
    }
    assert own | paceline._HOMES.keys() | {"__version__"} == set(paceline.__all__)


def test_every_name_is_there() -> None:
    """In a process of its own, since this loads PyTorch."""
    pytest.importorskip("safetensors", reason="needs the extra [torch]")
    code = "import paceline; print(*[n for n in paceline.__all__ if getattr(paceline, n, None) is None])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (result.returncode, result.stdout.split()) == (0, []), result.stderr


def test_strategies_need_no_torch() -> None:
    code = "import paceline, sys; print(paceline.parse_sync('local:H=4') == paceline.Outer(period_steps=4)); "
    code += "print(paceline.EveryStep(codec=paceline.Codec(name='int8')), 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert result.stdout.split() == ["True", "every:int8", "False"], result.stderr


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        paceline.Trainer  # noqa: B018


def test_version_is_the_newest_in_the_changelog() -> None:
    entries = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] == paceline.__version__
