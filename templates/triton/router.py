"""Choice of experts: one product, scores, and the k largest of them, the lowest index first among equals.

    sums of logits, shared among programs -> per token: add up, score, choose, weigh

With ONE, the last of the programs that share a block of tokens chooses for them; without, a second kernel does.

As in `hc`, fp32 weights are the sum of three bf16 numbers each, so bf16 tokens need no fp32 product. The logits of a
token are a fraction of its row, and come back from the cache.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.device.arrival import is_last
from dscompile.templates.triton.device.choice import choose_experts
from dscompile.templates.triton.device.hc import add_product
from dscompile.templates.triton.hc import PIECES
from dscompile.templates.triton.launching import counters, launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

SCORES = {"sqrtsoftplus": 0, "sigmoid": 1, "softmax": 2}
MOST_EXPERTS = 1024
# One warp a token: reductions need no shared memory.
_CHOOSE = config(1, 1)
# Of the scores of several tokens.
VALUES_PER_THREAD = 16


@triton.jit
def add_logits(
    x, x_stride, weight, w_stride, partial, N, expert_block, token_block, split,
    D: tl.constexpr, EXPERTS: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """partial fp32 [splits, N, EXPERTS]: what SPAN columns add to the logits."""
    expert = expert_block * BLOCK_E + tl.arange(0, BLOCK_E)
    token = (token_block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    alive, real = token < N, expert < EXPERTS
    total = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for start in range(0, SPAN, BLOCK_D):
        column = split * SPAN + start + tl.arange(0, BLOCK_D)
        at = x + token[:, None] * x_stride + column[None, :]
        there = weight + expert[None, :].to(tl.int64) * w_stride + column[:, None]
        if D % BLOCK_D == 0 and D % SPAN == 0:
            left = tl.load(at, mask=alive[:, None], other=0.0)
            right = tl.load(there, mask=real[None, :], other=0.0)
        else:
            left = tl.load(at, mask=alive[:, None] & (column < D)[None, :], other=0.0)
            right = tl.load(there, mask=real[None, :] & (column < D)[:, None], other=0.0)
        total = add_product(total, left, right, PIECES)
    at = partial + (split.to(tl.int64) * N + token)[:, None] * EXPERTS + expert[None, :]
    tl.store(at, total, mask=alive[:, None] & real[None, :])


@triton.jit
def router_logits_kernel(
    x, x_stride, weight, w_stride, partial, N,
    D: tl.constexpr, EXPERTS: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Programs with the same tokens are neighbours: the tokens come from memory once.
    add_logits(
        x, x_stride, weight, w_stride, partial, N, tl.program_id(0), tl.program_id(1), tl.program_id(2),
        D, EXPERTS, SPAN, PIECES, BLOCK_T, BLOCK_E, BLOCK_D,
    )  # fmt: skip


@triton.jit
def router_choose_kernel(
    partial, bias, forced, weights, indices, N, norm_eps, scale,
    EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr, SPLITS: tl.constexpr,
    ALL_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A token a program."""
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    choose_experts(
        partial, bias, forced, weights, indices, token, N, norm_eps, scale,
        EXPERTS, K, SCORE, NORMALIZE, SPLITS, 1, ALL_E, BLOCK_K,
    )  # fmt: skip


@triton.jit
def router_one_kernel(
    x, x_stride, weight, w_stride, partial, counter, bias, forced, weights, indices, N, norm_eps, scale,
    D: tl.constexpr, EXPERTS: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
    K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr, SPLITS: tl.constexpr,
    T: tl.constexpr, ALL_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `router_logits_kernel`; the last program of BLOCK_T tokens chooses for all of them, T at a time."""
    block = tl.program_id(1)
    add_logits(
        x, x_stride, weight, w_stride, partial, N, tl.program_id(0), block, tl.program_id(2),
        D, EXPERTS, SPAN, PIECES, BLOCK_T, BLOCK_E, BLOCK_D,
    )  # fmt: skip
    if is_last(counter + block, tl.num_programs(0) * SPLITS):
        first = block * BLOCK_T
        for start in range(first, tl.minimum(first + BLOCK_T, N), T):
            token = (start + tl.arange(0, T)).to(tl.int64)
            choose_experts(
                partial, bias, forced, weights, indices, token, N, norm_eps, scale,
                EXPERTS, K, SCORE, NORMALIZE, SPLITS, T, ALL_E, BLOCK_K,
            )  # fmt: skip


def router(
    x: Tensor, weight: Tensor, bias: Tensor | None, forced_indices: Tensor | None, top_k: int, score_fn: str,
    normalize: bool, norm_eps: float, scale: float, fp32: bool, *, config: Config, target: Target,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`dsv4::router`: x [N, D], weight [E, D] -> weights [N, k] (fp32, or x.dtype if not fp32), indices int64 [N, k].

    A forced index outside [0, E) gets weight 0 and stays what it is; the reference raises.
    """
    tokens, size = x.shape
    experts = weight.shape[0]
    x, weight = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, weight))
    bias = None if bias is None else bias.contiguous()
    forced = None if forced_indices is None else forced_indices.contiguous()
    pieces = PIECES[weight.dtype] if x.dtype == torch.bfloat16 else 0
    # A product in fp32 keeps its operands in registers.
    block_t, block_e, most = (config["BLOCK_T"], config["BLOCK_E"], config["BLOCK_D"]) if pieces else (16, 32, 32)
    block_d = max(16, min(most, triton.next_power_of_2(size)))
    span = block_d * triton.cdiv(size, block_d * config["SPLITS"])
    splits = triton.cdiv(size, span)
    partial = x.new_empty((splits, tokens, experts), dtype=torch.float32)
    blocks = triton.cdiv(tokens, block_t)
    grid = (triton.cdiv(experts, block_e), blocks, splits)
    weights = x.new_empty((tokens, top_k), dtype=torch.float32 if fp32 else x.dtype)
    indices = x.new_empty((tokens, top_k), dtype=torch.int64)
    given = (x, x.stride(0), weight, weight.stride(0), partial)
    choosing = (bias, forced, weights, indices, tokens, norm_eps, scale)
    product = {
        "D": size, "EXPERTS": experts, "SPAN": span, "PIECES": pieces,
        "BLOCK_T": block_t, "BLOCK_E": block_e, "BLOCK_D": block_d,
    }  # fmt: skip
    choice = {
        "K": top_k, "SCORE": SCORES[score_fn], "NORMALIZE": normalize, "SPLITS": splits,
        "ALL_E": triton.next_power_of_2(experts), "BLOCK_K": triton.next_power_of_2(top_k),
    }  # fmt: skip
    if config["ONE"]:
        at_once = 32 * config.num_warps * VALUES_PER_THREAD // choice["ALL_E"]
        launch(
            router_one_kernel, grid, *given, counters(x, blocks), *choosing,
            config=config, **product, **choice, T=max(1, min(block_t, at_once)),
        )  # fmt: skip
        return weights, indices
    launch(router_logits_kernel, grid, *given, tokens, config=config, **product)
    launch(router_choose_kernel, (tokens,), partial, *choosing, config=_CHOOSE, EXPERTS=experts, **choice)
    return weights, indices


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    tokens = sizes["N"]
    one = [config(8, 3, BLOCK_T=16, BLOCK_E=e, BLOCK_D=128, SPLITS=4, ONE=1) for e in (16, 32)]
    few = [config(4, 3, BLOCK_T=16, BLOCK_E=e, BLOCK_D=128, SPLITS=s, ONE=0) for e, s in ((32, 10), (64, 4))]
    some = [config(4, 3, BLOCK_T=64, BLOCK_E=64, BLOCK_D=64, SPLITS=s, ONE=0) for s in (4, 1)]
    many = [config(8, 3, BLOCK_T=128, BLOCK_E=128, BLOCK_D=d, SPLITS=1, ONE=0) for d in (64, 32)]
    if tokens <= 64:
        yield from (*one, *few, *some)
    elif tokens <= 1024:
        yield from (*some, *few)
    else:
        yield from (*many, *reversed(some))


def _check(config: Config, sizes: Sizes, target: Target) -> str | None:
    pieces = 6 if sizes["weight_bytes"] == 4 else 0  # three bf16 tiles beside the fp32 one
    each = config["BLOCK_E"] * (sizes["weight_bytes"] * config.num_stages + pieces)
    need = config["BLOCK_D"] * (each + config.num_stages * config["BLOCK_T"] * sizes["x_bytes"])
    if need <= target.smem_bytes_per_block:
        return None
    return f"{need} bytes of shared memory, allowed: {target.smem_bytes_per_block}"


def _applies(meta: Meta) -> str | None:
    experts, size = meta["weight"].shape
    if experts > MOST_EXPERTS:
        return f"{experts} experts, allowed: 1 to {MOST_EXPERTS}"
    return None if size > 0 else "tokens without a value"


TEMPLATES = (TritonTemplate("router", "dsv4::router", router, _configs, _check, _applies),)
