"""Sparse attention decode in CuTe DSL, compiled for GPUs with tensor memory, and what its code says."""

import pytest
import torch

from dscompile.targets import TARGETS, Target
from dscompile.templates.cute.attention import TEMPLATES, chunk_place
from dscompile.templates.triton.record import config
from dscompile.tuning.cute_offline import compile_request
from dscompile.tuning.disassembly import read

(ATTENTION,) = TEMPLATES
BLACKWELL = [target for target in TARGETS.values() if target.has("tcgen05")]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def arguments(heads: int) -> dict:
    """Decoding 8 sequences with the sizes of the released V4.1."""
    angles = meta(8, 1, 32, dtype=torch.float32)
    return {
        "q": meta(8, 1, heads, 512), "window_kv": meta(8, 128, 528, dtype=torch.uint8), "window": 128,
        "q_pos": meta(8, 1, dtype=torch.int64), "window_start": meta(8, dtype=torch.int64),
        "comp_kv": meta(8, 4096, 288, dtype=torch.uint8), "comp_idx": meta(8, 1, 512, dtype=torch.int32),
        "n_visible": None, "sink": meta(heads, dtype=torch.float32), "scale": 512**-0.5, "cos": angles, "sin": angles,
        "rope_q": True, "window_format": "fp8_g32_ue8m0", "comp_format": "fp4_g16_e4m3",
    }  # fmt: skip


@pytest.mark.parametrize("target", BLACKWELL, ids=lambda target: target.name)
@pytest.mark.parametrize("heads", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_release(heads: int, target: Target) -> None:
    (request,) = ATTENTION.requests(arguments(heads), config(8, 1), target)
    kernel = compile_request(request, target)
    facts = read(kernel.cubin)
    assert facts.spills == 0 and facts.stack_bytes == 0
    assert kernel.shared_bytes <= target.smem_bytes_per_block
    # Five tiles: 512 values of keys times queries, 128 keys times weights for four tiles of values, 16 at a time.
    assert facts.tensor_core == {"UTCHMMA": 5 * (512 // 16 + 4 * 128 // 16)}
    # Rows come in 16 bytes but for the scales of window rows; in 4 the lists, angles and the sink, in 8 positions.
    assert facts.loads == {4: 4 + 2 + 1, 8: 3, 16: 16 + 4 * (8 + 1) + 16 + 2 * 8}
    assert facts.stores == {16: 16}
    assert "cvt.rn.f16x2.e2m1x2" in kernel.ptx and "cvt.rn.f16x2.e4m3x2" in kernel.ptx
    assert kernel.ptx.count("tcgen05.commit") == 2 * 5


def test_keys_lie_alike_for_both_products() -> None:
    """As rows summed over values, and as columns summed over keys; queries and weights as they are stored."""
    from cutlass import cute

    from dscompile.templates.cute.attention_kernels import operands

    wrong = []

    def place(layout, coordinate) -> int:
        byte = 2 * cute.crd2idx(coordinate, layout.outer)
        return byte ^ (byte >> 7 & 7) << 4  # the swizzle of all four

    def look() -> None:
        scores, key_rows, queries, _, key_columns, weights = operands()
        for row in range(0, 128, 5):
            for dim in range(0, 512, 3):
                want = dim // 64 * 16384 + chunk_place(row, dim % 64 // 8) + dim % 8 * 2
                wrong.append(place(key_rows, ((row, dim % 16), 0, dim % 64 // 16, dim // 64)) - want)
                wrong.append(place(key_columns, ((dim % 128, row % 16), 0, row // 16, dim // 128)) - want)
        for head in range(64):
            for dim in range(0, 512, 7):
                want = dim // 64 * 8192 + chunk_place(head, dim % 64 // 8) + dim % 8 * 2
                wrong.append(place(queries, ((head, dim % 16), 0, dim % 64 // 16, dim // 64)) - want)
            for key in range(0, 128, 3):
                want = chunk_place(key, head // 8) + head % 8 * 2
                wrong.append(place(weights, ((head, key % 16), 0, key // 16, 0)) - want)
        assert all("S<3,4,3>" in str(layout) for layout in (key_rows, queries, key_columns, weights))

    @cute.kernel
    def nothing():
        pass

    @cute.jit
    def host():
        look()
        nothing().launch(grid=[1, 1, 1], block=[32, 1, 1])

    cute.compile(host, options="--gpu-arch sm_103a")
    assert len(wrong) > 10_000 and not any(wrong)
