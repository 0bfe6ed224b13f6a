"""Stands in for the package deep_ep: the calls of its elastic buffer that are used here, between threads on a CPU.

It is as strict as the documented interface about what it gets, and as careless about what it leaves: rows behind the
last one are garbage where the host does not wait for their number.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

topk_idx_t = torch.int64
__version__ = "2.1.0"


class Event:
    def __init__(self, group: Any, what: str) -> None:
        self.group, self.what = group, what

    def current_stream_wait(self, release_handle: bool = False) -> None:
        self.group.calls.append(("wait", {"what": self.what}))


class ElasticBuffer:
    def __init__(
        self, group: Any, num_bytes: int | None = None, num_cpu_bytes: int = 0, num_max_tokens_per_rank: int = 0,
        hidden: int = 0, num_topk: int = 0, use_fp8_dispatch: bool = False, deterministic: bool = False,
        allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True, explicitly_destroy: bool = False,
    ) -> None:  # fmt: skip
        self.group, self.most, self.hidden, self.top_k = group, num_max_tokens_per_rank, hidden, num_topk
        self.fp8, self.explicitly_destroy, self.alive = use_fp8_dispatch, explicitly_destroy, True
        made = {"tokens": num_max_tokens_per_rank, "fp8": use_fp8_dispatch}
        assert len(set(map(str, group.meeting.everyone(group.rank(), made)))) == 1, "made together, alike"
        group.calls.append(("buffer", made))

    def destroy(self) -> None:
        assert self.explicitly_destroy and self.alive
        self.alive = False
        self.group.calls.append(("destroy", {"tokens": self.most}))

    def dispatch(
        self, x: Any, topk_idx: Tensor, topk_weights: Tensor, num_experts: int, num_max_tokens_per_rank: int,
        expert_alignment: int = 1, do_cpu_sync: bool | None = None, async_with_compute_stream: bool = False,
    ) -> tuple[Any, Tensor, Tensor, Any, Event]:  # fmt: skip
        ranks, rank = self.group.size(), self.group.rank()
        assert self.alive and num_experts % ranks == 0 and 0 < num_max_tokens_per_rank <= self.most
        values, scales = x if isinstance(x, tuple) else (x, None)
        tokens = values.shape[0]
        assert 0 < tokens <= num_max_tokens_per_rank and values.shape[1] == self.hidden and values.is_contiguous()
        assert topk_idx.shape == topk_weights.shape == (tokens, self.top_k)
        assert topk_idx.dtype == topk_idx_t and topk_weights.dtype == torch.float32
        assert topk_idx.is_contiguous() and topk_weights.is_contiguous()
        assert int(topk_idx.min()) >= -1 and int(topk_idx.max()) < num_experts
        if scales is None:
            assert values.dtype == torch.bfloat16 and not self.fp8
        else:
            assert values.dtype == torch.float8_e4m3fn and self.fp8
            assert scales.shape == (tokens, self.hidden // 128) and scales.dtype == torch.int32
        sync = True if do_cpu_sync is None else do_cpu_sync
        self.group.calls.append(
            ("dispatch", {"sync": sync, "tokens": tokens, "asynchronous": async_with_compute_stream})
        )
        each = num_experts // ranks
        rows: list[tuple[int, int]] = []  # source, token
        sent = self.group.meeting.everyone(rank, (values, scales, topk_idx, topk_weights))
        counts = []
        for source, (_, _, chosen, _) in enumerate(sent):
            mine = ((chosen >= 0) & (chosen // each == rank)).any(1).nonzero().flatten().tolist()
            rows += [(source, token) for token in reversed(mine)]  # in no order that could be relied on
            counts.append(len(rows))
        room = len(rows) if sync else ranks * num_max_tokens_per_rank

        def gathered(part: int, garbage: float) -> Tensor:
            like = sent[rank][part]
            out = torch.empty((room, like.shape[1]), dtype=like.dtype)
            out.copy_(torch.full(out.shape, garbage))
            for row, (source, token) in enumerate(rows):
                out[row] = sent[source][part][token]
            return out

        local = gathered(2, 10**6)
        local[: len(rows)] = torch.where(local[: len(rows)] // each == rank, local[: len(rows)] % each, -1)
        handle = SimpleNamespace(
            psum_num_recv_tokens_per_scaleup_rank=torch.tensor(counts, dtype=torch.int32), rows=rows, room=room,
            tokens=tokens, num_experts=num_experts,
        )  # fmt: skip
        got = gathered(0, float("nan"))
        received = (got, gathered(1, 12345)) if scales is not None else got
        return received, local, gathered(3, float("nan")), handle, Event(self.group, "dispatch")

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, async_with_compute_stream: bool = False
    ) -> tuple[Tensor, None, Event]:
        rank = self.group.rank()
        assert self.alive and x.dtype == torch.bfloat16 and x.shape == (handle.room, self.hidden) and x.is_contiguous()
        self.group.calls.append(("combine", {"rows": x.shape[0], "asynchronous": async_with_compute_stream}))
        total = torch.zeros(handle.tokens, self.hidden)
        for values, rows in self.group.meeting.everyone(rank, (x, handle.rows)):
            for row, (source, token) in enumerate(rows):
                if source == rank:
                    total[token] += values[row]
        return total.bfloat16(), None, Event(self.group, "combine")
