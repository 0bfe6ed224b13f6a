"""`KVFormat`: how one row of a KV cache is rounded and laid out in bytes, as data."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dscompile.formats import numeric
from dscompile.formats.byte_report import ByteReport
from dscompile.formats.pages import PageLayout

Payload = Literal["e4m3", "e2m1", "bf16", "fp16", "fp32"]
Scale = Literal["none", "ue8m0", "e4m3", "fp32"]

PLAIN_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_QUANTISED = ("e4m3", "e2m1")


@dataclass(frozen=True)
class KVFormat:
    """One row layout: `payload | bf16 tail | scales | pad`, all bytes.

    A group of `group` values shares one scale. With `amax = max(max|x|, amax_floor)` the scale is `amax / max` of the
    payload type (6 or 448), rounded to the scale's own format before it is used, so reader and writer agree:

    - "ue8m0": up to a power of two, one byte. The quotient is `amax * fp32(1 / max)`.
    - "e4m3": to nearest E4M3, one byte. The quotient is a true division, clamped to 448.
    - "fp32": four bytes, little-endian; kept as it is, or rounded up to a power of two with `pow2`.

    The payload is the value divided by the rounded scale, clamped to +-max, rounded to nearest with ties to the even
    code. -0 is kept. A NaN makes its own group NaN and nothing else (a plain format keeps just that NaN). An infinity
    makes its group NaN, except with an E4M3 scale, where the group saturates (amax 448 * 6).

    Attributes:
        name: the key in `FORMATS`.
        payload: type of the values; "e2m1" packs two to a byte, the even element in the low nibble.
        group: values per scale; 0 for a plain row.
        scale: type of the scales; "none" for a plain row.
        amax_floor: smallest amax, keeps the scale of an all-zero group positive.
        pow2: for fp32 scales, round up to a power of two.
        tail: how many of the last values stay bf16.
        pad_bytes: zero bytes after the scales of every row, part of the scales.
        page: how rows are arranged in a page.
    """

    name: str
    payload: Payload
    group: int = 0
    scale: Scale = "none"
    amax_floor: float = 0.0
    pow2: bool = False
    tail: int = 0
    pad_bytes: int = 0
    page: PageLayout = PageLayout()

    def __post_init__(self) -> None:
        plain = self.payload in PLAIN_DTYPES
        if not plain and self.payload not in _QUANTISED:
            raise ValueError(f"{self.name}: payload {self.payload!r}, allowed: {[*_QUANTISED, *PLAIN_DTYPES]}")
        if plain and (self.group or self.tail or self.pad_bytes or self.scale != "none"):
            raise ValueError(f"{self.name}: a plain {self.payload} row has no group, tail, pad or scale")
        if not plain and self.scale not in ("ue8m0", "e4m3", "fp32"):
            raise ValueError(f"{self.name}: scale {self.scale!r}, allowed: ['ue8m0', 'e4m3', 'fp32']")
        if not plain and (self.group < 2 or self.group % 2):
            raise ValueError(f"{self.name}: group {self.group}, allowed: an even number of values")
        if not plain and self.amax_floor <= 0:
            raise ValueError(f"{self.name}: amax_floor {self.amax_floor}, allowed: > 0 (scale of an all-zero group)")

    # Widths

    @property
    def is_plain(self) -> bool:
        """True for a row without scales."""
        return self.payload in PLAIN_DTYPES

    @property
    def scale_itemsize(self) -> int:
        """Bytes of one scale."""
        return {"none": 0, "fp32": 4}.get(self.scale, 1)

    def check_dim(self, dim: int) -> None:
        """ValueError unless a row of `dim` values has whole groups."""
        if self.is_plain:
            return
        quantised = dim - self.tail
        if quantised <= 0 or quantised % self.group:
            tail = f" + {self.tail} bf16 values" if self.tail else ""
            raise ValueError(f"{self.name}: dim {dim}, allowed: a positive multiple of the group {self.group}{tail}")

    def payload_bytes(self, dim: int) -> int:
        """Bytes of a row's values, bf16 tail included."""
        self.check_dim(dim)
        if self.is_plain:
            return dim * PLAIN_DTYPES[self.payload].itemsize
        quantised = dim - self.tail
        return (quantised // 2 if self.payload == "e2m1" else quantised) + 2 * self.tail

    def scale_bytes(self, dim: int) -> int:
        """Bytes of a row's scales, pad included."""
        self.check_dim(dim)
        groups = 0 if self.is_plain else (dim - self.tail) // self.group
        return groups * self.scale_itemsize + self.pad_bytes

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` values."""
        return self.payload_bytes(dim) + self.scale_bytes(dim)

    def byte_report(self, dim: int, rows: int | None = None) -> ByteReport:
        """Bytes of a row of `dim` values, and of a page of `rows` rows (the layout's own number if it has one)."""
        payload, scales = self.payload_bytes(dim), self.scale_bytes(dim) - self.pad_bytes
        page_rows = self.page.rows if rows is None else self.page.rows_in_page(rows)
        page_bytes = self.page_bytes(dim, page_rows) if page_rows else 0
        return ByteReport(self.name, dim, payload, scales, self.pad_bytes, page_rows, page_bytes)

    # Values -> bytes

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[..., D] fp32, bf16 or fp16 -> (payload uint8 [..., payload_bytes], scales uint8 [..., scale_bytes])."""
        self._check_input(x)
        if self.is_plain:
            payload = _as_bytes(x.to(PLAIN_DTYPES[self.payload]))
            return payload, payload[..., :0]
        head, tail = self._split_tail(x)
        values, stored, _ = self._quantise(head)
        if self.payload == "e2m1":
            payload = numeric.e2m1_to_bytes(numeric.join_groups(values, head.shape[-1]))
        else:
            payload = numeric.join_groups(values, head.shape[-1]).view(torch.uint8)
        scales = self._scale_to_bytes(stored)
        if tail is not None:
            payload = torch.cat((payload, _as_bytes(tail.to(torch.bfloat16))), -1)
        if self.pad_bytes:
            scales = torch.cat((scales, scales.new_zeros((*x.shape[:-1], self.pad_bytes))), -1)
        return payload, scales

    def pack(self, x: Tensor) -> Tensor:
        """[..., D] fp32, bf16 or fp16 -> uint8 [..., row_bytes(D)]: the payload, then the scales."""
        payload, scales = self.encode(x)
        if self.is_plain:
            return payload
        return torch.cat((payload, scales), -1)

    def fake_quant(self, x: Tensor) -> Tensor:
        """`unpack(pack(x))` in x's shape and dtype, without going through bytes.

        code * scale is exact in bf16 for the release's formats, so a packed cache loses nothing against a bf16 one.
        Compiled by Inductor, the quantised values are bitwise these; a bf16 or fp16 rounding (a plain format, the tail)
        of a wider x may be left out, as Inductor leaves out any cast there and back by default.
        """
        self._check_input(x)
        if self.is_plain:
            return x.to(PLAIN_DTYPES[self.payload]).to(x.dtype)
        head, tail = self._split_tail(x)
        values, _, scale = self._quantise(head)
        y = numeric.join_groups(values.to(torch.float32) * scale, head.shape[-1]).to(x.dtype)
        return y if tail is None else torch.cat((y, tail.to(torch.bfloat16).to(x.dtype)), -1)

    # Bytes -> values

    def decode(self, payload: Tensor, scales: Tensor, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """(uint8 [..., payload_bytes], uint8 [..., scale_bytes]) -> [..., dim] of `dtype`.

        A plain row is viewed as its dtype and so must start at a multiple of its size, with a dense last dimension.
        """
        self._check_bytes("payload", payload, self.payload_bytes(dim))
        self._check_bytes("scales", scales, self.scale_bytes(dim))
        if self.is_plain:
            return payload.view(PLAIN_DTYPES[self.payload]).to(dtype)
        groups = (dim - self.tail) // self.group
        head = payload[..., : payload.shape[-1] - 2 * self.tail] if self.tail else payload
        scale = self._bytes_to_scale(scales[..., : groups * self.scale_itemsize] if self.pad_bytes else scales)
        values = numeric.bytes_to_e2m1(head) if self.payload == "e2m1" else numeric.e4m3_to_float(head)
        y = numeric.split_groups(values, self.group) * scale.unsqueeze(-1)
        y = numeric.join_groups(y, dim - self.tail).to(dtype)
        if not self.tail:
            return y
        tail = _from_bytes(payload[..., payload.shape[-1] - 2 * self.tail :], torch.bfloat16)
        return torch.cat((y, tail.to(dtype)), -1)

    def unpack(self, rows: Tensor, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """uint8 [..., row_bytes(dim)] -> [..., dim] of `dtype` (exact in float32)."""
        self.check_rows(rows, dim)
        split = self.payload_bytes(dim)
        if self.is_plain:
            return rows.view(PLAIN_DTYPES[self.payload]).to(dtype)
        return self.decode(rows[..., :split], rows[..., split:], dim, dtype)

    def convert(self, rows: Tensor, dim: int, to: "KVFormat") -> Tensor:
        """Rows of this format, uint8 [..., row_bytes(dim)] -> rows of `to`, uint8 [..., to.row_bytes(dim)].

        Lossless (the values that `to` unpacks are the values that this format unpacks):

        - to the same row encoding: the bytes are handed on as they are, whatever the page arrangement;
        - from any format to "fp32";
        - from the release's formats to "bf16" (a code times a scale has few enough bits).

        Otherwise the values are rounded a second time. Never convert to `fp4_g16_e4m3` what could be packed from the
        original: below a group amax of 0.094 (6 times the smallest normal E4M3 number) its scale is coarse enough
        that rounding an already rounded group again drifts.
        """
        if self.same_row(to):
            self.check_rows(rows, dim)
            return rows
        return to.pack(self.unpack(rows, dim))

    def same_row(self, other: "KVFormat") -> bool:
        """True if both read a row of bytes as the same values."""
        return self._reading() == other._reading()

    # Rows <-> pages

    def page_bytes(self, dim: int, rows: int | None = None) -> int:
        """Stride in bytes of a page of `rows` rows (the layout's own number if not given)."""
        return self.page.stride_bytes(self.row_bytes(dim), self.page.rows_in_page(rows))

    def page_parts(self, pages: Tensor, dim: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """uint8 [..., page_bytes] -> (payload [..., rows, payload_bytes], scales [..., rows, scale_bytes]).

        Both are views: what is written to them is written to the page, and `decode` reads them.
        """
        count = self.page.rows_in_page(rows)
        return self.page.parts(pages, self.payload_bytes(dim), self.scale_bytes(dim), count)

    def pages_to_rows(self, pages: Tensor, dim: int, rows: int | None = None) -> Tensor:
        """uint8 [..., page_bytes] -> rows uint8 [..., rows, row_bytes]; a view if rows lie one after the other."""
        count = self.page.rows_in_page(rows)
        return self.page.to_rows(pages, self.payload_bytes(dim), self.scale_bytes(dim), count)

    def rows_to_pages(self, rows: Tensor, dim: int) -> Tensor:
        """Rows uint8 [..., R, row_bytes] -> uint8 [..., page_bytes(dim, R)], padded with zero bytes.

        A view if rows lie one after the other and the page needs no padding. R is the layout's own number of rows,
        or any number where the layout has none.
        """
        self.check_rows(rows, dim)
        if rows.dim() < 2 or self.page.rows not in (0, rows.shape[-2]):
            allowed = self.page.rows or "R"
            raise ValueError(
                f"{self.name}: rows of a page have shape {tuple(rows.shape)}, allowed: [..., {allowed}, "
                f"{self.row_bytes(dim)}]"
            )
        return self.page.from_rows(rows, self.payload_bytes(dim))

    def check_rows(self, rows: Tensor, dim: int) -> None:
        """TypeError or ValueError unless `rows` is uint8 [..., row_bytes(dim)]."""
        self._check_bytes("rows", rows, self.row_bytes(dim))

    # Steps

    def _reading(self) -> tuple[object, ...]:
        return self.payload, self.group, self.scale, self.tail, self.pad_bytes

    def _check_input(self, x: Tensor) -> None:
        if x.dtype not in INPUT_DTYPES:
            raise TypeError(f"{self.name}: x has dtype {x.dtype}, allowed: {[str(d) for d in INPUT_DTYPES]}")
        if x.dim() == 0:
            raise ValueError(f"{self.name}: x has shape (), allowed: [..., dim]")
        self.check_dim(x.shape[-1])

    def _check_bytes(self, what: str, tensor: Tensor, width: int) -> None:
        if tensor.dtype != torch.uint8:
            raise TypeError(f"{self.name}: {what} have dtype {tensor.dtype}, allowed: torch.uint8")
        if tensor.dim() == 0 or tensor.shape[-1] != width:
            raise ValueError(f"{self.name}: {what} have shape {tuple(tensor.shape)}, allowed: [..., {width}]")

    def _split_tail(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.tail:
            return x, None
        split = x.shape[-1] - self.tail
        return x[..., :split], x[..., split:]

    def _quantise(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., D] -> (values on the payload's grid [..., G, group], stored scale, float32 scale, both [..., G, 1]).

        The stored scale is what the bytes follow from: int32 bits (ue8m0), float8_e4m3fn (e4m3), float32 (fp32).
        """
        grouped = numeric.split_groups(x.to(torch.float32), self.group)
        amax = grouped.abs().amax(-1, keepdim=True).clamp(min=self.amax_floor)
        stored = self._scale_from_amax(amax)
        scale = self._scale_value(stored)
        y = grouped / scale
        return (numeric.round_e2m1(y) if self.payload == "e2m1" else numeric.to_e4m3(y)), stored, scale

    def _scale_from_amax(self, amax: Tensor) -> Tensor:
        e2m1 = self.payload == "e2m1"
        if self.scale == "e4m3":
            return numeric.to_e4m3_scale(amax / 6.0 if e2m1 else amax / 448.0)
        quotient = amax * (1.0 / 6.0) if e2m1 else amax * (1.0 / 448.0)
        if self.scale == "ue8m0":
            return numeric.power_of_two_bits(quotient)
        return numeric.power_of_two_bits(quotient).view(torch.float32) if self.pow2 else quotient

    def _scale_value(self, stored: Tensor) -> Tensor:
        if self.scale == "ue8m0":
            return stored.view(torch.float32)
        return stored.to(torch.float32) if self.scale == "e4m3" else stored

    def _scale_to_bytes(self, stored: Tensor) -> Tensor:
        stored = stored.squeeze(-1)
        if self.scale == "ue8m0":
            return numeric.ue8m0_from_bits(stored)
        return _as_bytes(stored)

    def _bytes_to_scale(self, scales: Tensor) -> Tensor:
        if self.scale == "ue8m0":
            return numeric.ue8m0_to_float(scales)
        if self.scale == "e4m3":
            return numeric.e4m3_to_float(scales)
        return _from_bytes(scales, torch.float32)


def _as_bytes(x: Tensor) -> Tensor:
    """[..., D] -> uint8 [..., D * itemsize], little-endian; a view unless the last dimension has gaps."""
    x = x.contiguous()
    if x.stride(-1) != 1:
        x = x.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps a tensor without elements as it is
    return x.view(torch.uint8)


def _from_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., N * itemsize] -> `dtype` [..., N]; a copy, because a part of a row need not be aligned."""
    return x.clone(memory_format=torch.contiguous_format).view(dtype)
