"""The layers of a static cache for transformers' DeepSeek-V4: fixed tensors, written in place, positions as tensors.

transformers' own V4 cache grows by concatenation and keeps its counts as Python ints, so nearly every step has new
shapes and a new graph. Here every tensor has its final size from the start, and whatever depends on how many tokens
have been seen is index arithmetic on one int64 counter. The only sizes left are the number of new tokens `T` (a Python
int, from the inputs) and the constants of the configuration, so the model's branches on sizes are decided by `T` alone.

With `start` tokens cached, `r` the compression ratio and `g0 = start // r` the group that is still open:

* window: a ring of W rows, position p at `p % W`. `update` returns W - 1 + T rows in position order, row j at position
  `max(start - (W - 1), 0) + j`. Rows past the last token are stale; they lie in every query's future.
* open group: a ring of r tokens, position p at `p % r`, so the ring read in slot order *is* the open group in token
  order. `store_compression_weights` returns `G = ceil(T / r)` candidate groups, g0 .. g0 + G - 1. T tokens never close
  more than G groups. A candidate that this call does not close is computed from stale (finite) tokens.
* compressed pool: candidate g goes to row g, closed or not. Row g is visible to a query at position p only if
  `g < (p + 1) // r`, that is once the group is closed, and it is written again before that. So no branch, no scratch
  row; `ceil(max_tokens / r)` rows hold every candidate of a sequence that fits.
* overlap (ratio-4 layers): the first half of group g goes to slot `g % 2`, candidates included. The group before g0 is
  in slot `(g0 - 1) % 2`: the last call's candidates end at g0 - 1 or g0.

Index arithmetic is written out in each method from `start`: after graph capture it is shared between the layers.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

# The attention hook of `prepare` adds this to the attention call's keyword arguments where it has extended the mask
# over the compressed rows; a layer that needs it and does not find it refuses.
ROWS_MASKED = "compressed_rows_masked"


class StaticWindowLayer(CacheLayerMixin):
    """Sliding-window rows of one layer (keys are values): `window_rows` [B * W, D], flat, so a store is one index."""

    is_compileable = False  # see StaticV4Cache
    is_croppable = False
    is_sliding = True
    supports_early_init = False

    def __init__(
        self,
        *,
        layer_idx: int,
        batch_size: int,
        max_tokens: int,
        window: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        start: Tensor,
        length: Tensor,
    ) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.batch_size = batch_size
        self.max_tokens = max_tokens
        self.window = window
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        self.start = start
        self.length = length
        self.window_rows = self._zeros(batch_size * window, head_dim)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: everything is allocated on construction."""

    # -- the interface that transformers calls -----------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores `key_states` [B, 1, T, D] and returns the rows that these tokens may read, [B, 1, W - 1 + T, D] twice.

        The first layer also moves the counters on: `start` is the position of the first new token for every layer of
        this call, `length` counts all tokens.
        """
        self._check_rows(key_states)
        tokens = key_states.shape[-2]
        if self.layer_idx == 0:
            self.start.copy_(self.length)
            self.length.add_(tokens)
        rows = key_states.squeeze(1)
        offset = self._window_start()
        if tokens == 1:
            self._store_window(rows)
            order = (offset + torch.arange(self.window, device=self.device)) % self.window
            full = self._ring().index_select(1, order)
        else:
            position = offset + torch.arange(self.window - 1 + tokens, device=self.device)
            new = self.window + (position - self.start).clamp(max=tokens - 1)
            order = torch.where(position < self.start, position % self.window, new)
            full = torch.cat([self._ring(), rows], dim=1).index_select(1, order)
            self._store_window(rows)
        full = full.unsqueeze(1)
        return full, full

    def get_mask_sizes(self, query_length: int) -> tuple[int, Tensor]:  # type: ignore[override]
        """(rows that `update` will return, position of the first of them), asked before this call's `update`."""
        return self.window - 1 + query_length, (self.length - (self.window - 1)).clamp(min=0)

    def get_seq_length(self) -> Tensor:  # type: ignore[override]
        """Tokens seen so far, an int64 scalar tensor."""
        return self.length.clone()

    def get_max_length(self) -> int:
        """Tokens that the cache holds."""
        return self.max_tokens

    def reset(self) -> None:
        """Forgets everything; the tensors stay where they are."""
        self.start.zero_()
        self.length.zero_()
        for tensor in self.state():
            tensor.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row `beam_idx[b]` was, as beam search asks."""
        for tensor in self.state():
            rows = tensor.view(self.batch_size, -1)
            rows.copy_(rows.index_select(0, beam_idx.to(self.device)))

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Not possible: a closed group's tokens are gone."""
        raise NotImplementedError(
            f"StaticV4Cache cannot remove {abs(tokens_to_remove)} tokens: compressed groups cannot be reopened. "
            "Use reset() and prefill again."
        )

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Not possible: the batch size is fixed."""
        raise NotImplementedError(f"StaticV4Cache has a fixed batch of {self.batch_size}: build one with {repeats}x it")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Not possible: the batch size is fixed."""
        raise NotImplementedError(f"StaticV4Cache has a fixed batch of {self.batch_size}: build another one")

    # -- internals -----------------------------------------------------------------------------------------------------

    def state(self) -> tuple[Tensor, ...]:
        """Every tensor whose rows belong to sequences, batch-major when viewed as [B, -1]."""
        return (self.window_rows,)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _ring(self) -> Tensor:
        return self.window_rows.view(self.batch_size, self.window, self.head_dim)

    def _window_start(self) -> Tensor:
        return (self.start - (self.window - 1)).clamp(min=0)

    def _store_window(self, rows: Tensor) -> None:
        slots = _ring_slots(self.start, rows.shape[1], self.window, self.batch_size)
        _put_last(self.window_rows, slots, rows, self.window)

    def _check_rows(self, key_states: Tensor) -> None:
        batch, heads, _, dim = key_states.shape
        if (batch, heads, dim) != (self.batch_size, 1, self.head_dim):
            raise ValueError(
                f"StaticV4Cache layer {self.layer_idx} holds batch {self.batch_size}, 1 head of {self.head_dim}; "
                f"got batch {batch}, {heads} heads of {dim}"
            )
        if key_states.dtype != self.dtype:
            raise ValueError(f"StaticV4Cache was built for {self.dtype}; the model gives {key_states.dtype}")
        if key_states.device.type != self.device.type:
            raise ValueError(f"StaticV4Cache lives on {self.device}; the model gives {key_states.device}")


class StaticHCALayer(StaticWindowLayer):
    """A window layer with one stream of compressed rows (ratio 128 in the released models), all of them visible."""

    STREAMS: tuple[str, ...] = ("compressor",)
    WIDTH = 1  # features per token over features per compressed row
    MODEL_MASKS_ONE_TOKEN = False  # whether the model masks compressed rows when it decodes a single token

    def __init__(
        self, *, compress_rate: int, stream_dims: dict[str, int], gate_dtype: torch.dtype, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.compress_rate = compress_rate
        self.capacity = -(-self.max_tokens // compress_rate)
        self.stream_dims = stream_dims
        open_rows, pool_rows = self.batch_size * compress_rate, self.batch_size * self.capacity
        self.ring_kv = {name: self._zeros(open_rows, self.WIDTH * dim) for name, dim in stream_dims.items()}
        self.ring_gate = {name: self._zeros(open_rows, self.WIDTH * dim) for name, dim in stream_dims.items()}
        self.pool = {name: self._zeros(pool_rows, dim) for name, dim in stream_dims.items()}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As the window layer's. Refuses a single token if nothing masks the compressed rows (see `prepare`)."""
        masked = self.MODEL_MASKS_ONE_TOKEN or kwargs.get("kwargs", {}).get(ROWS_MASKED, False)
        if key_states.shape[-2] == 1 and not masked:
            raise RuntimeError(
                f"layer {self.layer_idx}: the model attends to every compressed row when it decodes one token, and a "
                "static cache also holds rows that are not written yet. Call "
                "dscompile.integrations.transformers.prepare(model) once before using StaticV4Cache."
            )
        return super().update(key_states, value_states, *args, **kwargs)

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Takes the new tokens' `kv` and `gate` [B, T, C]; returns G candidate groups of both, [B, G * r, C], and the
        position of the first of them (int64 scalar tensor)."""
        tokens, ratio = kv.shape[1], self.compress_rate
        first = self.start // ratio * ratio
        if tokens == 1:
            self._store_open(name, kv, gate)
            return self._open(self.ring_kv[name]), self._open(self.ring_gate[name]), first
        groups = -(-tokens // ratio)
        slot = torch.arange(groups * ratio, device=self.device)
        held = self.start % ratio  # tokens of the open group that came with earlier calls
        order = torch.where(slot < held, slot, ratio + (slot - held).clamp(max=tokens - 1))
        chunk_kv = torch.cat([self._open(self.ring_kv[name]), kv], dim=1).index_select(1, order)
        chunk_gate = torch.cat([self._open(self.ring_gate[name]), gate], dim=1).index_select(1, order)
        self._store_open(name, kv, gate)
        return chunk_kv, chunk_gate, first

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Stores the candidates' rows `compressed` [B, G, D] and returns the whole pool [B, capacity, D].

        A sequence longer than `max_tokens` gives a row past the pool's end: an IndexError, not another sequence's row.
        """
        groups, dim = compressed.shape[1], compressed.shape[2]
        row = self.start // self.compress_rate + torch.arange(groups, device=self.device)
        row = torch.where(row < self.capacity, row, self.batch_size * self.capacity)
        pool = self.pool[name]
        slots = _flat_slots(row, self.batch_size, self.capacity)
        pool.index_put_((slots,), compressed.reshape(-1, dim))
        return pool.view(self.batch_size, self.capacity, dim)

    def state(self) -> tuple[Tensor, ...]:
        """Every tensor whose rows belong to sequences, batch-major when viewed as [B, -1]."""
        return (*super().state(), *self.ring_kv.values(), *self.ring_gate.values(), *self.pool.values())

    def _open(self, ring: Tensor) -> Tensor:
        return ring.view(self.batch_size, self.compress_rate, -1)

    def _store_open(self, name: str, kv: Tensor, gate: Tensor) -> None:
        slots = _ring_slots(self.start, kv.shape[1], self.compress_rate, self.batch_size)
        _put_last(self.ring_kv[name], slots, kv, self.compress_rate)
        _put_last(self.ring_gate[name], slots, gate, self.compress_rate)


class StaticCSALayer(StaticHCALayer):
    """A layer whose groups overlap (ratio 4) and that also keeps the indexer's compressed keys."""

    STREAMS = ("compressor", "indexer")
    WIDTH = 2
    MODEL_MASKS_ONE_TOKEN = True

    def __init__(self, *, gate_dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__(gate_dtype=gate_dtype, **kwargs)
        batch, ratio, device = self.batch_size, self.compress_rate, self.device
        self.overlap_kv = {name: self._zeros(batch, 2, ratio, dim) for name, dim in self.stream_dims.items()}
        # Gates are kept after the position bias was added, which is fp32 in a model of any dtype.
        self.overlap_gate = {
            name: torch.full((batch, 2, ratio, dim), float("-inf"), dtype=gate_dtype, device=device)
            for name, dim in self.stream_dims.items()
        }

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """The first halves of the group before the first candidate, kv and gate [B, r, head_dim] (zeros and -inf before
        the first group); keeps those of the last two candidates of `chunk_*` [B, G, r, 2 * head_dim]."""
        groups = chunk_kv.shape[1]
        first = self.start // self.compress_rate
        before = ((first + 1) % 2).view(1)
        prior_kv = self.overlap_kv[name].index_select(1, before).squeeze(1)
        prior_gate = self.overlap_gate[name].index_select(1, before).squeeze(1)
        kept = min(groups, 2)
        slots = (first + torch.arange(groups - kept, groups, device=self.device)) % 2
        self.overlap_kv[name][:, slots] = chunk_kv[:, groups - kept :, :, :head_dim]
        self.overlap_gate[name][:, slots] = chunk_gate[:, groups - kept :, :, :head_dim].to(
            self.overlap_gate[name].dtype
        )
        return prior_kv, prior_gate

    def reset(self) -> None:
        """Forgets everything; the tensors stay where they are."""
        super().reset()
        for gate in self.overlap_gate.values():
            gate.fill_(float("-inf"))

    def state(self) -> tuple[Tensor, ...]:
        """Every tensor whose rows belong to sequences, batch-major when viewed as [B, -1]."""
        return (*super().state(), *self.overlap_kv.values(), *self.overlap_gate.values())


def _flat_slots(slot: Tensor, batch: int, size: int) -> Tensor:
    """[B * n]: `slot` [n] of every sequence as an index into a pool of `batch * size` rows."""
    bases = torch.arange(batch, device=slot.device) * size
    return (bases.unsqueeze(1) + slot).reshape(-1)


def _ring_slots(start: Tensor, tokens: int, size: int, batch: int) -> Tensor:
    """[B * n]: where the last n = min(tokens, size) of `tokens` new rows go in a ring of `size` rows a sequence."""
    if tokens == 1:
        return _flat_slots(start.view(1) % size, batch, size)
    kept = size if tokens > size else tokens  # `min` of a symbolic length would stay one, unlike the rows' count
    return _flat_slots((start + torch.arange(tokens - kept, tokens, device=start.device)) % size, batch, size)


def _put_last(ring: Tensor, slots: Tensor, rows: Tensor, size: int) -> None:
    """Writes the last min(T, size) of `rows` [B, T, D] to `slots` of `ring` [B * size, D]."""
    if rows.shape[1] > size:
        rows = rows[:, -size:]
    ring.index_put_((slots,), rows.reshape(-1, rows.shape[-1]))
