"""The kernels of the indexer: scores with a streaming choice, what several programs chose put together, candidates."""

import triton
import triton.language as tl

from dscompile.templates.triton.device.keys import key_values, load_keys
from dscompile.templates.triton.device.topk import NOTHING, add_best, best_kept, index_of, kth_best, ordered, places


@triton.jit
def index_scores_kernel(
    q, keys, head_weights, n_visible, candidates, buffer, counts, out, maxima,
    q_b, q_t, keys_b, keys_r, T, S, K, scale, UNIT: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr, NEWEST: tl.constexpr, SHORT: tl.constexpr, ASM: tl.constexpr,
    PAYLOAD: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """TOKENS neighbouring queries against one of SPLITS parts of the rows that they see.

    The K best go to `out` [B * T, K], by index, or, if that is None, as entries to `buffer` [B * T, SPLITS, CAPACITY]
    and their number to `counts` [B * T, SPLITS]. With BLOCK_SIZE > 0 the best score of every block of so many rows goes
    to `maxima` [B * T, blocks], -inf where there is none. SHORT: queries that see at most K rows need no scores.
    """
    M: tl.constexpr = TOKENS * BLOCK_H
    KIND: tl.constexpr = tl.float32 if DTYPE == 0 else (tl.bfloat16 if DTYPE == 1 else tl.float16)
    tiles = tl.cdiv(T, TOKENS)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    split = tl.program_id(1)
    first = (tl.program_id(0) % tiles) * TOKENS
    token = first + tl.arange(0, TOKENS)
    query = batch * T + token
    visible = tl.load(n_visible + query, mask=token < T, other=0).to(tl.int64)
    visible = tl.maximum(tl.minimum(visible, S), 0).to(tl.int32)
    end = tl.max(visible, 0)
    if SHORT:
        end = tl.where(end <= K, 0, end)
    blocks = tl.cdiv(end, BLOCK_N)
    share = tl.cdiv(blocks, SPLITS)
    begin = split * share
    stop = tl.minimum(begin + share, blocks)

    row = tl.arange(0, M)
    at_token, head = first + row // BLOCK_H, row % BLOCK_H
    live = (at_token < T) & (head < H)
    column = tl.arange(0, BLOCK_D)
    at = batch * q_b + at_token.to(tl.int64) * q_t + head * D
    queries = tl.load(q + at[:, None] + column[None, :], mask=live[:, None] & (column < D)[None, :], other=0.0)
    queries = tl.trans(queries.to(KIND))
    weight = tl.load(head_weights + (batch * T + at_token) * H + head, mask=live, other=0.0).to(tl.float32)

    slot = tl.arange(0, BLOCK_N)
    place = (query * SPLITS + split) * CAPACITY
    count = tl.zeros((TOKENS,), tl.int32)
    bar = tl.full((TOKENS,), NOTHING, tl.int64)
    base = keys + batch * keys_b * UNIT
    index = begin * BLOCK_N + slot
    if candidates is not None:
        marks = query[:, None] * S + slot[None, :]
        wanted = tl.load(candidates + marks + begin * BLOCK_N, mask=index[None, :] < visible[:, None], other=0) != 0
        needed = tl.max(wanted.to(tl.int32), 0) > 0
    else:
        wanted = index[None, :] < visible[:, None]
        needed = index < end
    payload, scales, tail = load_keys(
        base, index.to(tl.int64) * keys_r * UNIT, needed, D, BLOCK_D, PAYLOAD, GROUP, SCALE, TAIL
    )
    for block in range(begin, stop):
        # The rows of the next block are on their way while these are computed with.
        index = (block + 1) * BLOCK_N + slot
        coming = index < tl.minimum(end, stop * BLOCK_N)
        if candidates is not None:
            mask = coming[None, :] & (index[None, :] < visible[:, None])
            next_wanted = tl.load(candidates + marks + (block + 1) * BLOCK_N, mask=mask, other=0) != 0
            coming = tl.max(next_wanted.to(tl.int32), 0) > 0
        else:
            next_wanted = index[None, :] < visible[:, None]
        next_payload, next_scales, next_tail = load_keys(
            base, index.to(tl.int64) * keys_r * UNIT, coming, D, BLOCK_D, PAYLOAD, GROUP, SCALE, TAIL
        )
        rows = key_values(payload, scales, tail, D, BLOCK_D, PAYLOAD, GROUP, SCALE, TAIL, KIND, ASM)
        products = tl.dot(rows, queries, input_precision="ieee")
        parts = tl.where(products < 0, 0.0, products) * scale * weight[None, :]
        if H != BLOCK_H:
            parts = tl.where(live[None, :], parts, 0.0)
        scores = tl.zeros((TOKENS, BLOCK_N), tl.float32)
        for one in tl.static_range(TOKENS):  # not as a sum over three axes: Triton 3.6 fails on it for tcgen05
            own = parts if TOKENS == 1 else tl.where((row // BLOCK_H == one)[None, :], parts, 0.0)
            scores = tl.where(tl.arange(0, TOKENS)[:, None] == one, tl.sum(own, 1)[None, :], scores)
        if BLOCK_SIZE > 0:
            split_up = tl.reshape(tl.where(wanted, scores, float("-inf")), (TOKENS, BLOCK_N // BLOCK_SIZE, BLOCK_SIZE))
            no_number = tl.max((split_up != split_up).to(tl.int32), 2) > 0
            best = tl.where(no_number, float("-inf"), tl.max(split_up, 2))
            width = tl.cdiv(S, BLOCK_SIZE)
            piece = block * (BLOCK_N // BLOCK_SIZE) + tl.arange(0, BLOCK_N // BLOCK_SIZE)
            tl.store(maxima + query[:, None] * width + piece[None, :], best,
                     mask=(token < T)[:, None] & (piece < width)[None, :])  # fmt: skip
        entries = ordered(scores, block * BLOCK_N + slot[None, :], NEWEST)
        entries = tl.where(wanted, entries, NOTHING)
        count, bar = add_best(buffer, place, count, bar, entries, K, CAPACITY)
        payload, scales, tail, wanted = next_payload, next_scales, next_tail, next_wanted

    if out is not None or tl.max(count, 0) > K:
        entries, keep, _ = best_kept(buffer, place, count, K, CAPACITY)
        count = tl.sum(keep.to(tl.int32), 1)
        if out is not None:
            slot = tl.arange(0, CAPACITY)
            inside = (token < T)[:, None]
            target = out + query[:, None] * K
            if SHORT:
                few = visible <= K
                keep = keep & ~few[:, None]
                count = tl.where(few, visible, count)
                tl.store(target + slot[None, :], tl.broadcast_to(slot[None, :], (TOKENS, CAPACITY)).to(tl.int64),
                         mask=inside & few[:, None] & (slot[None, :] < count[:, None]))  # fmt: skip
            tl.store(target + places(keep), index_of(entries, NEWEST), mask=inside & keep)
            tl.store(target + slot[None, :], tl.full((TOKENS, CAPACITY), -1, tl.int64),
                     mask=inside & (slot[None, :] >= count[:, None]) & (slot[None, :] < K))  # fmt: skip
        else:
            tl.store(buffer + place[:, None] + places(keep), entries, mask=keep)
    if out is None:
        tl.store(counts + query * SPLITS + split, count, mask=token < T)


@triton.jit
def index_merge_kernel(
    lists, counts, n_visible, out, number, S, K,
    STRIDE: tl.constexpr, EACH: tl.constexpr, FAN: tl.constexpr, NEWEST: tl.constexpr, SHORT: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """One query: the K best of FAN of its `number` lists of entries, STRIDE apart, at most EACH in a list.

    counts [B * T, number]: entries of every list; None if all have K, absent ones NOTHING. With ENTRIES a row of K
    entries goes to out [B * T, number / FAN, K], NOTHING behind them, else K indices, rising, -1 behind them.
    """
    query = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, FAN * EACH)
    one, at = tl.program_id(1) * FAN + slot // EACH, slot % EACH
    held = tl.full((FAN * EACH,), K, tl.int32)
    if counts is not None:
        held = tl.load(counts + query * number + one, mask=one < number, other=0)
    mask = (one < number) & (at < held)
    entries = tl.load(lists + (query * number + one) * STRIDE + at, mask=mask, other=NOTHING)[None, :]
    keep = (entries >= kth_best(entries, K)[:, None]) & (entries != NOTHING)
    found = tl.sum(keep.to(tl.int32))
    result = entries if ENTRIES else index_of(entries, NEWEST)
    target = out + (query * tl.num_programs(1) + tl.program_id(1)) * K
    rest = slot[None, :]
    if SHORT and not ENTRIES:
        visible = tl.load(n_visible + query).to(tl.int64)
        if visible <= K:
            found = tl.maximum(tl.minimum(visible, S), 0).to(tl.int32)
            keep = rest < found
            result = rest.to(tl.int64)
    tl.store(target + places(keep), result, mask=keep)
    nothing = tl.full((1, FAN * EACH), NOTHING if ENTRIES else -1, tl.int64)
    tl.store(target + rest, nothing, mask=(rest >= found) & (rest < K))


@triton.jit
def index_order_kernel(entries, out, K, BLOCK_K: tl.constexpr, NEWEST: tl.constexpr):
    """Rows of K different entries, NOTHING behind them -> their indices by falling entry, -1 behind them.

    A program places BLOCK_K entries of a row: at the number of those that are better.
    """
    query = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = slot < K
    own = tl.load(entries + query * K + slot, mask=inside, other=NOTHING)
    better = tl.zeros((BLOCK_K,), tl.int32)
    for start in range(0, K, BLOCK_K):
        other = start + tl.arange(0, BLOCK_K)
        others = tl.load(entries + query * K + other, mask=other < K, other=NOTHING)
        better += tl.sum((others[None, :] > own[:, None]).to(tl.int32), 1)
    there = own != NOTHING
    tl.store(out + query * K + tl.where(there, better, slot), tl.where(there, index_of(own, NEWEST), -1), mask=inside)


@triton.jit
def block_entries(maxima, query, piece, width, last, NEWEST: tl.constexpr):
    """Blocks `piece` of a query as entries: NOTHING beyond block `last`, which holds the newest row and is the best."""
    best = tl.load(maxima + query * width + piece, mask=piece <= last, other=float("-inf"))
    best = tl.where(piece == last, float("inf"), best)
    return tl.where((piece <= last) & (best > float("-inf")), ordered(best, piece, NEWEST), NOTHING)


@triton.jit
def index_candidates_kernel(
    maxima, n_visible, out, S, KEEP,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, NEWEST: tl.constexpr,
):  # fmt: skip
    """out uint8 [B * T, S]: 1 for the rows of the KEEP best blocks of a query, whose maxima are [B * T, blocks].

    A program writes ROWS rows of one query. TILE blocks are held at a time; with several TILES each step of the search
    reads all again.
    """
    query = tl.program_id(0).to(tl.int64)
    visible = tl.minimum(tl.load(n_visible + query).to(tl.int64), S)
    width = tl.cdiv(S, BLOCK_SIZE)
    last = tl.where(visible > 0, (visible - 1) // BLOCK_SIZE, -1).to(tl.int32)
    slot = tl.arange(0, TILE)
    if TILES == 1:
        worst = tl.max(kth_best(block_entries(maxima, query, slot, width, last, NEWEST)[None, :], KEEP), 0)
    else:
        there, low, high = 0, tl.full((), -(2**63) + 1, tl.int64), tl.full((), NOTHING, tl.int64)
        for tile in range(TILES):
            entries = block_entries(maxima, query, tile * TILE + slot, width, last, NEWEST)
            there += tl.sum((entries != NOTHING).to(tl.int32))
            high = tl.maximum(high, tl.max(entries, 0))
        high = tl.where(there <= KEEP, low, high)
        while low < high:
            middle = (low | high) - ((low ^ high) >> 1)
            above = 0
            for tile in range(TILES):
                entries = block_entries(maxima, query, tile * TILE + slot, width, last, NEWEST)
                above += tl.sum((entries >= middle).to(tl.int32))
            low = tl.where(above >= KEEP, middle, low)
            high = tl.where(above <= KEEP, tl.where(above == KEEP, middle, middle - 1), high)
        worst = low
    piece = tl.program_id(1) * (ROWS // BLOCK_SIZE) + tl.arange(0, ROWS // BLOCK_SIZE)
    entries = block_entries(maxima, query, piece, width, last, NEWEST)
    kept = ((entries >= worst) & (entries != NOTHING)).to(tl.uint8)
    rows = tl.reshape(tl.broadcast_to(kept[:, None], (ROWS // BLOCK_SIZE, BLOCK_SIZE)), (ROWS,))
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tl.store(out + query * S + row, rows, mask=row < S)
