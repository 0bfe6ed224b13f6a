"""The machine of `arithmetic` on torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.formats.numeric import bytes_to_e2m1


class Host:
    """fp32 and int32 tensors [..., threads]; the same names as in `device.Device`."""

    @staticmethod
    def number(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32)

    @staticmethod
    def integer(value: int) -> Tensor:
        return torch.tensor(value, dtype=torch.int32)

    @staticmethod
    def bits(x: Tensor) -> Tensor:
        return x.view(torch.int32)

    @staticmethod
    def from_bits(bits: Tensor) -> Tensor:
        return bits.to(torch.int32).view(torch.float32)

    @staticmethod
    def mul(a: Tensor, b: Tensor | float) -> Tensor:
        return a * b

    @staticmethod
    def add(a: Tensor, b: Tensor | float) -> Tensor:
        return a + b

    @staticmethod
    def sub(a: Tensor, b: Tensor) -> Tensor:
        return a - b

    @staticmethod
    def div(a: Tensor, b: Tensor) -> Tensor:
        return a / b

    @staticmethod
    def abs(x: Tensor) -> Tensor:
        return x.abs()

    @staticmethod
    def exp(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def reciprocal(x: Tensor) -> Tensor:
        return 1.0 / x

    @staticmethod
    def min_number(a: Tensor, b: Tensor) -> Tensor:
        return torch.fmin(a, b)

    @staticmethod
    def max_number(a: Tensor, b: Tensor) -> Tensor:
        return torch.fmax(a, b)

    @staticmethod
    def negative(x: Tensor) -> Tensor:
        return -x

    @staticmethod
    def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Rounded twice, to fp64 and to fp32: the same wherever the sum is exact in fp64, or far from a tie of fp32."""
        return (a.double() * b.double() + c.double()).float()

    @staticmethod
    def rsqrt(x: Tensor) -> Tensor:
        return x.rsqrt()

    @staticmethod
    def max_of_warp(value: Tensor) -> Tensor:
        warps = value.unflatten(-1, (-1, 32))
        return warps.amax(-1, keepdim=True).expand_as(warps).flatten(-2)

    @staticmethod
    def neighbour(value: Tensor, step: int) -> Tensor:
        """The value of the thread whose number differs in one bit. [..., threads]."""
        return value[..., torch.arange(value.shape[-1]) ^ step]

    @staticmethod
    def max_int(a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)

    @staticmethod
    def select(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(condition, a, b)

    @staticmethod
    def bf16x2(low: Tensor, high: Tensor) -> Tensor:
        low, high = (x.to(torch.bfloat16).view(torch.int16).to(torch.int32) for x in (low, high))
        return (low & 0xFFFF) | (high << 16)

    @staticmethod
    def e4m3x2(low: Tensor, high: Tensor) -> Tensor:
        low, high = (_e4m3(x) for x in torch.broadcast_tensors(low, high))
        return low | (high << 8)

    @staticmethod
    def from_e4m3(code: Tensor) -> Tensor:
        return code.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)

    @staticmethod
    def from_e4m3x2(pair: Tensor) -> tuple[Tensor, Tensor]:
        return Host.from_e4m3(pair & 0xFF), Host.from_e4m3((pair >> 8) & 0xFF)

    @staticmethod
    def from_e2m1x2(byte: Tensor) -> tuple[Tensor, Tensor]:
        both = bytes_to_e2m1((byte & 0xFF).to(torch.uint8).unsqueeze(-1))
        return both[..., 0], both[..., 1]

    @staticmethod
    def max_float_of_warp(value: Tensor) -> Tensor:
        return Host.max_of_warp(value)

    @staticmethod
    def of_lane(value: Tensor, lane: int) -> Tensor:
        """What every thread of a warp has in that lane."""
        warps = value.unflatten(-1, (-1, 32))
        return warps[..., lane : lane + 1].expand_as(warps).flatten(-2)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)
