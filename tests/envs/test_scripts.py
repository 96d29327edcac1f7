"""The commands of an environment name its interpreter, whatever its path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_packages import info_of, install

from paceline.envs.inventory import find_distributions
from paceline.envs.scripts import copy_script, write_entry_points

FOLDERS = ["short", "with space", "/".join(["deep" * 10] * 4)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_commands_run(tmp_path: Path, folder: str) -> None:
    where = tmp_path / folder
    where.mkdir(parents=True)
    python = where / "python"
    python.symlink_to(sys.executable)
    files = {
        f"{info_of('a')}/entry_points.txt": "[console_scripts]\na-run = a.main:app.go [extra]\n[other]\nnot-me = a:b\n",
        "a/main.py": "class app:\n    @staticmethod\n    def go():\n        print('went')\n        return 7\n",
    }
    install(tmp_path, "a", files=files)
    write_entry_points(list(find_distributions([str(tmp_path)])), str(where), str(python))
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([where / "a-run"], capture_output=True, text=True, env=env, timeout=20)
    assert (done.stdout, done.returncode) == ("went\n", 7), done.stderr
    assert sorted(os.listdir(where)) == ["a-run", "python"]


def test_first_lines_of_other_scripts(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("#!/gone/bin/python3.11\nprint(1)\n")
    (tmp_path / "program").write_bytes(b"\x7fELF python\n")
    (tmp_path / "program").chmod(0o755)
    copy_script(str(tmp_path / "old"), str(tmp_path / "new"), "/e/bin/python")
    assert (tmp_path / "new").read_text() == "#!/e/bin/python\nprint(1)\n"
    copy_script(str(tmp_path / "program"), str(tmp_path / "same"), "/e/bin/python")
    assert (tmp_path / "same").read_bytes() == b"\x7fELF python\n"
    assert os.access(tmp_path / "new", os.X_OK) and os.access(tmp_path / "same", os.X_OK)
