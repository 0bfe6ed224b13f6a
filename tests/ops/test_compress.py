"""Pooling of tokens into compressed rows."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dscompile.ops  # noqa: F401

compress = torch.ops.dsv4.compress


def oracle(kv: Tensor, gate: Tensor, ape: Tensor | None, prior_kv: Tensor | None, prior_gate: Tensor | None,
           overlap: bool) -> Tensor:  # fmt: skip
    """Group by group, channel by channel, over the list of entries that the group pools."""
    batch, groups, ratio, channels = kv.shape
    gate = gate.double() + (0 if ape is None else ape.double())
    dim = channels // 2 if overlap else channels
    out = torch.zeros(batch, groups, dim, dtype=torch.float64)
    for b in range(batch):
        for g in range(groups):
            entries = [(kv[b, g, i, -dim:].double(), gate[b, g, i, -dim:]) for i in range(ratio)]
            if overlap and g > 0:
                entries += [(kv[b, g - 1, i, :dim].double(), gate[b, g - 1, i, :dim]) for i in range(ratio)]
            elif overlap and prior_kv is not None and prior_gate is not None:
                entries += [(prior_kv[b, i].double(), prior_gate[b, i].double()) for i in range(ratio)]
            logits = torch.stack([e[1] for e in entries])
            p = torch.exp(logits - logits.max(0).values)
            out[b, g] = (p / p.sum(0) * torch.stack([e[0] for e in entries])).sum(0)
    return out


@given(st.integers(0, 3), st.integers(1, 5), st.booleans(), st.booleans(), st.booleans())
def test_compress_matches_float64(groups: int, ratio: int, overlap: bool, biased: bool, prior: bool) -> None:
    kv, gate = torch.randn(2, groups, ratio, 8), torch.randn(2, groups, ratio, 8) * 3
    ape = torch.randn(ratio, 8) if biased else None
    before = (torch.randn(2, ratio, 4), torch.randn(2, ratio, 4)) if overlap and prior else (None, None)
    out = compress(kv, gate, ape, *before, overlap)
    torch.testing.assert_close(out.double(), oracle(kv, gate, ape, *before, overlap), rtol=1e-5, atol=1e-6)


def test_cutting_a_sequence_changes_nothing() -> None:
    """Groups pooled in two calls, the second one with the first halves of the last group before it."""
    kv, gate, ape = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 4, 8), torch.randn(4, 8)
    whole = compress(kv, gate, ape, None, None, True)
    for cut in range(1, 5):
        prior = kv[:, cut - 1, :, :4], (gate + ape)[:, cut - 1, :, :4]
        parts = (compress(kv[:, :cut], gate[:, :cut], ape, None, None, True),
                 compress(kv[:, cut:], gate[:, cut:], ape, *prior, True))  # fmt: skip
        assert torch.equal(torch.cat(parts, 1), whole)


def test_nothing_before_the_start_is_read() -> None:
    kv, gate = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8)
    clean = compress(kv, gate, None, None, None, True)
    kv[:, 2, :, :4] = gate[:, 2, :, :4] = float("nan")  # first halves of the last group: of the next group only
    assert torch.equal(compress(kv, gate, None, None, None, True), clean)
    prior = torch.full((1, 2, 4), float("nan"))
    masked = torch.full((1, 2, 4), -math.inf)
    assert torch.equal(compress(kv, gate, None, torch.zeros_like(prior), masked, True), clean)


def test_weights_are_rounded_to_the_values_dtype() -> None:
    kv, gate = torch.randn(2, 3, 4, 8).bfloat16(), torch.randn(2, 3, 4, 8).bfloat16()
    out = compress(kv, gate, None, None, None, False)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, (kv * gate.float().softmax(2).bfloat16()).sum(2))


def test_arguments_are_checked() -> None:
    kv = torch.ones(2, 3, 4, 8)
    with pytest.raises(ValueError, match=r"dsv4::compress: shape of gate is \[2, 3, 4, 7\]; allowed: \[2, 3, 4, 8\]"):
        compress(kv, kv[..., :7], None, None, None, False)
    with pytest.raises(ValueError, match=r"channels C \(axis 3 of kv\) is 7; allowed: an even number with overlap"):
        compress(kv[..., :7], kv[..., :7], None, None, None, True)
    with pytest.raises(ValueError, match=r"shape of ape is \[8, 4\]; allowed: \[4, 8\]"):
        compress(kv, kv, torch.ones(8, 4), None, None, False)
    with pytest.raises(ValueError, match="prior_kv is given; allowed: None without overlap"):
        compress(kv, kv, None, torch.ones(2, 4, 8), torch.ones(2, 4, 8), False)
    with pytest.raises(ValueError, match="prior_kv and prior_gate is only one given; allowed: both or none"):
        compress(kv, kv, None, torch.ones(2, 4, 4), None, True)
    with pytest.raises(ValueError, match=r"shape of prior_gate is \[2, 4, 8\]; allowed: \[2, 4, 4\]"):
        compress(kv, kv, None, torch.ones(2, 4, 4), torch.ones(2, 4, 8), True)
