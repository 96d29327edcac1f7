"""What a rank is doing, from the stack of its main thread: the collective that it waits in, and the script's own line.

Nothing is wrapped and nothing is noted while the script runs: the stack is read when nothing has moved for a while.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Sequence

from paceline.records import Record

SCRIPT = "the script, outside any collective"
GRADIENTS = "backward (gradients)"
BUFFERS = "forward (buffers)"

_C10D = "/torch/distributed/distributed_c10d.py"
_FUNCTIONAL = "/torch/distributed/_functional_collectives.py"
_MODEL = "/torch/nn/parallel/distributed.py"
_NAMED = {
    (_MODEL, "_sync_buffers"): BUFFERS,
    ("/torch/distributed/algorithms/join.py", "__exit__"): "join() of uneven inputs",
}
_NAMED_IF_NOTHING_ELSE = {
    (_MODEL, "__init__"): "DistributedDataParallel(...)",
    (_MODEL, "_pre_forward"): "forward (gradient buckets)",
    ("/torch/autograd/graph.py", "_engine_run_backward"): GRADIENTS,
}
_WAITS_FOR_WORK = re.compile(r"\.wait\(")
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = (sysconfig.get_path("stdlib") + os.sep, _OWN, "<")
_PACKAGES = re.compile(r"/(site|dist)-packages/")
_TEXT_LIMIT_CHARS = 80


class Frame(Record):
    """One call on a stack."""

    path: str
    function: str
    line: int
    is_main: bool = False
    """Of the module that runs as `__main__`."""

    @property
    def is_the_scripts(self) -> bool:
        """Not PyTorch's, Python's, paceline's or of another package."""
        return self.is_main or not (self.path.startswith(_LIBRARY) or _PACKAGES.search(self.path))


class Standing(Record):
    """Where a rank stands; the fields are those of `events.RankStalled`."""

    doing: str
    waits: bool
    where: str
    text: str


def find_standing(stack: Sequence[Frame], *, folder: str, text: str, busy: bool) -> Standing:
    """What the stack of a main thread, innermost call first, says.

    folder  where the rank was started; files below it are named from there
    text    the source line of the innermost frame that is the script's
    busy    the thread uses the processor: then a backward pass computes, and does not wait
    """
    index = script_index(stack)
    inner = stack[:index]
    name, is_sure = _find_collective(inner, text)
    where = _short(stack[index], folder) if index < len(stack) else ""
    return Standing(
        doing=name or _describe_script(inner),
        waits=name is not None and (is_sure or not busy),
        where=where,
        text=text[:_TEXT_LIMIT_CHARS],
    )


def script_index(stack: Sequence[Frame]) -> int:
    """The innermost frame of the script's; the length of the stack where there is none."""
    return next((index for index, frame in enumerate(stack) if frame.is_the_scripts), len(stack))


def _find_collective(inner: Sequence[Frame], text: str) -> tuple[str | None, bool]:
    """The name of what waits for other ranks, and whether it does nothing but wait.

    inner  the calls below the script's own, innermost first. The outermost that is known counts: a collective may be
           made of others
    """
    if _imports(inner):
        return None, False
    if not inner and _WAITS_FOR_WORK.search(text):
        return "wait() of a collective", True  # what else can be waited for has frames of Python below the script's
    for frame in reversed(inner):
        if frame.path.endswith((_C10D, _FUNCTIONAL)) and not frame.function.startswith(("_", "<")):
            return frame.function, True
        if (name := _look_up(frame, _NAMED)) is not None:
            return name, True
    for frame in reversed(inner):
        if (name := _look_up(frame, _NAMED_IF_NOTHING_ELSE)) is not None:
            return name, False
        if frame.path.startswith(_OWN + "sync" + os.sep):
            return "an exchange between hosts", False
        if "/torch/distributed/" in frame.path:
            return f"torch.distributed ({frame.function})", False
    return None, False


def _imports(inner: Sequence[Frame]) -> bool:
    return any(frame.function == "_find_and_load" for frame in inner)


def _look_up(frame: Frame, names: dict[tuple[str, str], str]) -> str | None:
    return next(
        (name for (path, function), name in names.items() if frame.function == function and frame.path.endswith(path)),
        None,
    )


def _describe_script(inner: Sequence[Frame]) -> str:
    if _imports(inner):
        return "an import"
    if any("/torch/_dynamo/" in frame.path or "/torch/_inductor/" in frame.path for frame in inner):
        return "compilation (torch.compile)"
    if any(frame.path.endswith("/torch/utils/data/dataloader.py") for frame in inner):
        return "its data loader"
    return SCRIPT


def _short(frame: Frame, folder: str) -> str:
    path = frame.path.removeprefix(folder.rstrip(os.sep) + os.sep)
    return f"{_PACKAGES.split(path)[-1]}:{frame.line}"
