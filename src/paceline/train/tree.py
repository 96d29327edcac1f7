"""Nested Python values as JSON plus a dictionary of tensors, and back. What pickle would do, without its
power."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import CheckpointError

_TENSOR, _TUPLE, _DICT = "$tensor", "$tuple", "$dict"


def flatten(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON; its tensors go into `tensors` under names that begin with `path`.

    Knows None, bool, int, float, str, list, tuple, dict and tensors. Raises CheckpointError that names
    anything else.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return {_TENSOR: path}
    if isinstance(value, (list, tuple)):
        items = [flatten(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, dict):
        # Pairs, because JSON would turn the keys into text, and an optimizer numbers its parameters.
        pairs = [
            [flatten(key, f"{path}.key", tensors), flatten(item, f"{path}.{key}", tensors)]
            for key, item in value.items()
        ]
        return {_DICT: pairs}
    raise CheckpointError(
        f"{path} is a {type(value).__name__} and can't be kept in a checkpoint",
        hint="a checkpoint keeps None, bool, int, float, str, list, tuple, dict and tensors",
    )


def rebuild(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The inverse of `flatten`."""
    if isinstance(value, list):
        return [rebuild(item, tensors) for item in value]
    if isinstance(value, dict):
        kind, content = next(iter(value.items()))
        if kind == _TENSOR:
            return tensors[content]
        if kind == _TUPLE:
            return tuple(rebuild(item, tensors) for item in content)
        return {rebuild(key, tensors): rebuild(item, tensors) for key, item in content}
    return value
