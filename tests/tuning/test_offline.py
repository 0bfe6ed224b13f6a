"""From a template to machine code of a GPU that is not here, and what is read from it."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from dscompile.compat import triton_source
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
    assert launch.arguments["stride"] == 5120 and launch.constants["D"] == 5120


def test_requests_follow_tritons_rules() -> None:
    """None and 1 are constants, what is divisible by 16 says so, what is not does not."""
    a = meta(64, dtype=torch.float32)
    gpu = GPUTarget("cuda", 103, 32)

    def request(**changes: Any) -> Any:
        given = {"a": a[4:], "b": a[1:], "out": a, "n": 1, "factor": 2.0, **changes}
        return triton_source(_add, gpu, given, {"N": 32}, {"num_warps": 4})

    source = request()
    types = {"a": "*fp32", "b": "*fp32", "out": "*fp32", "n": "constexpr", "factor": "fp32", "N": "constexpr"}
    assert source.signature == types and source.constants == {(3,): 1, (5,): 32}
    aligned = [["tt.divisibility", 16]]
    assert [source.attrs.get((i,)) == aligned for i in range(6)] == [True, False, True, False, False, False]
    assert request(n=1 << 40).signature["n"] == "i64" and request(n=48).attrs[3,] == aligned
    assert request(b=None).signature["b"] == "constexpr"


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


def test_loops_from_the_branches_back() -> None:
    """Inner loops once, branches ahead not at all, nor the trap behind the end that branches to itself."""
    sass = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ;
.L_x_2:
        /*0020*/                   LDG.E.64 R4, desc[UR4][R2.64] ;
        /*0030*/               @P1 BRA `(.L_x_2) ;
        /*0040*/               @P0 BRA `(.L_x_3) ;
        /*0050*/              @!P0 BRA `(.L_x_1) ;
.L_x_3:
        /*0060*/                   EXIT ;
.L_x_4:
        /*0070*/                   BRA `(.L_x_4);
    """
    facts = parse("REG:40", sass)
    assert (facts.instructions, facts.loop_instructions, facts.loop_bytes) == (8, 5, 24)
    assert facts.copied_bytes == 16 and facts.loaded_bytes == 40
