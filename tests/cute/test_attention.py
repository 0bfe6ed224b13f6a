"""Sparse attention on a CPU, with the arithmetic and layouts of the kernel: rows decoded, then tile after tile."""

import pytest
import torch

from dscompile.ops.attention import sparse_attention
from dscompile.ops.rope import rope
from dscompile.targets import TARGETS
from dscompile.templates.cute.attention import (
    COLUMNS,
    COMPRESSED,
    DIM,
    HEADS,
    KEYS,
    SHARED_BYTES,
    START,
    TEMPLATES,
    WINDOW,
    chunk_place,
    half_row,
    maxima_of_lanes,
    spec_of,
    sums_of_lanes,
    weights_of,
)
from dscompile.templates.cute.host import Host
from dscompile.templates.cute.record import UnsuitableError
from dscompile.templates.triton.record import config

(ATTENTION,) = TEMPLATES
SM103 = TARGETS["sm_103a"]


def example(heads: int = 64, selected: int = 200, position: int = 300) -> dict:
    generator = torch.Generator().manual_seed(heads)
    window = WINDOW.pack(torch.randn(2, 500, DIM, generator=generator))
    rows = COMPRESSED.pack(torch.randn(2, 400, DIM, generator=generator))
    rows[0, 7] = 0xFF  # NaN, and no query lists it
    listed = torch.randint(8, 400, (2, 1, selected), dtype=torch.int32, generator=generator)
    listed[:, :, 5::9] = -1
    angle = torch.rand(2, 1, 32, generator=generator) * 6
    return {
        "q": torch.randn(2, 1, heads, DIM, generator=generator).bfloat16(), "window_kv": window,
        "q_pos": torch.tensor([[position], [40]]), "window_start": torch.tensor([0, -3]), "window": 128,
        "comp_kv": rows, "comp_idx": listed, "n_visible": None, "sink": torch.randn(heads, generator=generator),
        "scale": DIM**-0.5, "cos": angle.cos(), "sin": angle.sin(), "rope_q": True, "window_format": WINDOW.name,
        "comp_format": COMPRESSED.name,
    }  # fmt: skip


def words(data: torch.Tensor) -> list[torch.Tensor]:
    return list(data.contiguous().view(torch.int32).unbind(-1))


@pytest.mark.parametrize("window", [True, False])
def test_half_rows_are_the_values_of_the_format(window: bool) -> None:
    record = WINDOW if window else COMPRESSED
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, DIM, generator=generator) * torch.logspace(-6, 4, 200)[:, None]
    rows, codes = record.pack(x), record.payload_bytes(DIM)
    seen = []
    for half in (0, 1):
        payload = rows[:, half * codes // 2 : (half + 1) * codes // 2]
        count = record.scale_bytes(DIM) // 2
        scales = rows[:, codes + half * count : codes + (half + 1) * count]
        chunks = half_row(Host, window, words(payload), words(scales))
        assert len(chunks) == 32 and all(len(chunk) == 4 for chunk in chunks)
        seen += [torch.stack(chunk, -1).view(torch.bfloat16) for chunk in chunks]
    assert torch.equal(torch.cat(seen, -1), record.unpack(rows, DIM).bfloat16())


def test_reductions_over_lanes() -> None:
    x = torch.randn(32, 4, 32, generator=torch.Generator().manual_seed(4))  # value, warp, lane
    lane = torch.arange(32)
    assert torch.equal(maxima_of_lanes(Host, list(x), lane.expand(4, 32)), x.amax(-1).T)
    torch.testing.assert_close(sums_of_lanes(Host, list(x), lane.expand(4, 32)), x.sum(-1).T, rtol=1e-5, atol=1e-5)


def test_chunks_of_a_slab_do_not_meet_in_a_bank() -> None:
    places = {chunk_place(row, chunk) for row in range(128) for chunk in range(8)}
    assert places == set(range(0, 128 * 128, 16))
    for chunk in range(8):
        assert len({chunk_place(row, chunk) % 128 for row in range(8)}) == 8


def tiles_of(args: dict, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(keys [128, 512], which are seen) of each tile, zeros where not seen."""
    spec = spec_of(args)
    ahead = int(args["q_pos"][batch, 0] - args["window_start"][batch])
    oldest = max(ahead - (spec.window - 1), -int(args["window_start"][batch]), 0)
    newest = min(ahead, args["window_kv"].shape[1] - 1)
    found = []
    for in_window, first in spec.tiles:
        key = torch.arange(KEYS) + first
        if in_window:
            index = key + oldest
            valid, record, pool = index <= newest, WINDOW, args["window_kv"]
        else:
            index = args["comp_idx"][batch, 0][key.clamp(max=spec.selected - 1)].long()
            valid = (index >= 0) & (key < spec.selected)
            record, pool = COMPRESSED, args["comp_kv"]
        rows = pool[batch, index.where(valid, torch.zeros_like(index))] * valid[:, None]
        found.append((record.unpack(rows, DIM).bfloat16().float(), valid))
    return found


@pytest.mark.parametrize(("heads", "selected", "position"), [(64, 200, 300), (128, 512, 127), (64, 128, 5000)])
def test_tile_after_tile(heads: int, selected: int, position: int) -> None:
    args = example(heads, selected, position)
    expected = sparse_attention(**args)
    turned = rope(args["q"], args["cos"].unsqueeze(2), args["sin"].unsqueeze(2), False).float()
    for batch in range(2):
        top, total, sums = torch.full((heads,), START), torch.zeros(heads), torch.zeros(heads, DIM)
        for keys, valid in tiles_of(args, batch):
            assert not keys.isnan().any()
            scores = (keys @ turned[batch, 0].T * args["scale"]).masked_fill(~valid[:, None], START)
            before, top = top, torch.maximum(top, scores.amax(0))
            p = torch.stack(weights_of(Host, list(scores.unbind(-1)), list(top.unbind(-1)), valid), -1)
            factor = (before - top).exp()
            total = total * factor + p.sum(0)
            sums = sums * factor[:, None] + p.bfloat16().float().T @ keys
        total = total + (args["sink"] - top).exp()
        result = (sums / total[:, None]).bfloat16().unsqueeze(0).unsqueeze(0)
        cos, sin = (args[n][batch : batch + 1].unsqueeze(2) for n in ("cos", "sin"))
        got = rope(result, cos, sin, True)[0, 0].float()
        want = expected[batch, 0].float()
        # Weights are rounded to bf16 against another maximum than in one pass: a unit of bf16 of the largest value.
        assert (got - want).abs().max() <= 2**-7 * want.abs().max()


def test_it_fits() -> None:
    assert SHARED_BYTES <= SM103.smem_bytes_per_block and COLUMNS == 512
    spec = spec_of(example(128, 512))
    assert spec.tiles == [(True, 0), *((False, first) for first in (0, 128, 256, 384))]
    (request,) = ATTENTION.requests(example(128), config(8, 1), SM103)
    assert request.threads == 256 and HEADS == 64


@pytest.mark.parametrize(
    ("change", "target", "reason"),
    [
        ({}, "sm_90a", "tensor memory"),
        ({"q": torch.zeros(2, 1, 16, DIM).bfloat16()}, "sm_103a", "16 heads of 512"),
        ({"comp_format": "none"}, "sm_103a", "formats"),
        ({"cos": None}, "sm_103a", "cos, allowed"),
        ({"q_pos": torch.zeros(2, 1, dtype=torch.int32)}, "sm_103a", "torch.int64"),
        ({"sink": torch.zeros(64).bfloat16()}, "sm_103a", "sink"),
        ({"comp_idx": torch.zeros(2, 1, 8, dtype=torch.int32)[..., ::2]}, "sm_103a", "strides of comp_idx"),
    ],
)
def test_what_it_cannot_serve_it_says(change: dict, target: str, reason: str) -> None:
    with pytest.raises(UnsuitableError, match=reason):
        ATTENTION.requests(example() | change, config(8, 1), TARGETS[target])
