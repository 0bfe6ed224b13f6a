"""The interpreter that the kernel tests rely on does arithmetic as the hardware does."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from support.triton_interpreter import count_traffic


@triton.jit
def _cast(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def _bf16_arithmetic(a, b, sums, products, largest, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(sums + at, x + y)
    tl.store(products + at, x * y)
    tl.store(largest, tl.max(x, 0))


@triton.jit
def _dot(a, b, out, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out + i * N + j, tl.dot(tl.load(a + i * N + j), tl.load(b + i * N + j)))


@triton.jit
def _scaled(a, a_scale, b, b_scale, out, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr):
    row, col = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    half = tl.arange(0, K // 2)
    group = tl.arange(0, K // GROUP)[None, :]
    left = tl.load(a + row * (K // 2) + half[None, :])
    right = tl.load(b + half[:, None] * N + col)
    s, t = tl.load(a_scale + row * (K // GROUP) + group), tl.load(b_scale + row * (K // GROUP) + group)
    tl.store(out + row * N + col, tl.dot_scaled(left, s, "e2m1", right, t, "e2m1"))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_round_to_nearest_and_saturate(kind: torch.dtype) -> None:
    x = torch.cat(
        (
            torch.randn(4096 - 6) * torch.logspace(-12, 6, 4090),
            torch.tensor([0.0, -0.0, 1e9, -1e9, torch.inf, -torch.inf]),
        )
    )
    out = torch.empty(4096, dtype=kind)
    _cast[(1,)](x, out, 4096)
    largest = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}.get(kind, torch.inf)
    want = x.clamp(-largest, largest).to(kind)
    assert out.view(torch.uint8).equal(want.view(torch.uint8))


def test_bf16_is_not_an_integer() -> None:
    a, b = torch.randn(256).bfloat16(), torch.randn(256).bfloat16()
    sums, products, largest = torch.empty_like(a), torch.empty_like(a), torch.empty(1, dtype=torch.bfloat16)
    _bf16_arithmetic[(1,)](a, b, sums, products, largest, 256)
    assert sums.equal(a + b) and products.equal(a * b) and largest.equal(a.max()[None])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_dot(kind: torch.dtype) -> None:
    a, b, out = torch.randn(32, 32).to(kind), torch.randn(32, 32).to(kind), torch.empty(32, 32)
    _dot[(1,)](a, b, out, 32)
    torch.testing.assert_close(out, a.float() @ b.float())


@pytest.mark.parametrize(("scale", "group"), [("ue8m0", 32), ("e4m3", 16)])
def test_dot_scaled(scale: str, group: int) -> None:
    """Both kinds of block scales, with four-bit values on both sides."""
    n, k = 32, 64
    generator = np.random.default_rng(0)
    codes = [generator.integers(0, 16, shape) for shape in ((n, k), (k, n))]
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    a, b = (np.where(c & 8, -1, 1) * grid[c & 7] for c in codes)
    packed_a = torch.from_numpy((codes[0][:, ::2] | codes[0][:, 1::2] << 4).astype(np.uint8))
    packed_b = torch.from_numpy((codes[1][::2] | codes[1][1::2] << 4).astype(np.uint8))
    if scale == "ue8m0":
        s, t = (torch.from_numpy(generator.integers(120, 133, (n, k // group)).astype(np.uint8)) for _ in range(2))
        factors = [np.ldexp(1.0, x.numpy().astype(int) - 127) for x in (s, t)]
    else:
        s, t = ((torch.rand(n, k // group) * 8).to(torch.float8_e4m3fn) for _ in range(2))
        factors = [x.float().numpy() for x in (s, t)]
    out = torch.empty(n, n)
    _scaled[(1,)](packed_a, s, packed_b, t, out, n, k, group)
    want = (a * factors[0].repeat(group, 1)) @ (b * factors[1].repeat(group, 1).T)
    torch.testing.assert_close(out.double(), torch.from_numpy(want), rtol=1e-5, atol=1e-3)


def test_traffic_counts_what_the_mask_lets_through() -> None:
    x, out = torch.randn(64), torch.empty(64, dtype=torch.bfloat16)
    with count_traffic() as traffic:
        _cast[(1,)](x, out, 32)
        _cast[(1,)](x, out, 64)
    assert (traffic.loaded, traffic.stored) == (96 * 4, 96 * 2)
    assert (traffic.distinct_loaded, traffic.distinct_stored) == (64 * 4, 64 * 2)
