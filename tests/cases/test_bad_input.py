"""What is not for the backend, or not as it expects: right results, and a word about it."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dscompile.backend import DscompileWarning
from dscompile.miniatures import v41_model
from dscompile.models.deepseek_v41 import DeepseekV41Cache, DeepseekV41Config, DeepseekV41ForCausalLM
from support.v4 import tiny, token_ids

IDS = token_ids(20)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def one_layer(kind: str = "sliding_attention", **changes: Any) -> nn.Module:
    model = tiny(num_hidden_layers=1, layer_types=[kind], mlp_layer_types=["moe"], hc_sinkhorn_iters=1, **changes)
    model.set_experts_implementation("grouped_mm")
    return model


# -- models of another kind --------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x[0]
        for step in x:
            state = self.cell(step, state)
        return self.head(state).softmax(-1)


OTHERS = {
    "encoder": lambda: (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16)),
    "convolution": lambda: (
        nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.SiLU(), nn.Conv1d(8, 2, 1)), torch.randn(2, 3, 9),
    ),
    "recurrent": lambda: (Recurrent(), torch.randn(4, 2, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_goes_through_unchanged(dsv4: Callable[..., Any], name: str) -> None:
    """Strict mode too: nothing there resembles DeepSeek's mathematics."""
    torch.manual_seed(0)
    model, x = OTHERS[name]()
    model.eval()
    compiled = dsv4(model, strict=True)
    torch.testing.assert_close(compiled(x), model(x))
    assert compiled.report.graphs and compiled.counts == {} and not compiled.report.misses
    assert "nothing matched" in str(compiled.report)


def test_a_function_of_no_tensor_and_one_of_no_elements(dsv4: Callable[..., Any]) -> None:
    compiled = dsv4(lambda x: (x.float().softmax(-1), x.shape[0]))
    values, rows = compiled(torch.zeros(0, 4))
    assert values.shape == (0, 4) and rows == 0
    assert dsv4(lambda n: n + 1)(3) == 4


# -- gradients and training --------------------------------------------------------------------------------------------


def test_gradients_are_those_of_the_model_and_a_warning_says_so(dsv4: Callable[..., Any]) -> None:
    model, compiled = one_layer(), None
    losses, gradients = [], []
    for compile_it in (False, True):
        run = model
        if compile_it:
            run = compiled = dsv4(model)
        model.zero_grad()
        with torch.enable_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = run(IDS, use_cache=False).logits.logsumexp(-1).mean()
            loss.backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert any("require gradients" in str(w.message) for w in caught if issubclass(w.category, DscompileWarning))
    assert compiled is not None and compiled.counts == {}
    assert "require gradients" in str(compiled.report)
    torch.testing.assert_close(losses[1], losses[0])
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 10
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def test_inference_and_gradients_take_turns(dsv4: Callable[..., Any]) -> None:
    """One compiled model: recognised without gradients, left alone with them, and recognised again."""
    model = one_layer()
    compiled = dsv4(model)
    want = model(IDS, use_cache=False).logits
    torch.testing.assert_close(compiled(IDS, use_cache=False).logits, want, rtol=0, atol=1e-4)
    with torch.enable_grad(), pytest.warns(DscompileWarning, match="require gradients"):
        out = compiled(IDS, use_cache=False).logits
    assert out.requires_grad
    torch.testing.assert_close(compiled(IDS, use_cache=False).logits, want, rtol=0, atol=1e-4)
    assert [bool(graph.counts()) for graph in compiled.report.graphs] == [True, False]


def test_training_mode_keeps_its_dropout(dsv4: Callable[..., Any]) -> None:
    """Attention with dropout is not the attention that is known: it stays, and drops what eager drops."""
    model = one_layer(attention_dropout=0.5).train()
    compiled = dsv4(model)
    for seed in (1, 2):
        torch.manual_seed(seed)
        want = model(IDS, use_cache=False).logits
        torch.manual_seed(seed)
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, want, rtol=0, atol=1e-4)
    assert compiled.counts["experts"] == 1 and "attention" not in compiled.counts
    assert "no attention recognised" in str(compiled.report)


# -- sizes at the edges ------------------------------------------------------------------------------------------------

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
SIZES = {
    "ones": {
        "hc_mult": 1, "num_attention_heads": 1, "o_groups": 1, "num_experts_per_tok": 1, "sliding_window": 1,
        "index_topk": 64, "index_n_heads": 1, "o_lora_rank": 1, "n_routed_experts": 1,
    },
    "odd": {
        "hidden_size": 60, "hc_mult": 3, "head_dim": 20, "num_attention_heads": 3, "o_groups": 3, "index_head_dim": 14,
        "moe_intermediate_size": 20, "q_lora_rank": 7, "o_lora_rank": 5, "num_experts_per_tok": 3, "vocab_size": 67,
        "sliding_window": 7, "index_topk": 1, "compress_rates": {CSA: 3, HCA: 5},
    },
    "nothing compressed": {"compress_rates": {CSA: 32, HCA: 64}},
}  # fmt: skip


@pytest.mark.parametrize("kind", [CSA, HCA])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_at_the_edges_are_eager_s(dsv4: Callable[..., Any], name: str, kind: str) -> None:
    """Recognised or left alone; never another answer, and no error that eager does not raise."""
    model = one_layer(kind, **SIZES[name])
    compiled = dsv4(model)
    want = model(IDS, use_cache=False).logits
    torch.testing.assert_close(compiled(IDS, use_cache=False).logits, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "changes", [{"head_dim": 36}, {"index_head_dim": 48}, {"num_experts_per_tok": 17}, {"sliding_window": 0}]
)
def test_sizes_that_cannot_be_are_refused_by_name(changes: dict[str, Any]) -> None:
    """V4.1's formats have groups of 32: refused when the model is made, long before a kernel."""
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f"{name}: {value}, allowed:"):
        DeepseekV41Config.miniature(**changes)


def test_wrong_tokens_are_errors_as_they_are_in_eager(dsv4: Callable[..., Any]) -> None:
    """Token ids that are no integers, past the vocabulary, or negative; the right ones work afterwards."""
    model = one_layer()
    compiled = dsv4(model)
    for wrong in (torch.tensor([[1, 64, 2]]), torch.tensor([[1, -1, 2]]), torch.zeros(1, 3)):
        for run in (model, compiled):
            with pytest.raises(Exception, match=r"(?i)index|indices"):
                run(wrong, use_cache=False)
    right = torch.tensor([[1, 63, 2]])
    want = model(right, use_cache=False).logits
    torch.testing.assert_close(compiled(right, use_cache=False).logits, want, rtol=0, atol=1e-4)


# -- pools that are one ------------------------------------------------------------------------------------------------


def one_pool(cache: DeepseekV41Cache) -> DeepseekV41Cache:
    return cache._replace(window={0: cache.window[0], 1: cache.window[0]})


def overlapping(cache: DeepseekV41Cache) -> DeepseekV41Cache:
    rows = len(cache.window[0])
    buffer = torch.zeros(rows + 4, cache.window[0].shape[1], dtype=torch.uint8)
    return cache._replace(window={0: buffer[:rows], 1: buffer[4:]})


def neighbours(cache: DeepseekV41Cache) -> DeepseekV41Cache:
    rows = len(cache.window[0])
    buffer = torch.zeros(2 * rows, cache.window[0].shape[1], dtype=torch.uint8)
    return cache._replace(window={0: buffer[:rows], 1: buffer[rows:]})


@pytest.fixture(scope="module")
def window_model() -> DeepseekV41ForCausalLM:
    return v41_model(
        torch.float32, num_hidden_layers=2, compress_ratios=(0, 0), kv_source_layer_ids=(), index_source_layer_ids=(),
        candidate_source_layer_id=None, hc_sinkhorn_iters=1,
    )  # fmt: skip


@pytest.mark.parametrize("share", [one_pool, overlapping, neighbours])
def test_layers_that_are_handed_one_pool_see_each_other_s_rows(
    dsv4: Callable[..., Any], window_model: DeepseekV41ForCausalLM, share: Callable[..., DeepseekV41Cache]
) -> None:
    """The second layer reads after the first has written, as eager does; nothing is read early or written late."""
    model = window_model
    compiled = dsv4(model, dynamic=False)
    mine, theirs = share(model.new_cache(1, 64)), share(model.new_cache(1, 64))
    for start in (0, 6, 12):
        ids, positions = IDS[:, start : start + 6], torch.arange(start, start + 6)[None]
        want, got = model(ids, positions, theirs), compiled(ids, positions, mine)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        assert all(mine.window[layer].equal(theirs.window[layer]) for layer in (0, 1))
    assert compiled.counts["store"] == 2 and len(compiled.report.graphs) == 1
