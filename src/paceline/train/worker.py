"""The process of one rank: runs the user's script as `__main__` and sees it to a clean end.

    python -c "from paceline.train.worker import main; main()" script train.py --epochs 3
    python -c "from paceline.train.worker import main; main()" module package.train --epochs 3

The script sees what it would see under plain Python: its own `__main__`, `sys.argv` and `sys.path`. When it has come to
its end the process leaves without the interpreter's teardown, in which Gloo's threads abort in one run of seven
(torch 2.13: 3 of 20 two-rank runs). A script that raises is reported at once, before the other ranks notice.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import io
import os
import sys
import threading
import traceback
from types import CodeType, ModuleType, TracebackType

from paceline.errors import PacelineError
from paceline.events import RankFinished, RankRaised, emit

_TRACEBACK_LIMIT_CHARS = 20_000


def main() -> None:
    """Run what `sys.argv` names; never returns."""
    kind, target, *arguments = sys.argv[1:]
    exit_code = 1
    try:
        code, module = _load(kind, target)
        sys.argv = [module.__file__ or target, *arguments]
        sys.modules["__main__"] = module
        exec(code, module.__dict__)  # this is what running a script is
        exit_code = 0
    except SystemExit as error:
        exit_code = _code_of(error)
    except BaseException as error:  # noqa: BLE001  # also KeyboardInterrupt ends the rank, and is reported
        _report(error)
    if exit_code == 0:
        emit(RankFinished())
    _leave(exit_code)


def _load(kind: str, target: str) -> tuple[CodeType, ModuleType]:
    if kind == "script":
        return _load_script(target)
    return _load_module(target)


def _load_script(path: str) -> tuple[CodeType, ModuleType]:
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    with io.open_code(os.path.abspath(path)) as file:
        code = compile(file.read(), path, "exec")
    module = ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    return code, module


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    """As `python -m name` does: a package means its __main__."""
    sys.path[0] = os.getcwd()
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec and hasattr(spec.loader, "get_code") else None  # type: ignore[union-attr]
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {name!r} that can be run", name=name)
    module = ModuleType("__main__")
    module.__spec__ = spec  # multiprocessing's spawned children find the module by it
    module.__package__ = spec.parent
    module.__loader__ = spec.loader
    module.__file__ = spec.origin
    module.__dict__["__builtins__"] = __builtins__
    return code, module


def _code_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _report(error: BaseException) -> None:
    """Send the traceback, without our own frames, to whoever started us; the driver shows it once, at the end."""
    if isinstance(error, PacelineError):
        text = f"{error}\n"
        summary = f"{error.message}"
    else:
        text = "".join(traceback.format_exception(type(error), error, _user_frames(error.__traceback__)))
        summary = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1]
    if os.environ.get("PACELINE_EVENT_FD") is None:
        sys.stderr.write(text)
    emit(RankRaised(summary=summary[:500], traceback=text[-_TRACEBACK_LIMIT_CHARS:]))


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _leave(exit_code: int) -> None:
    """What the interpreter does at its end, but for tearing itself down under threads that are still running."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's own threads
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(exit_code)
