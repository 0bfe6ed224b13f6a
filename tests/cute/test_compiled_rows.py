"""Row writers in CuTe DSL, compiled for each GPU: no spills, no barrier, 16-byte accesses, conversions in hardware."""

import pytest
import torch

from dscompile.formats import FORMATS
from dscompile.targets import TARGETS, Target
from dscompile.templates.cute.rows import TEMPLATES
from dscompile.templates.triton.record import config
from dscompile.tuning.cute_offline import compile_request
from dscompile.tuning.disassembly import read

(WRITER,) = TEMPLATES
GPUS = [target for target in TARGETS.values() if target.capability]
# Values of a row, and how payload is stored: bytes a store, stores a thread (the pool and the returned rows).
RELEASE = {"fp8_g32_ue8m0": (512, 16, 2), "fp4_g16_e4m3": (512, 16, 2), "fp4_g32_ue8m0": (128, 4, 8)}
MOST = {"fp8_g32_ue8m0": 400, "fp4_g16_e4m3": 1300, "fp4_g32_ue8m0": 1000}  # instructions
gpus = pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def arguments(name: str, dim: int, half: int = 32, normed: bool = True) -> dict:
    angles = meta(8, half, dtype=torch.float32)
    return {
        "pool": meta(4096, FORMATS[name].row_bytes(dim), dtype=torch.uint8), "x": meta(8, dim),
        "weight": meta(dim, dtype=torch.float32) if normed else None, "cos": angles, "sin": angles,
        "slots": meta(8, dtype=torch.int64), "eps": 1e-20, "format": name,
    }  # fmt: skip


@gpus
@pytest.mark.parametrize("name", RELEASE)
def test_release(name: str, target: Target) -> None:
    dim, width, stores = RELEASE[name]
    (request,) = WRITER.requests(arguments(name, dim), config(1, 1), target)
    kernel = compile_request(request, target)
    facts = read(kernel.cubin)
    assert facts.spills == 0 and facts.stack_bytes == 0 and facts.static_shared_bytes == 0
    assert "bar.sync" not in kernel.ptx and facts.registers <= 80
    # The slot is 8 bytes; x, the weight, cosines and sines come in 16: 2, 4 and 2 + 2 for 16 values.
    assert facts.loads == {8: 1, 16: 10 if "fp8" in name else 20}
    scales = 2 if name == "fp4_g16_e4m3" else 1
    assert facts.stores == {scales: 2, width: stores}
    fp4 = "fp4" in name
    assert ("e2m1x2" in kernel.ptx) == (fp4 and target.has("e2m1_cvt"))
    assert ("cvt.rn.satfinite.e4m3x2.f32" in kernel.ptx) == (name != "fp4_g32_ue8m0")
    # Nothing is fused but what says so: the two of every quotient by an E4M3 scale.
    assert kernel.ptx.count("fma.rn") == (2 * 32 if name == "fp4_g16_e4m3" else 0)
    assert facts.instructions <= MOST[name]


@gpus
def test_without_norm_and_rotation(target: Target) -> None:
    (request,) = WRITER.requests(arguments("fp8_g32_ue8m0", 512, 0, normed=False), config(4, 1), target)
    facts = read(compile_request(request, target).cubin)
    assert request.threads == 128 and facts.loads == {8: 1, 16: 2} and facts.spills == 0


def test_everything_is_loaded_before_it_is_waited_for() -> None:
    (request,) = WRITER.requests(arguments("fp8_g32_ue8m0", 512), config(1, 1), TARGETS["sm_103a"])
    before, after = compile_request(request, TARGETS["sm_103a"]).ptx.split("shfl.sync", 1)
    assert before.count("ld.global") == 11 and "ld.global" not in after


def test_equal_requests_give_equal_code() -> None:
    target = TARGETS["sm_90a"]
    keys = set()
    for _ in range(2):
        (request,) = WRITER.requests(arguments("fp8_g32_ue8m0", 512), config(1, 1), target)
        keys.add(compile_request(request, target).key)
    assert len(keys) == 1
