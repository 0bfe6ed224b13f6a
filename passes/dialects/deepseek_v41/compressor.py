"""The compressor's pooling: a softmax over the tokens of a group, per channel, in float32 (model_v41 2.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.passes.engine import Pattern


def _pool(kv: Tensor, gate: Tensor) -> Tensor:
    return (kv * gate.softmax(2)).sum(2)


def _compress(kv: Tensor, gate: Tensor) -> Tensor:
    return torch.ops.dsv4.compress(kv, gate, None, None, None, False)


PATTERNS = (
    Pattern(
        "compress.groups", "compressor", "deepseek_v41", _pool, _compress,
        inputs={"kv": "f32[b n r D]", "gate": "f32[b n r D]"},
    ),
)  # fmt: skip
