"""The indexer (model_v41 2.6): which compressed rows each token attends to."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dscompile.formats import FORMATS
from dscompile.models.deepseek_v41.config import DeepseekV41Config
from dscompile.models.deepseek_v41.linear import Linear
from dscompile.models.deepseek_v41.norm import RMSNorm
from dscompile.models.deepseek_v41.rope import apply_rope

INDEX_FORMAT = FORMATS["fp4_g32_ue8m0"]


def index_scores(q: Tensor, keys: Tensor, head_weights: Tensor, scale: float) -> Tensor:
    """q [B, T, H, d], keys [B, S, d], head_weights [B, T, H] -> float32 [B, T, S]: sum_h relu(q_h . k) scale w_h."""
    dots = torch.einsum("bthd,bsd->bths", q.float(), keys.float())
    return (torch.relu(dots) * (head_weights.float() * scale).unsqueeze(-1)).sum(2)


def visible_rows(positions: Tensor, ratio: int) -> Tensor:
    """Clean positions [B, T] -> how many compressed rows each token may see: those whose last token is not ahead."""
    return (positions + 1) // ratio


def mask_invisible(scores: Tensor, n_visible: Tensor) -> Tensor:
    """scores [B, T, S] with -inf at every row j >= n_visible [B, T]."""
    ahead = torch.arange(scores.shape[-1], device=scores.device) >= n_visible.unsqueeze(-1)
    return scores.masked_fill(ahead, -torch.inf)


def rank_keys(scores: Tensor) -> Tensor:
    """float32 [..., S] without NaN -> int64 [..., S], all different: ordered by score, among equal scores by row.

    Scores tie often (the ReLU leaves exact zeros), and what `topk` picks among equals depends on the row count and the
    device. With these keys the newest of them wins, whatever the size of the cache.
    """
    bits = scores.masked_fill(scores == 0, 0.0).view(torch.int32)  # -0 equals 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) + torch.arange(scores.shape[-1], device=scores.device)


def select_rows(scores: Tensor, top_k: int) -> Tensor:
    """Masked scores [B, T, S] -> int64 [B, T, min(top_k, S)]: the best rows in ascending order, then -1 for none."""
    rows = scores.shape[-1]
    index = rank_keys(scores).topk(min(top_k, rows)).indices
    index = torch.where(scores.gather(-1, index) > -torch.inf, index, rows).sort(-1).values
    return torch.where(index < rows, index, -1)


def candidate_rows(scores: Tensor, n_visible: Tensor, blocks: int, block_size: int) -> Tensor:
    """Masked scores [B, T, S] -> bool [B, T, S]: the rows of the `blocks` best blocks of `block_size` rows.

    A block scores as its best row; the newest visible block is always in, a block without a visible row never.
    """
    rows = scores.shape[-1]
    padded = F.pad(scores, (0, -rows % block_size), value=-torch.inf)
    best = padded.unflatten(-1, (-1, block_size)).amax(-1)
    newest = (n_visible - 1) // block_size
    pinned = torch.arange(best.shape[-1], device=scores.device) == newest.unsqueeze(-1)
    best = best.masked_fill(pinned, torch.inf)
    block = rank_keys(best).topk(min(blocks, best.shape[-1])).indices
    visible = best.gather(-1, block) > -torch.inf
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter(-1, block, visible)
    return chosen.repeat_interleave(block_size, -1)[..., :rows]


def decode_keys(own: Tensor, last: Tensor, positions: Tensor, ratio: int) -> Tensor:
    """The packed keys that a KV source scores in a decode step: own and last [B, S, row_bytes], positions [B, 1].

    The release publishes a layer's keys only when the layer emits a row. In a step that leaves the group open it
    scores what was published last: the keys of the model's last KV source, row for row.
    """
    is_open = ((positions + 1) % ratio != 0).unsqueeze(-1)
    return torch.where(is_open, last[:, : own.shape[1]], own)


class Indexer(nn.Module):
    """An index source: queries of its own, and keys of its own (`owns_keys`) or those of an earlier layer."""

    def __init__(self, config: DeepseekV41Config, dtype: torch.dtype, owns_keys: bool, packed: bool) -> None:
        super().__init__()
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, heads * dim, dtype, packed)
        self.weights_proj = Linear(config.hidden_size, heads, dtype)
        if owns_keys:
            self.wk = Linear(config.head_dim, dim, dtype)
            self.k_norm = RMSNorm(dim, config.rms_norm_eps)
        self.heads, self.dim, self.top_k = heads, dim, config.index_topk
        self.scale = dim**-0.5 * heads**-0.5
        self.blocks, self.block_size = config.candidate_topk_blocks, config.candidate_block_size

    def pack_keys(self, latents: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Latents [B, G, head_dim], cos and sin [B, G, rd / 2] of the groups -> packed keys uint8 [B, G, row_bytes]."""
        return INDEX_FORMAT.pack(apply_rope(self.k_norm(self.wk(latents)), cos, sin))

    def score(self, x: Tensor, q_latent: Tensor, packed_keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, hidden], q_latent [B, T, q_lora_rank], packed_keys uint8 [B, S, row_bytes] -> float32 [B, T, S]."""
        q = self.wq_b(q_latent).unflatten(-1, (self.heads, self.dim))
        q = INDEX_FORMAT.fake_quant(apply_rope(q, cos.unsqueeze(2), sin.unsqueeze(2)))
        keys = INDEX_FORMAT.unpack(packed_keys, self.dim, x.dtype)
        return index_scores(q, keys, self.weights_proj(x), self.scale)
