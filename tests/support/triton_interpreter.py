"""Triton's CPU interpreter with right arithmetic for bf16, fp8 and block scales, and with its memory traffic counted.

The stock interpreter keeps bf16 and fp8 as raw integers: products and sums of bf16 are those of its bit patterns, casts
to bf16 truncate, casts to fp8 do not saturate, and an E4M3 block scale is read as UE8M0. `install` replaces the methods
that are wrong; it works on Triton 3.6 to 3.9 and may be called again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as stock

Handle = stock.TensorHandle
FLOATS = {
    tl.float64: torch.float64, tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2,
}  # fmt: skip
# Types that numpy does not have: kept by the interpreter as unsigned integers of that width.
RAW = {
    tl.bfloat16: (np.uint16, torch.int16),
    tl.float8e4nv: (np.uint8, torch.uint8),
    tl.float8e5: (np.uint8, torch.uint8),
}
LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def to_torch(data: np.ndarray, kind: Any) -> torch.Tensor:
    """The interpreter's array of `kind` as a tensor of the same values."""
    flat = torch.from_numpy(np.array(data).reshape(-1).view(_signed(kind)))
    return flat.view(FLOATS[kind]).reshape(np.shape(data))


def _signed(kind: Any) -> Any:
    if kind not in RAW:
        return {tl.float64: np.float64, tl.float32: np.float32, tl.float16: np.float16}[kind]
    return np.int16 if kind is tl.bfloat16 or kind == tl.bfloat16 else np.uint8


def from_torch(values: torch.Tensor, kind: Any) -> np.ndarray:
    """And back."""
    values = values.to(FLOATS[kind]).contiguous()
    if kind not in RAW:
        return values.numpy()
    array, view = RAW[kind]
    return values.reshape(-1).view(view).numpy().view(array).reshape(tuple(values.shape))


def as_float32(handle: Any) -> np.ndarray:
    kind = handle.dtype.scalar
    return to_torch(handle.data, kind).float().numpy() if kind in RAW else handle.data


def convert(data: np.ndarray, source: Any, wanted: Any, rounding: Any = None) -> np.ndarray:
    """A float cast as the hardware does it: to nearest even; to fp8 saturating, NaN kept. Returns raw bits."""
    if source not in FLOATS or wanted not in FLOATS or rounding == stock._ir.ROUNDING_MODE.RTZ:
        return _originals["convert"](data, source, wanted, rounding)
    values = to_torch(data, source)
    values = values if values.dtype == torch.float64 else values.float()
    if wanted in LARGEST:
        limit = LARGEST[wanted]
        values = torch.where(values.isnan(), values, values.clamp(-limit, limit))
    bits = getattr(np, f"uint{wanted.primitive_bitwidth}")
    return np.ascontiguousarray(from_torch(values, wanted)).reshape(-1).view(bits).reshape(np.shape(data))


def binary_op(self: Any, left: Any, right: Any, operation: Callable[..., Any]) -> Any:
    if left.dtype.scalar != tl.bfloat16 or right.dtype.scalar != tl.bfloat16:
        return _originals["binary_op"](self, left, right, operation)
    result = np.asarray(operation(as_float32(left), as_float32(right)))
    if result.dtype == np.bool_:
        return Handle(result, tl.int1)
    return Handle(convert(result.astype(np.float32), tl.float32, tl.bfloat16), tl.bfloat16)


def create_dot(self: Any, a: Any, b: Any, total: Any, *precision: Any) -> Any:
    left, right, kind = as_float32(a), as_float32(b), total.dtype.scalar
    if np.issubdtype(left.dtype, np.integer):
        return Handle(np.matmul(left.astype(np.int32), right.astype(np.int32)) + total.data, kind)
    result = np.matmul(left.astype(np.float32), right.astype(np.float32)) + as_float32(total)
    if kind in RAW:
        return Handle(convert(result, tl.float32, kind), kind)
    return Handle(result.astype(total.data.dtype), kind)


def _scaled(handle: Any, scale: Any, kind: Any, packed_along_k: bool, right: bool) -> np.ndarray:
    """An operand of `tl.dot_scaled` as fp32 values times their scales."""
    if kind == stock._ir.ScaleDotElemTypeTY.E2M1:
        along_k, across = (-2, -1) if right else (-1, -2)
        axis = along_k if packed_along_k else across
        data = np.moveaxis(handle.data.view(np.uint8), axis, -1)
        pairs = np.stack((E2M1[data & 15], E2M1[data >> 4]), -1)
        values = np.moveaxis(pairs.reshape(*data.shape[:-1], -1), -1, axis)
    else:
        values = np.asarray(as_float32(handle), np.float32)
    if scale is None:
        return values
    if scale.dtype.scalar == tl.float8e4nv:
        factors = as_float32(scale)
    else:
        exponents = scale.data.view(np.uint8).astype(np.int32)
        factors = np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents - 127)).astype(np.float32)
    length = values.shape[-2 if right else -1]
    factors = np.repeat(factors, length // factors.shape[-1], axis=-1)  # scales are [rows, K / group] on both sides
    return values * (np.swapaxes(factors, -1, -2) if right else factors)


def create_dot_scaled(
    self: Any, a: Any, a_scale: Any, a_kind: Any, b: Any, b_scale: Any, b_kind: Any, fast_math: Any,
    a_packed_along_k: bool, b_packed_along_k: bool, total: Any,
) -> Any:  # fmt: skip
    left = _scaled(a, a_scale, a_kind, a_packed_along_k, False)
    right = _scaled(b, b_scale, b_kind, b_packed_along_k, True)
    return Handle(np.matmul(left, right) + total.data, tl.float32)


def _wrap_formats(original: Callable[..., Any]) -> Callable[..., Any]:
    """Triton before 3.8 expects the formats of `dot_scaled` as constexprs, and the interpreter hands in strings."""

    def dot_scaled(self: Any, a: Any, a_scale: Any, a_kind: Any, b: Any, b_scale: Any, b_kind: Any, *rest: Any, **named: Any) -> Any:  # fmt: skip # noqa: E501
        a_kind, b_kind = (k if isinstance(k, tl.constexpr) else tl.constexpr(k) for k in (a_kind, b_kind))
        return original(self, a, a_scale, a_kind, b, b_scale, b_kind, *rest, **named)

    return dot_scaled


# Reductions whose stock form is a Python loop over elements; tl.sort and tl.topk use the first.
_UFUNCS = {
    "_xor_combine": np.bitwise_xor, "_or_combine": np.bitwise_or, "_and_combine": np.bitwise_and,
    "_prod_combine": np.multiply,
}  # fmt: skip


def apply_reduction(self: Any, inputs: Any) -> Any:
    kind = inputs[0].dtype.scalar
    for name, ufunc in _UFUNCS.items():
        if (
            self.combine_fn is getattr(tl.standard, name, None)
            and len(inputs) == 1
            and kind not in RAW
            and self.axis is not None
        ):
            reduced = ufunc.reduce(inputs[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(reduced, inputs[0].dtype)
    if kind != tl.bfloat16:
        return _originals["reduce"](self, inputs)
    wide = (self.to_tensor(as_float32(inputs[0].handle), tl.float32), *inputs[1:])
    result = _originals["reduce"](self, wide if isinstance(inputs, tuple) else list(wide))

    def narrow(tensor: Any) -> Any:
        bits = convert(np.asarray(tensor.handle.data, np.float32), tl.float32, tl.bfloat16)
        return self.to_tensor(bits if tensor.type.is_block() else bits.reshape(-1)[0], tl.bfloat16)

    if isinstance(result, tuple | list):
        return type(result)([narrow(result[0]), *result[1:]])
    return narrow(result)


# -- memory traffic ----------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Bytes that kernels moved: every access counted (`loaded`, `stored`), and how many different bytes those were."""

    loaded: int = 0
    stored: int = 0
    _read: set[int] = field(default_factory=set)
    _written: set[int] = field(default_factory=set)

    @property
    def distinct_loaded(self) -> int:
        return len(self._read)

    @property
    def distinct_stored(self) -> int:
        return len(self._written)

    def add(self, pointers: np.ndarray, mask: np.ndarray, size: int, store: bool) -> None:
        addresses = np.asarray(pointers)[np.broadcast_to(np.asarray(mask, bool), np.shape(pointers))].reshape(-1)
        each = (addresses.astype(np.int64)[:, None] + np.arange(size)).reshape(-1).tolist()
        if store:
            self.stored += len(each)
            self._written.update(each)
        else:
            self.loaded += len(each)
            self._read.update(each)


_counting: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Counts the bytes of every kernel that runs inside."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def create_masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
    for traffic in _counting:
        traffic.add(pointers.data, mask.data, pointers.get_element_ty().primitive_bitwidth // 8, False)
    return _originals["load"](self, pointers, mask, *rest, **options)


def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    for traffic in _counting:
        traffic.add(pointers.data, mask.data, pointers.get_element_ty().primitive_bitwidth // 8, True)
    return _originals["store"](self, pointers, value, mask, *rest)


# ----------------------------------------------------------------------------------------------------------------------

_originals: dict[str, Callable[..., Any]] = {}


@functools.cache
def install() -> None:
    """Patch the interpreter; RuntimeError unless the process was started with TRITON_INTERPRET=1."""
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 must be set before Triton is imported")
    builder, reductions = stock.InterpreterBuilder, stock.ReduceOps
    _originals.update(
        convert=stock._convert_float, binary_op=builder.binary_op, reduce=reductions.apply_impl,
        load=builder.create_masked_load, store=builder.create_masked_store,
    )  # fmt: skip
    stock._convert_float = convert
    builder.binary_op = binary_op
    builder.create_dot = create_dot
    builder.create_dot_scaled = create_dot_scaled
    builder.create_masked_load = create_masked_load
    builder.create_masked_store = create_masked_store
    reductions.apply_impl = apply_reduction
    semantic = stock.TritonSemantic
    if ".value" in inspect.getsource(semantic.dot_scaled).split("allowed_formats")[0]:
        semantic.dot_scaled = _wrap_formats(semantic.dot_scaled)
