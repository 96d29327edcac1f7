"""Train PyTorch models on the machines and the network you already have.

Importing this package does no work and does not import PyTorch; the names below are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import CheckpointError, HostError, InputError, PacelineError, WorldError

if TYPE_CHECKING:
    from paceline.codec import Codec
    from paceline.strategy import EveryStep, Outer, parse_sync
    from paceline.train.batches import Batches
    from paceline.train.run import Run, init

__version__ = "0.1.0"

__all__ = [
    "Batches",
    "CheckpointError",
    "Codec",
    "EveryStep",
    "HostError",
    "InputError",
    "Outer",
    "PacelineError",
    "Run",
    "WorldError",
    "__version__",
    "init",
    "parse_sync",
]

_HOMES = {
    "Batches": "paceline.train.batches",
    "Codec": "paceline.codec",
    "EveryStep": "paceline.strategy",
    "Outer": "paceline.strategy",
    "Run": "paceline.train.run",
    "init": "paceline.train.run",
    "parse_sync": "paceline.strategy",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    import importlib

    if home.startswith("paceline.train."):
        importlib.import_module("paceline.train.requirements").require_torch()
    return getattr(importlib.import_module(home), name)
