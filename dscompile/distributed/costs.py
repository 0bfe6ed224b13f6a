"""What a step of V4.1 on one GPU computes and reads, part by part, from the model's configuration (model_v41 7).

*Modelled*, by `FORMULAS`; a multiply-add is two FLOP. Left out: norms, activations and rounding (fused into their
neighbours), the scores that a selection reads (fused with scoring), Engram's table (it lies in the host's memory), the
draft layers, and whatever a launch or an exchange takes before its first byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dscompile.models.deepseek_v41.attention import COMPRESSED_FORMAT, WINDOW_FORMAT
from dscompile.models.deepseek_v41.config import DeepseekV41Config
from dscompile.models.deepseek_v41.indexer import INDEX_FORMAT

FORMULAS: Mapping[str, str] = MappingProxyType(
    {
        "projection FLOP": "2 x parameters x tokens; fp32 products (router, mHC) at the bf16 rate",
        "experts FLOP": "6 D I x k x tokens routed, 6 D I x tokens shared; FP4 weights at the FP8 rate",
        "sparse attention FLOP": "4 H d x (min(W, p + 1) + min(top-k, (p + 1) / r)) x tokens, p their positions; bf16",
        "index scoring FLOP": "2 H_i d_i x rows scored: (p + 1) / r, among candidates at most blocks x block size",
        "weight bytes": "once a step: FP8 1 + 1/1024, FP4 1/2 + 1/32, bf16 2, fp32 4 bytes a parameter; of routed "
        "experts slots x (1 - (1 - k / E)^(tokens of all ranks))",
        "KV bytes": "each query its own compressed rows; window rows and index keys once a step for every sequence",
        "stream bytes": "read and written once by each of two sublayers: 4 x 2 h D a token",
        "exchange bytes": "tokens x remote ranks x (D + D / 32) there, x 2 D back, for every layer that runs",
        "prefill": "layers before the last KV source, and its rows and keys, for all tokens; the rest for a request's "
        "tail: bounded W, exact W + (layers behind it - 1) (W - 1); the head for one token",
    }
)  # fmt: skip

FP8, FP4, BF16, FP32 = 1 + 1 / 1024, 1 / 2 + 1 / 32, 2.0, 4.0  # bytes a parameter, scales included (model_v41 3, 4)


class RoleError(ValueError):
    """A model, a workload or an instance that cannot be planned; the message names the value and what is allowed."""


@dataclass(frozen=True)
class Dense:
    """Weights that every rank holds and every token meets. width: bytes a parameter; operand: of the product."""

    part: str
    parameters: int
    width: float
    operand: str

    @property
    def hbm_bytes(self) -> float:
        return self.parameters * self.width


@dataclass(frozen=True)
class Line:
    """One part of one layer in one step on one GPU."""

    kind: str
    part: str
    operand: str
    flops: float
    hbm_bytes: float


@dataclass(frozen=True)
class Span:
    """Tokens of a step on one GPU that go through the same layers.

    sequences: requests that they belong to. first, last: positions, `last` not included; the tokens lie evenly between.
    share: of all steps, those in which such tokens occur; tokens and sequences are means over all steps.
    """

    tokens: float
    sequences: float
    first: int
    last: int
    share: float = 1.0


def expert_parameters(config: DeepseekV41Config) -> int:
    """Of one expert: gate, up and down."""
    return 3 * config.hidden_size * config.moe_intermediate_size


def row_parts(config: DeepseekV41Config, layer: int) -> Iterator[Dense]:
    """What a KV source needs for its compressed rows and index keys; nothing in other layers."""
    if config.kind(layer) == "full":
        matrices = 2 if config.ratio(layer) > 1 else 1  # pooling has a gate
        d = config.head_dim
        yield Dense("compressor", matrices * config.hidden_size * d + d * config.index_head_dim, BF16, "bf16")


def dense_parts(config: DeepseekV41Config, layer: int) -> Iterator[Dense]:
    """Everything that `layer` has beside its routed experts."""
    width, rank, heads = config.hidden_size, config.q_lora_rank, config.num_attention_heads * config.head_dim
    low = config.o_lora_rank
    projections = width * (rank + config.head_dim) + rank * heads + heads * low + config.o_groups * low * width
    yield Dense("attention projections", projections, FP8, "fp8")
    yield Dense("shared expert", config.n_shared_experts * expert_parameters(config), FP8, "fp8")
    yield Dense("router", config.n_routed_experts * width, BF16, "bf16")
    h = config.hc_mult
    yield Dense("mHC", 2 * (2 * h + h * h) * h * width, FP32, "bf16")
    yield from row_parts(config, layer)
    if config.kind(layer) in ("full", "reindex"):
        yield Dense("index queries", rank * config.index_n_heads * config.index_head_dim, FP8, "fp8")
        yield Dense("index queries", width * config.index_n_heads, BF16, "bf16")
    if layer in config.engram_layer_ids:
        yield Dense("Engram", config.num_engram_rows * config.engram_head_dim * (h + 1) * width, FP8, "fp8")


def head_part(config: DeepseekV41Config) -> Dense:
    """From hidden state to logits."""
    return Dense("head", config.vocab_size * config.hidden_size, BF16, "bf16")


def last_source(config: DeepseekV41Config) -> int:
    """The last layer that owns compressed rows; a prefill needs those behind it for a request's tail only.

    Raises:
        RoleError: there is none.
    """
    if not config.kv_source_layer_ids:
        raise RoleError("kv_source_layer_ids: (), allowed: at least one layer")
    return max(config.kv_source_layer_ids)


def active_parameters(config: DeepseekV41Config, all_layers: bool = True) -> int:
    """That a token meets: in every layer and the head, or only up to the last source's rows, as in prefill."""
    routed = config.num_experts_per_tok * expert_parameters(config)
    end = config.num_hidden_layers if all_layers else last_source(config)
    found = sum(routed + sum(part.parameters for part in dense_parts(config, layer)) for layer in range(end))
    tail = (head_part(config),) if all_layers else tuple(row_parts(config, end))
    return found + sum(part.parameters for part in tail)


def total_parameters(config: DeepseekV41Config) -> int:
    """Of the backbone: without Engram's tables, draft layers and vision."""
    layers = range(config.num_hidden_layers)
    dense = sum(part.parameters for layer in layers for part in dense_parts(config, layer))
    experts = config.num_hidden_layers * config.n_routed_experts * expert_parameters(config)
    return dense + experts + 2 * head_part(config).parameters  # embedding and head


def dense_bytes(config: DeepseekV41Config) -> float:
    """HBM bytes of what every rank holds whole: all but routed experts; with embedding and head."""
    layers = range(config.num_hidden_layers)
    return sum(p.hbm_bytes for i in layers for p in dense_parts(config, i)) + 2 * head_part(config).hbm_bytes


def expert_bytes(config: DeepseekV41Config, slots: int) -> float:
    """HBM bytes of `slots` routed experts in every layer."""
    return slots * config.num_hidden_layers * expert_parameters(config) * FP4


def mean_rows(most: float, ratio: int, first: int, last: int) -> float:
    """Mean of min(most, (p + 1) / ratio) over the positions p in [first, last)."""
    edge = min(max(int(most * ratio), first), last)  # positions before it see fewer than `most`
    return ((first + 1 + edge) * (edge - first) / 2 / ratio + (last - edge) * most) / (last - first)


def _attention(config: DeepseekV41Config, layer: int, span: Span) -> Iterator[Line]:
    kind, ratio, heads = config.kind(layer), config.ratio(layer), config.num_attention_heads
    window = mean_rows(config.sliding_window, 1, span.first, span.last)
    rows = mean_rows(config.index_topk, ratio, span.first, span.last) if ratio else 0.0
    row, ring = COMPRESSED_FORMAT.row_bytes(config.head_dim), WINDOW_FORMAT.row_bytes(config.head_dim)
    # Neighbouring queries share their windows: a sequence's n tokens read window + n - 1 rows, and write n.
    read = span.sequences * (window - 1) + span.tokens
    flops = 4 * heads * config.head_dim * (window + rows) * span.tokens
    yield Line(kind, "sparse attention", "bf16", flops, span.tokens * (rows * row + ring) + read * ring)
    if kind in ("full", "reindex"):
        most = (
            config.candidate_topk_blocks * config.candidate_block_size if config.uses_candidates(layer) else span.last
        )
        scored = mean_rows(most, ratio, span.first, span.last)
        flops = 2 * config.index_n_heads * config.index_head_dim * scored * span.tokens
        yield Line(
            kind, "index scoring", "fp4", flops,
            span.sequences * scored * INDEX_FORMAT.row_bytes(config.index_head_dim),
        )  # fmt: skip


def _product(kind: str, part: Dense, span: Span) -> Line:
    return Line(kind, part.part, part.operand, 2 * part.parameters * span.tokens, part.hbm_bytes * span.share)


def layer_lines(
    config: DeepseekV41Config, layer: int, span: Span, ranks: int, slots: int, rows: bool = True
) -> Iterator[Line]:
    """A layer. ranks share the experts, each with `slots` of them; the choice of experts is taken as even.

    rows: with the compressed rows and index keys of a KV source, else they are counted elsewhere.
    """
    kind = config.kind(layer)
    elsewhere = () if rows else tuple(row_parts(config, layer))
    for part in dense_parts(config, layer):
        if part not in elsewhere:
            yield _product(kind, part, span)
    yield from _attention(config, layer, span)
    k, one = config.num_experts_per_tok, expert_parameters(config)
    touched = slots * span.share * (1 - (1 - k / config.n_routed_experts) ** (span.tokens / span.share * ranks))
    yield Line(kind, "routed experts", "fp8", 2 * one * k * span.tokens, touched * one * FP4)
    yield Line(kind, "streams", "bf16", 0.0, 2 * 2 * 2 * config.hc_mult * config.hidden_size * span.tokens)


def row_lines(config: DeepseekV41Config, layer: int, span: Span) -> Iterator[Line]:
    """Only the compressed rows and index keys of a KV source."""
    for part in row_parts(config, layer):
        yield _product(config.kind(layer), part, span)


def head_line(config: DeepseekV41Config, span: Span) -> Line:
    """Logits of one token for every sequence."""
    part = head_part(config)
    return Line("head", part.part, part.operand, 2 * part.parameters * span.sequences, part.hbm_bytes * span.share)
