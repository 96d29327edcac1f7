"""Watches over the process group that a script makes for itself.

A script with a hard-coded MASTER_ADDR, or one that spawns its own workers, started on two hosts, trains twice and
succeeds twice. Under `paceline run` it fails at once and says why. No torch is imported here: the watch is put in place
when, and if, the script imports torch.distributed.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from paceline.errors import WorldError

_WATCHED_MODULE = "torch.distributed.distributed_c10d"


def watch_process_group() -> None:
    """Wrap `init_process_group` as soon as torch.distributed is imported in this process."""
    if int(os.environ.get("PACELINE_WORLD_SIZE", "1")) > 1:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _WATCHED_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_wrap(module: ModuleType) -> None:
                load(module)
                module.init_process_group = _watched(module.init_process_group, module)  # type: ignore[attr-defined]

            spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec


def _watched(init_process_group: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    @functools.wraps(init_process_group)
    def init(*args: Any, **kwargs: Any) -> None:
        problem = find_problem(os.environ, kwargs.get("world_size", -1), kwargs.get("init_method"))
        if problem is not None:
            raise WorldError(problem, hint=_HINT)
        init_process_group(*args, **kwargs)
        problem = find_problem(os.environ, module.get_world_size(), None)  # type: ignore[attr-defined]
        if problem is not None:
            raise WorldError(problem, hint=_HINT)

    return init


_HINT = (
    "let the script take RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment, "
    "as under torchrun; or start it on one host with one rank, if it starts its own workers"
)


def find_problem(environ: Mapping[str, str], world_size: int, init_method: str | None) -> str | None:
    """What is wrong with the process group that is about to be made, or None.

    `world_size`: what the script passes, or -1 where it leaves it to the environment.
    """
    started = int(environ["PACELINE_WORLD_SIZE"])
    if world_size is None or world_size < 0:
        world_size = int(environ.get("WORLD_SIZE", started))
    if world_size == started:
        return None
    where = init_method or f"{environ.get('MASTER_ADDR', '?')}:{environ.get('MASTER_PORT', '?')}"
    return (
        f"paceline started {started} ranks, but this script makes a process group of {world_size} of its own "
        f"(at {where}): every host would train by itself"
    )
