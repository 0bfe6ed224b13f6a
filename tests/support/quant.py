"""Independent, slow-but-plain forms of FP4 and FP8 rounding, to hold `dscompile.formats` against."""

import torch

E2M1_GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
_MIDPOINTS = (E2M1_GRID[1:] + E2M1_GRID[:-1]) / 2


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 value of fp32 `x`; ties go to the even code, the sign of zero is kept."""
    magnitude = x.abs().clamp(max=6.0)
    code = torch.bucketize(magnitude, _MIDPOINTS)
    at_tie = magnitude == _MIDPOINTS[code.clamp(max=6)]
    return torch.copysign(E2M1_GRID[code + (at_tie & (code % 2 == 1)).long()], x)


def kv4(x: torch.Tensor) -> torch.Tensor:
    """V4.1's compressed KV row through quantise and dequantise: groups of 16, E4M3 scale, floor 2**-9. Returns fp32."""
    groups = x.float().unflatten(-1, (-1, 16))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-9)
    scale = (amax / 6).clamp_max(448).to(torch.float8_e4m3fn).float()
    return (e2m1(groups / scale) * scale).flatten(-2)


def ix4(x: torch.Tensor) -> torch.Tensor:
    """V4.1's index query or key through quantise and dequantise: groups of 32, power-of-two scale rounded up."""
    groups = x.float().unflatten(-1, (-1, 32))
    exact = groups.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) / 6
    mantissa, exponent = torch.frexp(exact)
    scale = torch.ldexp(torch.ones_like(exact), exponent - (mantissa == 0.5).int())
    return (e2m1(groups / scale) * scale).flatten(-2)


def fp8(x: torch.Tensor) -> torch.Tensor:
    """float64 [..., D] of what E4M3 with a power-of-two scale per 32 keeps of x."""
    groups = x.double().unflatten(-1, (-1, 32))
    step = 2.0 ** torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448))
    return ((groups / step).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * step).flatten(-2)
