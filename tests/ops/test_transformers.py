"""The references, in the dialect of transformers' DeepSeek-V4, against its own modules: same rounding, same bits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import dscompile.ops  # noqa: F401
from support.v4 import tiny_config

v4: Any = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
moe: Any = pytest.importorskip("transformers.integrations.moe")
ops = torch.ops.dsv4
FP32, BF16 = torch.float32, torch.bfloat16
both = pytest.mark.parametrize("dtype", [FP32, BF16])


def config(**change: Any) -> Any:
    return tiny_config(**({"hc_mult": 4, "hc_sinkhorn_iters": 20} | change))


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def randomise(module: torch.nn.Module) -> Any:
    for p in module.parameters():
        p.copy_(torch.randn(p.shape) * 0.3)
    return module


@both
def test_norms(dtype: torch.dtype) -> None:
    x = (torch.randn(2, 7, 64) * 4).to(dtype)
    module = randomise(v4.DeepseekV4RMSNorm(64, 1e-6))
    assert torch.equal(ops.rms_norm(x, module.weight, 1e-6, "fp32"), module(x))
    assert torch.equal(ops.rms_norm(x, None, 1e-6, "scale_cast"), v4.DeepseekV4UnweightedRMSNorm(1e-6)(x))


@both
@pytest.mark.parametrize("inverse", [False, True])
def test_rope(dtype: torch.dtype, inverse: bool) -> None:
    x, angle = torch.randn(2, 3, 7, 32).to(dtype), torch.rand(2, 7, 8) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    want = v4.apply_rotary_pos_emb(x, cos, -sin if inverse else sin)
    assert torch.equal(ops.rope(x, cos.unsqueeze(1), sin.unsqueeze(1), inverse), want)


@both
def test_hyper_connections(dtype: torch.dtype) -> None:
    cfg = config()
    module, head = randomise(v4.DeepseekV4HyperConnection(cfg)), randomise(v4.DeepseekV4HyperHead(cfg))
    streams = torch.randn(2, 5, 4, 64).to(dtype)
    post, comb, collapsed = module(streams)
    eps = cfg.rms_norm_eps
    x, _, our_post, our_comb = ops.hc_pre(streams, module.fn, module.scale, module.base, None, None, eps, cfg.hc_eps,
                                          cfg.hc_sinkhorn_iters, eps, True)  # fmt: skip
    assert torch.equal(our_post, post) and torch.equal(our_comb, comb) and torch.equal(x, collapsed)
    assert torch.equal(ops.hc_head(streams, head.hc_fn, head.hc_scale, head.hc_base, eps, cfg.hc_eps), head(streams))
    y = torch.randn(2, 5, 64).to(dtype)
    want = post.to(dtype).unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.to(dtype).transpose(-1, -2), streams)
    assert torch.equal(ops.hc_post(y, streams, post, comb, False), want)


@both
@pytest.mark.parametrize("score_fn", ["sqrtsoftplus", "sigmoid"])
def test_routers(dtype: torch.dtype, score_fn: str) -> None:
    cfg = config(n_routed_experts=12, num_experts_per_tok=3, scoring_func=score_fn)
    x, ids = torch.randn(9, 64).to(dtype), torch.randint(0, 64, (9,))
    learned, hashed = v4.DeepseekV4TopKRouter(cfg), v4.DeepseekV4HashRouter(cfg)
    for module in (learned, hashed):
        randomise(module).to(dtype)
    learned.e_score_correction_bias = torch.randn(12)
    hashed.tid2eid.copy_(torch.randint(0, 12, hashed.tid2eid.shape))
    tail = 3, score_fn, True, 1e-20, cfg.routed_scaling_factor, False
    weights, indices = ops.router(x, learned.weight, learned.e_score_correction_bias, None, *tail)
    _, want_weights, want_indices = learned(x)  # in no order
    assert weights.dtype == want_weights.dtype and torch.equal(indices.sort(1).values, want_indices.sort(1).values)
    dense = torch.zeros(9, 12, dtype=dtype)
    # the sum of the weights runs in the order of the choice: one rounding apart
    torch.testing.assert_close(dense.scatter(1, indices, weights), dense.scatter(1, want_indices, want_weights),
                               rtol=2 * torch.finfo(dtype).eps, atol=0)  # fmt: skip
    weights, indices = ops.router(x, hashed.weight, None, hashed.tid2eid[ids], *tail)
    _, want_weights, want_indices = hashed(x, ids)
    assert torch.equal(indices, want_indices) and torch.equal(weights, want_weights)


@both
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_experts(dtype: torch.dtype, tokens: int) -> None:
    cfg = config()
    module = randomise(v4.DeepseekV4Experts(cfg)).to(dtype)
    module.limit = 1.0
    x, weights = torch.randn(tokens, 64).to(dtype), torch.rand(tokens, 2).to(dtype)
    indices = torch.stack([torch.randperm(8)[:2] for _ in range(tokens)])
    want = moe.grouped_mm_experts_forward(module, x, indices, weights)
    out = ops.experts(x, indices, weights, module.gate_up_proj, module.down_proj, module.limit, False, dtype)
    if dtype == FP32:
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    else:  # a matrix product of another shape may round one last bit the other way
        assert (out != want).float().mean() < 0.02
        torch.testing.assert_close(out, want, rtol=2**-6, atol=2**-6)


def pooled(module: Any, hidden: Tensor, rate: int) -> Tensor:
    """What the module hands to its norm: everything but the pooling is switched off."""
    seen: list[Tensor] = []

    class Stop(Exception):
        pass

    def norm(x: Tensor) -> Tensor:
        seen.append(x)
        raise Stop

    module.kv_norm.forward = norm
    with pytest.raises(Stop):
        positions = torch.arange(hidden.shape[1]).expand(hidden.shape[0], -1)
        module(hidden, hidden[..., :32], positions, None, 0)
    return seen[0]


@both
@pytest.mark.parametrize("kind", ["CSA", "HCA"])
def test_compressors(dtype: torch.dtype, kind: str) -> None:
    overlap, rate = kind == "CSA", 4 if kind == "CSA" else 8
    module = randomise(getattr(v4, f"DeepseekV4{kind}Compressor")(config()))
    module.kv_proj.to(dtype)
    module.gate_proj.to(dtype)
    hidden = torch.randn(2, 27, 64).to(dtype)
    want = pooled(module, hidden, rate)
    groups = hidden[:, : 27 // rate * rate]
    kv, gate = (p(hidden)[:, : groups.shape[1]].unflatten(1, (-1, rate)) for p in (module.kv_proj, module.gate_proj))
    assert torch.equal(ops.compress(kv, gate, module.position_bias, None, None, overlap), want)


@both
def test_index_scores_choose_the_same_rows(dtype: torch.dtype) -> None:
    cfg = config()
    scorer = randomise(v4.DeepseekV4IndexerScorer(cfg)).to(dtype)
    q, keys, hidden = (
        torch.randn(2, 9, 32, 16).to(dtype),
        torch.randn(2, 7, 16).to(dtype),
        torch.randn(2, 9, 64).to(dtype),
    )
    visible = (torch.arange(9).repeat(2, 1) * 7) // 8
    scores = scorer(q, keys, hidden).masked_fill(torch.arange(7) >= visible.unsqueeze(-1), float("-inf"))
    picked = scores.topk(3, -1).indices
    want = torch.where(picked >= visible.unsqueeze(-1), -1, picked)
    weights = scorer.weights_proj(hidden).float() * scorer.weights_scaling
    out = ops.index_topk(q, keys, weights, visible, None, 3, scorer.softmax_scale, "none", False)
    assert torch.equal(out, want)


@both
def test_grouped_output(dtype: torch.dtype) -> None:
    module = randomise(v4.DeepseekV4GroupedLinear(64, 2 * 16, 2)).to(dtype)
    down, o = randomise(torch.nn.Linear(32, 64, bias=False)).to(dtype), torch.randn(2, 5, 2, 64).to(dtype)
    want = down(module(o).flatten(2))
    assert torch.equal(ops.grouped_output(o, module.weight.view(2, 16, 64), down.weight), want)


@both
@pytest.mark.parametrize("selected", [True, False])
def test_attention(dtype: torch.dtype, selected: bool) -> None:
    """The dense masked form with window, selection mask and sink; bf16 differs where it rounds its scores."""
    batch, tokens, heads, dim, window, comp = 2, 13, 4, 32, 5, 3
    q, kv = torch.randn(batch, heads, tokens, dim).to(dtype), torch.randn(batch, 1, tokens + comp, dim).to(dtype)
    sinks = torch.randn(heads)
    t = torch.arange(tokens)
    visible = ((t + 1) // 4).clamp(max=comp).expand(batch, tokens)
    age = t[:, None] - t
    mask = torch.full((batch, 1, tokens, tokens + comp), float("-inf"))
    mask[..., :tokens].masked_fill_((age >= 0) & (age < window), 0.0)
    index = torch.where(torch.arange(2) < visible.unsqueeze(-1), torch.arange(2), -1) if selected else None
    for b in range(batch):
        for i in range(tokens):
            rows = index[b, i][index[b, i] >= 0] if index is not None else torch.arange(int(visible[b, i]))
            mask[b, 0, i, tokens + rows] = 0.0
    module = SimpleNamespace(num_key_value_groups=heads, sinks=sinks, training=False)
    want, _ = v4.eager_attention_forward(module, q, kv, kv, mask.to(dtype), dim**-0.5)
    out = ops.sparse_attention(
        q.transpose(1, 2), kv[:, 0, :tokens], t.expand(batch, tokens), torch.zeros(batch, dtype=torch.long), window,
        kv[:, 0, tokens:], index, None if selected else visible, sinks, dim**-0.5, None, None, False, "none", "none",
    )  # fmt: skip
    tolerance = 1e-5 if dtype == FP32 else 0.03
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)
