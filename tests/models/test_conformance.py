"""The model against the release's own numbers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.models.deepseek_v41 import DeepseekV41Cache, DeepseekV41ForCausalLM, attention, moe
from dscompile.models.deepseek_v41.block import sequence_rows

Load = Callable[[str], dict[str, Tensor]]

LENGTHS = (1, 2, 3, 15, 16, 17, 33, 77)
STEPS = 9


@pytest.fixture(scope="module")
def model(conformance_dir: Path) -> DeepseekV41ForCausalLM:
    return DeepseekV41ForCausalLM.from_pretrained(conformance_dir, dtype=torch.float32, progress=False)


@pytest.fixture(scope="module")
def bf16_model(conformance_dir: Path) -> DeepseekV41ForCausalLM:
    return DeepseekV41ForCausalLM.from_pretrained(conformance_dir, dtype=torch.bfloat16, progress=False)


def at(start: int, end: int) -> Tensor:
    return torch.arange(start, end).expand(2, -1)


def run(model: DeepseekV41ForCausalLM, ids: Tensor, cuts: list[int], cache: DeepseekV41Cache) -> Tensor:
    """Logits of ids fed in the chunks that `cuts` bound."""
    parts = [model(ids[:, a:b], at(a, b), cache) for a, b in zip(cuts, cuts[1:])]
    return torch.cat(parts, 1)


def relative(got: Tensor, want: Tensor) -> Tensor:
    """Error of every position's logits, relative to their norm."""
    return (got - want).norm(dim=-1) / want.norm(dim=-1)


def decode_cuts(prompt: list[int]) -> list[int]:
    return [*prompt, *range(prompt[-1] + 1, prompt[-1] + STEPS + 1)]


def wanted(data: dict[str, Tensor], length: int) -> Tensor:
    steps = [data[f"len{length}.decode{s}.logits"] for s in range(STEPS)]
    return torch.cat([data[f"len{length}.prefill.logits"], *steps], 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_and_decode(model: DeepseekV41ForCausalLM, conformance: Load, length: int) -> None:
    data = conformance("tiny_fp32")
    cache = model.new_cache(2, length + STEPS)
    error = relative(run(model, data[f"len{length}.input_ids"], decode_cuts([0, length]), cache), wanted(data, length))
    assert error.median() <= 1e-5 and error.max() <= 1e-4


@pytest.mark.parametrize(
    ("length", "cuts"),
    [
        (15, [0, 2, 5, 15]),
        (17, [0, 15, 17]),
        (33, [0, 16, 31, 33]),
        (33, [0, 30, 33]),
        (77, [0, 3, 60, 77]),
        (77, [0, 40, 77]),
    ],
)
def test_chunked(model: DeepseekV41ForCausalLM, conformance: Load, length: int, cuts: list[int]) -> None:
    """Cuts inside a group, on it, across the window and beyond it."""
    data = conformance("tiny_fp32")
    cache = model.new_cache(2, 96)
    error = relative(run(model, data[f"len{length}.input_ids"], decode_cuts(cuts), cache), wanted(data, length))
    assert error.median() <= 1e-5 and error.max() <= 1e-4


@pytest.mark.parametrize("length", (1, 3, 16, 33, 77))
def test_bf16(bf16_model: DeepseekV41ForCausalLM, conformance: Load, length: int) -> None:
    data = conformance("tiny_bf16")
    cache = bf16_model.new_cache(2, length + STEPS)
    got = run(bf16_model, data[f"len{length}.input_ids"], decode_cuts([0, length]), cache)
    cosine = torch.cosine_similarity(got, wanted(data, length).float(), dim=-1)
    assert cosine.min() >= 0.99


def test_every_layer(model: DeepseekV41ForCausalLM, conformance: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams, mixes, attention, routing, selections and candidates of each layer, and the cache in the end."""
    data, length = conformance("tiny_fp32"), 77
    blocks: list[tuple[Tensor, ...]] = []
    attended: list[Tensor] = []
    routed: list[tuple[Tensor, Tensor]] = []
    output, route = attention.Attention.output, moe.route
    monkeypatch.setattr(attention.Attention, "output", lambda *a: attended.append(output(*a)) or attended[-1])
    monkeypatch.setattr(moe, "route", lambda *a: routed.append(route(*a)) or routed[-1])
    hooks = [layer.register_forward_hook(lambda _, __, out: blocks.append(out)) for layer in model.layers]
    cache = model.new_cache(2, length + STEPS)
    ids = data[f"len{length}.input_ids"]
    model(ids[:, :length], at(0, length), cache)
    for hook in hooks:
        hook.remove()
    for i in range(8):
        name = f"len{length}.prefill.layers.{i}"
        assert relative(blocks[i][0], data[f"{name}.streams"]).max() <= 1e-5
        torch.testing.assert_close(blocks[i][1], data[f"{name}.pre_mix"], rtol=1e-5, atol=1e-6)
        assert relative(attended[i], data[f"{name}.attn_out"]).max() <= 1e-5
        weights, experts = routed[i]
        order, want_order = experts.argsort(-1), data[f"{name}.router_indices"].argsort(-1)
        assert experts.gather(-1, order).equal(data[f"{name}.router_indices"].long().gather(-1, want_order))
        want_weights = data[f"{name}.router_weights"].gather(-1, want_order)
        torch.testing.assert_close(weights.gather(-1, order), want_weights, rtol=1e-5, atol=1e-6)
        if f"{name}.topk_idxs" in data:
            want = data[f"{name}.topk_idxs"].long()
            want = torch.where(want < 0, length + 10000, want).sort(-1).values - length
            assert blocks[i][2].equal(torch.where(want == 10000, -1, want))
    assert blocks[4][3][..., :length].equal(data[f"len{length}.prefill.layers.4.candidates"])

    run(model, ids, list(range(length, length + STEPS + 1)), cache)
    for i in range(8):
        for pools, part, kind, dim in (
            (cache.window, "window_kv", "fp8_g32_ue8m0", 64),
            (cache.compressed, "compress_kv", "fp4_g16_e4m3", 64),
            (cache.index_keys, "index_k", "fp4_g32_ue8m0", 32),
        ):
            if i in pools:
                rows = FORMATS[kind].unpack(sequence_rows(pools[i], 2), dim)
                assert rows.equal(data[f"len{length}.final.layers.{i}.{part}"]), (i, part)
