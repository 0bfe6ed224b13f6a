"""The products of `experts`. Importing this needs nvidia-cutlass-dsl. Compiled only: no GPU has run it.

Warps 0 to 3 take the sums out of tensor memory, one copies tiles into shared memory, one starts the products.
"""

from typing import Any

import cutlass
from cutlass import BFloat16, Float4E2M1FN, Float8E4M3FN, Float8E8M0FNU, Float32, Int32, Int64, Uint8, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_stream, make_ptr
from cutlass.memory import SmemAllocator
from cutlass.utils import blackwell_helpers, blockscaled_layout

from dscompile.templates.cute import arithmetic
from dscompile.templates.cute.device import (
    Device,
    bytes_after,
    load_int32,
    load_shared,
    load_shared_word,
    load_words,
    store_bytes,
    store_shared_byte,
    store_shared_half,
    store_words,
)
from dscompile.templates.cute.experts import BLOCK_K, EPILOGUE_WARPS, ROUNDING, THREADS, GemmSpec
from dscompile.templates.cute.layouts import BLOCK_BYTES, GROUP, ROWS

COPY_WARP, PRODUCT_WARP = EPILOGUE_WARPS, EPILOGUE_WARPS + 1
ONE = tcgen05.CtaGroup.ONE
CHUNK = 16  # columns that a thread takes out of tensor memory at a time


def product(block_t: int) -> cute.TiledMma:
    """128 rows of FP4 weights times `block_t` columns of FP8 activations, 32 values at a time, a scale each."""
    op = tcgen05.MmaMXF8F6F4Op(
        Float4E2M1FN, Float8E4M3FN, (ROWS, block_t, 32), ONE, tcgen05.OperandSource.SMEM, OperandMajorMode.K,
        OperandMajorMode.K,
    )  # fmt: skip
    return cute.make_tiled_mma(op)


class GroupedGemm:
    """One product of `experts`; a block makes 128 rows (of both parts) of one tile of slots."""

    def __init__(self, spec: GemmSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        weights: cute.Pointer,
        weight_scales: cute.Pointer,
        x: cute.Pointer,
        x_scales: cute.Pointer,
        tile_expert: cute.Pointer,
        slot_data: cute.Pointer,
        out: cute.Pointer,
        out_scales: cute.Pointer,
        experts: Int32,
        tiles: Int32,
        stream: Any,
    ):
        """weights [experts, parts * rows, size / 2 bytes], weight_scales arranged; x [tiles * BLOCK_T, size], x_scales
        a block of 128 rows a tile; tile_expert int32 [tiles], -1 for none; tiles is at least 1.

        up: slot_data fp32 [tiles * BLOCK_T], routing weights; out E4M3 [tiles * BLOCK_T, rows], out_scales like
        x_scales. down: slot_data int32 [tiles * BLOCK_T], pairs, -1 for none; out bf16 [pairs, rows].
        """
        spec = self.spec
        height = spec.parts * spec.rows
        a = cute.make_tensor(
            weights, cute.make_layout((height, spec.size, experts), stride=(spec.size, 1, height * spec.size))
        )
        columns = tiles * spec.block_t
        b = cute.make_tensor(x, cute.make_layout((columns, spec.size, 1), stride=(spec.size, 1, 0)))
        sfa = cute.make_tensor(weight_scales, blockscaled_layout.tile_atom_to_shape_SF(a.shape, GROUP))
        sfb = cute.make_tensor(x_scales, blockscaled_layout.tile_atom_to_shape_SF((tiles * ROWS, spec.size, 1), GROUP))
        mma, mma_sfb = product(spec.block_t), product(ROWS)
        tile, tile_sfb = (ROWS, spec.block_t, BLOCK_K), (ROWS, ROWS, BLOCK_K)
        a_layout = blackwell_helpers.make_smem_layout_a(mma, tile, Uint8, spec.parts * spec.stages)
        b_layout = blackwell_helpers.make_smem_layout_b(mma, tile, Float8E4M3FN, spec.stages)
        sfa_layout = blockscaled_layout.make_smem_layout_sfa(mma, tile, GROUP, spec.parts * spec.stages)
        sfb_layout = blockscaled_layout.make_smem_layout_sfb(mma, tile, GROUP, spec.stages)
        first = (None, None, None, 0)
        op = cpasync.CopyBulkTensorTileG2SOp(ONE)
        # A byte for a 4-bit type asks for the copy that widens.
        copy_a, a = cute.nvgpu.make_tiled_tma_atom_A(
            op, a, cute.slice_(a_layout, first), tile, mma, (1, 1, 1, 1), internal_type=Uint8
        )
        copy_b, b = cute.nvgpu.make_tiled_tma_atom_B(op, b, cute.slice_(b_layout, first), tile, mma, (1, 1, 1, 1))
        copy_sfa, sfa = cute.nvgpu.make_tiled_tma_atom_A(
            op, sfa, cute.slice_(sfa_layout, first), tile, mma, (1, 1, 1, 1), internal_type=cutlass.Int16
        )
        copy_sfb, sfb = cute.nvgpu.make_tiled_tma_atom_B(
            op, sfb, cute.slice_(sfb_layout, first), tile_sfb, mma_sfb, (1, 1, 1, 1), internal_type=cutlass.Int16
        )
        # Shared memory allows one block a multiprocessor; not knowing that, the compiler saves registers and spills.
        self.kernel(
            mma, mma_sfb, copy_a, a, copy_b, b, copy_sfa, sfa, copy_sfb, sfb, tile_expert, slot_data, out, out_scales,
            a_layout, b_layout, sfa_layout, sfb_layout,
        ).launch(
            grid=[spec.row_tiles, tiles, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        mma_sfb: cute.TiledMma,
        copy_a: cute.CopyAtom,
        a: cute.Tensor,
        copy_b: cute.CopyAtom,
        b: cute.Tensor,
        copy_sfa: cute.CopyAtom,
        sfa: cute.Tensor,
        copy_sfb: cute.CopyAtom,
        sfb: cute.Tensor,
        tile_expert: cute.Pointer,
        slot_data: cute.Pointer,
        out: cute.Pointer,
        out_scales: cute.Pointer,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        sfa_layout: cute.Layout,
        sfb_layout: cute.Layout,
    ):
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        row_tile, slot_tile, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        expert = load_int32(bytes_after(tile_expert, slot_tile * 4))
        if expert >= 0:
            shared = SmemAllocator()
            full_empty = shared.allocate_array(Int64, 2 * spec.stages)
            done = shared.allocate_array(Int64, 2)
            tmem_at = shared.allocate_array(Int32, 1)
            s_a = shared.allocate_tensor(Uint8, a_layout.outer, 1024, a_layout.inner)
            s_b = shared.allocate_tensor(Float8E4M3FN, b_layout.outer, 1024, b_layout.inner)
            s_sfa = shared.allocate_tensor(Float8E8M0FNU, sfa_layout, 128)
            s_sfb = shared.allocate_tensor(Float8E8M0FNU, sfb_layout, 128)
            staging = shared.allocate_tensor(Uint8, cute.make_layout(spec.staging_bytes), 128).iterator

            one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
            producer, consumer = pipeline.PipelineTmaUmma.create(
                barrier_storage=full_empty, num_stages=spec.stages, producer_group=one, consumer_group=one,
                tx_count=spec.copied_bytes,
            ).make_participants()  # fmt: skip
            sums_producer, sums_consumer = pipeline.PipelineUmmaAsync.create(
                barrier_storage=done, num_stages=1, producer_group=one,
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32 * EPILOGUE_WARPS),
            ).make_participants()  # fmt: skip
            if warp == 0:
                cute.arch.alloc_tmem(spec.columns, tmem_at)
            cute.arch.barrier()
            sums_at = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_at)
            shape = mma.partition_shape_C((ROWS, spec.block_t))
            sums = [
                cute.make_tensor(sums_at + part * spec.block_t, mma.make_fragment_C(shape).layout)
                for part in range(spec.parts)
            ]

            if warp == COPY_WARP:
                thr, thr_sfb = mma.get_slice(0), mma_sfb.get_slice(0)
                mk, nk = (ROWS, BLOCK_K), (spec.block_t, BLOCK_K)
                everything = (None, None, None)
                one_cta = cute.make_layout(1)
                to_a, from_a = cpasync.tma_partition(
                    copy_a, 0, one_cta, cute.group_modes(s_a, 0, 3),
                    cute.group_modes(thr.partition_A(cute.local_tile(a, mk, everything)), 0, 3),
                )  # fmt: skip
                to_b, from_b = cpasync.tma_partition(
                    copy_b, 0, one_cta, cute.group_modes(s_b, 0, 3),
                    cute.group_modes(thr.partition_B(cute.local_tile(b, nk, everything)), 0, 3),
                )  # fmt: skip
                to_sfa, from_sfa = cpasync.tma_partition(
                    copy_sfa, 0, one_cta, cute.group_modes(s_sfa, 0, 3),
                    cute.group_modes(thr.partition_A(cute.local_tile(sfa, mk, everything)), 0, 3),
                )  # fmt: skip
                to_sfb, from_sfb = cpasync.tma_partition(
                    copy_sfb, 0, one_cta, cute.group_modes(s_sfb, 0, 3),
                    cute.group_modes(thr_sfb.partition_B(cute.local_tile(sfb, mk, everything)), 0, 3),
                )  # fmt: skip
                to_sfa, from_sfa = cute.filter_zeros(to_sfa), cute.filter_zeros(from_sfa)
                to_sfb, from_sfb = cute.filter_zeros(to_sfb), cute.filter_zeros(from_sfb)
                for step in cutlass.range(spec.steps, unroll=1):
                    stage = producer.acquire_and_advance()
                    for part in cutlass.range_constexpr(spec.parts):
                        rows = row_tile + part * spec.row_tiles
                        at = stage.index * spec.parts + part
                        cute.copy(copy_a, from_a[None, rows, step, expert], to_a[None, at], tma_bar_ptr=stage.barrier)
                        cute.copy(
                            copy_sfa, from_sfa[None, rows, step, expert], to_sfa[None, at], tma_bar_ptr=stage.barrier
                        )
                    cute.copy(
                        copy_b, from_b[None, slot_tile, step, 0], to_b[None, stage.index], tma_bar_ptr=stage.barrier
                    )
                    cute.copy(
                        copy_sfb, from_sfb[None, slot_tile, step, 0], to_sfb[None, stage.index],
                        tma_bar_ptr=stage.barrier,
                    )  # fmt: skip
                producer.tail()

            if warp == PRODUCT_WARP:
                first = (None, None, None, 0)
                sfa_at, sfb_at = spec.scale_columns()
                t_sfa_layout = blockscaled_layout.make_tmem_layout_sfa(
                    mma, (ROWS, spec.block_t, BLOCK_K), GROUP, cute.slice_(sfa_layout, first)
                )
                t_sfb_layout = blockscaled_layout.make_tmem_layout_sfb(
                    mma, (ROWS, spec.block_t, BLOCK_K), GROUP, cute.slice_(sfb_layout, first)
                )
                t_sfa = [
                    cute.make_tensor(cute.recast_ptr(sums_at + at, dtype=Float8E8M0FNU), t_sfa_layout) for at in sfa_at
                ]
                t_sfb = cute.make_tensor(cute.recast_ptr(sums_at + sfb_at, dtype=Float8E8M0FNU), t_sfb_layout)
                copies_sfa = [scale_copy(s_sfa, tensor) for tensor in t_sfa]
                copy_sfb_t, from_sfb_s, to_sfb_t = scale_copy(s_sfb, t_sfb)
                r_a, r_b = mma.make_fragment_A(s_a), mma.make_fragment_B(s_b)
                empty = sums_producer.acquire_and_advance()
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _step in cutlass.range(spec.steps, unroll=1):
                    stage = consumer.wait_and_advance()
                    for part in cutlass.range_constexpr(spec.parts):
                        copy_t, from_s, to_t = copies_sfa[part]
                        cute.copy(copy_t, from_s[None, None, None, None, stage.index * spec.parts + part], to_t)
                    cute.copy(copy_sfb_t, from_sfb_s[None, None, None, None, stage.index], to_sfb_t)
                    for block in cutlass.range_constexpr(BLOCK_K // 32):
                        mma.set(tcgen05.Field.SFB, t_sfb[None, None, block].iterator)
                        for part in cutlass.range_constexpr(spec.parts):
                            mma.set(tcgen05.Field.SFA, t_sfa[part][None, None, block].iterator)
                            at = stage.index * spec.parts + part
                            cute.gemm(
                                mma, sums[part], r_a[None, None, block, at], r_b[None, None, block, stage.index],
                                sums[part],
                            )  # fmt: skip
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    stage.release()
                empty.commit()

            if warp < EPILOGUE_WARPS:
                ready = sums_consumer.wait_and_advance()
                slot = slot_tile * spec.block_t
                if cutlass.const_expr(spec.up):
                    self.activate(sums, staging, slot, slot_data, thread)
                else:
                    self.round(sums, staging, thread)
                cute.arch.barrier(barrier_id=1, number_of_threads=32 * EPILOGUE_WARPS)
                if cutlass.const_expr(spec.up):
                    self.store_codes(staging, slot, slot_tile, row_tile, thread, out, out_scales)
                else:
                    self.store_rows(staging, slot, row_tile, thread, slot_data, out)
                ready.release()
            cute.arch.barrier()
            if warp == 0:
                cute.arch.relinquish_tmem_alloc_permit()
                cute.arch.dealloc_tmem(sums_at, spec.columns)

    def activate(self, sums: list[Any], staging: Any, slot: Any, slot_data: Any, thread: Any) -> None:
        """Codes of act [slot, row] into `staging`, a byte each at 128 * slot + row, and their scales behind them."""
        spec = self.spec
        lane, warp = thread % 32, thread // 32
        scales_at = staging.toint() + spec.block_t * ROWS
        mine = Int32(0)
        for first in range(0, spec.block_t, CHUNK):
            gate, up = (taken(tensor, first, thread) for tensor in sums)
            factor = [Device.from_bits(w) for w in load_words(bytes_after(slot_data, (slot + first) * 4), CHUNK)]
            scaled, scales = arithmetic.activated(Device, gate, up, factor, spec.limit, ROUNDING)
            for place, stored in enumerate(scales):
                mine = Device.select(lane == (first + place) % 32, stored, mine)
            for place in range(0, CHUNK, 2):
                both = Device.e4m3x2(scaled[place], scaled[place + 1])
                at = staging.toint() + (first + place) * ROWS + thread
                store_shared_byte(at, both)
                store_shared_byte(at + ROWS, both >> 8)
            last = first + CHUNK
            if last % 32 == 0 or last == spec.block_t:
                # Lane r holds the scale of slot 32 * (last // 32) + r, and of none if there are fewer slots.
                store_shared_byte(scales_at + lane * 16 + (last - 1) // 32 * 4 + warp, mine)

    def round(self, sums: list[Any], staging: Any, thread: Any) -> None:
        """bf16 results [slot, row] into `staging`, at 256 * slot + 2 * row."""
        for first in range(0, self.spec.block_t, CHUNK):
            values = taken(sums[0], first, thread)
            for place in range(0, CHUNK, 2):
                both = Device.bf16x2(values[place], values[place + 1])
                at = staging.toint() + (first + place) * 2 * ROWS + thread * 2
                store_shared_half(at, both)
                store_shared_half(at + 2 * ROWS, both >> 16)

    @cute.jit
    def store_codes(
        self, staging: cute.Pointer, slot: Int32, slot_tile: Int32, row_tile: Int32, thread: Int32, out: cute.Pointer,
        out_scales: cute.Pointer,
    ):  # fmt: skip
        spec = self.spec
        for step in cutlass.range_constexpr(spec.block_t * ROWS // (16 * 32 * EPILOGUE_WARPS)):
            part = thread + step * 32 * EPILOGUE_WARPS
            words = load_shared(staging.toint() + part * 16)
            row = Int64(slot + part // 8) * spec.rows
            store_words(bytes_after(out, row + row_tile * ROWS + part % 8 * 16), words, 16)
        if thread < spec.block_t:
            place = thread % 32 * 16 + thread // 32 * 4
            word = load_shared_word(staging.toint() + spec.block_t * ROWS + place)
            block = Int64(slot_tile * spec.row_tiles + row_tile) * BLOCK_BYTES
            store_bytes(bytes_after(out_scales, block + place), word, 4)

    @cute.jit
    def store_rows(
        self, staging: cute.Pointer, slot: Int32, row_tile: Int32, thread: Int32, slot_data: cute.Pointer,
        out: cute.Pointer,
    ):  # fmt: skip
        spec = self.spec
        for step in cutlass.range_constexpr(spec.block_t * ROWS * 2 // (16 * 32 * EPILOGUE_WARPS)):
            part = thread + step * 32 * EPILOGUE_WARPS
            pair = load_int32(bytes_after(slot_data, (slot + part // 16) * 4))
            words = load_shared(staging.toint() + part * 16)
            if pair >= 0:
                row = Int64(pair) * (2 * spec.rows)
                store_words(bytes_after(out, row + row_tile * (2 * ROWS) + part % 16 * 16), words, 16)


def scale_copy(shared: Any, to: Any) -> tuple[Any, Any, Any]:
    """(copy, source with a mode for stages, destination) of scales, from shared to tensor memory."""
    to = cute.filter_zeros(to)
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(ONE), Float8E8M0FNU)
    copy = tcgen05.make_s2t_copy(atom, to)
    part = copy.get_slice(0)
    source = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(cute.filter_zeros(shared)))
    return copy, source, part.partition_D(to)


def taken(sums: Any, first: int, thread: Any) -> list[Any]:
    """CHUNK columns of a thread's row of sums."""
    rows = sums[(None, None), 0, 0]
    part = cute.local_tile(rows, (ROWS, CHUNK), (0, first // CHUNK))
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(CHUNK), tcgen05.Pack.NONE), Float32)
    copy = tcgen05.make_tmem_copy(atom, part)
    own = copy.get_slice(thread)
    registers = cute.make_rmem_tensor(own.partition_D(cute.make_identity_tensor((ROWS, CHUNK))).shape, Float32)
    cute.copy(copy, own.partition_S(part), registers)
    cute.arch.fence_view_async_tmem_load()
    return [registers[i] for i in range(CHUNK)]


def arguments(spec: GemmSpec) -> tuple[Any, ...]:
    """What stands for the arguments of `GroupedGemm.__call__` when it is compiled."""

    def pointer(dtype: Any, aligned: int = 128) -> Any:
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=aligned)

    return (
        pointer(Float4E2M1FN), pointer(Float8E8M0FNU), pointer(Float8E4M3FN), pointer(Float8E8M0FNU), pointer(Int32),
        pointer(Float32 if spec.up else Int32), pointer(Uint8 if spec.up else BFloat16), pointer(Uint8), Int32(1),
        Int32(1), make_fake_stream(),
    )  # fmt: skip
