"""The kernels of sparse attention: one over the keys, one that combines what several programs saw of them."""

import triton
import triton.language as tl

from dscompile.templates.triton.device.arrival import is_last
from dscompile.templates.triton.device.attention import START, attend, combined, finished, rotate_stored, rotated
from dscompile.templates.triton.device.keys import key_values, load_keys


@triton.jit
def combine_tile(
    part, ends, sink, cos, sin, out, batch, base_token, base_head, written, T, H,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, TOKENS: tl.constexpr,
    SPLITS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The parts of TOKENS queries and BLOCK_H heads together, 16 rows at a time; see `combined` and the kernel."""
    ROWS: tl.constexpr = 16 if TOKENS * BLOCK_H > 16 else TOKENS * BLOCK_H
    SHARED: tl.constexpr = ROWS // BLOCK_H if ROWS > BLOCK_H else 1
    column = tl.arange(0, BLOCK_D)
    for first in tl.range(0, TOKENS * BLOCK_H, ROWS):
        row = first + tl.arange(0, ROWS)
        token = base_token + row // BLOCK_H
        head = base_head + row % BLOCK_H
        query = batch * T + token
        live = (token < T) & (head < H)
        result = combined(part, ends, sink, query, head, live, written, H, D, BLOCK_D, SPLITS, PADDED, 2)
        result = result.to(out.dtype.element_ty)
        if HALF > 0:
            each = base_token + first // BLOCK_H + tl.arange(0, SHARED)
            result = rotated(result, cos, sin, batch * T + each, each < T, SHARED, True, D - 2 * HALF, HALF)
        inside = live[:, None] & (column < D)[None, :]
        tl.store(out + ((query * H + head) * D)[:, None] + column[None, :], result, mask=inside)


@triton.jit
def sparse_attention_kernel(
    q, window_kv, slots, q_pos, window_start, comp_kv, comp_idx, n_visible, sink, cos, sin, out, part, ends, counter,
    q_b, q_t, window_b, window_r, slots_b, comp_b, comp_r, idx_b, idx_t,
    T, H, S, P, window, C, K, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr, ROPE_Q: tl.constexpr,
    BLOCK_H: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, SWAP: tl.constexpr,
    COMBINE: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
    W_PAYLOAD: tl.constexpr, W_GROUP: tl.constexpr, W_SCALE: tl.constexpr, W_TAIL: tl.constexpr,
    C_PAYLOAD: tl.constexpr, C_GROUP: tl.constexpr, C_SCALE: tl.constexpr, C_TAIL: tl.constexpr,
):  # fmt: skip
    """TOKENS neighbouring queries of BLOCK_H heads over one of SPLITS parts of their keys.

    slots: None, or which of P rows each of the S keys of a window is; a key whose slot is none of them is not there.
    With one split `out` gets the result, else `part` [B * T, SPLITS, H, D] the sum over this part's keys and `ends`
    [B * T, SPLITS, 2, H] its maximum and its denominator, which is -1 where the query sees no key at all. With COMBINE
    the last program of a tile of queries puts the parts together, else `combine_kernel` does.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    M: tl.constexpr = TOKENS * BLOCK_H
    head_blocks = tl.cdiv(H, BLOCK_H)
    tiles = tl.cdiv(T, TOKENS)
    tile = tl.program_id(0) // head_blocks
    batch = (tile // tiles).to(tl.int64)
    split = tl.program_id(1)
    row = tl.arange(0, M)
    base_token = (tile % tiles) * TOKENS
    base = batch * T + base_token
    token = base_token + row // BLOCK_H
    base_head = (tl.program_id(0) % head_blocks) * BLOCK_H
    head = base_head + row % BLOCK_H
    query = batch * T + token
    inside = token < T
    live = inside & (head < H)

    # Which rows a query sees, by their index: oldest <= index <= newest in the window, index < count or a list beside.
    start = tl.load(window_start + batch).to(tl.int64)
    ahead = tl.load(q_pos + query, mask=inside, other=0).to(tl.int64) - start
    oldest = tl.maximum(tl.maximum(ahead - (window - 1), -start), 0)
    newest = tl.where(inside, tl.minimum(ahead, S - 1), -1)
    some = oldest <= newest
    end = tl.max(tl.where(some, newest + 1, 0), 0)
    first = tl.minimum(tl.min(tl.where(some, oldest, end), 0), end)
    window_blocks = tl.cdiv(end - first, BLOCK_N).to(tl.int32)
    low = tl.where(some, oldest - first, 0).to(tl.int32)
    high = tl.where(some, newest + 1 - first, 0).to(tl.int32)
    if slots is not None:
        some = token < 0  # known when the slots have been read
    zero = tl.zeros((M,), tl.int32)
    count = zero
    comp_blocks = 0
    if n_visible is not None:
        count = tl.minimum(tl.load(n_visible + query, mask=inside, other=0).to(tl.int64), C)
        count = tl.maximum(count, 0).to(tl.int32)
        some = some | (count > 0)
        comp_blocks = tl.cdiv(tl.max(count, 0), BLOCK_N)
    if comp_idx is not None:
        comp_blocks = tl.cdiv(K, BLOCK_N)
    share = tl.cdiv(window_blocks + comp_blocks, SPLITS)
    begin = split * share
    stop = tl.minimum(begin + share, window_blocks + comp_blocks)

    # From the first element of the program on, so that offsets are narrow and known when the kernel is compiled.
    column = tl.arange(0, BLOCK_D)
    near = (row // BLOCK_H)[:, None] * q_t + (row % BLOCK_H * D)[:, None] + column[None, :]
    here = live[:, None] & (column < D)[None, :] if not (EVEN and D == BLOCK_D) else tl.full((1, 1), True, tl.int1)
    here = tl.broadcast_to(here, (M, BLOCK_D))
    q += batch * q_b + base_token.to(tl.int64) * q_t + base_head * D
    given = tl.load(q + near, mask=here, other=0.0)
    each = tl.arange(0, TOKENS)
    if ROPE_Q:
        given = rotated(given, cos, sin, base + each, base_token + each < T, TOKENS, False, D - 2 * HALF, HALF)

    slot = tl.arange(0, BLOCK_N)
    listed = slot < 0
    top = tl.full((M,), START, tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((BLOCK_D, M) if SWAP else (M, BLOCK_D), tl.float32)
    # Rows that hang on slots are not loaded ahead: what that takes in registers is not there.
    AHEAD: tl.constexpr = None if slots is None else 1
    for block in tl.range(begin, tl.minimum(stop, window_blocks), num_stages=AHEAD, disable_licm=True):
        index = first + block * BLOCK_N + slot
        valid = index < end
        rows = batch * window_b + index * window_r
        if slots is not None:
            place = tl.load(slots + batch * slots_b + index, mask=valid, other=-1).to(tl.int64)
            valid = valid & (place >= 0) & (place < P)
            rows = place * window_r
            if TOKENS == 1:
                listed = listed | valid
            else:
                at = (block * BLOCK_N + slot)[None, :]
                seen = valid[None, :] & (at >= low[:, None]) & (at < high[:, None])
                some = some | (tl.max(seen.to(tl.int32), 1) > 0)
        payload, scales, tail = load_keys(window_kv, rows, valid, D, BLOCK_D, W_PAYLOAD, W_GROUP, W_SCALE, W_TAIL)
        keys = key_values(payload, scales, tail, D, BLOCK_D, W_PAYLOAD, W_GROUP, W_SCALE, W_TAIL, DTYPE, ASM)
        top, total, acc = attend(given, keys, valid, block * BLOCK_N + slot, low, high, top, total, acc, scale,
                                 TOKENS, SWAP)  # fmt: skip
    if comp_kv is not None:
        for block in tl.range(
            tl.maximum(begin, window_blocks) - window_blocks, stop - window_blocks, disable_licm=True
        ):
            index = (block * BLOCK_N + slot).to(tl.int64)
            if comp_idx is not None:
                index = tl.load(comp_idx + batch * idx_b + base_token.to(tl.int64) * idx_t + index,
                                mask=index < K, other=-1).to(tl.int64)  # fmt: skip
                valid = (index >= 0) & (index < C)
                listed = listed | valid
            else:
                valid = index < tl.max(count, 0)
            rows = batch * comp_b + index * comp_r
            payload, scales, tail = load_keys(comp_kv, rows, valid, D, BLOCK_D, C_PAYLOAD, C_GROUP, C_SCALE, C_TAIL)
            keys = key_values(payload, scales, tail, D, BLOCK_D, C_PAYLOAD, C_GROUP, C_SCALE, C_TAIL, DTYPE, ASM)
            top, total, acc = attend(given, keys, valid, block * BLOCK_N + slot, zero, count, top, total, acc, scale,
                                     TOKENS, SWAP)  # fmt: skip
    if slots is not None or comp_idx is not None:
        some = some | (tl.max(listed.to(tl.int32), 0) > 0)

    if SWAP:
        acc = tl.trans(acc)
    near = (row // BLOCK_H * H + row % BLOCK_H) * D
    if SPLITS == 1:
        result = finished(acc, total, top, sink, head, live, some).to(DTYPE)
        out += (base * H + base_head) * D
        tl.store(out + near[:, None] + column[None, :], result, mask=here)
        if HALF > 0:
            rotate_stored(out, near, live, cos, sin, base + each, base_token + each < T, TOKENS, D, HALF, TURNED)
    else:
        place = query * SPLITS + split
        tl.store(ends + place * 2 * H + head, top, mask=live)
        tl.store(ends + (place * 2 + 1) * H + head, tl.where(some, total, -1.0), mask=live)
        if begin < stop:
            mine = part + ((base * SPLITS + split) * H + base_head) * D
            near += row // BLOCK_H * (SPLITS - 1) * H * D
            tl.store(mine + near[:, None] + column[None, :], acc, mask=here)
        if COMBINE:
            if is_last(counter + tl.program_id(0), SPLITS):
                written = tl.cdiv(window_blocks + comp_blocks, tl.maximum(share, 1))
                combine_tile(part, ends, sink, cos, sin, out, batch, base_token, base_head, written, T, H,
                             D, BLOCK_D, HALF, BLOCK_H, TOKENS, SPLITS, PADDED)  # fmt: skip


@triton.jit
def combine_kernel(
    part, ends, sink, cos, sin, out, H,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, SPLITS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """The parts of one query and BLOCK_H heads together; see `sparse_attention_kernel`."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = head < H
    result = combined(part, ends, sink, query, head, live, None, H, D, BLOCK_D, SPLITS, PADDED, 4)
    result = result.to(out.dtype.element_ty)
    if HALF > 0:
        one = tl.arange(0, 1)
        result = rotated(result, cos, sin, query + one, one == 0, 1, True, D - 2 * HALF, HALF)
    column = tl.arange(0, BLOCK_D)
    inside = live[:, None] & (column < D)[None, :]
    tl.store(out + (query * H + head)[:, None] * D + column[None, :], result, mask=inside)
