"""The target records and the detection of a device's target."""

import pytest
import torch

from dscompile.targets import TARGETS, Constant, UnsupportedTargetError, detect_target, get_target


def test_every_target_is_filed_under_its_name():
    assert list(TARGETS) == ["cpu", "sm_90a", "sm_100a", "sm_103a"]
    assert all(TARGETS[name].name == name for name in TARGETS)


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "cpu"])
def test_gpu_constants_are_there_and_say_where_they_come_from(name: str):
    for field, constant in TARGETS[name].constants().items():
        assert constant.value is not None, field
        assert constant.status in ("datasheet", "unconfirmed") and constant.source, field


def test_records_cannot_be_changed():
    with pytest.raises(TypeError):
        TARGETS["new"] = TARGETS["cpu"]  # type: ignore[index]
    with pytest.raises(TypeError):
        TARGETS["sm_90a"].flops_per_s["fp4"] = Constant(1, "unknown", "")  # type: ignore[index]
    assert "fp4" not in TARGETS["sm_90a"].flops_per_s
    assert hash(TARGETS["sm_90a"]) != hash(TARGETS["sm_100a"])


@pytest.mark.parametrize(
    ("name", "operand", "ridge_flop_per_byte"),
    [("sm_103a", "fp8", 625), ("sm_103a", "fp4", 1875), ("sm_90a", "fp8", 412.5)],
)
def test_ridge_points(name: str, operand: str, ridge_flop_per_byte: float):
    target = TARGETS[name]
    ridge = target.flops_per_s[operand].value / target.hbm_bytes_per_s.value
    assert ridge == pytest.approx(ridge_flop_per_byte, rel=1e-3)


def test_floor_is_the_slowest_of_memory_arithmetic_and_links():
    target = TARGETS["sm_103a"]
    assert target.floor_us(hbm_bytes=8e6) == pytest.approx(1.0)
    assert target.floor_us(hbm_bytes=8e6, flops=10e9, operand="fp8") == pytest.approx(2.0)
    assert target.floor_us(hbm_bytes=8e6, flops=10e9, operand="fp8", link_bytes=9e6) == pytest.approx(10.0)
    assert target.floor_us() == 0


def test_floor_is_unknown_where_a_constant_is():
    assert TARGETS["cpu"].floor_us(hbm_bytes=1) is None
    assert TARGETS["sm_90a"].floor_us(flops=1, operand="fp4") is None


def test_unknown_name():
    with pytest.raises(UnsupportedTargetError, match="'sm_80'; allowed: cpu, sm_90a, sm_100a, sm_103a"):
        get_target("sm_80")


def test_detect_cpu():
    assert detect_target("cpu") is TARGETS["cpu"]
    if not torch.cuda.is_available():
        assert detect_target() is TARGETS["cpu"]
        with pytest.raises(UnsupportedTargetError, match="no CUDA device.*options="):
            detect_target("cuda:0")


def test_detect_refuses_other_devices():
    with pytest.raises(UnsupportedTargetError, match="'meta'.*cpu, sm_90a"):
        detect_target("meta")


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a")])
def test_detect_by_compute_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert detect_target("cuda").name == name


def test_detect_names_a_gpu_without_a_target(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(UnsupportedTargetError, match=r"A100 \(compute capability 8\.0\).*sm_90a"):
        detect_target("cuda:0")


@pytest.mark.gpu
def test_detect_the_real_device():
    assert detect_target().device_type == "cuda"
