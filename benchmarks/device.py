"""Every Triton template on this machine's GPU: right or wrong, how fast, against what; and a model end to end.

    benchmarks/device.sh [--out FOLDER] [--minutes 9] [--dry-run]

Ceilings are measured in the same run: a large copy (GB/s) and a large bf16 product (TFLOP/s). Every call of a decoding
step and of a prompt of V4.1 (its widths, shapes from a capture) is compared with its reference, then timed beside the
reference run eagerly and compiled by stock Inductor, attention of one token also beside FlexAttention. `--dry-run` does
everything but what needs a GPU: it finds the calls, makes small ones' arguments, compiles kernels for the target and
writes the same files without times.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import flex
import torch

from dscompile.compat import version_text
from dscompile.lowering.template import choose, triton_templates
from dscompile.models.deepseek_v41 import DeepseekV41Config
from dscompile.ops import OPS
from dscompile.targets import Target, UnsupportedTargetError, detect_target, get_target
from dscompile.tuning.build import Failure, Job, compile_jobs
from dscompile.tuning.calls import Call, TensorSpec
from dscompile.tuning.inputs import make_inputs
from dscompile.tuning.measure import Measurer, driver_version
from dscompile.workload import Role, v41_calls

EXPERTS = 64  # of the release's 384, so that weights fit beside their copies; a call reads only those that are chosen
REFERENCE_FLOPS = 2e12  # above this the plain reference would take minutes


def find_calls(target: Target, context: int) -> list[tuple[str, Call]]:
    """(what it is part of, call) of V4.1 with fewer experts: decoding 8 and 64 sequences, a prompt of 4,096 tokens.

    The steps of 8 sequences also with stored weights, and with the rows that expert parallelism would send.
    """
    config = replace(DeepseekV41Config.released(), n_routed_experts=EXPERTS)
    found: dict[Call, str] = {}
    steps: tuple[tuple[Role, int, int, bool], ...] = (
        ("decode", 8, 1, False), ("decode", 8, 1, True), ("decode", 64, 1, False), ("prefill", 1, 4096, False),
    )  # fmt: skip
    for role, batch, tokens, stored in steps:
        for call in v41_calls(config, target.name, role, batch, context, tokens, stored=stored):
            found.setdefault(replace(call, count=1), f"{role} {batch}x{tokens}{' stored' * stored}")
    for tokens in (64, 4096):
        for call in exchange_calls(config, tokens):
            found[call] = f"exchange {tokens}"
    return [(where, call) for call, where in found.items()]


def exchange_calls(config: DeepseekV41Config, tokens: int) -> list[Call]:
    """Packing rows for other devices and adding up what comes back, every token at as many ranks as it has experts."""
    k, size = config.num_experts_per_tok, config.hidden_size
    x, rows = (torch.empty(n, size, dtype=torch.bfloat16, device="meta") for n in (tokens, tokens * k))
    token = torch.empty(tokens * k, dtype=torch.int64, device="meta")
    slot = torch.empty(tokens, k, dtype=torch.int64, device="meta")
    return [
        Call("pack_rows", (TensorSpec.of(x), TensorSpec.of(token), "fp8_g32_ue8m0")),
        Call("combine_rows", (TensorSpec.of(rows), TensorSpec.of(slot), None)),
    ]


def ceilings(device: torch.device) -> dict[str, float]:
    """GB/s of a copy of 2 GB (read and written), TFLOP/s of a bf16 product of 8,192 squared."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    place = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    copy, product = median_us(lambda: place.copy_(source)), median_us(lambda: a @ b)
    return {"copy_gb_per_s": 2 * source.nbytes / copy / 1e3, "bf16_tflops": 2 * 8192**3 / product / 1e6}


def median_us(run: Any, rounds: int = 15) -> float:
    times = []
    for _ in range(rounds + 3):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) * 1e3)
    return sorted(times[3:])[rounds // 2]


def run_call(where: str, call: Call, target: Target, peaks: dict[str, float] | None) -> dict[str, Any]:
    """One row of the results; "error" says what went wrong."""
    cost = call.cost().numbers()
    row: dict[str, Any] = {"part": where, "call": str(call), "op": call.op, **cost}
    choice = choose(triton_templates().get(f"dsv4::{call.op}", ()), call.named())
    if choice.template is None:
        return {**row, "error": f"no template: {choice.reason}"}
    space = choice.template.space(call.sizes(), target)
    if not space:
        return {**row, "error": "no config passes its checks"}
    job = Job(call, choice.template.name, space[0])
    row |= {"template": job.template, "config": str(job.config)}
    if peaks is None:
        ((_, built),) = compile_jobs([job], target, 1)
        if isinstance(built, Failure):
            return {**row, "error": built.reason}
        return {
            **row,
            "kernels": {b.kernel.name: {"registers": b.facts.registers, "spills": b.facts.spills} for b in built},
        }
    device = torch.device("cuda")
    try:
        took = row["dsv4_us"] = Measurer(target, device)(job)  # compares with the reference first
        row["correct"] = True
        moved = cost["read_bytes"] + cost["write_bytes"]
        row |= {"gb_per_s": moved / took / 1e3, "tflops": cost["flops"] / took / 1e6}
        row["of_ceiling"] = max(row["gb_per_s"] / peaks["copy_gb_per_s"], row["tflops"] / peaks["bf16_tflops"])
        if cost["flops"] < REFERENCE_FLOPS:
            row |= peers(call, device)
    except Exception as error:  # the next call may work
        row |= {"error": f"{type(error).__name__}: {error}"[:600], "trace": traceback.format_exc()[-1500:]}
    return row


def peers(call: Call, device: torch.device) -> dict[str, Any]:
    """The plain reference, eagerly and through stock Inductor, microseconds; what fails says so."""
    found: dict[str, Any] = {}
    args = make_inputs(call, device)
    reference = OPS[call.op].reference
    if call.op in flex.SERVES:
        found["flex_us"] = flex_time(call, args)
    for name, run in (("eager_us", reference), ("stock_us", torch.compile(reference))):
        try:
            run(*args)
            found[name] = median_us(lambda run=run: run(*args), 5)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    torch._dynamo.reset()
    return found


def flex_time(call: Call, args: tuple[Any, ...]) -> float | str:
    """Of FlexAttention on rows that were gathered and decoded before."""
    try:
        run = flex.flex_call(call.op, args)
        if run is None:
            return "steps of one token only"
        run()
        return median_us(run)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


def end_to_end(device: torch.device, target: Target) -> dict[str, Any]:
    """V4.1's miniature: a prompt and four tokens, eager and compiled, compared."""
    from dscompile.miniatures import token_ids, v41_model

    model = v41_model(torch.bfloat16).to(device)
    options = {"target": target.name, "inductor": device.type == "cuda"}
    compiled = torch.compile(model, backend="dsv4", options=options)
    ids, caches = token_ids(24).to(device), [model.new_cache(1, 64, device=device) for _ in range(2)]
    cosines = []
    with torch.no_grad():
        for start, stop in ((0, 20), (20, 21), (21, 22), (22, 23), (23, 24)):
            at = torch.arange(start, stop, device=device)[None]
            got, want = (
                run(ids[:, start:stop], at, cache).float().flatten() for run, cache in zip((compiled, model), caches)
            )
            cosines.append(float(torch.nn.functional.cosine_similarity(got, want, 0)))
    return {"cosines": cosines, "correct": min(cosines) > 0.99}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("device-results"), help="folder for results.json")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop starting new calls after this")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--target", help="default: the GPU that is here; in a dry run sm_90a")
    parser.add_argument("--calls", type=int, help="only so many calls")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: compile, time nothing")
    options = parser.parse_args()
    began = time.monotonic()
    if not options.dry_run and not torch.cuda.is_available():
        print("no GPU here: use --dry-run", file=sys.stderr)
        return 2
    try:
        chosen = options.target or ("sm_90a" if options.dry_run else None)
        target = get_target(chosen) if chosen else detect_target("cuda")
    except UnsupportedTargetError as error:
        print(error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    place = options.out / "results.json"
    results: dict[str, Any] = {
        "target": target.name, "dry_run": options.dry_run, "torch": torch.__version__, "triton": version_text("triton"),
        "python": sys.version.split()[0], "driver": driver_version(), "calls": [], "not_run": [],
        "device": None if options.dry_run else torch.cuda.get_device_name(),
    }  # fmt: skip
    peaks = None if options.dry_run else ceilings(torch.device("cuda"))
    results["ceilings"] = peaks
    if not options.dry_run:
        results["end_to_end"] = _guarded(lambda: end_to_end(torch.device("cuda"), target))
    for number, (where, call) in enumerate(find_calls(target, options.context)):
        if time.monotonic() - began > 60 * options.minutes or (options.calls is not None and number >= options.calls):
            results["not_run"].append(str(call))
            continue
        row = run_call(where, call, target, peaks)
        results["calls"].append(row)
        print(f"[{time.monotonic() - began:5.0f} s] {where}: {call.op} {_shown(row)}", flush=True)
        place.write_text(json.dumps(results, indent=1, default=str))
    place.write_text(json.dumps(results, indent=1, default=str))
    wrong = [row for row in results["calls"] if "error" in row]
    print(f"{len(results['calls'])} calls, {len(wrong)} with errors, {len(results['not_run'])} not run: {place}")
    return 1 if wrong or not results.get("end_to_end", {"correct": True}).get("correct") else 0


def _guarded(run: Any) -> dict[str, Any]:
    try:
        return dict(run())
    except Exception as error:
        return {
            "correct": False,
            "error": f"{type(error).__name__}: {error}"[:600],
            "trace": traceback.format_exc()[-2000:],
        }


def _shown(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"ERROR {row['error'].splitlines()[0][:150]}"
    if "kernels" in row:
        return f"compiled: {', '.join(row['kernels'])}"
    times = f"eager {row.get('eager_us')}, stock {row.get('stock_us')}"
    return f"{row['dsv4_us']:.1f} us, {row['of_ceiling']:.0%} of the ceiling, {times}"


if __name__ == "__main__":
    sys.exit(main())
