"""The indexer compiled for the GPUs, in the shapes of the released V4.1-Flash."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from dscompile.formats import FORMATS
from dscompile.targets import TARGETS, Target
from dscompile.templates.triton.device.keys import E2M1_TIMES_BF16
from dscompile.templates.triton.index_topk import TEMPLATES
from dscompile.tuning.disassembly import Facts
from dscompile.tuning.offline import launches_of
from support.kernels import space, spec_of
from support.offline import compiled, meta

TOPK, BLOCKS = TEMPLATES
GPUS = [target for target in TARGETS.values() if target.capability]
FP4 = "fp4_g32_ue8m0"


def arguments(batch: int, tokens: int, rows: int, marked: bool = False) -> tuple[Any, ...]:
    """32 heads of 128, rows of 68 bytes, 512 of them chosen."""
    return (
        meta(batch, tokens, 32, 128), meta(batch, rows, 68, dtype=torch.uint8), meta(batch, tokens, 32),
        meta(batch, tokens, dtype=torch.int64), meta(batch, tokens, rows, dtype=torch.bool) if marked else None,
        512, 1.0, FP4, True,
    )  # fmt: skip


def check_scores(facts: Facts, target: Target, marked: bool = False) -> None:
    """64 or more rows of keys times the heads: the large instruction of either generation. Keys come four bytes at a
    time, all that rows of 68 bytes allow, and not one by one.
    """
    assert set(facts.tensor_core) == {"UTCHMMA" if target.has("tcgen05") else "HGMMA"}
    assert facts.loads.get(1, 0) <= 8 * marked and facts.loads.get(2, 0) <= 2 and 16 in facts.loads
    assert facts.registers <= 255


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize("marked", [False, True], ids=["all", "candidates"])
def test_decode(target: Target, marked: bool) -> None:
    """8 sequences at 128k rows; candidates as the layers behind the candidate layer read them."""
    kernels = compiled(TOPK, arguments(8, 1, 131072, marked), target)
    assert set(kernels) == {"index_scores_kernel", "index_merge_kernel"}
    check_scores(kernels["index_scores_kernel"][1], target, marked)


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_decode_of_many_sequences(target: Target) -> None:
    """256 at 8k: a program a sequence, so nothing is left to merge."""
    kernels = compiled(TOPK, arguments(256, 1, 8192), target)
    check_scores(kernels["index_scores_kernel"][1], target)
    assert set(kernels) <= {"index_scores_kernel", "index_merge_kernel"}


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_candidates(target: Target) -> None:
    (q, keys, weights, visible, _, *rest), size = arguments(8, 1, 131072), 8
    kernels = compiled(BLOCKS, (q, keys, weights, visible, *rest, 2048, size), target)
    check_scores(kernels["index_scores_kernel"][1], target)
    assert 16 in kernels["index_candidates_kernel"][1].stores


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_prompt(target: Target) -> None:
    kernels = compiled(TOPK, arguments(1, 4096, 4096), target)
    assert set(kernels) == {"index_scores_kernel"}
    check_scores(kernels["index_scores_kernel"][1], target)


@pytest.mark.slow
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize(("dtype", "k"), [(torch.float32, 512), (torch.bfloat16, 2048)])
def test_other_kinds(target: Target, dtype: torch.dtype, k: int) -> None:
    """Plain fp32 keys, and as many choices as there may be, by falling score."""
    args = (meta(4, 1, 64, 128, dtype=dtype), meta(4, 16384, 128, dtype=dtype), meta(4, 1, 64),
            meta(4, 1, dtype=torch.int64), None, k, 1.0, "none", False)  # fmt: skip
    assert set(compiled(TOPK, args, target)) == {"index_scores_kernel", "index_merge_kernel", "index_order_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_every_config(target: Target) -> None:
    """All tiles that the check lets through compile without spills; splits do not change the first kernel but for 1."""
    for args in (arguments(8, 1, 131072), arguments(256, 1, 8192), arguments(1, 4096, 4096)):
        seen = set()
        for chosen in TOPK.space(spec_of(TOPK).sizes(*args), target):
            kind = (chosen.num_warps, chosen["TOKENS"], chosen["BLOCK_N"], chosen["SPLITS"] == 1)
            if kind not in seen:
                seen.add(kind)
                compiled(TOPK, args, target, chosen)


def test_no_scores_in_memory() -> None:
    """At 128k rows a program keeps at most 1,024 of the entries of its 4,096 or more rows."""
    args = arguments(8, 1, 131072)
    for target in GPUS:
        launches = launches_of(TOPK, args, space(TOPK, args, target)[0], target)
        buffer = launches[0].arguments["buffer"]
        assert buffer.shape[1] <= 32 and buffer.shape[2] == 1024


# Decoding E2M1 by machine instructions cannot run without a GPU: here they are carried out one by one.


def lanes(value: np.ndarray, kind: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(value).view(kind))


def prmt(a: np.ndarray, b: np.ndarray, selectors: np.ndarray) -> np.ndarray:
    source = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros_like(a)
    for byte in range(4):
        selector = (selectors >> np.uint32(4 * byte)) & np.uint32(15)
        chosen = ((source >> (8 * (selector & 7)).astype(np.uint64)) & np.uint64(255)).astype(np.uint32)
        chosen = np.where(selector & 8, np.where(chosen & 128, 255, 0), chosen).astype(np.uint32)
        out |= chosen << np.uint32(8 * byte)
    return out


def carried_out(text: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    values = dict(inputs)
    for line in re.findall(r"^\s*([a-z][\w.]*) (.*);$", text, re.M):
        name, arguments = line[0], [argument.strip() for argument in line[1].split(",")]
        target, sources = arguments[0], [
            values[a] if a in values else np.full_like(inputs["$4"], int(a, 0)) for a in arguments[1:]
        ]  # fmt: skip
        if name == "and.b32":
            values[target] = sources[0] & sources[1]
        elif name == "shl.b32":
            values[target] = sources[0] << sources[1]
        elif name == "shr.u32":
            values[target] = sources[0] >> sources[1]
        elif name == "prmt.b32":
            values[target] = prmt(*sources)
        elif name == "lop3.b32":
            assert int(arguments[4], 0) == 0xF8  # a | (b & c)
            values[target] = sources[0] | (sources[1] & sources[2])
        elif name == "mul.rn.bf16x2":
            left, right = (lanes(x, np.int16).view(torch.bfloat16) for x in sources)
            values[target] = (left * right).view(torch.int16).numpy().view(np.uint32)
        else:
            raise AssertionError(f"unknown instruction {name}")
    return values


@pytest.mark.parametrize("scale", [2.0**-127, 2.0**-9, 1.0, 0.40625, 448.0, 2.0**120])
def test_e2m1_by_instructions(scale: float) -> None:
    """Every byte in every place of a register gives the values of the format."""
    data = np.stack([np.roll(np.arange(256, dtype=np.uint8), shift) for shift in (0, 77, 131, 200)], 1)
    factors = torch.tensor([scale, 1.0, scale, 2.0]).bfloat16().repeat(256, 1)
    pairs = factors.view(torch.int16).numpy().view(np.uint32)
    words = np.ascontiguousarray(data).view(np.uint32)[:, 0]
    inputs = {"$4": words, "$5": pairs[:, 0].copy(), "$6": pairs[:, 1].copy()}
    out = carried_out(E2M1_TIMES_BF16.value.replace(".reg", "//"), inputs)
    halves = {register: lanes(out[register], np.int16).view(256, 2) for register in ("$0", "$1", "$2", "$3")}
    got = torch.stack((torch.cat((halves["$0"], halves["$1"]), 1), torch.cat((halves["$2"], halves["$3"]), 1)), 2)
    ones = torch.full((256, 1), 0x38, dtype=torch.uint8)  # 1 in E4M3
    values = FORMATS["fp4_g16_e4m3"].decode(torch.from_numpy(data).repeat(1, 2), ones, 16)[:, :8].view(256, 4, 2)
    assert torch.equal(got, (values * factors.float().unsqueeze(2)).bfloat16().view(torch.int16))
