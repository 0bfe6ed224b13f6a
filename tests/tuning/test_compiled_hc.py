"""Hyper-connections of the released V4.1-Flash compiled for each target: wide accesses, tensor cores, no spills."""

import pytest
import torch

from dscompile.targets import Target, get_target
from dscompile.templates.triton import hc, hc_post, hc_post_pre, sinkhorn
from support.kernels import space
from support.offline import compiled, meta

PRE, HEAD = hc.TEMPLATES
(POST,) = hc_post.TEMPLATES
(POST_PRE,) = hc_post_pre.TEMPLATES
(SINKHORN,) = sinkhorn.TEMPLATES
FP32 = torch.float32
TARGETS = [get_target(name) for name in ("sm_90a", "sm_100a", "sm_103a")]
QUICK = [
    pytest.param(target, marks=[pytest.mark.slow] if target.name == "sm_100a" else [], id=target.name)
    for target in TARGETS
]


def pre(tokens: int, delayed: bool = True, kind: torch.dtype = torch.bfloat16) -> tuple:
    return (
        meta(tokens, 4, 5120, dtype=kind), meta(24, 20480, dtype=FP32), meta(3, dtype=FP32), meta(24, dtype=FP32),
        meta(tokens, 4, dtype=FP32) if delayed else None, meta(5120), 1e-20, 1e-6, 20, 1e-20, False,
    )  # fmt: skip


def post_pre(tokens: int, delayed: bool = True, kind: torch.dtype = torch.bfloat16) -> tuple:
    return (
        meta(tokens, 5120, dtype=kind), meta(tokens, 4, 5120, dtype=kind), meta(tokens, 4, dtype=FP32),
        meta(tokens, 4, 4, dtype=FP32), True, *pre(tokens, delayed, kind)[1:],
    )  # fmt: skip


@pytest.mark.parametrize("target", QUICK)
@pytest.mark.parametrize("delayed", [True, False])
def test_pre_of_few_tokens_is_one_launch(delayed: bool, target: Target) -> None:
    found = compiled(PRE, pre(8, delayed), target)
    assert list(found) == ["hc_one_kernel"]
    kernel, one = found["hc_one_kernel"]
    # Four streams of 16 by 128 numbers, as much of fn four times over, the sums of a span.
    assert set(one.tensor_core) == {"HMMA"} and one.loads[16] >= 20 and one.stores[16] >= 3
    assert not {1, 2} & {*one.loads, *one.stores} and one.registers <= 168
    assert kernel.ptx.count("atom.global.gpu.acq_rel") == 1


@pytest.mark.parametrize("target", QUICK)
@pytest.mark.parametrize("delayed", [True, False])
def test_post_and_pre_of_few_tokens_are_one_launch(delayed: bool, target: Target) -> None:
    found = compiled(POST_PRE, post_pre(8, delayed), target)
    assert list(found) == ["hc_one_kernel"]
    one = found["hc_one_kernel"][1]
    # As above, and y; the new streams are stored, and never come back before the product.
    assert set(one.tensor_core) == {"HMMA"} and one.loads[16] >= 21 and one.stores[16] >= 7
    assert not {1, 2} & {*one.loads, *one.stores} and one.registers <= 200


@pytest.mark.parametrize("target", QUICK)
def test_pre_in_two_launches(target: Target) -> None:
    config = next(c for c in space(PRE, pre(8), target) if not c["ONE"])
    found = compiled(PRE, pre(8), target, config)
    split, finish = found["hc_split_kernel"][1], found["hc_finish_kernel"][1]
    assert set(split.tensor_core) == {"HMMA"} and split.loads[16] == 16  # four streams, and as much of fn each
    assert 16 in split.stores and 16 in finish.loads and 16 in finish.stores and finish.registers <= 64


@pytest.mark.parametrize("target", QUICK)
def test_post_and_pre_of_many_tokens(target: Target) -> None:
    found = compiled(POST_PRE, post_pre(256), target)
    assert list(found) == ["hc_split_kernel", "hc_finish_kernel"]
    split = found["hc_split_kernel"][1]
    assert set(split.tensor_core) == {"HMMA"} and split.async_copies and split.stores[16] >= 5
    assert list(compiled(POST_PRE, post_pre(8192), target)) == ["hc_post_kernel", "hc_whole_kernel"]


@pytest.mark.parametrize("target", QUICK)
def test_pre_of_a_batch(target: Target) -> None:
    split = compiled(PRE, pre(256), target)["hc_split_kernel"][1]
    assert set(split.tensor_core) == {"HMMA"} and split.async_copies and 16 in split.stores


@pytest.mark.parametrize("target", QUICK)
def test_pre_of_a_prompt(target: Target) -> None:
    whole = compiled(PRE, pre(8192), target)["hc_whole_kernel"][1]
    assert set(whole.tensor_core) == {"HGMMA" if target.has("wgmma") else "UTCHMMA"}
    assert whole.async_copies and 16 in whole.stores


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("kind", [torch.bfloat16, FP32], ids=str)
def test_every_config(kind: torch.dtype, target: Target) -> None:
    for tokens in (8, 64, 8192):
        for template, args in ((PRE, pre(tokens, False, kind)), (POST_PRE, post_pre(tokens, True, kind))):
            for config in template.space({"N": tokens, "n": 4, "D": 5120, "x_bytes": kind.itemsize}, target):
                compiled(template, args, target, config)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_head(target: Target) -> None:
    args = (meta(8, 4, 5120), meta(4, 20480, dtype=FP32), meta(1, dtype=FP32), meta(4, dtype=FP32), 1e-6, 1e-6)
    for config in HEAD.space({"N": 8, "n": 4, "D": 5120, "x_bytes": 2}, target):
        compiled(HEAD, args, target, config)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("tokens", [8, 8192])
def test_post_loads_every_stream_once(tokens: int, target: Target) -> None:
    args = (
        meta(tokens, 5120), meta(tokens, 4, 5120), meta(tokens, 4, dtype=FP32), meta(tokens, 4, 4, dtype=FP32), True,
    )  # fmt: skip
    facts = compiled(POST, args, target)["hc_post_kernel"][1]
    assert facts.loads[16] == 5 and facts.stores == {16: 4} and facts.registers <= 72


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_sinkhorn_stays_in_registers(target: Target) -> None:
    kernel, facts = compiled(SINKHORN, (meta(256, 4, 4, dtype=FP32), 20, 1e-6), target)["sinkhorn_kernel"]
    assert kernel.shared_bytes == 0 and facts.loads == {16: 1} and facts.stores == {16: 1}


@pytest.mark.parametrize("kind", [FP32, torch.float16], ids=str)
def test_streams_that_are_not_bf16(kind: torch.dtype) -> None:
    """Products in fp32, without tensor cores."""
    for tokens in (8, 8192):
        for _, facts in compiled(PRE, pre(tokens, False, kind), TARGETS[0]).values():
            assert not facts.tensor_core and facts.registers <= 168
