"""Blocks of rows written along the second axis of a buffer, as the overlap of two token groups is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.passes.engine import Pattern


def _search(pool: Tensor, slots: Tensor, blocks: Tensor) -> Tensor:
    return torch.ops.aten.index_put(pool, [None, slots], blocks)


def _replace(pool: Tensor, slots: Tensor, blocks: Tensor) -> Tensor:
    """A block is one long row; a negative slot counts from the end, which `store_rows` would skip.

    A slot out of range must not reach the places of another sequence: it becomes one behind all of them, an error.
    """
    batch, places = pool.shape[:2]
    first = torch.arange(batch, device=slots.device).unsqueeze(1) * places
    place = first + torch.where(slots < 0, slots + places, slots)
    slots = torch.where((slots >= -places) & (slots < places), place, batch * places).reshape(-1)
    torch.ops.dsv4.store_rows(pool.view(batch * places, -1), blocks.reshape(slots.shape[0], -1), slots)
    return pool


def _pattern(name: str, batch: str, slots: str, blocks: str) -> Pattern:
    return Pattern(
        name=f"store_rows.{name}", family="store", dialect="transformers_v4", search=_search, replace=_replace,
        inputs={"pool": f"act[{batch} s r w]", "slots": f"i64[{slots}]", "blocks": f"act[{blocks}]"},
    )  # fmt: skip


#: An assignment drops leading axes of size 1 from what it writes.
PATTERNS = (
    _pattern("blocks", "b", "n", "b n r w"),
    _pattern("blocks.one_sequence", "1", "n", "n r w"),
    _pattern("blocks.one_block", "1", "1", "r w"),
)
