"""Arguments with values for calls known by their sizes: dtypes, strides, indices in range, rows that decode."""

import pytest
import torch

from dscompile.formats import FORMATS
from dscompile.models.deepseek_v41 import DeepseekV41Config
from dscompile.ops import OPS
from dscompile.targets import get_target
from dscompile.templates.triton.record import config
from dscompile.tuning import measure
from dscompile.tuning.build import Job
from dscompile.tuning.calls import Call, TensorSpec
from dscompile.tuning.inputs import make_inputs
from dscompile.tuning.measure import Measurer, WrongResultError, check, disagreement
from dscompile.workload import v41_calls


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    return v41_calls(DeepseekV41Config.miniature(hc_sinkhorn_iters=2), "sm_103a", "decode", batch=2, context=64)


def test_references_take_them(calls: list[Call]) -> None:
    """No index is out of range and no row decodes to NaN: results are finite."""
    assert len({call.op for call in calls}) > 10
    for call in calls:
        args, again = make_inputs(call), make_inputs(call)
        assert all(a.equal(b) for a, b in zip(args, again) if isinstance(a, torch.Tensor))
        for made, wanted in zip(args, call.args, strict=True):
            if isinstance(wanted, TensorSpec):
                assert TensorSpec.of(made) == wanted
        results = OPS[call.op].reference(*args)
        for result in [results] if isinstance(results, torch.Tensor) else results or ():
            assert not result.dtype.is_floating_point or result.isfinite().all(), call


def test_packed_rows_and_indices() -> None:
    rows = TensorSpec((2, 9000, 68), (9000 * 68, 68, 1), torch.uint8)
    picks = TensorSpec((2, 3, 7), (21, 7, 1), torch.int64)
    call = Call("gather_rows", (rows, TensorSpec((2, 21), (21, 1), torch.int64), "fp4_g32_ue8m0", 128, torch.bfloat16))
    made, indices, *_ = make_inputs(call)
    assert FORMATS["fp4_g32_ue8m0"].unpack(made, 128).std() == pytest.approx(1.0, abs=0.1)
    assert indices.unique(dim=-1).shape == indices.shape and 0 <= indices.min() and indices.max() < 9000
    assert picks.shape == (2, 3, 7)


def test_a_wrong_result_never_wins() -> None:
    call = Call("rms_norm", (TensorSpec((4, 64), (64, 1), torch.bfloat16), None, 1e-6, "fp32"))
    args = make_inputs(call)
    check("rms_norm", lambda a: OPS["rms_norm"].reference(*a), args)
    with pytest.raises(WrongResultError, match="rms_norm: value 0 differs"):
        check("rms_norm", lambda a: OPS["rms_norm"].reference(*a) * 1.1, args)


def test_what_an_op_writes_is_compared_and_the_arguments_stay(calls: list[Call]) -> None:
    call = next(c for c in calls if c.op == "store_rows")
    args = make_inputs(call)
    before = [a.clone() for a in args]
    check("store_rows", lambda a: OPS["store_rows"].reference(*a), args)
    with pytest.raises(WrongResultError, match="store_rows"):
        check("store_rows", lambda a: None, [args[0].fill_(3), *args[1:]])
    args[0].copy_(before[0])
    assert all(a.equal(b) for a, b in zip(args, before))


def test_disagreement() -> None:
    x = torch.randn(1000)
    assert disagreement(x, x) == 0 and disagreement(x, x * 1.001) < 1 < disagreement(x, x * 1.1)
    assert disagreement(x, x.double()) == disagreement(x, x[1:]) == float("inf")
    assert disagreement(torch.where(x > 2, torch.nan, x), x) == float("inf")
    rows = torch.zeros(10, 200, dtype=torch.uint8)
    moved = rows.clone()
    moved[0, 0] = 1
    assert (
        0 < disagreement(moved, rows) < 1 < disagreement(moved, rows[:, :100]) and disagreement(rows[:0], rows[:0]) == 0
    )


def test_copies_are_larger_than_the_cache_together() -> None:
    target = get_target("sm_90a")
    measurer = Measurer(target, torch.device("cpu"))
    l2 = int(target.l2_bytes.value or 0)
    small, large = torch.empty(l2 // 4, dtype=torch.uint8), torch.empty(3 * l2, dtype=torch.uint8)
    assert measurer.copies((small, 3, None)) == 8 and measurer.copies((large,)) == 2
    assert measurer.copies((torch.empty(1),)) == measurer.calls
    assert Measurer(target, torch.device("cpu"), most_bytes=l2).copies((large,)) == 1
    assert measure.driver_version() == "" or measure.driver_version()[0].isdigit()
    assert Job(Call("rms_norm", ()), "rms_norm", config()).template == "rms_norm"
