"""Grouped products in CuTe DSL, compiled for GPUs with block-scaled tensor cores, and what their code says."""

import functools
import re

import pytest
import torch

from dscompile.targets import TARGETS, Target
from dscompile.templates.cute import layouts
from dscompile.templates.cute.experts import TEMPLATES, THREADS, GemmSpec
from dscompile.templates.triton.record import config
from dscompile.tuning.cute_offline import CompiledCute, compile_request
from dscompile.tuning.disassembly import Facts, read

(EXPERTS,) = TEMPLATES
BLACKWELL = [target for target in TARGETS.values() if target.has("block_scaled_mma")]
blackwell = pytest.mark.parametrize("target", BLACKWELL, ids=lambda target: target.name)
RELEASE = {
    "x": torch.empty(8, 5120, dtype=torch.bfloat16, device="meta"), "limit": 10.0, "weight_format": "e2m1_1x32",
    "w13": torch.empty(384, 4608, 2560, dtype=torch.uint8, device="meta"),
}  # fmt: skip


@functools.cache
def compiled(block_t: int, stages: int, target: Target) -> dict[str, tuple[CompiledCute, Facts, dict]]:
    found = {}
    for request in EXPERTS.requests(RELEASE, config(6, stages, BLOCK_T=block_t), target):
        kernel = compile_request(request, target)
        facts = read(kernel.cubin)
        assert facts.spills == 0 and facts.stack_bytes == 0, (request.name, facts)
        assert kernel.shared_bytes <= target.smem_bytes_per_block
        found[request.name] = kernel, facts, request.details
    return found


def descriptors(ptx: str, spec: GemmSpec) -> set[int]:
    """The constant parts of instruction descriptors: those that name N, the number of tokens."""
    numbers = {int(n) for n in re.findall(r"\b(\d{8,10})\b", ptx)}
    return {n for n in numbers if (n >> 17) & 63 == spec.block_t // 8 and (n >> 23) & 1 and (n >> 27) & 3 == 1}


@blackwell
@pytest.mark.parametrize(
    ("block_t", "stages"),
    [(32, 5), *(pytest.param(*other, marks=pytest.mark.slow) for other in ((16, 5), (64, 4), (128, 3)))],
)
def test_release(block_t: int, stages: int, target: Target) -> None:
    kernels = compiled(block_t, stages, target)
    assert list(kernels) == ["experts_gather", "experts_up", "experts_down"]
    for name, parts in (("experts_up", 2), ("experts_down", 1)):
        kernel, facts, details = kernels[name]
        spec: GemmSpec = details["spec"]
        # Four times 32 values a stage, for w1 and for w3; nothing else multiplies.
        assert facts.tensor_core == {"UTCQMMA": 4 * parts}
        assert kernel.ptx.count("tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale") == 4 * parts
        # Codes and scales of every part and of the tokens come in bulk, and scales go on to tensor memory.
        assert facts.tma == 2 * parts + 2 and kernel.ptx.count("tcgen05.cp.") == parts + 1
        assert kernel.threads == THREADS == int(re.search(r"\.reqntid (\d+)", kernel.ptx)[1])  # type: ignore[index]
        assert facts.registers <= 110
        assert "mov.b32 \t%r" in kernel.ptx and re.search(
            rf", {spec.copied_bytes};\s+mbarrier.arrive.expect_tx", kernel.ptx
        )
        assert kernel.ptx.count("tcgen05.wait::ld") == kernel.ptx.count("tcgen05.ld.") == parts * block_t // 16
        assert re.search(rf"mov.b32 \t%r\d+, {spec.columns};\s+tcgen05.alloc", kernel.ptx)
        # E2M1 rows times E4M3 columns.
        assert {(n >> 7 & 7, n >> 10 & 7) for n in descriptors(kernel.ptx, spec)} == {(5, 0)}
    _, up, _ = kernels["experts_up"]
    # Routing weights in, codes out, 16 bytes each; 4 for the tile's expert and for four scales.
    assert up.loads == {4: 1, 16: block_t // 4} and up.stores == {4: 1, 16: block_t // 16}
    _, down, _ = kernels["experts_down"]
    assert down.loads == {4: 1 + block_t // 8} and down.stores == {16: block_t // 8}


@blackwell
def test_gather(target: Target) -> None:
    _, facts, _ = compiled(32, 5, target)["experts_gather"]
    assert facts.loads == {4: 1, 16: 2} and facts.stores == {4: 1, 16: 1} and facts.registers <= 40


def test_layouts_are_the_compilers() -> None:
    """Scale factors, widened FP4 and tensor memory, as nvidia-cutlass-dsl arranges them."""
    from cutlass import Float4E2M1FN, Float8E4M3FN, Uint8, cute
    from cutlass._mlir.dialects import cute_nvgpu
    from cutlass.utils import blackwell_helpers, blockscaled_layout

    from dscompile.templates.cute.expert_kernels import product

    seen = []

    def look() -> None:
        layout = blockscaled_layout.tile_atom_to_shape_SF((256, 512, 3), 32)
        for row in range(0, 256, 7):
            for group in range(16):
                at = cute.crd2idx((row, 32 * group + 5, 2), layout)
                seen.append(at == 2 * 256 * 16 + layouts.scale_offset(row, group, 16))
        # The copy that widens is one of its own.
        kinds = [cute_nvgpu.get_default_tma_format(Float4E2M1FN.mlir_type, wide) for wide in (True, False)]
        seen.append(kinds[0] != kinds[1])
        for block_t in (16, 32, 64, 128):
            mma, tile = product(block_t), (128, block_t, 128)
            a = blackwell_helpers.make_smem_layout_a(mma, tile, Uint8, 2)
            b = blackwell_helpers.make_smem_layout_b(mma, tile, Float8E4M3FN, 2)
            seen.append(cute.cosize(a.outer) == 2 * 128 * 128 and cute.cosize(b.outer) == 2 * block_t * 128)
            scales = blockscaled_layout.make_smem_layout_sfb(mma, tile, 32, 1)
            seen.append(cute.cosize(cute.filter_zeros(scales)) == layouts.BLOCK_BYTES)

    @cute.kernel
    def nothing():
        pass

    @cute.jit
    def host():
        look()
        nothing().launch(grid=[1, 1, 1], block=[32, 1, 1])

    cute.compile(host, options="--gpu-arch sm_103a")
    assert len(seen) == 37 * 16 + 9 and all(seen)
