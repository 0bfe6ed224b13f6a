"""The kernel of `attention`. Importing this needs nvidia-cutlass-dsl. Compiled only: no GPU has run it.

A thread has one key of a tile: half of its row when it is decoded, half of the heads when its scores are read.
"""

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cute.runtime import make_fake_stream, make_ptr
from cutlass.memory import SmemAllocator
from cutlass.utils import blackwell_helpers

from dscompile.templates.cute import arithmetic
from dscompile.templates.cute.attention import (
    COLUMNS,
    COMPRESSED,
    DIM,
    HEADS,
    KEY_BYTES,
    KEYS,
    QUERY_BYTES,
    ROTATED,
    SCORES_AT,
    SLAB,
    SLABS,
    START,
    SUMS_AT,
    TABLES,
    THREADS,
    WEIGHT_BYTES,
    WINDOW,
    AttentionSpec,
    half_row,
    maxima_of_lanes,
    sums_of_lanes,
    weights_of,
)
from dscompile.templates.cute.device import (
    Device,
    bytes_after,
    load_int32,
    load_int64,
    load_shared,
    load_shared_word,
    load_two_words,
    load_words,
    store_shared,
    store_shared_half,
    store_shared_word,
    store_words,
    tensor_load,
    tensor_store,
)

ONE = tcgen05.CtaGroup.ONE
WINDOW_BYTES, COMPRESSED_BYTES = WINDOW.row_bytes(DIM), COMPRESSED.row_bytes(DIM)


def product(major: Any) -> cute.TiledMma:
    """128 rows, 64 columns, 16 values at a time; both operands in shared memory, K-major or not."""
    op = tcgen05.MmaF16BF16Op(BFloat16, Float32, (KEYS, HEADS, 16), ONE, tcgen05.OperandSource.SMEM, major, major)
    return cute.make_tiled_mma(op)


def operands() -> tuple[Any, Any, Any, Any, Any, Any]:
    """(score product, layouts of keys and queries in it; sum product, layouts of the same keys and of weights)."""
    scores, sums = product(OperandMajorMode.K), product(OperandMajorMode.MN)
    make_a, make_b = blackwell_helpers.make_smem_layout_a, blackwell_helpers.make_smem_layout_b
    narrow, wide = (KEYS, HEADS, SLAB), (128, HEADS, KEYS)
    return (
        scores, make_a(scores, narrow, BFloat16, SLABS), make_b(scores, narrow, BFloat16, SLABS),
        sums, make_a(sums, wide, BFloat16, DIM // 128), make_b(sums, wide, BFloat16, 1),
    )  # fmt: skip


def seen_as(pointer: Any, layout: Any) -> Any:
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, BFloat16), layout.outer)


class Attention:
    """out[query, head] for 64 heads of one query a block; see `attention`."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        window_kv: cute.Pointer,
        q_pos: cute.Pointer,
        window_start: cute.Pointer,
        comp_kv: cute.Pointer,
        comp_idx: cute.Pointer,
        sink: cute.Pointer | None,
        cos: cute.Pointer,
        sin: cute.Pointer,
        out: cute.Pointer,
        queries: Int32,
        tokens: Int32,
        window_rows: Int64,
        comp_rows: Int64,
        stream: Any,
    ):
        """Dense tensors as in `dsv4::sparse_attention`; queries = batch * tokens, at least 1. window_rows and
        comp_rows: of a sequence. An index outside the pool is skipped like -1."""
        self.kernel(
            q, window_kv, q_pos, window_start, comp_kv, comp_idx, sink, cos, sin, out, tokens, window_rows, comp_rows
        ).launch(grid=[queries, self.spec.heads // HEADS, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self,
        q: cute.Pointer,
        window_kv: cute.Pointer,
        q_pos: cute.Pointer,
        window_start: cute.Pointer,
        comp_kv: cute.Pointer,
        comp_idx: cute.Pointer,
        sink: cute.Pointer | None,
        cos: cute.Pointer,
        sin: cute.Pointer,
        out: cute.Pointer,
        tokens: Int32,
        window_rows: Int64,
        comp_rows: Int64,
    ):
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        query, head_block, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane, quarter, half = thread % 32, warp % 4, warp // 4
        key = thread % KEYS
        batch = Int64(query // tokens)

        shared = SmemAllocator()
        barriers = shared.allocate_array(Int64, 2)
        tmem_at = shared.allocate_array(Int32, 1)
        keys = shared.allocate_tensor(Uint8, cute.make_layout(KEY_BYTES), 1024).iterator
        queries = shared.allocate_tensor(Uint8, cute.make_layout(QUERY_BYTES), 1024).iterator
        weights = shared.allocate_tensor(Uint8, cute.make_layout(WEIGHT_BYTES), 1024).iterator
        tables = shared.allocate_tensor(Uint8, cute.make_layout(4 * sum(TABLES.values())), 128).iterator
        table = table_places(tables.toint())
        if warp == 0:
            cute.arch.alloc_tmem(COLUMNS, tmem_at)
        if thread == 0:
            cute.arch.mbarrier_init(barriers, 1)
            cute.arch.mbarrier_init(barriers + 1, 1)
        cute.arch.mbarrier_init_fence()
        if thread < HEADS:
            store_shared_word(table["top"] + thread * 4, Device.bits(Float32(START)))
            store_shared_word(table["total"] + thread * 4, Int32(0))
        rows = rows_of(
            spec, batch, query, window_kv, q_pos, window_start, comp_kv, comp_idx, window_rows, comp_rows, key
        )
        fetched = fetch(spec.tiles[0], rows, half)
        # A quarter of a row of queries a thread: two slabs, of which the very last is rotated.
        row, part = thread % HEADS, warp // 2
        at = bytes_after(q, (Int64(query) * spec.heads + head_block * HEADS + row) * (2 * DIM) + part * (DIM // 2))
        for chunk in cutlass.range_constexpr(DIM // 32):
            words = load_words(at + chunk * 16, 4)
            if cutlass.const_expr(spec.rope_q and chunk >= 8):
                words = rotated_where(part == 3, words, cos, sin, query, chunk - 8)
            slab = part * 2 + chunk // 8
            place = slab * (HEADS * 128) + row * 128 + ((chunk % 8) ^ (row % 8)) * 16
            store_shared(queries.toint() + place, words)
        cute.arch.barrier()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_at)
        own = tmem.toint() + (quarter << 21)  # lanes 32 * quarter on

        for tile in cutlass.range_constexpr(len(spec.tiles)):
            payload, scales, valid = fetched
            if cutlass.const_expr(tile > 0):
                cute.arch.mbarrier_wait(barriers + 1, (tile - 1) % 2)
            for place, chunk_words in enumerate(half_row(Device, spec.tiles[tile][0], payload, scales)):
                slab = half * (SLABS // 2) + place // 8
                at = slab * (KEYS * 128) + key * 128 + ((place % 8) ^ (key % 8)) * 16
                store_shared(keys.toint() + at, chunk_words)
            cute.arch.fence_view_async_shared()
            before_sync()
            cute.arch.barrier()
            if warp == 0:
                after_sync()
                multiply_scores(keys, queries, tmem)
                with cute.arch.elect_one():
                    tcgen05.commit(barriers, None, ONE)
            if cutlass.const_expr(tile + 1 < len(spec.tiles)):
                fetched = fetch(spec.tiles[tile + 1], rows, half)
            cute.arch.mbarrier_wait(barriers, tile % 2)
            after_sync()
            scores = [
                Device.select(valid, Device.mul(Device.from_bits(word), spec.scale), Float32(START))
                for word in tensor_load(own + SCORES_AT + half * 32, 32)
            ]
            mine = maxima_of_lanes(Device, scores, lane)
            head = half * 32 + lane
            store_shared_word(table["maxima"] + (quarter * HEADS + head) * 4, Device.bits(mine))
            cute.arch.barrier()
            before = Device.from_bits(load_shared_word(table["top"] + head * 4))
            top = before
            for other in cutlass.range_constexpr(4):
                seen = load_shared_word(table["maxima"] + (other * HEADS + head) * 4)
                top = Device.max_number(top, Device.from_bits(seen))
            tops = [Device.of_lane(top, place) for place in range(32)]
            p = weights_of(Device, scores, tops, valid)
            total = sums_of_lanes(Device, p, lane)
            store_shared_word(table["sums"] + (quarter * HEADS + head) * 4, Device.bits(total))
            bits = [Device.bf16x2(low, high) for low, high in zip(p[::2], p[1::2])]
            for place in cutlass.range_constexpr(4):
                at = key * 128 + ((half * 4 + place) ^ (key % 8)) * 16
                store_shared(weights.toint() + at, bits[4 * place : 4 * place + 4])
            if quarter == 0:
                factor = Device.exp(Device.sub(before, top))
                store_shared_word(table["factor"] + head * 4, Device.bits(factor))
            cute.arch.fence_view_async_shared()
            cute.arch.barrier()
            if quarter == 0:
                # All have read the old maximum; the next tile's is behind a barrier.
                factor = Device.from_bits(load_shared_word(table["factor"] + head * 4))
                sum_here = Device.mul(Device.from_bits(load_shared_word(table["total"] + head * 4)), factor)
                for other in cutlass.range_constexpr(4):
                    seen = load_shared_word(table["sums"] + (other * HEADS + head) * 4)
                    sum_here = Device.add(sum_here, Device.from_bits(seen))
                store_shared_word(table["total"] + head * 4, Device.bits(sum_here))
                store_shared_word(table["top"] + head * 4, Device.bits(top))
            if cutlass.const_expr(tile > 0):
                shrink(own + SUMS_AT + half * 2 * HEADS, table["factor"])
            before_sync()
            cute.arch.barrier()
            if warp == 0:
                after_sync()
                multiply_sums(keys, weights, tmem, tile > 0)
                with cute.arch.elect_one():
                    tcgen05.commit(barriers + 1, None, ONE)
        cute.arch.mbarrier_wait(barriers + 1, (len(spec.tiles) - 1) % 2)
        after_sync()

        if cutlass.const_expr(spec.sink):
            if thread < HEADS:
                extra = Device.from_bits(load_int32(bytes_after(sink, (head_block * HEADS + thread) * 4)))
                top = Device.from_bits(load_shared_word(table["top"] + thread * 4))
                total = Device.from_bits(load_shared_word(table["total"] + thread * 4))
                total = Device.add(total, Device.exp(Device.sub(extra, top)))
                store_shared_word(table["total"] + thread * 4, Device.bits(total))
            cute.arch.barrier()
        angle = Int64(query) * (2 * ROTATED) + (key % ROTATED // 2) * 4
        c = Device.from_bits(load_int32(bytes_after(cos, angle)))
        s = Device.from_bits(load_int32(bytes_after(sin, angle)))
        for part in cutlass.range_constexpr(2):
            dim = (half * 2 + part) * 128 + key
            for first in cutlass.range_constexpr(0, HEADS, 16):
                sums = tensor_load(own + SUMS_AT + half * 2 * HEADS + part * HEADS + first, 16)
                totals = [word for i in range(4) for word in load_shared(table["total"] + (first + 4 * i) * 4)]
                results = finished(sums, totals)
                if cutlass.const_expr(part == 1):
                    results = turned_back(dim >= DIM - ROTATED, results, c, s, key)
                for place in cutlass.range_constexpr(0, 16, 2):
                    both = Device.bf16x2(results[place], results[place + 1])
                    at = keys.toint() + (first + place) * (2 * DIM) + dim * 2
                    store_shared_half(at, both)
                    store_shared_half(at + 2 * DIM, both >> 16)
        cute.arch.barrier()
        start = (Int64(query) * spec.heads + head_block * HEADS) * (2 * DIM)
        for step in cutlass.range_constexpr(HEADS * DIM * 2 // 16 // THREADS):
            place = (thread + step * THREADS) * 16
            store_words(bytes_after(out, start + place), load_shared(keys.toint() + place), 16)
        if warp == 0:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(tmem, COLUMNS)


def table_places(first: Any) -> dict[str, Any]:
    places, offset = {}, 0
    for name, count in TABLES.items():
        places[name] = first + 4 * offset
        offset += count
    return places


def before_sync() -> None:
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def after_sync() -> None:
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def rows_of(
    spec: AttentionSpec, batch: Any, query: Any, window_kv: Any, q_pos: Any, window_start: Any, comp_kv: Any,
    comp_idx: Any, window_rows: Any, comp_rows: Any, key: Any,
) -> Any:  # fmt: skip
    """A function: a tile of `spec.tiles` -> (address of this thread's row, whether the query sees it)."""
    start = load_int64(bytes_after(window_start, batch * 8))
    ahead = load_int64(bytes_after(q_pos, Int64(query) * 8)) - start
    oldest = cutlass.max(cutlass.max(ahead - (spec.window - 1), -start), Int64(0))
    newest = cutlass.min(ahead, window_rows - 1)

    def place(tile: tuple[bool, int]) -> tuple[Any, Any]:
        in_window, first = tile
        if in_window:
            index = oldest + first + Int64(key)
            valid = index <= newest
            if first + KEYS > spec.window:
                valid = valid & (key < spec.window - first)
            size, pool, rows = WINDOW_BYTES, window_kv, window_rows
        else:
            at = cutlass.min(key + first, spec.selected - 1)
            index = Int64(load_int32(bytes_after(comp_idx, (Int64(query) * spec.selected + at) * 4)))
            valid = (index >= 0) & (index < comp_rows) & (key + first < spec.selected)
            size, pool, rows = COMPRESSED_BYTES, comp_kv, comp_rows
        index = Int64(cutlass.select_(valid, index, Int64(0)))
        return bytes_after(pool, (batch * rows + index) * size), valid

    return place


def fetch(tile: tuple[bool, int], rows: Any, half: Any) -> tuple[list[Any], list[Any], Any]:
    """Half of this thread's row: (words of payload, words of scales, whether it is seen); zeros where it is not."""
    at, valid = rows(tile)
    if tile[0]:
        payload = load_words(at + half * (DIM // 2), DIM // 8)
        scales = load_two_words(at + DIM + half * (DIM // 64))
    else:
        payload = load_words(at + half * (DIM // 4), DIM // 16)
        scales = load_words(at + DIM // 2 + half * (DIM // 32), 4)
    # What a query does not see must not reach it by way of 0 * NaN.
    mask = Int32(cutlass.select_(valid, Int32(-1), Int32(0)))
    return [word & mask for word in payload], [word & mask for word in scales], valid


def rotated_where(turns: Any, words: list[Any], cos: Any, sin: Any, query: Any, chunk: int) -> list[Any]:
    """8 of the rotated values, in order of chunks, turned by the query's angles, where `turns`."""
    values = [half for word in words for half in arithmetic.halves(Device, word)]
    place = Int64(query) * (2 * ROTATED) + 16 * chunk
    c, s = ([Device.from_bits(w) for w in load_words(bytes_after(a, place), 4)] for a in (cos, sin))
    turned = arithmetic.rotated(Device, values, c, s)
    bits = [Device.bf16x2(low, high) for low, high in zip(turned[::2], turned[1::2])]
    return [Device.select(turns, new, old) for new, old in zip(bits, words)]


def multiply_scores(keys: Any, queries: Any, tmem: Any) -> None:
    mma, key_layout, query_layout, *_ = operands()
    a, b = mma.make_fragment_A(seen_as(keys, key_layout)), mma.make_fragment_B(seen_as(queries, query_layout))
    to = cute.make_tensor(tmem + SCORES_AT, mma.make_fragment_C(mma.partition_shape_C((KEYS, HEADS))).layout)
    mma.set(tcgen05.Field.ACCUMULATE, False)
    for slab in range(SLABS):
        for block in range(SLAB // 16):
            cute.gemm(mma, to, a[None, None, block, slab], b[None, None, block, slab], to)
            mma.set(tcgen05.Field.ACCUMULATE, True)


def multiply_sums(keys: Any, weights: Any, tmem: Any, more: bool) -> None:
    *_, mma, key_layout, weight_layout = operands()
    a, b = mma.make_fragment_A(seen_as(keys, key_layout)), mma.make_fragment_B(seen_as(weights, weight_layout))
    layout = mma.make_fragment_C(mma.partition_shape_C((128, HEADS))).layout
    for part in range(DIM // 128):
        to = cute.make_tensor(tmem + SUMS_AT + part * HEADS, layout)
        mma.set(tcgen05.Field.ACCUMULATE, more)
        for block in range(KEYS // 16):
            cute.gemm(mma, to, a[None, None, block, part], b[None, None, block, 0], to)
            mma.set(tcgen05.Field.ACCUMULATE, True)


def shrink(at: Any, factors: Any) -> None:
    """Two tiles of 64 columns times a factor each."""
    for first in range(0, HEADS, 16):
        factor = [Device.from_bits(w) for i in range(4) for w in load_shared(factors + (first + 4 * i) * 4)]
        for part in range(2):
            words = tensor_load(at + part * HEADS + first, 16)
            scaled = [Device.bits(Device.mul(Device.from_bits(w), f)) for w, f in zip(words, factor)]
            tensor_store(at + part * HEADS + first, scaled)


def finished(sums: list[Any], totals: list[Any]) -> list[Any]:
    """Sums over their denominators, 0 where that is 0; rounded to bf16."""
    results = []
    for word, total in zip(sums, totals):
        total = Device.from_bits(total)
        value = Device.div(Device.from_bits(word), total)
        results.append(Device.select(total == 0.0, Float32(0.0), value))
    return arithmetic.to_bf16(Device, results)


def turned_back(turns: Any, values: list[Any], c: Any, s: Any, key: Any) -> list[Any]:
    """The other value of a pair is the neighbour's."""
    sign = Device.select(key % 2 == 0, s, Device.negative(s))
    results = []
    for value in values:
        turned = Device.add(Device.mul(value, c), Device.mul(Device.neighbour(value, 1), sign))
        results.append(Device.select(turns, turned, value))
    return results


def arguments(spec: AttentionSpec) -> tuple[Any, ...]:
    """What stands for the arguments of `Attention.__call__` when it is compiled."""

    def pointer(dtype: Any, aligned: int = 16) -> Any:
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=aligned)

    return (
        pointer(BFloat16), pointer(Uint8), pointer(Int64), pointer(Int64), pointer(Uint8), pointer(Int32),
        pointer(Float32) if spec.sink else None, pointer(Float32), pointer(Float32), pointer(BFloat16), Int32(1),
        Int32(1), Int64(1), Int64(1), make_fake_stream(),
    )  # fmt: skip
