"""Is the PyTorch here new enough? Asked before any module that imports it is loaded."""

from __future__ import annotations

import importlib
import re

from paceline.errors import InputError

MINIMUM_TORCH = (2, 4)


def require_torch() -> None:
    """Raises InputError when PyTorch or safetensors is missing, or PyTorch is older than MINIMUM_TORCH."""
    wanted = ".".join(map(str, MINIMUM_TORCH))
    try:
        found = str(importlib.import_module("torch").__version__)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError(
            f"training needs PyTorch {wanted} or newer, and there is none in this Python",
            hint=f'pip install "torch>={wanted}"',
        ) from None
    check_torch_version(found)
    try:
        importlib.import_module("safetensors")
    except ModuleNotFoundError:
        raise InputError(
            "training needs safetensors, and it is not in this Python", hint="pip install safetensors"
        ) from None


def check_torch_version(found: str) -> None:
    """Raises InputError for a version text such as '2.3.1+cu121' that is older than MINIMUM_TORCH."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers < MINIMUM_TORCH:
        wanted = ".".join(map(str, MINIMUM_TORCH))
        raise InputError(
            f"training needs PyTorch {wanted} or newer; found {found}",
            hint=f'pip install --upgrade "torch>={wanted}"',
        )
