"""`activations="fp8"`: what enters a product with a quantised weight is rounded as the release rounds it."""

from collections.abc import Callable

import pytest
import torch

from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM as Model
from dscompile.models.deepseek_v41.linear import Linear
from dscompile.models.deepseek_v41.moe import Experts, run_experts
from support.quant import fp8


def test_which_modules_round(make_model: Callable[..., Model]) -> None:
    """All that the release stores in FP8 or FP4; neither compressors, index keys, head weights nor the head."""
    model = make_model(activations="fp8")
    rounding = {name.split(".", 2)[-1] for name, module in model.named_modules()
                if isinstance(module, Linear | Experts) and module.round_activations}  # fmt: skip
    assert rounding == {
        "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "indexer.wq_b", "wkv", "ffn.experts",
        "ffn.shared_experts.w1", "ffn.shared_experts.w3", "ffn.shared_experts.w2",
    }  # fmt: skip
    assert not any(getattr(module, "round_activations", False) for module in make_model().modules())
    with pytest.raises(ValueError, match="activations: 'fp4', allowed: 'plain' or 'fp8'"):
        make_model(activations="fp4")


@pytest.mark.parametrize("packed", [True, False])
def test_a_linear_layer(packed: bool) -> None:
    layer = Linear(96, 64, torch.float32, packed)
    layer.round_activations = True
    layer.weight.copy_(torch.randn(64, 96))
    if layer.scale is not None:
        layer.scale.copy_(torch.randint(120, 130, layer.scale.shape))
    x = torch.randn(5, 96)
    want = fp8(x) @ layer.dense_weight().double().T
    torch.testing.assert_close(layer(x).double(), want, rtol=1e-6, atol=1e-4)


def test_experts() -> None:
    x, weights, experts = torch.randn(4, 64), torch.rand(4, 2), torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2]])
    w13, w2 = torch.randn(3, 64, 64) / 8, torch.randn(3, 64, 32) / 6
    got = run_experts(x, weights, experts, w13, w2, 10.0, round_activations=True)
    want = torch.zeros(4, 64, dtype=torch.float64)
    for n in range(4):
        for weight, e in zip(weights[n], experts[n].tolist()):
            gate, up = (w13[e].double() @ fp8(x[n])).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up * weight
            want[n] += w2[e].double() @ fp8(hidden.float())
    torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02 * float(want.abs().max()))
    plain = run_experts(x, weights, experts, w13, w2, 10.0)
    assert (got - plain).abs().max() > 1e-3
