"""Nested Python values as JSON plus a dictionary of tensors, and back. What pickle would do, without its
power."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import CheckpointError
from paceline.train.checks import printable

_TENSOR, _TUPLE, _DICT = "$tensor", "$tuple", "$dict"
_MAX_DEPTH = 100
_KEY_TYPES = (type(None), bool, int, float, str)
_HINT = "a checkpoint keeps None, bool, int, float, str, list, tuple, dict and dense, real tensors"


def flatten(value: Any, path: str, tensors: dict[str, torch.Tensor], *, above: tuple[int, ...] = ()) -> Any:
    """`value` as JSON; its tensors go into `tensors`, numbered, because keys joined to a name need not be
    unique.

    Knows None, bool, int, float, str, list, tuple, dict and dense, real tensors. `path` says where `value` is,
    and `above` holds the ids of the containers around it. Raises CheckpointError that names the place of anything
    else, of a container that holds itself, and of one more than 100 deep.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        _require_plain(value, path)
        name = str(len(tensors))
        tensors[name] = value
        return {_TENSOR: name}
    if not isinstance(value, (list, tuple, dict)):
        raise _refused(path, f"is a {type(value).__name__}")
    if id(value) in above:
        raise _refused(path, "holds itself")
    if len(above) == _MAX_DEPTH:
        raise _refused(path, f"is more than {_MAX_DEPTH} containers deep")
    above = (*above, id(value))
    if isinstance(value, dict):
        # Pairs, because JSON would turn the keys into text, and an optimizer numbers its parameters.
        pairs = [
            [_flatten_key(key, path), flatten(item, f"{path}.{_shown(key)}", tensors, above=above)]
            for key, item in value.items()
        ]
        return {_DICT: pairs}
    items = [flatten(item, f"{path}.{index}", tensors, above=above) for index, item in enumerate(value)]
    return items if isinstance(value, list) else {_TUPLE: items}


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


def _flatten_key(key: Any, path: str) -> Any:
    """Exact types only: what comes back must find the same entries as the key that went."""
    if type(key) in _KEY_TYPES:
        return key
    if type(key) is tuple:
        return {_TUPLE: [_flatten_key(part, path) for part in key]}
    raise _refused(path, f"has a key that is a {type(key).__name__}")


def _require_plain(tensor: torch.Tensor, path: str) -> None:
    if tensor.is_meta:
        raise _refused(path, "is a tensor without content, on the meta device,")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise _refused(path, "is a sparse or nested tensor")
    if tensor.is_complex() or tensor.is_quantized:
        raise _refused(path, f"is a {str(tensor.dtype).removeprefix('torch.')} tensor")


def _shown(key: Any) -> str:
    return printable(str(key)) if type(key) in _KEY_TYPES else type(key).__name__


def _refused(path: str, what: str) -> CheckpointError:
    shown = path if len(path) <= 200 else f"{path[:200]}..."
    return CheckpointError(f"{shown} {what} and can't be kept in a checkpoint", hint=_HINT)
