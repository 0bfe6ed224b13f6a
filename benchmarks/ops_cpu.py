"""How much faster the CPU templates are than the references of their ops, per op and shape.

    python benchmarks/ops_cpu.py [--only hc_pre] [--repeat 5] [--dtype bfloat16] [--skip-slow]

Shapes are those of a model of hidden size 1,024 (16 heads of 128, window 128, 512 of up to 2,048 compressed rows, 32
experts top-4): one prompt of 4,096 tokens, and decoding steps of 1 and 8 sequences. Times are the best of `--repeat`
runs. CPU milliseconds count all threads and hardly change when other processes keep the cores busy; wall-clock ones do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dscompile.lowering.cpu import opaque_op
from dscompile.lowering.template import cpu_templates
from dscompile.ops import OPS

HIDDEN, STREAMS, HEADS, DIM, WINDOW, TOP_K, INDEX_HEADS, INDEX_DIM = 1024, 4, 16, 128, 128, 512, 32, 128
EXPERTS, PICKED, INNER = 32, 4, 512


@dataclass(frozen=True)
class Case:
    """One call: the op, what is special about it, its arguments."""

    op: str
    what: str
    args: tuple[Any, ...]


def mixes_of(tokens: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    rows, width = STREAMS * (STREAMS + 2), STREAMS * HIDDEN
    fn = torch.randn(rows, width) / width**0.5
    return torch.randn(*tokens, STREAMS, HIDDEN).to(dtype), fn, torch.rand(3) + 0.5, torch.randn(rows)


def mhc(batch: int, tokens: int, dtype: torch.dtype) -> Iterator[Case]:
    streams, fn, scale, base = mixes_of((batch, tokens), dtype)
    what = f"[{batch}, {tokens}, {STREAMS}, {HIDDEN}]"
    yield Case("hc_pre", what, (streams, fn, scale, base, None, torch.rand(HIDDEN), 1e-6, 1e-6, 20, 1e-6, True))
    post, comb = torch.rand(batch, tokens, STREAMS), torch.rand(batch, tokens, STREAMS, STREAMS)
    yield Case("hc_post", what, (torch.randn(batch, tokens, HIDDEN).to(dtype), streams, post, comb, False))
    yield Case("sinkhorn", f"[{batch}, {tokens}, 4, 4] x 20", (comb, 20, 1e-6))


def attention(batch: int, tokens: int, context: int, dtype: torch.dtype) -> Iterator[Case]:
    """Queries at the end of `context` tokens, ratio-4 compressed rows; for one token also with packed rows."""
    rows = min(context, tokens + WINDOW - 1)
    comp = context // 4
    positions = torch.arange(context - tokens, context).expand(batch, tokens)
    q, window = torch.randn(batch, tokens, HEADS, DIM).to(dtype), torch.randn(batch, rows, DIM).to(dtype)
    pool, start = torch.randn(batch, comp, DIM).to(dtype), torch.full((batch,), context - rows)
    angle = torch.rand(batch, tokens, 32)
    k = min(TOP_K, comp)
    scores = torch.rand(batch, tokens, comp)
    visible = (positions + 1) // 4
    scores = scores.masked_fill(torch.arange(comp) >= visible[..., None], -1.0)
    picked = torch.where(scores.topk(k, -1).values >= 0, scores.topk(k, -1).indices, comp).sort(-1).values
    picked = torch.where(picked < comp, picked, -1)
    where = f"[{batch}, {tokens}, {HEADS}, {DIM}] at {context}"
    for name, extra in (
        ("window", (None, None, None)),
        (f"window + {k} of {comp}", (pool, picked, None)),
        (f"window + all of {comp // 32}", (pool[:, : comp // 32], None, visible // 32)),
    ):
        yield Case("sparse_attention", f"{where}, {name}",
                   (q, window, positions, start, WINDOW, *extra, torch.randn(HEADS), DIM**-0.5, angle.cos(),
                    angle.sin(), False, "none", "none"))  # fmt: skip
    if tokens == 1:
        packed = (
            OPS["quant_pack"].reference(window, "fp8_g32_ue8m0"),
            OPS["quant_pack"].reference(pool, "fp4_g16_e4m3"),
        )
        yield Case("sparse_attention", f"{where}, packed rows",
                   (q, packed[0], positions, start, WINDOW, packed[1], picked, None, torch.randn(HEADS), DIM**-0.5,
                    angle.cos(), angle.sin(), False, "fp8_g32_ue8m0", "fp4_g16_e4m3"))  # fmt: skip
    index_q = torch.randn(batch, tokens, INDEX_HEADS, INDEX_DIM).to(dtype)
    keys, weights = torch.randn(batch, comp, INDEX_DIM).to(dtype), torch.randn(batch, tokens, INDEX_HEADS)
    where = f"[{batch}, {tokens}, {INDEX_HEADS}, {INDEX_DIM}] x {comp}"
    yield Case("index_topk", where, (index_q, keys, weights, visible, None, TOP_K, 0.1, "none", True))
    packed_keys = OPS["quant_pack"].reference(keys, "fp4_g32_ue8m0")
    yield Case(
        "index_topk", f"{where} FP4", (index_q, packed_keys, weights, visible, None, TOP_K, 0.1, "fp4_g32_ue8m0", True)
    )
    yield Case("index_topk_candidates", where, (index_q, keys, weights, visible, TOP_K, 0.1, "none", True, 128, 8))


def rows_of(count: int, dtype: torch.dtype) -> Iterator[Case]:
    x, angle = torch.randn(count, 512).to(dtype), torch.rand(count, 32)
    for name in ("fp8_g32_ue8m0", "fp4_g16_e4m3", "fp4_g32_ue8m0"):
        yield Case("quant_pack", f"[{count}, 512] {name}", (x, name))
        yield Case("unpack", f"[{count}, 512] {name}", (OPS["quant_pack"].reference(x, name), name, 512, dtype))
    yield Case("fake_quant", f"[{count}, 512] fp8_g32_ue8m0", (x, "fp8_g32_ue8m0"))
    pool, slots = torch.zeros(8192, 528, dtype=torch.uint8), torch.randperm(8192)[:count]
    yield Case("store_rows", f"[{count}, 528]", (pool, torch.zeros(count, 528, dtype=torch.uint8), slots))
    yield Case("norm_rope_store", f"[{count}, 512] fp8_g32_ue8m0",
               (pool, x, torch.rand(512), angle.cos(), angle.sin(), slots, 1e-6, "fp8_g32_ue8m0"))  # fmt: skip


def layers(tokens: int, dtype: torch.dtype) -> Iterator[Case]:
    x = torch.randn(tokens, HIDDEN).to(dtype)
    gate = (torch.randn(EXPERTS, HIDDEN) / 32).to(dtype)
    yield Case("router", f"[{tokens}, {HIDDEN}] x {EXPERTS}, fp32",
               (x, gate, torch.randn(EXPERTS), None, PICKED, "sqrtsoftplus", True, 1e-20, 1.5, True))  # fmt: skip
    w13, w2 = torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 32, torch.randn(EXPERTS, HIDDEN, INNER) / 23
    indices = torch.rand(tokens, EXPERTS).topk(PICKED).indices
    yield Case("experts", f"[{tokens}, {HIDDEN}], {PICKED} of {EXPERTS} x {INNER}",
               (x, indices, torch.rand(tokens, PICKED), w13.to(dtype), w2.to(dtype), 10.0, True, dtype))  # fmt: skip
    o = torch.randn(1, tokens, 4, HEADS * DIM // 4).to(dtype)
    wo_a, wo_b = torch.randn(4, 256, HEADS * DIM // 4) / 23, torch.randn(HIDDEN, 1024) / 32
    yield Case("grouped_output", f"[{tokens}, 4, {HEADS * DIM // 4}]", (o, wo_a.to(dtype), wo_b.to(dtype)))
    q, angle = torch.randn(1, tokens, HEADS, DIM).to(dtype), torch.rand(1, tokens, 1, 32)
    yield Case("rope", f"[1, {tokens}, {HEADS}, {DIM}]", (q, angle.cos(), angle.sin(), False))
    if tokens >= 4:
        kv, bias = torch.randn(1, tokens // 4, 4, 2 * DIM).to(dtype), torch.randn(4, 2 * DIM)
        yield Case("compress", f"[1, {tokens // 4}, 4, {2 * DIM}] overlap", (kv, kv.clone(), bias, None, None, True))
    table = torch.randint(0, 256, (100_000, 256)).to(torch.uint8)
    scales, rows = torch.full((100_000, 8), 120, dtype=torch.uint8), torch.randint(0, 100_000, (tokens, 24))
    yield Case("engram_gather", f"[{tokens}, 24] x 256", (table, scales, rows, dtype))
    streams = torch.randn(tokens, STREAMS, HIDDEN).to(dtype)
    weight = torch.rand(STREAMS, HIDDEN)
    yield Case(
        "engram_gate", f"[{tokens}, {STREAMS}, {HIDDEN}]", (streams, streams.clone(), x, weight, weight, None, 1e-20)
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for batch, tokens, context in ((1, 4096, 4096), (1, 1, 1024), (1, 1, 8192), (8, 1, 8192)):
        yield from attention(batch, tokens, context, dtype)
    for batch, tokens in ((1, 4096), (1, 1), (8, 1)):
        yield from mhc(batch, tokens, dtype)
        yield from layers(batch * tokens, dtype)
        yield from rows_of(batch * tokens, dtype)


def best(call: Callable[[], Any], repeat: int) -> tuple[float, float]:
    """Best wall-clock and CPU milliseconds of a call, after one to warm up; short calls are measured in batches."""
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    if once > 2.0:
        repeat = 1
    batch = max(1, min(200, int(0.002 / max(once, 1e-6))))
    wall = cpu = float("inf")
    for _ in range(repeat):
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(batch):
            call()
        wall = min(wall, (time.perf_counter() - start) / batch)
        cpu = min(cpu, (time.process_time() - cpu_start) / batch)
    return wall * 1e3, cpu * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help="an op's name")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--skip-slow", action="store_true", help="leave out the prompt of 4,096 tokens")
    options = parser.parse_args()
    torch.manual_seed(0)
    opaque = {t.op.removeprefix("dsv4::"): t for ts in cpu_templates().values() for t in ts if t.form == "opaque"}
    table = Table("op", "case", "reference ms", "template ms", "ratio", "CPU ms", "CPU ratio", show_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    with torch.no_grad():
        for case in cases(getattr(torch, options.dtype)):
            if (options.only and case.op != options.only) or (options.skip_slow and "4096" in case.what):
                continue
            op, reference = opaque_op(opaque[case.op]), OPS[case.op].reference
            op(*case.args)  # compiles the kernel
            fast, fast_cpu = best(lambda op=op, case=case: op(*case.args), options.repeat)  # type: ignore[misc]
            slow, slow_cpu = best(lambda reference=reference, case=case: reference(*case.args), options.repeat)  # type: ignore[misc]
            table.add_row(case.op, case.what, f"{slow:.3f}", f"{fast:.3f}", f"{slow / fast:.1f}", f"{fast_cpu:.3f}",
                          f"{slow_cpu / fast_cpu:.1f}")  # fmt: skip
    Console(width=140).print(table)
    print(f"{options.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")


if __name__ == "__main__":
    main()
