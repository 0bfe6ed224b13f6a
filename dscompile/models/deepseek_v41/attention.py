"""Sparse attention over one shared vector per position (model_v41 2.3, 2.4 and 2.7).

K and V are the same row, shared by all heads. A token attends to the last `sliding_window` positions and to the
compressed rows that the indexer chose; both are read from their packed form.
"""

import torch
from torch import Tensor, nn

from dscompile.formats import FORMATS
from dscompile.models.deepseek_v41.config import DeepseekV41Config
from dscompile.models.deepseek_v41.linear import Linear, frozen
from dscompile.models.deepseek_v41.norm import RMSNorm
from dscompile.models.deepseek_v41.plan import gather_rows, read_history, read_rows, store_rows
from dscompile.models.deepseek_v41.rope import apply_rope, undo_rope

WINDOW_FORMAT = FORMATS["fp8_g32_ue8m0"]
COMPRESSED_FORMAT = FORMATS["fp4_g16_e4m3"]

_LOWEST_MAX = -1e30  # finite, so that a token without any key gives 0 and not NaN


def window_index(positions: Tensor, window: int) -> Tensor:
    """Clean positions [B, T] -> int64 [B, T, window]: which of the [window + T] rows each token sees, -1 for none.

    Row j of the `window` rows of history followed by the chunk has position `positions[:, 0] - window + j`. Token t
    looks at rows t + 1 .. t + window; those before the start of the sequence and those of padding are hidden.
    """
    length = positions.shape[1]
    row = torch.arange(length, device=positions.device).unsqueeze(1) + 1
    row = row + torch.arange(window, device=positions.device)
    key, query = positions[:, :1].unsqueeze(-1) - window + row, positions.unsqueeze(-1)
    visible = (key >= 0) & (key <= query) & (query - key < window)
    return torch.where(visible, row, -1)


def ring_index(positions: Tensor, window: int) -> Tensor:
    """Clean positions [B, 1] -> int64 [B, 1, window]: which of the last `window` rows, its own included, a token sees.

    Row j has position `positions - window + 1 + j`; -1 for those before the start of the sequence.
    """
    row = torch.arange(window, device=positions.device)
    query = positions.unsqueeze(-1)
    key = query - window + (row + 1)
    visible = (key >= 0) & (key <= query) & (query - key < window)
    return torch.where(visible, row, -1)


def visible_window(rows: Tensor, positions: Tensor, window: int) -> Tensor:
    """The index of `Attention.window_rows` that each token sees, int64 [B, T, window]."""
    return (ring_index if rows.shape[1] == window else window_index)(positions, window)


def attend(q: Tensor, kv: Tensor, index: Tensor, sink: Tensor, scale: float) -> Tensor:
    """q [B, T, H, D], kv [B, S, D], index int64 [B, T, K] into S (-1 = skip), sink [H] -> [B, T, H, D] in q's dtype.

    float32 softmax over the K rows of each token, of which duplicates count twice; exp(sink) joins the denominator
    only. Weights are rounded to q's dtype before they meet the values. No row at all gives 0.
    """
    rows = gather_rows(kv, index.clamp(min=0)).float()
    scores = torch.einsum("bthd,btkd->bthk", q.float(), rows) * scale
    scores = scores.masked_fill((index < 0).unsqueeze(2), -torch.inf)
    largest = scores.amax(-1, keepdim=True).clamp(min=_LOWEST_MAX)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink.unsqueeze(-1) - largest)
    out = torch.einsum("bthk,btkd->bthd", weights.to(q.dtype).float(), rows)
    return (out / total).to(q.dtype)


def attend_window(q: Tensor, window_rows: Tensor, positions: Tensor, window: int, sink: Tensor, scale: float) -> Tensor:
    """`attend` to the packed window rows (`Attention.window_rows`) alone."""
    kv = WINDOW_FORMAT.unpack(window_rows, q.shape[-1], q.dtype)
    return attend(q, kv, visible_window(window_rows, positions, window), sink, scale)


def attend_sparse(
    q: Tensor,
    window_rows: Tensor,
    positions: Tensor,
    window: int,
    compressed_rows: Tensor,
    indices: Tensor,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """`attend` to the window rows and to the packed compressed rows uint8 [B, C, row_bytes] named by `indices`.

    `indices` int64 [B, T, K], -1 = none. A position may be seen twice: in the window and in its compressed row.
    """
    recent = WINDOW_FORMAT.unpack(window_rows, q.shape[-1], q.dtype)
    distant = COMPRESSED_FORMAT.unpack(compressed_rows, q.shape[-1], q.dtype)
    chosen = torch.where(indices >= 0, indices + recent.shape[1], -1)
    index = torch.cat((visible_window(window_rows, positions, window), chosen), -1)
    return attend(q, torch.cat((recent, distant), 1), index, sink, scale)


def project_groups(o: Tensor, wo_a: Tensor) -> Tensor:
    """o [B, T, groups, d], wo_a [groups, rank, d] -> [B, T, groups * rank]: every group of heads has its own matrix."""
    return torch.einsum("btgd,grd->btgr", o, wo_a).flatten(2)


class Attention(nn.Module):
    """What every attention layer has: queries, window rows and the output projection."""

    def __init__(self, config: DeepseekV41Config, dtype: torch.dtype, packed: bool) -> None:
        super().__init__()
        heads, dim, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
        groups, rank = config.o_groups, config.o_lora_rank
        self.wq_a = Linear(hidden, config.q_lora_rank, dtype, packed)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = Linear(config.q_lora_rank, heads * dim, dtype, packed)
        self.wkv = Linear(hidden, dim, dtype, packed)
        self.kv_norm = RMSNorm(dim, config.rms_norm_eps)
        self.wo_a = Linear(heads * dim // groups, groups * rank, dtype, packed)
        self.wo_b = Linear(groups * rank, hidden, dtype, packed)
        self.attn_sink = frozen(heads, dtype=torch.float32)
        self.heads, self.dim, self.groups, self.window = heads, dim, groups, config.sliding_window
        self.scale = dim**-0.5

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, hidden] -> the query latent [B, T, q_lora_rank] and the rotated queries [B, T, H, D]."""
        latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(latent).unflatten(-1, (self.heads, self.dim))
        return latent, apply_rope(q, cos.unsqueeze(2), sin.unsqueeze(2))

    def window_rows(self, x: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, read: Tensor, write: Tensor) -> Tensor:
        """Packed window rows uint8 [B, window + T, row_bytes]: the history from `pool`, then the chunk's own.

        The history is read before the chunk's last `window` rows are stored over it. A single token is stored first
        and the ring is read as it lies, [B, window, row_bytes] with the token's own row at the end.
        """
        chunk = WINDOW_FORMAT.pack(apply_rope(self.kv_norm(self.wkv(x)), cos, sin))
        if x.shape[1] == 1:
            store_rows(pool, write, chunk)
            return read_rows(pool, read)
        rows = torch.cat((read_history(pool, read, chunk), chunk), 1)
        store_rows(pool, write, chunk)
        return rows

    def output(self, o: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention output [B, T, H, D] -> [B, T, hidden]: rotate back, project per group, project."""
        o = undo_rope(o, cos.unsqueeze(2), sin.unsqueeze(2))
        wo_a = self.wo_a.dense_weight().unflatten(0, (self.groups, -1))
        return self.wo_b(project_groups(o.flatten(2).unflatten(2, (self.groups, -1)), wo_a))
