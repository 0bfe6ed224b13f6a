"""Parts of the kernels that lead from the residual streams into a sublayer, and back into them.

Where a y is given, "the streams" are what `hc_post` makes of those in memory with y, post_in and comb_in.
"""

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
def factor_at(at, alive, KIND: tl.constexpr, FP32: tl.constexpr):
    """One of post or comb, as fp32; not FP32: rounded to KIND. alive: a mask, or None."""
    value = tl.load(at) if alive is None else tl.load(at, mask=alive, other=0.0)
    return value.to(tl.float32) if FP32 else value.to(KIND).to(tl.float32)


@triton.jit
def post_factors(y, post_in, comb_in, token, alive, KIND: tl.constexpr, STREAMS: tl.constexpr, FP32: tl.constexpr):
    """post and comb of tokens as a tuple: STREAMS numbers, then STREAMS times STREAMS; empty without a y.

    token: a number or [T, 1], which is then the shape of each factor.
    """
    factors = ()
    if y is not None:
        for j in tl.static_range(STREAMS):
            factors = factors + (factor_at(post_in + token * STREAMS + j, alive, KIND, FP32),)  # type: ignore[assignment]
        for cell in tl.static_range(STREAMS * STREAMS):
            at = comb_in + token * (STREAMS * STREAMS) + cell
            factors = factors + (factor_at(at, alive, KIND, FP32),)  # type: ignore[assignment]
    return factors


@triton.jit
def streams_at(
    streams, token_stride, stream_stride, y, y_stride, factors, token, column, inside,
    STREAMS: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """Columns of every stream as a tuple, in the streams' type; 0 where not inside.

    With y: post[j] * y + sum over i of comb[i, j] * stream i, from the `post_factors`. Not FP32: both addends and their
    sum are rounded to the type of the streams.
    """
    kind = streams.dtype.element_ty
    # All loads before the first use: a store would make the compiler wait, or load again.
    loaded = ()
    if y is not None:
        given = tl.load(y + token * y_stride + column, mask=inside, other=0.0)
    for j in tl.static_range(STREAMS):
        at = streams + token * token_stride + j * stream_stride + column
        loaded = loaded + (tl.load(at, mask=inside, other=0.0),)  # type: ignore[assignment]
    if y is not None:
        given = given.to(tl.float32) if FP32 else given.to(kind).to(tl.float32)
        made = ()
        for j in tl.static_range(STREAMS):
            spread = factors[j] * given
            mixed = factors[STREAMS + j] * loaded[0].to(tl.float32)  # type: ignore[misc]
            for i in tl.static_range(1, STREAMS):
                mixed += factors[(i + 1) * STREAMS + j] * loaded[i].to(tl.float32)
            if not FP32:
                spread, mixed = spread.to(kind).to(tl.float32), mixed.to(kind).to(tl.float32)
            made = made + ((spread + mixed).to(kind),)  # type: ignore[assignment]
        loaded = made
    return loaded


@triton.jit
def mix_columns(
    streams, token_stride, stream_stride, y, y_stride, post_in, comb_in, out, fn, fn_stride, pre_in, partial, x, N,
    first_token, first,
    STREAMS: tl.constexpr, D: tl.constexpr, MIXES: tl.constexpr, P: tl.constexpr, PIECES: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """partial[token], BLOCK_T tokens: the products of fn with columns first .. first + SPAN of every stream (MIXES
    numbers), the sum of squares of what was read and that of the collapsed row, which goes to x if there is a pre_in.
    The streams go to out if there is a y. P: at least MIXES + 2."""
    token = first_token + tl.arange(0, BLOCK_T).to(tl.int64)
    alive = token < N
    mix = tl.arange(0, P)
    if y is not None:
        # Eight columns of one token to a thread: what belongs to a token then need not move between threads.
        CHUNKS: tl.constexpr = BLOCK_D // 8
        chunk = tl.arange(0, BLOCK_T * CHUNKS)
        owner = (first_token + (chunk // CHUNKS).to(tl.int64))[:, None]
        present = owner < N
        factors = post_factors(y, post_in, comb_in, owner, present, streams.dtype.element_ty, STREAMS, FP32)
    total = tl.zeros((BLOCK_T, P), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    collapsed_squares = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, SPAN, BLOCK_D):
        column = first + start + tl.arange(0, BLOCK_D)
        # A span is no multiple of the block only if it is a whole row.
        inside = column < D
        live = alive[:, None] & inside[None, :]
        power = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        collapsed = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        if y is not None:
            place = first + start + (chunk % CHUNKS)[:, None] * 8 + tl.arange(0, 8)[None, :]
            real = present & (place < D)
            parts = streams_at(
                streams, token_stride, stream_stride, y, y_stride, factors, owner, place, real, STREAMS, FP32
            )  # fmt: skip
            for j in tl.static_range(STREAMS):
                tl.store(out + (owner * STREAMS + j) * D + place, parts[j], mask=real)
        for j in tl.static_range(STREAMS):
            if y is not None:
                # Zero already where not real. That it is said again keeps the compiler from doing all of the above in
                # the layout of the product's operand, of which every warp has a copy.
                part = tl.reshape(tl.where(real, parts[j], 0.0), (BLOCK_T, BLOCK_D))
            else:
                at = streams + token[:, None] * token_stride + j * stream_stride + column[None, :]
                part = tl.load(at, mask=live, other=0.0)
            at = fn + mix[None, :] * fn_stride + j * D + column[:, None]
            weight = tl.load(at, mask=(mix < MIXES)[None, :] & inside[:, None], other=0.0)
            total = add_product(total, part, weight, PIECES)
            wide = part.to(tl.float32)
            power += wide * wide
            if pre_in is not None:
                gate = tl.load(pre_in + token * STREAMS + j, mask=alive, other=0.0).to(tl.float32)
                collapsed += gate[:, None] * wide
        squares += tl.sum(power, 1)
        if pre_in is not None:
            rounded = collapsed.to(x.dtype.element_ty)
            tl.store(x + token[:, None] * D + column[None, :], rounded, mask=live)
            wide = rounded.to(tl.float32)
            collapsed_squares += tl.sum(wide * wide, 1)
    total = tl.where((mix == MIXES)[None, :], squares[:, None], total)
    if pre_in is not None:
        total = tl.where((mix == MIXES + 1)[None, :], collapsed_squares[:, None], total)
    # Numbers in fours, so that accesses are 16 bytes wide.
    used = (mix < (MIXES + 5) // 4 * 4)[None, :]
    tl.store(partial + token[:, None] * P + mix[None, :], total, mask=alive[:, None] & used)


@triton.jit
def mix_sums(
    partial, token, N, MIXES: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """partial [SPLITS, N, P] added up over the splits, SPLIT_BLOCK of them at a time: fp32 [T, P]."""
    which = tl.arange(0, P)[None, None, :]
    inside = (token < N)[None, :, None] & (which < (MIXES + 5) // 4 * 4)
    total = tl.zeros((SPLIT_BLOCK, T, P), tl.float32)
    for first in range(0, SPLITS, SPLIT_BLOCK):
        split = first + tl.arange(0, SPLIT_BLOCK)[:, None, None]
        at = partial + (split.to(tl.int64) * N + token[None, :, None]) * P + which
        total += tl.load(at, mask=(split < SPLITS) & inside, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def mix_weights(
    partial, scale, base, pre, post, comb, token, N, mix_eps, hc_eps, iters,
    STREAMS: tl.constexpr, D: tl.constexpr, MIXES: tl.constexpr, P: tl.constexpr, MATRIX: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Stores pre, post and comb, unless they are None; returns the sums of `mix_columns` with pre in the place of its
    mixes, fp32 [T, P]: STREAMS gates first, the sum of squares of the collapsed row at MIXES + 1.

    MATRIX: STREAMS rounded up to a power of two.
    """
    alive = (token < N)[:, None]
    sums = mix_sums(partial, token, N, MIXES, P, SPLITS, SPLIT_BLOCK, T)
    which = tl.arange(0, P)[None, :]
    square = tl.sum(tl.where(which == MIXES, sums, 0.0), 1)
    factor = tl.rsqrt(square / (STREAMS * D) + mix_eps)[:, None]
    # Three kinds of mixes, each with its scale: STREAMS for pre, STREAMS for post, the rest for comb.
    kind = tl.minimum(which // STREAMS, 2)
    mixes = sums * factor * tl.load(scale + kind, mask=which < MIXES, other=0.0).to(tl.float32)
    mixes += tl.load(base + which, mask=which < MIXES, other=0.0).to(tl.float32)
    gates = tl.sigmoid(mixes)
    if post is not None:
        tl.store(pre + token[:, None] * STREAMS + which, gates + hc_eps, mask=alive & (kind == 0))
        tl.store(post + token[:, None] * STREAMS + which - STREAMS, 2.0 * gates, mask=alive & (kind == 1))
        cell = tl.arange(0, MATRIX * MATRIX)[None, :]
        real = (cell // MATRIX < STREAMS) & (cell % MATRIX < STREAMS)
        at = tl.where(real, cell // MATRIX * STREAMS + cell % MATRIX, 0)
        logits = tl.gather(mixes, tl.broadcast_to(2 * STREAMS + at, (T, MATRIX * MATRIX)), 1)
        matrix = sinkhorn_matrices(tl.reshape(logits, (T, MATRIX, MATRIX)), iters, hc_eps, STREAMS, MATRIX)
        to = comb + token[:, None] * (STREAMS * STREAMS) + at
        tl.store(to, tl.reshape(matrix, (T, MATRIX * MATRIX)), mask=alive & real)
    return tl.where(which < STREAMS, gates + hc_eps, sums)


@triton.jit
def mix_column(sums, column, P: tl.constexpr):
    """[T] of what `mix_weights` returns."""
    return tl.sum(tl.where(tl.arange(0, P)[None, :] == column, sums, 0.0), 1)


@triton.jit
def collapse_rows(
    streams, token_stride, stream_stride, sums, x, token, N,
    STREAMS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """x[token] = sum over j of pre[:, j] * streams[token, j], rounded once; returns its sums of squares [T]."""
    alive = token < N
    gates = ()
    for j in tl.static_range(STREAMS):
        gates = gates + (mix_column(sums, j, P)[:, None],)  # type: ignore[assignment]
    squares = tl.zeros((T,), tl.float32)
    for start in range(0, D, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        inside = alive[:, None] & (column < D)[None, :]
        total = tl.zeros((T, BLOCK_D), tl.float32)
        for j in tl.static_range(STREAMS):
            at = streams + token[:, None] * token_stride + j * stream_stride + column[None, :]
            total += gates[j] * tl.load(at, mask=inside, other=0.0).to(tl.float32)
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


@triton.jit
def collapse_token(
    streams, token_stride, stream_stride, y, y_stride, post_in, comb_in, pre_in, norm_weight, x, norm_eps, token,
    STREAMS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """x[token], a whole row: the streams times pre_in, rounded, and normalised if there is a norm_weight."""
    column = tl.arange(0, BLOCK_D)
    inside = column < D
    kind = streams.dtype.element_ty
    factors = post_factors(y, post_in, comb_in, token, None, kind, STREAMS, FP32)
    if norm_weight is not None:
        weight = tl.load(norm_weight + column, mask=inside, other=0.0)
    parts = streams_at(
        streams, token_stride, stream_stride, y, y_stride, factors, token, column, inside, STREAMS, FP32
    )  # fmt: skip
    total = tl.zeros((BLOCK_D,), tl.float32)
    for j in tl.static_range(STREAMS):
        total += tl.load(pre_in + token * STREAMS + j).to(tl.float32) * parts[j].to(tl.float32)
    rounded = total.to(x.dtype.element_ty)
    if norm_weight is not None:
        wide = rounded.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 0) / D + norm_eps)
        rounded = (wide * factor * weight.to(tl.float32)).to(x.dtype.element_ty)
    tl.store(x + token * D + column, rounded, mask=inside)
