"""Nothing stops matching in silence (case R21): counts follow from the model, and what is missing is said.

Counts for other batch sizes, chunks, caches and symbolic lengths: `test_v4.py`, `test_v41.py`, and per pass in
`tests/passes/transformers_v4`.
"""

import contextlib
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from dscompile.backend import DscompileWarning
from dscompile.completeness import gaps
from dscompile.report import Match
from dscompile.rewriting import StrictError
from support.v4 import tiny, token_ids

IDS = token_ids(20)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def one_layer(kind: str = "compressed_sparse_attention") -> nn.Module:
    model = tiny(num_hidden_layers=1, layer_types=[kind], mlp_layer_types=["moe"], hc_sinkhorn_iters=1)
    model.set_experts_implementation("grouped_mm")
    return model


WINDOW = {"attention": 1, "compressor": 0, "experts": 1, "indexer": 0, "mhc": 7, "output": 1, "router": 1}
ALL = {**WINDOW, "compressor": 2, "indexer": 1}


def of(found: dict[str, int]) -> dict[str, int]:
    return {family: found.get(family, 0) for family in ALL}


@pytest.mark.parametrize(
    "setting",
    [
        "batch 1",
        "batch 3",
        "bfloat16",
        "all bfloat16",
        "autocast",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("all float16", "everything symbolic")),
    ],
)
def test_counts_do_not_depend_on_the_setting(dsv4: Callable[..., Any], setting: str) -> None:
    """And strict mode, which raises for anything that is missing, has nothing to say."""
    model = one_layer()
    ids = token_ids(20, 3 if setting == "batch 3" else 1)
    if setting == "bfloat16":  # as `from_pretrained(dtype=torch.bfloat16)` loads it
        kept = model._keep_in_fp32_modules_strict
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and not any(part in name for part in (*kept, "inv_freq")):
                tensor.data = tensor.data.to(torch.bfloat16)
    if setting.startswith("all "):  # also what `from_pretrained` keeps in float32
        model.to(getattr(torch, setting.removeprefix("all ")))
    compiled = dsv4(model, dynamic=True if setting == "everything symbolic" else None, strict=True)
    autocast = torch.autocast("cpu", torch.bfloat16) if setting == "autocast" else contextlib.nullcontext()
    with autocast:
        got, want = compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits
    half = setting.endswith("16") or setting == "autocast"
    assert (got - want).norm() / want.norm() < (0.1 if half else 1e-5)
    assert of(compiled.counts) == ALL


class Norm(nn.Module):
    """Holds a float, which `dynamic=True` would make an input like any other."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(12)), eps

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)) * factor


def test_numbers_that_a_module_holds_stay_numbers_under_dynamic_shapes(dsv4: Callable[..., Any]) -> None:
    """With a guard: another epsilon is another graph. A number that the caller passes may be any."""
    model, x = Norm(1e-6), torch.randn(5, 12)
    compiled = dsv4(model, dynamic=True)
    for eps, factor, graphs in ((1e-6, 0.5, 1), (1e-6, 0.7, 1), (1e-2, 0.7, 2), (1e-2, 0.9, 2)):
        model.eps = eps
        torch.testing.assert_close(compiled(x, factor), model(x, factor))
        assert compiled.counts == {"norm": 1} and len(compiled.report.graphs) == graphs


@pytest.mark.parametrize("spelling", ["sigmoid", "bounded sum"])
def test_other_routers_are_recognised(dsv4: Callable[..., Any], spelling: str) -> None:
    """By the configuration; or with weights that are divided by something else, which then stays as it is."""
    model = tiny(
        num_hidden_layers=2, layer_types=["sliding_attention"] * 2, mlp_layer_types=["hash_moe", "moe"],
        hc_sinkhorn_iters=1, scoring_func="sigmoid" if spelling == "sigmoid" else "sqrtsoftplus",
    )  # fmt: skip
    model.set_experts_implementation("grouped_mm")
    if spelling == "bounded sum":
        gate = model.model.layers[1].mlp.gate
        gate.forward = types.MethodType(bounded_sum, gate)
    compiled = dsv4(model, strict=True)
    torch.testing.assert_close(
        compiled(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits, rtol=0, atol=1e-4
    )
    assert compiled.counts["router"] == 2 and not compiled.report.graphs[0].gaps


def bounded_sum(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    scores = F.softplus(logits).sqrt()
    indices = torch.topk(scores + self.e_score_correction_bias, self.top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, indices)
    return logits, weights / weights.sum(-1, keepdim=True).clamp(min=1e-9) * self.routed_scaling_factor, indices


# -- spellings that are not known --------------------------------------------------------------------------------------


def other_scores(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A router whose score function is one that the operation does not have."""
    logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    scores = logits.tanh()
    indices = torch.topk(scores + self.e_score_correction_bias, self.top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, indices)
    return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.routed_scaling_factor, indices


def other_activation(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up


def other_index_scores(self: Any, q: Tensor, compressed_kv: Tensor, hidden_states: Tensor) -> Tensor:
    scores = F.silu(q.float() @ compressed_kv.transpose(-1, -2).float().unsqueeze(1)) * self.softmax_scale
    weights = self.weights_proj(hidden_states).float() * self.weights_scaling
    return (scores * weights.unsqueeze(-1)).sum(dim=2)


def other_output(self: Any, x: Tensor) -> Tensor:
    """The grouped projection with something between its two products."""
    weight = self.weight.view(self.n_groups, -1, x.shape[-1])
    return torch.einsum("...gd,grd->...gr", x, weight).tanh()


class Change:
    """A method of the model's modules, written in another way in one instance."""

    def __init__(self, family: str, owner: str, method: str, function: Callable[..., Any]) -> None:
        self.family, self.owner, self.method, self.function = family, owner, method, function

    def apply(self, model: nn.Module) -> None:
        changed = [module for module in model.modules() if isinstance(module, getattr(modeling, self.owner))]
        assert changed
        for module in changed:
            setattr(module, self.method, types.MethodType(self.function, module))


CHANGES = {
    "scores": Change("router", "DeepseekV4TopKRouter", "forward", other_scores),
    "activation": Change("experts", "DeepseekV4Experts", "_apply_gate", other_activation),
    "index scores": Change("indexer", "DeepseekV4IndexerScorer", "forward", other_index_scores),
    "output": Change("output", "DeepseekV4GroupedLinear", "forward", other_output),
}


def changed_model(name: str) -> tuple[nn.Module, dict[str, int]]:
    """A layer with that change, and the counts that are left."""
    change = CHANGES[name]
    ratio4 = change.family == "indexer"
    model = one_layer() if ratio4 else one_layer("sliding_attention")
    change.apply(model)
    return model, {**(ALL if ratio4 else WINDOW), change.family: 0}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_recognised_is_right_and_said(dsv4: Callable[..., Any], name: str) -> None:
    """The count of that family alone goes to 0; a warning or a near miss names it; the numbers are the model's."""
    model, left = changed_model(name)
    family = CHANGES[name].family
    want = model(IDS, use_cache=False).logits
    compiled = dsv4(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, want, rtol=0, atol=1e-4)
    graph = compiled.report.graphs[0]
    assert of(graph.counts()) == left
    gaps = [line for line in graph.gaps if f"no {family}" in line]
    reasons = [miss for miss in graph.misses if miss.family == family]
    assert gaps or reasons
    assert all(miss.reason and ".py:" in miss.source and miss.layer == "layers.0" for miss in reasons)
    text = str(compiled.report)
    assert f"no {family} recognised" in text or f"near miss: {family}/" in text
    messages = [str(w.message) for w in caught if issubclass(w.category, DscompileWarning)]
    assert bool(gaps) == any(f"layers.0: no {family} recognised" in message for message in messages)


@pytest.mark.parametrize("name", ["scores", "index scores"])
def test_strict_raises_and_names_what_is_missing(dsv4: Callable[..., Any], name: str) -> None:
    """With the part that is missing, or the place that resembles it."""
    family = CHANGES[name].family
    with pytest.raises(Exception, match=rf"(no {family} recognised|{family}/)") as caught:
        dsv4(changed_model(name)[0], strict=True)(IDS, use_cache=False)
    assert isinstance(caught.value, StrictError) or "StrictError" in str(caught.value)


def test_every_layer_is_watched_on_its_own(dsv4: Callable[..., Any]) -> None:
    """One of two layers is written in another way: the other still counts, and the report names the layer."""
    model = tiny(
        num_hidden_layers=2, layer_types=["sliding_attention"] * 2, mlp_layer_types=["moe"] * 2, hc_sinkhorn_iters=1
    )
    model.set_experts_implementation("grouped_mm")
    CHANGES["scores"].apply(model.model.layers[1])
    compiled = dsv4(model, disable=("output",))  # what was switched off is not missed
    with pytest.warns(DscompileWarning, match=r"layers\.1: no router recognised"):
        compiled(IDS, use_cache=False)
    assert compiled.counts["router"] == 1 and len(compiled.report.graphs[0].gaps) == 1


# -- parts that every layer has ----------------------------------------------------------------------------------------


def halves(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """Llama's pairing: the first half of the rotated channels with the second."""
    cos, sin = (torch.cat((t, t), -1).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    kept, turned = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :]
    a, b = turned.float().chunk(2, -1)
    return torch.cat([kept, (turned.float() * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)], -1)


def leading(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """The first channels are rotated instead of the last ones."""
    cos, sin = (t.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    rotated = turned.float() * cos + modeling.rotate_half(turned).float() * sin
    return torch.cat([rotated.to(x.dtype), kept], dim=-1)


@pytest.mark.parametrize("rotation", [halves, leading])
def test_another_rotation_is_said(
    dsv4: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, rotation: Callable[..., Tensor]
) -> None:
    """It is other mathematics than the operation's. The layer has the rest, so it must have a rotation."""
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", rotation)
    model = one_layer("sliding_attention")
    compiled = dsv4(model)
    with pytest.warns(DscompileWarning, match=r"layers\.0: no rope recognised, though mhc, attention"):
        got = compiled(IDS, use_cache=False).logits
    torch.testing.assert_close(got, model(IDS, use_cache=False).logits, rtol=0, atol=1e-4)
    assert of(compiled.counts) == WINDOW and "rope" not in compiled.counts
    assert compiled.report.graphs[0].gaps == [
        "layers.0: no rope recognised, though mhc, attention, output, router, experts were"
    ]


def of_layer(*families: str, layer: str = "layers.0") -> list[Match]:
    """Matches of these families, or of "family/pattern"."""
    parts = [family.partition("/") for family in families]
    return [Match(layer, family, pattern or family) for family, _, pattern in parts]


WHOLE = ("mhc", "attention", "output", "router", "experts", "norm", "rope")
TWO_POOLS = ("compressor/compress.overlap.first", "compressor/compress.overlap.later")


@pytest.mark.parametrize(("families", "missing"), [
    (WHOLE, []),
    ([f for f in WHOLE if f != "rope"], ["rope"]),
    ([f for f in WHOLE if f not in ("norm", "rope")], ["norm", "rope"]),
    (("mhc", "router", "experts"), ["attention", "output", "norm", "rope"]),
    (("attention", "output"), ["norm", "rope"]),
    (("attention",), []),  # compiled on its own
    (("norm", "rope", "experts"), []),
    ((*WHOLE, *TWO_POOLS), ["indexer"]),
    ((*WHOLE, *TWO_POOLS, "indexer"), []),
    (TWO_POOLS, ["indexer"]),
    ((*WHOLE, *TWO_POOLS[:1]), []),  # the index may be another layer's
    ((*WHOLE, "compressor/compress.plain", "compressor/compress.groups"), []),
])  # fmt: skip
def test_what_belongs_to_a_layer(families: tuple[str, ...], missing: list[str]) -> None:
    lines = gaps(of_layer(*families))
    assert len(lines) == bool(missing)
    assert all(line.startswith("layers.0: " + ", ".join(f"no {m}" for m in missing) + " recognised") for line in lines)
    assert not gaps(of_layer(*families), disabled=missing)  # what was switched off is not missed
    other = of_layer(*WHOLE, layer="layers.1")
    assert gaps([*of_layer(*families), *other]) == lines
