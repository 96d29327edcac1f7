"""How the agent gets onto a host: what stands on the remote command line, and what then travels over the channel.

The command line holds no secret and nothing of the user's: it starts the interpreter, which reads one line of Python
(LOADER) and then this package itself. The package is kept on the host under the hash of its content, so that Python's
compiled files are there the next time; the ranks import it from the same folder.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import shlex
import zlib

import paceline

NO_PYTHON = b"\x01paceline-no-python\x01"
OLD_PYTHON = b"\x01paceline-old-python\x01"
NOT_INSTALLED = b"\x01paceline-not-installed\x01"

_DRIVER_ONLY = {"checks", "cli", "envs", "explain", "lab", "watch"}
_ERRANDS = {
    "checks": {"__init__", "calls", "group_errand", "pair_errand", "speed_errand", "details", "details_machine"},
    "envs": {"__init__", "inventory", "listing", "looking", "making", "pulling", "scripts"},
}
"""What of them runs on hosts."""

_FIRST_STAGE = (
    'import sys;sys.path[:]=[q for q in sys.path if q];f=open(0,"rb",0,closefd=False);exec(eval(f.readline()))'
)

LOADER = r"""
import os, sys
def say(mark, text):
    os.write(1, mark + text.encode() + b"\n")
    sys.exit(127)
if sys.version_info < (3, 10):
    say({old!r}, "%d.%d at %s" % (sys.version_info[0], sys.version_info[1], sys.executable))
digest, size = f.readline().decode().split()
data = b""
while len(data) < int(size):
    piece = f.read(int(size) - len(data))
    if not piece:
        sys.exit(1)
    data += piece
base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
folder = os.path.join(base, "paceline", "runtime", digest)
try:
    if not os.path.isdir(folder):
        import json, shutil, tempfile, zlib
        os.makedirs(os.path.join(base, "paceline"), mode=0o700, exist_ok=True)  # projects' copies will lie there, too
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        part = tempfile.mkdtemp(prefix=digest + ".", dir=os.path.dirname(folder))  # hosts may share this home
        for path, text in json.loads(zlib.decompress(data)).items():
            os.makedirs(os.path.dirname(os.path.join(part, path)), exist_ok=True)
            with open(os.path.join(part, path), "w", encoding="utf-8") as file:
                file.write(text)
        try:
            os.rename(part, folder)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
            if not os.path.isdir(folder):
                raise
except OSError as error:
    say({not_installed!r}, "%s: %s" % (error.strerror, error.filename))
sys.path.insert(0, folder)
sys.dont_write_bytecode = False  # whatever the user's own code is to do: this is compiled once, not at each start
from paceline.launch.agent import main
main()
"""

_SEARCHED = (
    '"$HOME"/.venv/bin/python "$HOME"/venv/bin/python "$HOME"/miniconda3/bin/python '
    '"$HOME"/miniconda3/envs/*/bin/python "$HOME"/anaconda3/bin/python "$HOME"/anaconda3/envs/*/bin/python '
    "/opt/conda/bin/python /usr/local/bin/python3 /usr/bin/python3"
)
_DESCRIBE = (
    "import sys,importlib.util as u;"
    'print(sys.executable,"%d.%d"%sys.version_info[:2],"with torch" if u.find_spec("torch") else "without torch")'
)

SITE_CUSTOMIZE = '''\
"""Runs at the start of every Python process of a run: watches over its process group, then makes way."""
import os
import sys

if os.environ.get("PACELINE_RUN_ID") and sys.version_info >= (3, 10):
    # Whole lines, at once: else they would be late, lost with a rank that is killed, or torn between its processes.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    _asked, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    from paceline.train.guard import watch_process_group

    sys.dont_write_bytecode = _asked
    watch_process_group()

# A sitecustomize of the user's own must run as well: hide this one, and import again.
_here = os.path.dirname(os.path.abspath(__file__))
_path = sys.path[:]
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _here]
_ours = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # noqa: F401
except ImportError as error:
    if getattr(error, "name", "sitecustomize") != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = _ours
finally:
    sys.path[:] = _path + [entry for entry in sys.path if entry not in _path]
'''


def pack_runtime() -> tuple[str, bytes]:
    """This package as (hash, compressed JSON of path -> source), with the sitecustomize that ranks start with."""
    root = pathlib.Path(paceline.__file__).parent
    paths = [path.relative_to(root) for path in sorted(root.rglob("*.py")) if _travels(path)]
    files = {f"paceline/{path.as_posix()}": (root / path).read_text(encoding="utf-8") for path in paths}
    files["sitecustomize.py"] = SITE_CUSTOMIZE
    data = zlib.compress(json.dumps(files).encode(), 1)
    return hashlib.sha256(data).hexdigest()[:20], data


def _travels(path: pathlib.Path) -> bool:
    folder = path.parent.name
    return folder not in _DRIVER_ONLY or path.stem in _ERRANDS.get(folder, ())


def first_bytes(digest: str, data: bytes) -> bytes:
    """What the driver sends as soon as the channel is open."""
    loader = LOADER.format(old=OLD_PYTHON, not_installed=NOT_INSTALLED)
    return f"{loader!r}\n{digest} {len(data)}\n".encode() + data


def local_command(python: str) -> list[str]:
    """The agent's command on this machine."""
    return [python, "-c", _FIRST_STAGE]


def remote_command(python: str) -> str:
    """The agent's command for ssh: one word for any login shell, which needs nothing on its PATH but `sh`.

    Where there is no such interpreter it prints NO_PYTHON and the interpreters that it found.
    """
    path = f'"$HOME"/{shlex.quote(python[2:])}' if python.startswith("~/") else shlex.quote(python)
    script = (
        f'p={path}; case "$p" in */*) ;; *) p=$(command -v "$p") ;; esac; '
        f'if [ -f "$p" ] && [ -x "$p" ]; then exec "$p" -c {shlex.quote(_FIRST_STAGE)}; fi; '
        f'printf {shlex.quote(_octal(NO_PYTHON))}; echo "$p"; '
        f"for q in {_SEARCHED}; do "
        f'[ -x "$q" ] && "$q" -c {shlex.quote(_DESCRIBE)} 2>/dev/null; done; exit 127'
    )
    return f"sh -c {shlex.quote(script)}"


def _octal(mark: bytes) -> str:
    return "".join(f"\\{byte:03o}" if byte < 32 else chr(byte) for byte in mark)
