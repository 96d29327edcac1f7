"""The process of one rank: runs the user's script as `__main__` and sees it to a clean end.

    python -c "from paceline.train.worker import main; main()" script train.py --epochs 3
    python -c "from paceline.train.worker import main; main()" module package.train --epochs 3

The script sees what it would see under plain Python: its own `__main__`, `sys.argv` and `sys.path`. When it has come to
its end the process leaves without the interpreter's teardown, in which Gloo's threads abort in one run of seven
(torch 2.13: 3 of 20 two-rank runs). A script that raises is reported at once, before the other ranks notice.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib.machinery
import importlib.util
import io
import os
import sys
import threading
import traceback
from types import CodeType, ModuleType, TracebackType

from paceline.errors import PacelineError
from paceline.events import RankFinished, RankRaised, emit
from paceline.train import guard

_TRACEBACK_LIMIT_CHARS = 20_000


def main() -> None:
    """Run what `sys.argv` names; never returns."""
    guard.reporting_pid = os.getpid()
    kind, target, *arguments = sys.argv[1:]
    folder = os.getcwd()
    exit_code = 1
    sync = os.environ.get("PACELINE_SYNC")
    if sync is not None:
        guard.watch_models()
    try:
        code, module = _load(kind, target)
        sys.argv = [target if kind == "script" else module.__file__ or target, *arguments]
        sys.modules["__main__"] = module
        exec(code, module.__dict__)  # this is what running a script is
        exit_code = 0
    except SystemExit as error:
        exit_code = _code_of(error)
    except BaseException as error:  # noqa: BLE001  # also KeyboardInterrupt ends the rank, and is reported
        _report(error, folder)
    if exit_code == 0:
        exit_code = _end_sync(sync, folder)
    guard.has_failed = exit_code != 0
    if exit_code == 0:
        trained_alone = "torch" in sys.modules and not guard.made_process_group
        alone = trained_alone and int(os.environ.get("PACELINE_WORLD_SIZE", "1")) > 1
        emit(RankFinished(alone=alone, steps=guard.count_steps()))
    _leave(exit_code)


def _end_sync(sync: str | None, folder: str) -> int:
    """The exit code, after the last exchange between hosts."""
    try:
        guard.finish_models()
    except BaseException as error:  # noqa: BLE001  # as above
        _report(error, folder)
        return 1
    if sync is not None and not guard.saw_model and os.environ.get("PACELINE_RANK") == "0":
        print(f"paceline: --sync {sync} had no effect: this script made no DistributedDataParallel model", flush=True)
    return 0


def _load(kind: str, target: str) -> tuple[CodeType, ModuleType]:
    if kind == "script":
        return _load_script(target)
    return _load_module(target)


def _load_script(path: str) -> tuple[CodeType, ModuleType]:
    sys.path[0] = os.path.dirname(os.path.realpath(path))  # as Python does, also for a link to a script
    path = os.path.join(os.getcwd(), path)  # like Python, which leaves the dots in it
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)  # our __future__ imports are not the script's
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__["__builtins__"] = builtins
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
    module.__dict__["__builtins__"] = builtins
    return code, module


def _code_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _report(error: BaseException, folder: str) -> None:
    """Send the traceback, without our own frames, to whoever started us; the driver shows it once, at the end.

    Files below `folder`, where the rank was started, are named from there: so the same error reads the same everywhere.
    """
    frames = _user_frames(error.__traceback__)
    if isinstance(error, PacelineError):
        text, summary = f"{error}\n", error.message
    else:
        text = "".join(traceback.format_exception(type(error), error, frames))
        summary = _summary(error)
    if sys.excepthook is not sys.__excepthook__:
        # An experiment tracker's, say, which marks the run as failed. What it prints goes nowhere: the hook that
        # torch.distributed sets prints the traceback, on every rank, that the driver shows once.
        with contextlib.suppress(BaseException), contextlib.redirect_stderr(io.StringIO()):
            sys.excepthook(type(error), error, frames)
    if os.environ.get("PACELINE_EVENT_FD") is None:
        sys.stderr.write(text)
    text = text.replace(f'File "{folder}/', 'File "')
    emit(RankRaised(summary=summary[:500], traceback=text[-_TRACEBACK_LIMIT_CHARS:]))


def _summary(error: BaseException) -> str:
    """`ValueError: ...`, the first line of it; what a SyntaxError shows of the source comes before."""
    lines = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
    said = next((line for line in lines if type(error).__name__ in line.partition(":")[0]), lines[-1])
    if said.rstrip().endswith(":"):  # torch.multiprocessing's, around the traceback of a child: that one's last line
        said = next((line for line in reversed(lines) if line[:1].strip()), said)
    return said


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
    for thing in [*gc.get_objects(), sys.stdout, sys.stderr]:
        # The teardown would also write out files that the script has left open.
        if issubclass(type(thing), io.BufferedIOBase | io.TextIOBase):
            with contextlib.suppress(BaseException):
                thing.flush()
    os._exit(exit_code)
