"""The three kernels of the experts on a CPU, with the arithmetic and layouts of the kernels, against the operation."""

import pytest
import torch

from dscompile.formats.numeric import e4m3_to_float, ue8m0_to_float
from dscompile.ops.experts_packed import ACTIVATIONS, dense, experts_packed
from dscompile.targets import TARGETS
from dscompile.templates.cute import arithmetic, layouts
from dscompile.templates.cute.experts import (
    ROUNDING,
    TEMPLATES,
    VALUES,
    GemmSpec,
    Plan,
    four_scales,
    gathered,
    plan,
    specs,
)
from dscompile.templates.cute.host import Host
from dscompile.templates.cute.record import UnsuitableError
from dscompile.templates.triton.record import config

(EXPERTS,) = TEMPLATES
SM103 = TARGETS["sm_103a"]


def example(tokens: int = 24, size: int = 512, inner: int = 256, count: int = 6, k: int = 2) -> dict:
    generator = torch.Generator().manual_seed(7)

    def packed(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(116, 121, shape, dtype=torch.uint8, generator=generator)

    indices = torch.rand(tokens, count, generator=generator).argsort(-1)[:, :k].clone()
    indices[3, 1], indices[:, 0] = -1, torch.where(indices[:, 0] == 4, 5, indices[:, 0])
    return {
        "x": torch.randn(tokens, size, generator=generator).bfloat16(), "indices": indices,
        "weights": torch.rand(tokens, k, generator=generator), "w13": packed(count, 2 * inner, size // 2),
        "w13_scale": scales(count, 2 * inner, size // 32), "w2": packed(count, size, inner // 2),
        "w2_scale": scales(count, size, inner // 32), "limit": 10.0, "weight_format": "e2m1_1x32",
        "out_dtype": torch.bfloat16,
    }  # fmt: skip


def simulated_gather(x: torch.Tensor, k: int, to: Plan, spec: GemmSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [slots, size] and scales [tiles, size / 128, 512]; what is not written is NaN and 255."""
    slots, tiles, threads = to.slot_pair.numel(), to.tile_expert.numel(), spec.size // VALUES
    codes = torch.full((slots, spec.size), 0x7F, dtype=torch.uint8)
    scales = torch.full((tiles, spec.steps * layouts.BLOCK_BYTES), 0xFF, dtype=torch.uint8)
    for slot, pair in enumerate(to.slot_pair.tolist()):
        if pair < 0:
            continue
        words = list(x[pair // k].view(torch.int32).view(threads, VALUES // 2).unbind(-1))
        payload, stored = gathered(Host, words)
        codes[slot] = torch.stack(payload, -1).view(torch.uint8).flatten()
        four = (
            four_scales(Host, stored, torch.arange(threads, dtype=torch.int32) % 32).view(threads, 1).view(torch.uint8)
        )
        tile, row = divmod(slot, spec.block_t)
        for thread in range(0, threads, 8):
            at = thread // 8 * layouts.BLOCK_BYTES + row % 32 * 16 + row // 32 * 4
            scales[tile, at : at + 4] = four[thread]
    return codes, scales


def values(codes: torch.Tensor, scales: torch.Tensor, spec: GemmSpec) -> torch.Tensor:
    """[tiles, BLOCK_T, size]: what the tensor core multiplies."""
    blocks = scales.view(-1, 1, spec.steps, 32, 4, 4)
    factors = ue8m0_to_float(layouts.restored_scales(blocks))[:, : spec.block_t]
    return e4m3_to_float(codes).view(-1, spec.block_t, spec.size) * factors.repeat_interleave(32, -1)


def simulated_up(args: dict, x: torch.Tensor, to: Plan, spec: GemmSpec) -> tuple[torch.Tensor, torch.Tensor]:
    tiles = to.tile_expert.numel()
    codes = torch.empty(tiles * spec.block_t, spec.rows, dtype=torch.uint8)
    scales = torch.full((tiles, spec.row_tiles * layouts.BLOCK_BYTES), 0xFF, dtype=torch.uint8)
    w13_scale = layouts.restored_scales(layouts.arranged_scales(args["w13_scale"]))
    for tile, expert in enumerate(to.tile_expert.tolist()):
        both = x[tile] @ dense(args["w13"][expert], w13_scale[expert], "e2m1_1x32").T
        gate, up = both.chunk(2, -1)
        slots = slice(tile * spec.block_t, (tile + 1) * spec.block_t)
        columns = lambda t: list(t.view(spec.block_t, spec.row_tiles, 128).unbind(0))  # noqa: E731
        factor = list(to.slot_weight[slots].view(-1, 1, 1).unbind(0))
        scaled, stored = arithmetic.activated(Host, columns(gate), columns(up), factor, spec.limit, ROUNDING)
        codes[slots] = Host.e4m3x2(torch.stack(scaled), torch.zeros(1)).to(torch.uint8).flatten(1)
        for slot, of_slot in enumerate(stored):
            for row_tile in range(spec.row_tiles):
                for warp in range(4):
                    place = layouts.scale_place(slot, warp) + row_tile * layouts.BLOCK_BYTES
                    scales[tile, place] = of_slot[row_tile, 32 * warp]
    return codes, scales


@pytest.mark.parametrize("block_t", [16, 64])
def test_the_whole_chain(block_t: int) -> None:
    args = example()
    up, down = specs(args, config(6, 3, BLOCK_T=block_t))
    to = plan(args["indices"], args["weights"], args["w13"].shape[0], block_t)
    act = values(*simulated_up(args, values(*simulated_gather(args["x"], 2, to, up), up), to, up), down)
    pairs = torch.zeros(args["indices"].numel(), up.size)
    w2_scale = layouts.restored_scales(layouts.arranged_scales(args["w2_scale"]))
    for tile, expert in enumerate(to.tile_expert.tolist()):
        result = (act[tile] @ dense(args["w2"][expert], w2_scale[expert], "e2m1_1x32").T).bfloat16().float()
        slots = to.slot_pair[tile * block_t : (tile + 1) * block_t].long()
        pairs[slots[slots >= 0]] = result[slots >= 0]
    got = pairs.view(-1, 2, up.size).sum(1).bfloat16()
    expected = experts_packed(**args)
    assert not got.isnan().any()
    # Sums in another order, and an exponential of another rounding: a bf16, or a code, one unit off here and there.
    assert (got == expected).float().mean() > 0.9
    torch.testing.assert_close(got.float(), expected.float(), rtol=2**-6, atol=float(expected.abs().max()) * 2**-8)


def test_gathered_rows_are_those_of_the_format() -> None:
    args = example()
    spec, _ = specs(args, config(6, 3, BLOCK_T=32))
    to = plan(args["indices"], args["weights"], 6, 32)
    x = values(*simulated_gather(args["x"], 2, to, spec), spec).flatten(0, 1)
    live = to.slot_pair >= 0
    expected = ACTIVATIONS.fake_quant(args["x"].float())[to.slot_pair[live].long() // 2]
    assert torch.equal(x[live], expected)


def test_plan() -> None:
    indices = torch.tensor([[2, 0], [2, -1], [7, 2]])
    got = plan(indices, torch.tensor([[0.5, 0.25], [1.0, 9.0], [9.0, 2.0]]), 4, 2)
    assert got.tile_expert.tolist() == [0, 2, 2]
    assert got.slot_pair.tolist() == [1, -1, 0, 2, 5, -1]
    assert got.slot_weight.tolist() == [0.25, 0.0, 0.5, 1.0, 2.0, 0.0]


def test_memory_of_the_release() -> None:
    meta = {"x": torch.empty(8, 5120, device="meta"), "w13": torch.empty(384, 4608, 2560, device="meta"), "limit": 10.0}
    up, down = specs(meta, config(6, 5, BLOCK_T=32))
    assert (up.steps, up.row_tiles, down.steps, down.row_tiles) == (40, 18, 18, 40)
    assert (up.columns, down.columns) == (128, 64)
    assert up.scale_columns() == ([64, 68], 72) and down.scale_columns() == ([32], 36)
    assert up.copied_bytes == 2 * (128 * 64 + 512) + 32 * 128 + 512
    sizes = {"N": 256, "k": 6, "E": 384, "D": 5120, "I": 2304}
    assert len(EXPERTS.space(sizes, SM103)) == 4
    assert EXPERTS.space({**sizes, "N": 8192}, SM103)[0]["BLOCK_T"] == 64


@pytest.mark.parametrize(
    ("change", "target", "reason"),
    [
        ({}, "sm_90a", "block-scaled tensor cores"),
        ({"weight_format": "e4m3_32x32"}, "sm_103a", "allowed: 'e2m1_1x32'"),
        ({"x": torch.zeros(2, 512)}, "sm_103a", "allowed: torch.bfloat16"),
        ({"x": torch.zeros(2, 480).bfloat16()}, "sm_103a", "480 and 256 values"),
        ({"x": torch.zeros(2, 1024).bfloat16()[:, ::2]}, "sm_103a", "rows at multiples of 16 bytes"),
        ({"x": torch.zeros(2, 516).bfloat16()[:, :512]}, "sm_103a", "rows at multiples of 16 bytes"),
    ],
)
def test_what_it_cannot_serve_it_says(change: dict, target: str, reason: str) -> None:
    with pytest.raises(UnsuitableError, match=reason):
        EXPERTS.requests(example() | change, config(6, 3, BLOCK_T=32), TARGETS[target])
