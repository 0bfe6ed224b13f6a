"""From a template to machine code of a GPU that is not here, and what is read from it."""

import pytest
import torch
import triton
import triton.language as tl

from dscompile.targets import TARGETS, Target, get_target
from dscompile.templates.triton.launching import Launch, record_launches
from dscompile.templates.triton.record import config
from dscompile.templates.triton.rms_norm import TEMPLATES, rms_norm
from dscompile.tuning.disassembly import ToolError, parse
from dscompile.tuning.offline import OfflineCompileError, compile_launch, launches_of
from support.offline import compiled, meta

GPUS = [target for target in TARGETS.values() if target.capability]
ARGS = (meta(8, 5120), meta(5120, dtype=torch.float32), 1e-20, "fp32")


@triton.jit
def _add(a, b, out, n, factor, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(a + at) + tl.load(b + at) * factor, mask=at < n)


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_rms_norm_of_the_released_model(target: Target) -> None:
    kernel, facts = compiled(TEMPLATES[0], ARGS, target)["rms_norm_kernel"]
    assert f".target {target.name}" in kernel.ptx
    assert set(facts.loads) <= {16, 8} and 16 in facts.loads
    assert facts.stores and min(facts.stores) >= 8
    assert facts.registers <= 128


def test_recording_looks_at_no_data_and_starts_nothing() -> None:
    with record_launches() as launches:
        out = rms_norm(*ARGS, config=config(4, 3), target=get_target("sm_100a"))
    assert out.shape == (8, 5120) and out.device.type == "meta"
    (launch,) = launches
    assert launch.name == "rms_norm_kernel" and launch.grid == (8,) and launch.config == config(4, 3)
    types, constants, attributes = launch.signature()
    assert types["x"] == "*bf16" and types["weight"] == "*fp32" and types["stride"] == "i32" and types["eps"] == "fp32"
    assert types["D"] == "constexpr" and constants["D"] == 5120
    assert (0,) in attributes and (launch.kernel.arg_names.index("stride"),) in attributes


def test_signatures_follow_tritons_rules() -> None:
    """None and 1 are constants, what is divisible by 16 says so, what is not does not."""
    a = meta(64, dtype=torch.float32)
    given = {"a": a[4:], "b": a[1:], "out": a, "n": 1, "factor": 2.0}
    launch = Launch(_add, (1,), given, {"N": 32}, config())
    types, constants, attributes = launch.signature()
    assert types == {"a": "*fp32", "b": "*fp32", "out": "*fp32", "n": "constexpr", "factor": "fp32", "N": "constexpr"}
    assert constants == {"N": 32, "n": 1} and set(attributes) == {(0,), (2,)}
    assert Launch(_add, (1,), {**given, "n": 1 << 40}, {"N": 32}, config()).signature()[0]["n"] == "i64"
    with pytest.raises(TypeError, match="complex64"):
        Launch(_add, (1,), {**given, "a": meta(4, dtype=torch.complex64)}, {"N": 32}, config()).signature()


def test_keys_name_what_decides_about_the_code() -> None:
    """Equal for equal requests, different for another target, type or config."""
    sm90, sm103 = get_target("sm_90a"), get_target("sm_103a")

    def key(args: tuple, target: Target, warps: int = 4) -> str:
        (launch,) = launches_of(TEMPLATES[0], args, config(warps), target)
        return compile_launch(launch, target).key

    other = (meta(8, 5120, dtype=torch.float16), *ARGS[1:])
    keys = [key(ARGS, sm103), key(ARGS, sm90), key(ARGS, sm103, 8), key(other, sm103)]
    assert len(set(keys)) == 4
    assert key(ARGS, sm103) == keys[0]
    assert key((meta(16, 5120), *ARGS[1:]), sm103) == keys[0]  # another grid is the same code


def test_what_cannot_be_compiled_is_named() -> None:
    (launch,) = launches_of(TEMPLATES[0], ARGS, config(), get_target("sm_90a"))
    with pytest.raises(OfflineCompileError, match="'cpu' is no GPU"):
        compile_launch(launch, get_target("cpu"))
    broken = Launch(_add, (1,), dict(zip("a b out n factor".split(), (ARGS[0],) * 3 + (3, 1.0))), {"N": 33}, config())
    with pytest.raises(OfflineCompileError, match=r"_add for sm_103a \(warps=4 stages=2, N=33\)"):
        compile_launch(broken, get_target("sm_103a"))


def test_facts_from_the_text_of_the_tools() -> None:
    usage = "Fatbin:\n Function k:\n  REG:40 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:900 TEXTURE:0"
    sass = """
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.U8 R4, desc[UR4][R2.64] ;
        /*0030*/               @P1 STG.E desc[UR4][R2.64], R5 ;
        /*0040*/                   LDL R5, [R1] ;
        /*0050*/                   UTCQMMA gdesc[UR8], gdesc[UR10], tmem[UR6] ;
        /*0060*/                   UTMALDG.2D [UR8], [UR4] ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ;
    """
    facts = parse(usage, sass)
    assert (facts.registers, facts.stack_bytes, facts.spills, facts.instructions) == (40, 16, 1, 8)
    assert facts.loads == {1: 1, 16: 1} and facts.stores == {4: 1}
    assert facts.tensor_core == {"UTCQMMA": 1} and facts.tma == 1 and facts.async_copies == 1
    assert "FP8/FP4" in facts.describe_tensor_core()
    with pytest.raises(ToolError, match="no registers"):
        parse("nothing", sass)
