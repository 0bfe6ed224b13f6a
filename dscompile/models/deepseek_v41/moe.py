"""The mixture of experts (model_v41 2.9): router, routed experts in a static sorted form, and the shared expert."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dscompile.formats import FORMATS
from dscompile.models.deepseek_v41.config import DeepseekV41Config
from dscompile.models.deepseek_v41.grouped import grouped_mm
from dscompile.models.deepseek_v41.linear import ACTIVATION_FORMAT, Linear, frozen

EXPERT_FORMAT = FORMATS["fp4_g32_ue8m0"]

_TINY = 1e-20


def route(x: Tensor, weight: Tensor, bias: Tensor, top_k: int, normalise: bool, scale: float) -> tuple[Tensor, Tensor]:
    """x [N, D], weight [E, D], bias [E], both float32 -> weights float32 [N, k] and experts int64 [N, k].

    Scores are sqrt(softplus(logits)) in float32. The bias takes part in the choice, not in the weights.
    """
    scores = F.softplus(F.linear(x.float(), weight)).sqrt()
    experts = (scores + bias).topk(top_k).indices
    weights = scores.gather(-1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return weights * scale, experts


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(gate) * up in float32, with gate clamped from above and up from both sides at `limit`."""
    return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


def run_experts(
    x: Tensor, weights: Tensor, experts: Tensor, w13: Tensor, w2: Tensor, limit: float,
    round_activations: bool = False,
) -> Tensor:  # fmt: skip
    """x [N, D], weights and experts [N, k], w13 [E, 2I, D], w2 [E, D, I] -> float32 [N, D].

    Token-expert pairs are sorted by expert, so that each expert's are one block of a grouped product. The routing
    weight is applied before the down projection; outputs are summed in float32. `round_activations` as in `Linear`.
    """
    top_k = experts.shape[1]
    chosen, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(w13.shape[0], device=x.device), right=True, out_int32=True)
    entering = ACTIVATION_FORMAT.fake_quant if round_activations else _as_it_is
    gate, up = grouped_mm(entering(x)[order // top_k], w13.transpose(1, 2), ends).chunk(2, -1)
    hidden = swiglu(gate, up, limit) * weights.flatten()[order].unsqueeze(-1)
    down = grouped_mm(entering(hidden.to(x.dtype)), w2.transpose(1, 2), ends)
    return down[order.argsort()].float().unflatten(0, (-1, top_k)).sum(1)


def _as_it_is(x: Tensor) -> Tensor:
    return x


class Gate(nn.Module):
    """The router's weight and its selection bias, both float32."""

    def __init__(self, config: DeepseekV41Config) -> None:
        super().__init__()
        self.weight = frozen(config.n_routed_experts, config.hidden_size, dtype=torch.float32)
        self.bias = frozen(config.n_routed_experts, dtype=torch.float32)


_HELD: ContextVar[tuple[int, ...] | None] = ContextVar("held_experts", default=None)


@contextmanager
def holding(experts: tuple[int, ...]) -> Iterator[None]:
    """Models made inside have room for these experts only in every layer, in this order."""
    token = _HELD.set(experts)
    try:
        yield
    finally:
        _HELD.reset(token)


class Experts(nn.Module):
    """The routed experts of a layer, stacked: w13 [E, 2I, D] (gate rows, then up rows) and w2 [E, D, I].

    `packed` keeps FP4 codes and their scales in memory and dequantises the stack in every forward. `held` names the
    experts where it is not all of them (`holding`).
    """

    def __init__(self, config: DeepseekV41Config, dtype: torch.dtype, packed: bool) -> None:
        super().__init__()
        self.held = _HELD.get() or tuple(range(config.n_routed_experts))
        experts, hidden, inner = len(self.held), config.hidden_size, config.moe_intermediate_size
        self.dtype, self.packed, self.round_activations = dtype, packed, False
        self.shapes = {"w13": (experts, 2 * inner, hidden), "w2": (experts, hidden, inner)}
        for name, (_, rows, columns) in self.shapes.items():
            if packed:
                payload, scales = EXPERT_FORMAT.payload_bytes(columns), EXPERT_FORMAT.scale_bytes(columns)
                setattr(self, name, frozen(experts, rows, payload, dtype=torch.uint8))
                setattr(self, f"{name}_scale", frozen(experts, rows, scales, dtype=torch.uint8))
            else:
                setattr(self, name, frozen(experts, rows, columns, dtype=dtype))

    def dense(self, name: str) -> Tensor:
        """ "w13" or "w2" as a dense stack in the activation dtype."""
        weight = getattr(self, name)
        if not self.packed:
            return weight
        return EXPERT_FORMAT.decode(weight, getattr(self, f"{name}_scale"), self.shapes[name][-1], self.dtype)


class SharedExpert(nn.Module):
    """The expert that every token uses."""

    def __init__(self, config: DeepseekV41Config, dtype: torch.dtype, packed: bool) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size * config.n_shared_experts
        self.w1 = Linear(hidden, inner, dtype, packed)
        self.w3 = Linear(hidden, inner, dtype, packed)
        self.w2 = Linear(inner, hidden, dtype, packed)
        self.limit = config.activation_limit

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit).to(x.dtype))


class MoE(nn.Module):
    """Router, routed experts and shared expert."""

    def __init__(self, config: DeepseekV41Config, dtype: torch.dtype, packed: bool) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config, dtype, packed)
        self.shared_experts = SharedExpert(config, dtype, packed)
        self.top_k, self.normalise = config.num_experts_per_tok, config.norm_topk_prob
        self.scale, self.limit = config.routed_scaling_factor, config.activation_limit

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, hidden] -> the same shape and dtype."""
        tokens = x.flatten(0, 1)
        weights, experts = route(tokens, self.gate.weight, self.gate.bias, self.top_k, self.normalise, self.scale)
        w13, w2 = self.experts.dense("w13"), self.experts.dense("w2")
        routed = run_experts(tokens, weights, experts, w13, w2, self.limit, self.experts.round_activations)
        return (routed + self.shared_experts(tokens).float()).to(x.dtype).unflatten(0, x.shape[:2])
