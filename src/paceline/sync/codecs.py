"""How values become bytes for the wire, and back: the kernels of fp16, int8, int4 and topk.

A row of encoded bytes is all codes, then a bfloat16 scale per group of neighbours. The scale is rounded up, so that the
largest value of its group has a code, and codes are computed with the rounded scale. Decoding is one multiplication of
code and scale: the same bits on every machine, compiled or not. A group with a value that isn't finite gets such a
scale and decodes to values that aren't finite; a finite one below 3.3e38 stays finite.

Codes of int8 and int4 are signed and lie in 32-bit words: a word holds one value of each quarter (int8) or eighth
(int4) of its group, so that whole vector registers are scaled, rounded and shifted into place. The words are declared
as float32, the one type that PyTorch's compiler loads at full speed with AVX2 (int32 or int8: four times slower).

Each kernel is a plain PyTorch function. `prepare` compiles those of a codec for a device; until then, and where that
fails, they run as they are, with the same result.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.codec import Codec, CodecName

_ROUND_UP = 1 + 2**-8 + 2**-15
"""Times this, a float32 that is rounded to the nearest bfloat16 is not below where it started."""
_SMALLEST = 2.0**-126
"""The least scale: its reciprocal is finite, so that a block of zeros needs no care."""
COMPILED_FROM_VALUES = 1 << 16
"""A row of fewer values is encoded sooner than the checks before a compiled kernel are done (0.1 ms)."""
_OPTIONS = {"cpp.vec_isa_ok": True, "compile_threads": 1}
"""PyTorch would try the compiler on each kind of vector instruction first (17 s), and start processes that help."""


def _scales(values: Tensor, largest_code: int) -> Tensor:
    largest = values.abs().amax((-2, -1), keepdim=True)
    return (largest * (_ROUND_UP / largest_code)).clamp_min(_SMALLEST).to(torch.bfloat16)


def _encode_fp16(values: Tensor, codes: Tensor) -> Tensor:
    # the power of two at or below the largest value: codes end below 2**15, where float16 hasn't ended yet
    largest = values.abs().amax((-2, -1), keepdim=True)
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)
    scales = (power * 2.0**-14).clamp_min(_SMALLEST)
    codes.copy_(values * scales.reciprocal())
    return scales.to(torch.bfloat16)


def _decode_fp16(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * scales.float()


def _words(bits: int) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """How codes of so many bits are written into words, and read."""

    def encode(values: Tensor, codes: Tensor) -> Tensor:
        scales = _scales(values, 2 ** (bits - 1) - 1)
        rounded = torch.round(values * scales.float().reciprocal()).to(torch.int32) & (2**bits - 1)
        shifted = [part << bits * place for place, part in enumerate(rounded.split(1, -2))]
        codes.copy_(functools.reduce(torch.bitwise_or, shifted).view(torch.float32))
        return scales

    def decode(codes: Tensor, scales: Tensor) -> Tensor:
        # up to the word's end, which drops the codes above it, and back down, which brings its sign along
        up = torch.arange(32 - bits, -1, -bits, dtype=torch.int32, device=codes.device).view(-1, 1)
        return (codes.view(torch.int32) << up >> (32 - bits)).float() * scales.float()

    return encode, decode


class _Kernels(NamedTuple):
    """What runs for one codec. A group is seen as its quarters (int8), eighths (int4) or as one part (the others):

    values   [..., groups, parts, values of a part]  float32
    codes    [..., groups, 1, words]
    scales   [..., groups, 1, 1]                     bfloat16
    """

    encode: Callable[[Tensor, Tensor], Tensor]
    """(values, codes written in place) -> scales"""
    decode: Callable[[Tensor, Tensor, Tensor], None]
    """(codes, scales, values written in place)"""
    decode_sum: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    """(codes [N, ...], scales [N, ...], weights [N], values written in place)"""


def _kernels(encode: Callable[[Tensor, Tensor], Tensor], decode: Callable[[Tensor, Tensor], Tensor]) -> _Kernels:
    def decode_into(codes: Tensor, scales: Tensor, values: Tensor) -> None:
        values.copy_(decode(codes, scales))

    def decode_sum_into(codes: Tensor, scales: Tensor, weights: Tensor, values: Tensor) -> None:
        # term by term: compiled, a sum over a dimension would be written to memory of its own first (5 times slower)
        terms = [decode(codes[row], scales[row]) * weights[row] for row in range(codes.shape[0])]
        values.copy_(functools.reduce(torch.add, terms))

    return _Kernels(encode, decode_into, decode_sum_into)


_EAGER: dict[CodecName, _Kernels] = {
    "fp16": _kernels(_encode_fp16, _decode_fp16),
    "int8": _kernels(*_words(8)),
    "int4": _kernels(*_words(4)),
}
_CODES: dict[CodecName, torch.dtype] = {
    "fp16": torch.float16,
    "int8": torch.float32,
    "int4": torch.float32,
}
_compiled: dict[tuple[CodecName, str], _Kernels] = {}
_prepared: dict[tuple[CodecName, str, int], str] = {}


@torch.no_grad()
def encode(codec: Codec, values: Tensor, out: Tensor) -> None:
    """Write `values` for the wire.

    values  [rows, width] float32, contiguous; width is a multiple of `codec.block_values`
    out     [rows, codec.encoded_bytes(width)] uint8, contiguous; written in place
    """
    if codec.name == "topk":
        _encode_topk(codec, values, out)
        return
    groups, (codes, scales) = _groups(codec, values), _parts(codec, out)
    if (kernels := _compiled_for(codec, values)) is None:
        scales.copy_(_EAGER[codec.name].encode(groups, codes))
        return
    for row in range(len(values)):
        scales[row].copy_(kernels.encode(_alone(groups[row]), _alone(codes[row])))


@torch.no_grad()
def decode(codec: Codec, encoded: Tensor, out: Tensor) -> None:
    """The inverse of `encode`, from [rows, codec.encoded_bytes(width)] uint8 into `out` [rows, width] float32."""
    if codec.name == "topk":
        out.zero_()
        for row, into in zip(encoded, out, strict=True):
            _add_topk(codec, row, 1.0, into)
        return
    groups, (codes, scales) = _groups(codec, out), _parts(codec, encoded)
    if (kernels := _compiled_for(codec, out)) is None:
        _EAGER[codec.name].decode(codes, scales, groups)
        return
    kernels.decode(_alone(codes), _alone(scales), _alone(groups))


@torch.no_grad()
def decode_sum(codec: Codec, encoded: Tensor, weights: Tensor, out: Tensor) -> None:
    """The weighted sum of N encoded rows.

    encoded  [N, codec.encoded_bytes(width)] uint8, contiguous
    weights  [N] float32
    out      [width] float32, contiguous; written in place
    """
    if codec.name == "topk":
        out.zero_()
        for row, weight in zip(encoded, weights, strict=True):
            _add_topk(codec, row, weight, out)
        return
    groups, (codes, scales) = _groups(codec, out), _parts(codec, encoded)
    is_prepared = (codec.name, out.device.type, len(encoded)) in _prepared
    kernels = (is_prepared and _compiled_for(codec, out)) or _EAGER[codec.name]
    kernels.decode_sum(_alone(codes), _alone(scales), weights, _alone(groups))


def prepare(codec: Codec, device: torch.device, num_hosts: int) -> str | None:
    """Compile the kernels of `codec` for `device`, once per process, so that no step waits for it; sums of `num_hosts`
    rows. What is compiled is kept on disk where PyTorch keeps such things, so that the next process is sooner ready.

    Returns a line that says how long it took, or why kernels run uncompiled; None where there is nothing to compile.
    """
    if codec.name not in _EAGER:
        return None
    key = codec.name, device.type, num_hosts
    if key not in _prepared:
        began_s = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what the compiler could do better is nothing that the user can mend
                kernels = _Kernels(*map(_compile, _EAGER[codec.name]))
                _run_once(codec, device, num_hosts, kernels)
        except Exception as error:  # noqa: BLE001 - whatever a compiler may lack; the kernels work without it
            lines = [line for line in str(error).splitlines() if line and not line.endswith("raised:")]
            reason = next(iter(lines), type(error).__name__)
            _prepared[key] = f"{codec} runs uncompiled on the {device.type}, several times slower: {reason}"
        else:
            _compiled[key[:2]] = kernels
            _prepared[key] = f"{codec} compiled for the {device.type} in {time.monotonic() - began_s:.1f} s"
    return _prepared[key]


def _compile(kernel: Callable[..., Any]) -> Any:
    return torch.compile(kernel, options=_OPTIONS)


@torch.no_grad()
def _run_once(codec: Codec, device: torch.device, num_hosts: int, kernels: _Kernels) -> None:
    """Compile for any number of groups, wherever they begin in memory: these begin at odd places."""
    num_blocks, rows = 5, max(2, num_hosts)
    width = num_blocks * codec.block_values
    for num_rows in (rows, 1):  # one row alone is another way in which tensors lie
        groups = _groups(codec, torch.ones(num_rows * width + 1, device=device)[1:].view(num_rows, width))
        encoded = torch.zeros(num_rows, codec.encoded_bytes(width), dtype=torch.uint8, device=device)
        codes, scales = _parts(codec, encoded)
        kernels.decode(*(_any_size(tensor) for tensor in (codes, scales, groups)))
        if num_rows == 1:
            kernels.encode(_any_size(groups[0]), _any_size(codes[0]))
        else:
            weights = torch.ones(rows, device=device)
            kernels.decode_sum(_any_size(codes, 1), _any_size(scales, 1), weights, _any_size(groups[1]))


def _any_size(tensor: Tensor, first: int = 0) -> Tensor:
    """Its number of groups, and of rows from dimension `first` on, is not to be compiled in."""
    tensor = _alone(tensor)
    for dim in range(first, tensor.dim() - 2):
        if tensor.shape[dim] > 1:
            torch._dynamo.mark_dynamic(tensor, dim)
    return tensor


def _alone(tensor: Tensor) -> Tensor:
    """The same memory, as if nothing lay before or behind it: compiled code is made for one way in which tensors are
    views of others, and each other way would be compiled anew."""
    return torch.from_dlpack(tensor)


def _compiled_for(codec: Codec, values: Tensor) -> _Kernels | None:
    if values.shape[-1] < COMPILED_FROM_VALUES:
        return None
    return _compiled.get((codec.name, values.device.type))


def _groups(codec: Codec, values: Tensor) -> Tensor:
    """`values` [..., width] as [..., groups, parts, values of a part]."""
    parts = {"int8": 4, "int4": 8}.get(codec.name, 1)
    return values.unflatten(-1, (-1, parts, codec.group_values // parts))


def _parts(codec: Codec, encoded: Tensor) -> tuple[Tensor, Tensor]:
    """The codes [rows, groups, 1, words] and scales [rows, groups, 1, 1] in `encoded` [rows, bytes]."""
    groups = encoded.shape[1] // codec.encoded_bytes(codec.block_values) * codec.scales_per_block
    codes_bytes = encoded.shape[1] - groups * torch.bfloat16.itemsize
    codes = encoded[:, :codes_bytes].view(_CODES[codec.name])
    scales = encoded[:, codes_bytes:].view(torch.bfloat16)
    return codes.unflatten(1, (groups, 1, -1)), scales[..., None, None]


def _encode_topk(codec: Codec, values: Tensor, out: Tensor) -> None:
    """Per row: codes, indices (two in three bytes), scales."""
    blocks = values.unflatten(1, (-1, codec.block_values))
    places = blocks.abs().topk(codec.kept_values, sorted=False).indices
    kept = blocks.gather(-1, places)
    scales = _scales(kept[..., None, :], 127)
    codes = torch.round(kept * scales.squeeze(-1).float().reciprocal()).to(torch.int8)
    first, second = places.unflatten(-1, (-1, 2)).unbind(-1)
    packed = torch.stack((first & 255, first >> 8 | (second & 15) << 4, second >> 4), -1).to(torch.uint8)
    parts = codes.view(torch.uint8), packed, scales.view(torch.uint8)
    torch.cat([part.flatten(1) for part in parts], 1, out=out)


def _add_topk(codec: Codec, encoded: Tensor, weight: Tensor | float, out: Tensor) -> None:
    """Add `weight` times what a row holds to `out` [width]. No place occurs twice: the order makes no difference."""
    kept, blocks = codec.kept_values, len(out) // codec.block_values
    codes, packed, scales = encoded.split((kept * blocks, kept * blocks * 3 // 2, 2 * blocks))
    low, middle, high = packed.view(blocks, -1, 3).int().unbind(-1)
    places = torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), -1).view(blocks, kept).long()
    scales = scales.clone().view(torch.bfloat16).view(blocks, 1)  # the clone begins where two bytes may be read as one
    values = codes.view(torch.int8).view(blocks, kept).float() * scales.float()
    out.view(blocks, -1).scatter_add_(1, places, values * weight)
