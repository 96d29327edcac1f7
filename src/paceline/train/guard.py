"""Watches over the process group that a script makes for itself, and over its models where `--sync` was given.

A script with a hard-coded MASTER_ADDR, or one that spawns its own workers, started on two hosts, trains twice and
succeeds twice. Under `paceline run` it fails at once and says why. No torch is imported here: the watch is put in place
when, and if, the script imports torch.distributed.

From then on `train/progress.py` watches whether anything moves in this rank.

With `--sync`, `train/unmodified.py` is called for each DistributedDataParallel that is built, and at a good end.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from paceline.errors import WorldError
from paceline.events import RankRaised, emit

reporting_pid = 0
"""The process whose exceptions the worker reports; all others that are refused report it themselves."""
made_process_group = False
"""This process has joined the run's world."""

saw_model = False
"""`--sync` was applied to a model of the script's, or the script was told why not."""
has_failed = False
"""This rank ends, but not well: it takes part in nothing any more."""


def watch_process_group() -> None:
    """Wrap `init_process_group` as soon as torch.distributed is imported in this process."""
    if int(os.environ.get("PACELINE_WORLD_SIZE", "1")) > 1:
        _after_import("torch.distributed.distributed_c10d", _watch_start)


def watch_models() -> None:
    """Let `--sync` have each DistributedDataParallel that this process builds, until `leave_models_alone`."""
    _after_import("torch.distributed.distributed_c10d", _watch_end)
    _after_import("torch.nn.parallel.distributed", _watch_models)


def leave_models_alone() -> None:
    """`paceline.init` was called: the run synchronises its model by itself."""
    global saw_model, _builds_models
    saw_model, _builds_models = True, False


def finish_models() -> None:
    """The script, or its process group, has come to a good end."""
    wrapping = sys.modules.get("paceline.train.wrapping")  # no model was attached where nobody has imported it
    if wrapping is not None and not has_failed:
        wrapping.finish()


def count_steps() -> int | None:
    """Optimizer steps that this rank has done; None where they were not counted."""
    progress = sys.modules.get("paceline.train.progress")
    return progress.count_steps() if progress is not None else None


_builds_models = True


def _after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Calls `change` with a module when it has been imported: now, or later."""
    if (module := sys.modules.get(name)) is not None:
        change(module)
        return
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _AfterImport)), None)
    if finder is None:
        finder = _AfterImport()
        sys.meta_path.insert(0, finder)
    finder.changes.setdefault(name, []).append(change)


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.changes: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        changes = self.changes.pop(fullname, None)
        if changes is None:
            return None
        if not self.changes:
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                for change in changes:
                    change(module)

            spec.loader.exec_module = load_and_change
        return spec


def _replace(module: ModuleType, name: str, wrapped: Callable[..., None]) -> None:
    """In the module and, where that was imported long ago, under the name by which scripts know it."""
    original = getattr(module, name)
    for home in (module, sys.modules.get("torch.distributed")):
        if getattr(home, name, None) is original:
            setattr(home, name, wrapped)


def _watch_start(module: ModuleType) -> None:
    _replace(module, "init_process_group", _watched(module.init_process_group, module))


def _watch_end(module: ModuleType) -> None:
    destroy_process_group = module.destroy_process_group

    @functools.wraps(destroy_process_group)
    def destroy(group: Any = None) -> None:
        is_failing = isinstance(sys.exc_info()[1], Exception)  # called while an error passes by
        if group in (None, module.GroupMember.WORLD) and not is_failing:
            finish_models()
        destroy_process_group(group)

    _replace(module, "destroy_process_group", destroy)


def _watch_models(module: ModuleType) -> None:
    model_class = module.DistributedDataParallel
    init = model_class.__init__

    @functools.wraps(init)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _builds_models:
            init(self, *args, **kwargs)
            return
        global saw_model
        saw_model = True
        from paceline.train import unmodified  # needs PyTorch, which has been imported whole only by now

        unmodified.build(self, init, *args, **kwargs)

    model_class.__init__ = build


def _watched(init_process_group: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    import inspect  # PyTorch has imported it; at the top, every process of a run would pay for it

    signature = inspect.signature(init_process_group)

    @functools.wraps(init_process_group)
    def init(*args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(TypeError):  # of a wrong call, which the real one explains better
            asked = signature.bind(*args, **kwargs).arguments
            known = {name: asked[name] for name in ("world_size", "rank") if asked.get(name) is not None}
            meeting = "a store" if asked.get("store") is not None else asked.get("init_method") or "env://"
            _refuse(find_problem(os.environ, **known, meeting=meeting))
        _watch_progress()
        init_process_group(*args, **kwargs)
        made = {"world_size": module.get_world_size(), "rank": module.get_rank()}
        _refuse(find_problem(os.environ, **made, meeting="where they have met"))
        global made_process_group
        made_process_group = True

    return init


def _watch_progress() -> None:
    if os.environ.get("TORCHELASTIC_RUN_ID") == os.environ["PACELINE_RUN_ID"]:
        with contextlib.suppress(Exception):  # a script must never fail for want of a watch
            from paceline.train import progress  # needs PyTorch, which has been imported whole only by now

            progress.start()


def _refuse(problem: str | None) -> None:
    if problem is None:
        return
    error = WorldError(problem, hint=_HINT)
    if os.getpid() != reporting_pid:
        # A parent that does not look at how its workers end would make a success of it.
        emit(RankRaised(summary=problem, traceback=f"{error}\n"))
    raise error


_THIS_MACHINE = {"localhost", "127.0.0.1", "::1", "[::1]"}
_HINT = (
    "let the script take RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment, "
    "as under torchrun; or start it on one host with one rank, if it starts its own workers"
)


def find_problem(environ: Mapping[str, str], *, world_size: int = -1, rank: int = -1, meeting: str) -> str | None:
    """What is wrong with the process group that is about to be made, or None.

    `world_size` and `rank`: what the script passes, or -1 where it leaves it to the environment. `meeting`: where the
    ranks are to meet, as an `init_method`.
    """
    if environ.get("TORCHELASTIC_RUN_ID") != environ["PACELINE_RUN_ID"]:
        return None  # `paceline run -- torchrun ...`: that launcher answers for its own world
    started, started_rank = int(environ["PACELINE_WORLD_SIZE"]), int(environ["PACELINE_RANK"])
    if world_size < 0:
        world_size = int(environ.get("WORLD_SIZE", started))
    if rank < 0:
        rank = int(environ.get("RANK", started_rank))
    address = meeting
    if meeting.startswith("env://"):
        address = environ.get("MASTER_ADDR", "?")
    elif meeting.startswith("tcp://"):
        address = meeting.removeprefix("tcp://").rpartition(":")[0]
    if world_size != started:
        return (
            f"paceline started {started} ranks, but this script makes a process group of {world_size} of its own "
            f"(at {address}): every host would train by itself"
        )
    if rank != started_rank:
        return (
            f"paceline started this process as rank {started_rank}, but the script joins as rank {rank}: "
            "it numbers its workers by itself, and two of them would have the same number"
        )
    if int(environ["PACELINE_NUM_HOSTS"]) > 1 and address in _THIS_MACHINE:
        return (
            f"the script's ranks are to meet at {address}, which is another machine on each of the "
            f"{environ['PACELINE_NUM_HOSTS']} hosts: they would wait for each other until the time limit"
        )
    return None
