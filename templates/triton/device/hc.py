"""Parts of the kernels that lead from the residual streams into a sublayer."""

import triton
import triton.language as tl

from dscompile.templates.triton.device.sinkhorn import sinkhorn_matrices


@triton.jit
def add_product(total, stream, weight, PIECES: tl.constexpr):
    """total + stream [T, K] times weight [K, P], as exact as in fp32. PIECES: see `hc.PIECES`."""
    if PIECES == 0:
        total = tl.dot(stream.to(tl.float32), weight.to(tl.float32), total, input_precision="ieee")
    else:
        part = weight.to(tl.bfloat16)
        total = tl.dot(stream, part, total)
        if PIECES > 1:
            rest = weight.to(tl.float32) - part.to(tl.float32)
            part = rest.to(tl.bfloat16)
            total = tl.dot(stream, part, total)
            if PIECES > 2:
                total = tl.dot(stream, (rest - part.to(tl.float32)).to(tl.bfloat16), total)
    return total


@triton.jit
def mix_columns(
    streams, token_stride, stream_stride, fn, fn_stride, pre_in, partial, x, N, token, first,
    STREAMS: tl.constexpr, D: tl.constexpr, MIXES: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr,
    PIECES: tl.constexpr, SPAN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """partial[token]: the products of fn with columns first .. first + SPAN of every stream (MIXES numbers), the sum of
    squares of what was read and that of the collapsed row, which goes to x if there is a pre_in."""
    alive = token < N
    mix = tl.arange(0, P)
    total = tl.zeros((BLOCK_T, P), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    collapsed_squares = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, SPAN, BLOCK_D):
        column = first + start + tl.arange(0, BLOCK_D)
        # A span is no multiple of the block only if it is a whole row.
        inside = column < D
        collapsed = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for j in tl.static_range(STREAMS):
            at = streams + token[:, None] * token_stride + j * stream_stride + column[None, :]
            stream = tl.load(at, mask=alive[:, None] & inside[None, :], other=0.0)
            at = fn + mix[None, :] * fn_stride + j * D + column[:, None]
            weight = tl.load(at, mask=(mix < MIXES)[None, :] & inside[:, None], other=0.0)
            total = add_product(total, stream, weight, PIECES)
            wide = stream.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            if pre_in is not None:
                gate = tl.load(pre_in + token * STREAMS + j, mask=alive, other=0.0).to(tl.float32)
                collapsed += gate[:, None] * wide
        if pre_in is not None:
            rounded = collapsed.to(x.dtype.element_ty)
            tl.store(x + token[:, None] * D + column[None, :], rounded, mask=alive[:, None] & inside[None, :])
            wide = rounded.to(tl.float32)
            collapsed_squares += tl.sum(wide * wide, 1)
    to = partial + token * WIDTH
    tl.store(to[:, None] + mix[None, :], total, mask=alive[:, None] & (mix < MIXES)[None, :])
    tl.store(to + MIXES, squares, mask=alive)
    tl.store(to + MIXES + 1, collapsed_squares, mask=alive)


@triton.jit
def added_up(partial, at, inside, N, WIDTH: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr):
    """The sum over all splits of partial[at]: at, inside [T, K] -> fp32 [T, K]."""
    split = tl.arange(0, SPLIT_BLOCK)[:, None, None]
    there = partial + split.to(tl.int64) * N * WIDTH + tl.expand_dims(at, 0)
    return tl.sum(tl.load(there, mask=(split < SPLITS) & tl.expand_dims(inside, 0), other=0.0), 0)


@triton.jit
def mix_weights(
    partial, scale, base, pre, post, comb, token, N, mix_eps, hc_eps, iters,
    STREAMS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, MIXES: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Stores pre, post and comb, unless they are None; returns pre [T, P] and the collapsed rows' sums of squares [T].

    P: STREAMS rounded up to a power of two.
    """
    alive = token < N
    row = token[:, None] * WIDTH
    one = tl.arange(0, 1)[None, :]
    square = added_up(partial, row + MIXES + one, alive[:, None] & (one == 0), N, WIDTH, SPLITS, SPLIT_BLOCK)
    factor = tl.rsqrt(square / (STREAMS * D) + mix_eps)
    stream = tl.arange(0, P)[None, :]
    inside = alive[:, None] & (stream < STREAMS)
    gate = added_up(partial, row + stream, inside, N, WIDTH, SPLITS, SPLIT_BLOCK) * factor
    offset = tl.load(base + stream, mask=stream < STREAMS, other=0.0).to(tl.float32)
    gate = tl.sigmoid(gate * tl.load(scale).to(tl.float32) + offset) + hc_eps
    if post is not None:
        tl.store(pre + token[:, None] * STREAMS + stream, gate, mask=inside)
        spread = added_up(partial, row + STREAMS + stream, inside, N, WIDTH, SPLITS, SPLIT_BLOCK) * factor
        offset = tl.load(base + STREAMS + stream, mask=stream < STREAMS, other=0.0).to(tl.float32)
        spread = 2.0 * tl.sigmoid(spread * tl.load(scale + 1).to(tl.float32) + offset)
        tl.store(post + token[:, None] * STREAMS + stream, spread, mask=inside)
        cell = tl.arange(0, P * P)[None, :]
        at = cell // P * STREAMS + cell % P
        real = (cell // P < STREAMS) & (cell % P < STREAMS)
        logit = added_up(partial, row + 2 * STREAMS + at, alive[:, None] & real, N, WIDTH, SPLITS, SPLIT_BLOCK) * factor
        offset = tl.load(base + 2 * STREAMS + at, mask=real, other=0.0).to(tl.float32)
        logit = logit * tl.load(scale + 2).to(tl.float32) + offset
        matrix = sinkhorn_matrices(tl.reshape(logit, (T, P, P)), iters, hc_eps, STREAMS, P)
        to = comb + token[:, None] * (STREAMS * STREAMS) + at
        tl.store(to, tl.reshape(matrix, (T, P * P)), mask=alive[:, None] & real)
    squares = added_up(partial, row + MIXES + 1 + one, alive[:, None] & (one == 0), N, WIDTH, SPLITS, SPLIT_BLOCK)
    return gate, tl.reshape(squares, (T,))


@triton.jit
def collapse_rows(
    streams, token_stride, stream_stride, gates, x, token, N,
    STREAMS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """x[token] = sum over j of gates[:, j] * streams[token, j], rounded once; returns its sums of squares [T]."""
    alive = token < N
    which = tl.arange(0, P)[None, :]
    squares = tl.zeros((T,), tl.float32)
    for start in range(0, D, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        inside = alive[:, None] & (column < D)[None, :]
        total = tl.zeros((T, BLOCK_D), tl.float32)
        for j in tl.static_range(STREAMS):
            gate = tl.sum(tl.where(which == j, gates, 0.0), 1)
            at = streams + token[:, None] * token_stride + j * stream_stride + column[None, :]
            total += gate[:, None] * tl.load(at, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(x.dtype.element_ty)
        tl.store(x + token[:, None] * D + column[None, :], rounded, mask=inside)
        wide = rounded.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    return squares


@triton.jit
def normalise_rows(x, squares, weight, eps, token, N, D: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr):
    """x[token], in place: divided by its root mean square, times weight, in fp32, rounded once."""
    alive = token < N
    factor = tl.rsqrt(squares / D + eps)
    for start in range(0, D, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        inside = alive[:, None] & (column < D)[None, :]
        at = x + token[:, None] * D + column[None, :]
        by = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32) * factor[:, None] * by[None, :]
        tl.store(at, value.to(x.dtype.element_ty), mask=inside)
