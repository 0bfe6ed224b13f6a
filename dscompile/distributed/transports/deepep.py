"""DeepEP's elastic buffer: tokens travel by its kernels, over NVLink and RDMA.

What of it is used here: `ElasticBuffer(group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)`, its
`dispatch` without expansion and its `combine`. It numbers experts through all ranks, equally many each, which is what
slots are here; a rank gets each token once, with its own slots and -1 for others. Values are bf16, or E4M3 with scales
in 4-byte packs: those of fp8_g32_ue8m0, four powers of two each.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dscompile import compat
from dscompile.distributed import traffic
from dscompile.distributed.routing import Spec, chosen_slots
from dscompile.distributed.transports import checked_indices, refuse_capture
from dscompile.distributed.wire import PAYLOAD
from dscompile.formats import FORMATS

_MOST_CHOICES = 32  # of a token; its kernels hold one per lane of a warp


class DeepEP:
    """A transport. One buffer for each kind of rows, made anew if more tokens come."""

    def __init__(self, group: str, package: Any) -> None:
        self._group, self._package = compat.process_group(group), package
        self._buffers: dict[tuple[int, int, bool], tuple[int, Any]] = {}

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor, table: Tensor, spec: Spec) -> DeepEPExchange:
        """As `Transport.dispatch`; no token may choose an expert twice. In the padded form `capacity` bounds a rank's
        tokens, in the exact one nothing does.

        Raises:
            ValueError: rows that are not bf16 or whose width does not fit; too many choices; more tokens than capacity.
        """
        _check(x, indices, spec)
        slot = chosen_slots(checked_indices(indices, table.shape[0]), table, spec.rank)
        if x.shape[0] == 0:  # a token that goes nowhere, as nothing says that its kernels run without any
            x, weights = x.new_zeros((1, x.shape[1])), weights.new_zeros((1, weights.shape[1]))
            return self._start(x, slot.new_full((1, slot.shape[1]), -1), weights, spec, 0)
        return self._start(x, slot, weights, spec, x.shape[0])

    def _start(self, x: Tensor, slot: Tensor, weights: Tensor, spec: Spec, tokens: int) -> DeepEPExchange:
        most = spec.capacity if spec.fixed else self._most_tokens(x)
        buffer = self._buffer(most, x.shape[1], slot.shape[1], spec.payload == "fp8")
        traffic.record(spec, 0, 0, 0, 0)  # its kernels do not say how many rows they send
        return DeepEPExchange(buffer, most, x, slot.to(self._package.topk_idx_t), weights, spec, tokens)

    def _most_tokens(self, x: Tensor) -> int:
        """Of any rank, up to a power of two: kernels and buffers are made for this number."""
        most = torch.tensor(x.shape[0], device=x.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        return max(64, 1 << (int(most) - 1).bit_length())

    def _buffer(self, tokens: int, hidden: int, top_k: int, fp8: bool) -> Any:
        room, buffer = self._buffers.get((hidden, top_k, fp8), (0, None))
        if room >= tokens:
            return buffer
        refuse_capture("transport 'deep_ep'")
        if buffer is not None:
            buffer.destroy()
        # Sums of ranks are added once, at the end, and not on the way as well, where they would be rounded again.
        buffer = self._package.ElasticBuffer(
            self._group, num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=top_k, use_fp8_dispatch=fp8,
            allow_multiple_reduction=False, explicitly_destroy=True,
        )  # fmt: skip
        self._buffers[hidden, top_k, fp8] = tokens, buffer
        return buffer


class DeepEPExchange:
    """One exchange; see `Exchange`."""

    def __init__(
        self, buffer: Any, most: int, x: Tensor, slot: Tensor, weights: Tensor, spec: Spec, tokens: int
    ) -> None:
        """most: tokens of any rank. slot: [N, k] in the package's own type, -1 for none. tokens: of x that are real."""
        self._buffer, self._spec, self._hidden, self._tokens = buffer, spec, x.shape[1], tokens
        self._dtype, self._weights_dtype = x.dtype, weights.dtype
        values: Any = _encoded(x) if spec.payload == "fp8" else x.contiguous()
        self._arrived = buffer.dispatch(
            values, topk_idx=slot.contiguous(), topk_weights=weights.float().contiguous(),
            num_experts=spec.ranks * spec.slots, num_max_tokens_per_rank=most, expert_alignment=1,
            do_cpu_sync=not spec.fixed, async_with_compute_stream=True,
        )  # fmt: skip
        self._handle: Any = self._arrived[3]
        self._combined: tuple[Any, ...] = ()

    def arrive(self) -> tuple[Tensor, Tensor, Tensor]:
        values, slots, shares, handle, event = self._arrived
        event.current_stream_wait()
        x = _decoded(values, self._hidden, self._dtype) if isinstance(values, tuple) else values
        slots, shares = slots.long(), shares.to(self._weights_dtype)
        self._arrived = ()
        if not self._spec.fixed:
            return x, slots, shares
        # Without a wait for the host there is room for every row that could come, and what lies behind the last one
        # that did is left as it was in memory.
        count = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        unused = (torch.arange(x.shape[0], device=x.device) >= count).unsqueeze(1)
        return x.masked_fill(unused, 0), slots.masked_fill(unused, -1), shares.masked_fill(unused, 0)

    def combine(self, sums: Tensor) -> None:
        values = sums.to(torch.bfloat16).contiguous()
        self._combined = self._buffer.combine(values, handle=self._handle, async_with_compute_stream=True)

    def finish(self) -> Tensor:
        total, _, event = self._combined
        event.current_stream_wait()
        self._combined, self._handle = (), None
        done: Tensor = total[: self._tokens].float()
        return done


def _check(x: Tensor, indices: Tensor, spec: Spec) -> None:
    if x.dtype != torch.bfloat16:
        raise ValueError(f"transport 'deep_ep' with rows of {x.dtype}, allowed: torch.bfloat16")
    # Rows are copied 16 bytes at a time, scales four at a time.
    step, why = (128, " with payload 'fp8'") if spec.payload == "fp8" else (8, "")
    if x.shape[1] % step:
        raise ValueError(f"transport 'deep_ep'{why}: rows of {x.shape[1]} values, allowed: multiples of {step}")
    if indices.shape[1] > _MOST_CHOICES:
        raise ValueError(f"transport 'deep_ep': {indices.shape[1]} experts a token, allowed: up to {_MOST_CHOICES}")
    if spec.fixed and x.shape[0] > spec.capacity:
        raise ValueError(
            f"{x.shape[0]} tokens on rank {spec.rank} with expert_capacity {spec.capacity}, allowed: up to the "
            "capacity, or expert_overflow='exact'"
        )


def _encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, D] -> E4M3 [N, D] and its scales int32 [N, D / 128], four bytes each."""
    payload, scales = FORMATS[PAYLOAD].encode(x)
    return payload.view(torch.float8_e4m3fn), scales.contiguous().view(torch.int32)


def _decoded(values: tuple[Tensor, Tensor], hidden: int, dtype: torch.dtype) -> Tensor:
    payload, scales = values
    return FORMATS[PAYLOAD].decode(
        payload.view(torch.uint8), scales.contiguous().view(torch.uint8), hidden, dtype
    )  # fmt: skip


def connect(group: str) -> DeepEP:
    """The transport of a group.

    Raises:
        ValueError: the package is not installed, cannot be imported, or is a release before its elastic buffer.
    """
    try:
        package = importlib.import_module("deep_ep")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "deep_ep"
        why = "is not installed" if missing else f"cannot be imported ({error})"
        raise ValueError(
            f"transport 'deep_ep' needs the package deep_ep, which {why}: github.com/deepseek-ai/DeepEP, or choose "
            "'collectives'"
        ) from None
    if not hasattr(package, "ElasticBuffer"):
        raise ValueError(
            f"transport 'deep_ep': deep_ep {getattr(package, '__version__', '(no version)')} has no ElasticBuffer, "
            "allowed: release 2 or later"
        )
    return DeepEP(group, package)
