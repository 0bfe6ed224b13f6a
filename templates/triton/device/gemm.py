"""Matrix products of rows with rows, and what follows them in the same kernel.

A product here is [rows of a weight, tokens]: the weight is the left operand. Tensor cores want 64 or 128 rows on the
left and take 8 or more columns on the right, so few tokens waste nothing.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(rows, columns, alive, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """rows: pointers [R]; columns [BLOCK_K], the first a multiple of BLOCK_K -> [R, BLOCK_K]; 0 outside of SIZE."""
    at = rows[:, None] + columns[None, :]
    if SIZE % BLOCK_K == 0:
        return tl.load(at, mask=alive[:, None], other=0.0)
    return tl.load(at, mask=alive[:, None] & (columns < SIZE)[None, :], other=0.0)


@triton.jit
def product(
    w_rows, w_alive, x_rows, x_alive,
    SIZE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Pointers to rows of SIZE values each, [ROWS] and [TOKENS] -> fp32 [ROWS, TOKENS]. Rows not alive count as 0."""
    column = tl.arange(0, BLOCK_K)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        w = load_tile(w_rows, start + column, w_alive, SIZE, BLOCK_K)
        x = load_tile(x_rows, start + column, x_alive, SIZE, BLOCK_K)
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    return total


@triton.jit
def product_pair(
    w_rows, other_rows, w_alive, x_rows, x_alive,
    SIZE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Two products with the same tokens; `w_rows` and `other_rows` are alive together."""
    column = tl.arange(0, BLOCK_K)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    second = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        w = load_tile(w_rows, start + column, w_alive, SIZE, BLOCK_K)
        v = load_tile(other_rows, start + column, w_alive, SIZE, BLOCK_K)
        x = tl.trans(load_tile(x_rows, start + column, x_alive, SIZE, BLOCK_K))
        total = tl.dot(w, x, total, input_precision="ieee")
        second = tl.dot(v, x, second, input_precision="ieee")
    return total, second


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """fp32 -> fp32, by way of DTYPE."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def clamped_silu(gate, up, limit, CLAMP: tl.constexpr, DTYPE: tl.constexpr):
    """fp32 -> fp32: silu(gate) * up, gate at most `limit`, up within +-limit; every result rounded to DTYPE."""
    if CLAMP:
        # Comparisons that are false for NaN, which therefore passes.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up)
    gate, up = rounded(gate, DTYPE), rounded(up, DTYPE)
    return rounded(rounded(gate / (1.0 + tl.exp(-gate)), DTYPE) * up, DTYPE)
