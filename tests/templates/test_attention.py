"""Sparse attention: both kernels (fp32 multiply-adds and tiles) against the reference, over masks, runs and lists."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.templates.cpu.sparse_attention import sparse_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def case(
    batch: int, tokens: int, heads: int, dim: int, rows: int, window: int, comp: int, picks: int, dtype: torch.dtype,
    mode: str, formats: tuple[str, str] = ("none", "none"), rope_q: bool = False, position: int = 0,
) -> list[Any]:  # fmt: skip
    """Arguments of the op. mode: "list" (with -1 and duplicates), "run" (consecutive), "count", "none"."""
    q = torch.randn(batch, tokens, heads, dim).to(dtype)
    window_kv, comp_kv = torch.randn(batch, rows, dim).to(dtype), torch.randn(batch, comp, dim).to(dtype)
    if formats[0] != "none":
        window_kv = FORMATS[formats[0]].pack(window_kv)
    if formats[1] != "none":
        comp_kv = FORMATS[formats[1]].pack(comp_kv)
    q_pos = (torch.arange(tokens) + position).expand(batch, tokens).clone()
    start = torch.full((batch,), position + tokens - rows)
    index = count = None
    if mode == "list":
        index = torch.randint(-1, comp, (batch, tokens, picks)) if comp else torch.full((batch, tokens, picks), -1)
    elif mode == "run":
        index = torch.arange(picks).expand(batch, tokens, picks).clone()
        index = torch.where(index < torch.randint(0, picks + 1, (batch, tokens, 1)), index, -1)
    elif mode == "count":
        count = torch.randint(-2, comp + 3, (batch, tokens))
    angle = torch.rand(batch, tokens, dim // 8) * 6
    return [q, window_kv, q_pos, start, window, None if mode == "none" else comp_kv, index, count, torch.randn(heads),
            dim**-0.5, angle.cos(), angle.sin(), rope_q, *formats]  # fmt: skip


def verify(check: Callable[..., Any], args: list[Any]) -> Tensor:
    limit = TOLERANCE[args[0].dtype]
    return check(sparse_attention, *args, rtol=limit, atol=limit)


@pytest.mark.parametrize("mode", ["list", "run", "count", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dim", "rows", "window", "comp", "picks", "position"),
    [
        (2, 7, 3, 64, 20, 8, 33, 9, 13),  # fewer heads than lanes, history before the chunk
        (1, 1, 16, 128, 128, 128, 300, 70, 900),  # one step of decoding
        (3, 41, 20, 32, 41, 16, 10, 10, 0),  # two groups of heads, odd prompt
        (1, 9, 1, 96, 9, 4, 5, 3, 0),
        (2, 33, 17, 24, 33, 8, 12, 4, 0),  # no tiles: 24 is no multiple of 32
        (1, 70, 4, 64, 70, 128, 0, 5, 0),  # no compressed row yet, window longer than the prompt
    ],
)
def test_equals_the_reference(
    check: Callable[..., Any], batch: int, tokens: int, heads: int, dim: int, rows: int, window: int, comp: int,
    picks: int, position: int, dtype: torch.dtype, mode: str,
) -> None:  # fmt: skip
    if mode == "run":
        picks = min(picks, comp)
    for rope_q in (False, True):
        verify(
            check,
            case(batch, tokens, heads, dim, rows, window, comp, picks, dtype, mode, rope_q=rope_q, position=position),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("formats", [("fp8_g32_ue8m0", "fp4_g16_e4m3"), ("bf16", "fp8_g32_ue8m0"), ("none", "fp32")])
def test_packed_pools(check: Callable[..., Any], formats: tuple[str, str], dtype: torch.dtype) -> None:
    for tokens, picks in ((1, 6), (5, 9), (40, 20)):
        verify(check, case(2, tokens, 4, 64, 40, 8, 30, picks, dtype, "list", formats, position=60))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [16, 32, 48, 64])
@pytest.mark.parametrize("sink", [None, -2.0, 60.0, 500.0])
def test_leading_skips_and_empty_rows(
    check: Callable[..., Any], masked: int, sink: float | None, dtype: torch.dtype
) -> None:
    """Case R14."""
    for tokens in (2, 9):
        args = case(1, tokens, 3, 32, 0, 1, 80, 64, dtype, "list")
        args[6][0, 0, :masked] = -1
        args[6][0, 1] = -1
        args[8] = None if sink is None else torch.full((3,), sink)
        args[10] = args[11] = None
        out = verify(check, args)
        assert torch.equal(out[0, 1], torch.zeros(3, 32, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [3, 12])
def test_rows_that_are_not_seen_may_hold_anything(fast: Callable[..., Any], tokens: int, dtype: torch.dtype) -> None:
    args = case(1, tokens, 2, 32, tokens + 6, 2, 50, 4, dtype, "list", position=6)
    args[6][:] = torch.tensor([1, -1, 30, 47])
    clean = fast(sparse_attention, *args)
    for which, row in ((1, 0), (1, 3), (5, 0), (5, 2), (5, 29), (5, 31), (5, 49)):
        for junk in (torch.nan, torch.inf):
            dirty = list(args)
            dirty[which] = args[which].clone()
            dirty[which][:, row] = junk
            assert torch.equal(fast(sparse_attention, *dirty), clean), (which, row, junk)
    dirty = list(args)
    dirty[5] = args[5].clone()
    dirty[5][:, 30] = torch.nan
    assert fast(sparse_attention, *dirty).isnan().all()


def test_padding_tokens_see_nothing(check: Callable[..., Any]) -> None:
    """Position -1 pads a row; its query and its cosines may be NaN without reaching another token."""
    for dtype in (torch.float32, torch.bfloat16):
        args = case(2, 6, 4, 32, 6, 4, 9, 3, dtype, "count")
        args[2][1, 4:] = -1
        args[7][1, 4:] = 0
        out = verify(check, args)
        assert out[1, 4:].eq(0).all()
        args[0][1, 4:] = torch.nan
        again = check.__closure__ and verify(check, args)
        assert again is not None and torch.equal(again[0], out[0]) and torch.equal(again[1, :4], out[1, :4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_position_is_safe(check: Callable[..., Any], dtype: torch.dtype) -> None:
    """Positions and starts far outside the pool, negative ones and the largest integers: nothing seen, nothing read."""
    big = 2**62
    args = case(4, 5, 2, 32, 7, 3, 0, 1, dtype, "none")
    args[2] = torch.tensor([[0, big, -5, 3, 2**40], [9, 1, 0, -1, -big], [4, 4, 4, 4, 4], [2, 100, 1, 50, 3]])
    args[3] = torch.tensor([-3, 0, 2**40, -100])
    verify(check, args)


@pytest.mark.parametrize("bad", [30, -2, 2**40, -(2**40)])
def test_an_index_out_of_range_is_an_error(bad: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        args = case(1, 6, 2, 32, 6, 4, 30, 3, dtype, "list")
        args[6][0, 5, 2] = bad
        with pytest.raises(IndexError, match="comp_idx"):
            sparse_attention(*args)


def test_strides_and_index_types(check: Callable[..., Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        args = case(2, 9, 4, 64, 9, 4, 20, 5, dtype, "list")
        args[0] = args[0].transpose(1, 2).contiguous().transpose(1, 2)
        args[1] = torch.cat((args[1], args[1]), 2)[:, :, :64]
        args[5] = torch.cat((args[5], args[5]), 1)[:, ::2]
        args[6] = args[6].clamp(max=19).int()
        args[2], args[3] = args[2].int(), args[3].int()
        args[10], args[11] = args[10].to(torch.bfloat16), args[11].to(torch.bfloat16)
        verify(check, args)
        args[0] = torch.randn(2, 9, 64, 4).to(dtype).transpose(2, 3)
        verify(check, args)


def test_released_numbers(fast: Callable[..., Any], conformance: Callable[[str], dict[str, Tensor]]) -> None:
    data = conformance("parts")
    q = data["attn.q"]
    empty = (q.new_zeros(2, 0, 64), torch.zeros(2, 11, dtype=torch.long), torch.zeros(2, dtype=torch.long), 1)
    out = fast(sparse_attention, q, *empty, data["attn.kv"], data["attn.idxs"], None, data["attn.sink"],
               float(data["attn.scale"]), None, None, False, "none", "none")  # fmt: skip
    torch.testing.assert_close(out, data["attn.out"], rtol=1e-5, atol=1e-5)
