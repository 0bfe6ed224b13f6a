"""The Triton sparse attention against float64, with the bound that its roundings give, and the bytes that it moves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.targets import Target, get_target
from dscompile.templates.triton.record import Config
from dscompile.templates.triton.sparse_attention import TEMPLATES
from support.attention import CONFIGS, DTYPES, FP4, FP8, assert_close, blocks, case
from support.kernels import named, parameters, reference, runs, spec_of
from support.triton_interpreter import count_traffic

TEMPLATE, PAGED = TEMPLATES
SM90 = get_target("sm_90a")


def run(args: list[Any], chosen: Config, target: Target = SM90) -> Tensor:
    assert TEMPLATE.applies(named(TEMPLATE, tuple(args))) is None
    return TEMPLATE.fn(*args, config=chosen, target=target)


def check(args: list[Any], configs: tuple[Config, ...] = CONFIGS) -> Tensor:
    out = reference(TEMPLATE, *args)
    assert_close(out, args)
    for chosen in configs:
        assert_close(run(args, chosen), args)
    return run(args, configs[0])


def test_takes_the_arguments_of_its_op() -> None:
    assert parameters(TEMPLATE) == [argument.name for argument in spec_of(TEMPLATE).op._schema.arguments]


@settings(max_examples=7, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.data())
def test_equals_float64(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    tokens = draw(1, 5)
    args = case(
        draw(1, 2), tokens, draw(1, 18), data.draw(st.sampled_from([8, 16, 24, 64])), draw(0, 40), draw(1, 20),
        draw(0, 40), draw(0, 40), data.draw(st.sampled_from(DTYPES)),
        data.draw(st.sampled_from(["list", "count", "none"])), rope_q=data.draw(st.booleans()), position=draw(0, 50),
        half=data.draw(st.sampled_from([0, 1, 4])),
    )  # fmt: skip
    args[3] = args[3] + draw(-8, 8)
    if data.draw(st.booleans()):
        args[8] = None
    chosen = data.draw(st.sampled_from(CONFIGS))
    assert_close(run(args, chosen), args)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 12, 16, 20, 64, 128])
def test_head_counts(heads: int) -> None:
    """Case R15: what a rank may hold. Heads that fill up a tile are never written."""
    args = case(1, 1, heads, 32, picks=20, formats=(FP8, FP4))
    assert_close(run(args, blocks(splits=2)), args)
    with count_traffic() as traffic:
        assert_close(run(args, blocks(swap=1, heads=32)), args)
    assert traffic.distinct_stored == args[0].numel() * args[0].element_size()


def test_released_numbers(conformance: Callable[[str], dict[str, Tensor]]) -> None:
    data = conformance("parts")
    q = data["attn.q"]
    empty = (q.new_zeros(2, 0, 64), torch.zeros(2, 11, dtype=torch.long), torch.zeros(2, dtype=torch.long), 1)
    args = [q, *empty, data["attn.kv"], data["attn.idxs"], None, data["attn.sink"], float(data["attn.scale"]), None,
            None, False, "none", "none"]  # fmt: skip
    torch.testing.assert_close(run(args, blocks(keys=32)), data["attn.out"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "formats", [(FP8, FP4), ("bf16", "fp4_g32_ue8m0"), ("fp32", "fp8_g128_fp32"), ("none", "fp16")]
)
def test_packed_rows(formats: tuple[str, str], dtype: torch.dtype) -> None:
    check(case(1, 2, dim=128 if "fp8_g128_fp32" in formats else 32, dtype=dtype, formats=formats), CONFIGS[2:3])


def test_rows_with_a_tail_of_16_bit_values() -> None:
    check(case(1, 1, dim=512, heads=2, formats=("fp8_g64_ue8m0_tail64",) * 2, half=32), CONFIGS[:1])


@pytest.mark.parametrize("masked", [16, 32, 48, 64])
@pytest.mark.parametrize("sink", [None, -2.0, 60.0, 500.0])
def test_leading_skips_and_empty_rows(masked: int, sink: float | None) -> None:
    """Case R14."""
    args = case(1, 2, 3, 32, 0, 1, 80, 64, torch.float32, half=0)
    args[6][0, 0, :masked] = -1
    args[6][0, 1] = -1
    args[8] = None if sink is None else torch.full((3,), sink)
    for chosen in CONFIGS[1:3]:
        out = run(args, chosen)
        assert torch.equal(out[0, 1], torch.zeros(3, 32))
        torch.testing.assert_close(out, reference(TEMPLATE, *args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["list", "count"])
def test_rows_that_are_not_seen_may_hold_anything(mode: str) -> None:
    """NaN and infinity reach exactly the queries that see the row, also when neighbours share the loaded rows."""
    args = case(1, 6, 2, 16, 14, 3, 50, 4, torch.float32, mode, position=8)
    if mode == "list":
        args[6][:] = torch.tensor([1, -1, 30, 47])
    else:
        args[7] = torch.tensor([[0, 3, 9, 9, 20, 33]])
    for junk, chosen in ((torch.nan, CONFIGS[2]), (torch.inf, CONFIGS[1])):
        dirty = list(args)
        dirty[1], dirty[5] = args[1].clone(), args[5].clone()
        dirty[1][:, [0, 5, 9]] = junk
        dirty[5][:, [0, 12, 35, 49] if mode == "count" else [0, 2, 29, 49]] = junk
        want = reference(TEMPLATE, *dirty)
        assert want.isfinite().flatten(2).all(-1).any() and not want.isfinite().all()
        got = run(dirty, chosen)
        clean = want.isfinite() & got.isfinite()
        assert torch.equal(got.isfinite().flatten(2).all(-1), want.isfinite().flatten(2).all(-1))
        torch.testing.assert_close(got[clean], want[clean], rtol=1e-5, atol=1e-5)


def test_packed_rows_that_are_not_seen_may_hold_anything() -> None:
    args = case(1, 2, formats=(FP8, FP4))
    clean = [run(args, chosen) for chosen in CONFIGS[1:3]]
    args[1][:, :4], args[5][:] = 0xFF, args[5]
    unused = torch.ones(1, 33, dtype=torch.bool)
    unused[0, args[6][args[6] >= 0]] = False
    args[5][unused] = 0xFF
    for chosen, want in zip(CONFIGS[1:3], clean):
        assert torch.equal(run(args, chosen), want)


@pytest.mark.parametrize("bad", [33, -2, 2**40, -(2**40), 2**31 + 1])
def test_an_index_out_of_range_is_skipped(bad: int) -> None:
    args = case()
    args[6][:, :, 4] = bad
    got = run(args, CONFIGS[1])
    args[6][:, :, 4] = -1
    assert torch.equal(got, run(args, CONFIGS[1]))


def test_any_position_is_safe() -> None:
    """Positions and starts far outside the pool, negative ones and large integers: nothing seen, nothing read."""
    big = 2**62
    args = case(4, 5, 2, 32, 7, 3, mode="none", dtype=torch.float32, half=0)
    args[2] = torch.tensor([[0, big, -5, 3, 2**40], [9, 1, 0, -1, -big], [4, 4, 4, 4, 4], [2, 100, 1, 50, 3]])
    args[3] = torch.tensor([-3, 0, 2**40, -100])
    for chosen in CONFIGS[1:3]:
        torch.testing.assert_close(run(args, chosen), reference(TEMPLATE, *args), rtol=1e-5, atol=1e-5)


def test_strides_and_index_types() -> None:
    args = case(2, 3, 4, 32)
    args[0] = args[0].transpose(1, 2).contiguous().transpose(1, 2)
    args[1] = torch.cat((args[1], args[1]), 2)[:, :, :32]
    args[5] = torch.cat((args[5], args[5]), 1)[:, ::2]
    args[6] = args[6].repeat(1, 1, 2)[:, :, ::2].int()
    args[2], args[3] = args[2].int(), args[3].int()
    args[10], args[11] = args[10].to(torch.bfloat16), args[11].to(torch.bfloat16)
    args[8] = args[8].to(torch.bfloat16)
    check(args, CONFIGS[1:2])


def test_the_configs_of_the_template(target: Target) -> None:
    for args in (case(1, 1, 16, 64, formats=(FP8, FP4)), case(1, 5, 3, 32, mode="count"), case(1, dtype=torch.float32)):
        for got in runs(TEMPLATE, tuple(args), target):
            assert_close(got, args)


@pytest.mark.parametrize("empty", [{"batch": 0}, {"tokens": 0}, {"heads": 0}])
def test_nothing_to_do(empty: dict[str, int]) -> None:
    args = case(**empty)
    assert run(args, CONFIGS[1]).shape == args[0].shape


def test_bytes() -> None:
    """Decode of rows as they are released: everything once; a split adds the parts that are put together at the end."""
    args = case(2, 1, 16, 128, 16, 16, 256, 48, formats=(FP8, FP4), half=16, position=900)
    args[6] = torch.stack([torch.randperm(256)[:48] for _ in range(2)]).unsqueeze(1)
    cost = spec_of(TEMPLATE).cost_of(*args).numbers()
    for splits, combine in ((1, 0), (2, 0), (2, 1)):
        handed = 0 if splits == 1 else 2 * splits * 16 * (128 + 2) * 4
        with count_traffic() as traffic:
            run(args, blocks(splits=splits, combine=combine))
        turned = 2 * 16 * 32 * 2 if splits == 1 else 0
        handed += 2 * 4 * combine  # a counter for each sequence
        assert traffic.distinct_stored == cost["write_bytes"] + handed
        assert traffic.stored == traffic.distinct_stored + turned  # the rotated part is stored twice
        assert traffic.distinct_loaded <= 1.1 * cost["read_bytes"] + handed + turned


@pytest.mark.parametrize(("change", "reason"), [({"dim": 2048}, "2048"), ({"dim": 33, "half": 0}, None)])
def test_refuses(change: dict[str, int], reason: str | None) -> None:
    args = case(batch=1, tokens=1, heads=1, rows=1, comp=1, **change)
    refusal = TEMPLATE.applies(named(TEMPLATE, tuple(args)))
    assert refusal is None if reason is None else reason in str(refusal)
