"""Grouped output projection and Engram."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dscompile.ops  # noqa: F401

ops = torch.ops.dsv4
Loader = Callable[[str], dict[str, Tensor]]


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_grouped_output_matches_float64(groups: int) -> None:
    o, wo_a, wo_b = torch.randn(2, 3, groups, 12), torch.randn(groups, 5, 12), torch.randn(16, groups * 5)
    low = torch.cat([o[:, :, g].double() @ wo_a[g].double().T for g in range(groups)], -1)
    torch.testing.assert_close(ops.grouped_output(o, wo_a, wo_b).double(), low @ wo_b.double().T, rtol=1e-5, atol=1e-4)
    half = ops.grouped_output(o.bfloat16(), wo_a.bfloat16(), wo_b.bfloat16())
    rounded = torch.cat([o[:, :, g].bfloat16() @ wo_a[g].bfloat16().T for g in range(groups)], -1)
    torch.testing.assert_close(half, rounded @ wo_b.bfloat16().T, rtol=2**-6, atol=2**-4)


def test_grouped_output_checks_its_arguments() -> None:
    o, wo_a, wo_b = torch.ones(2, 3, 4, 12), torch.ones(4, 5, 12), torch.ones(16, 20)
    with pytest.raises(ValueError, match=r"dsv4::grouped_output: shape of wo_a is \[3, 5, 12\]; allowed: \[4, 5, 12\]"):
        ops.grouped_output(o, wo_a[:3], wo_b)
    with pytest.raises(ValueError, match=r"shape of wo_b is \[16, 19\]; allowed: \[16, 20\]"):
        ops.grouped_output(o, wo_a, wo_b[:, :19])
    with pytest.raises(TypeError, match=r"dtype of wo_b is torch.bfloat16; allowed: torch.float32"):
        ops.grouped_output(o, wo_a, wo_b.bfloat16())


def test_released_engram(conformance: Loader) -> None:
    """Gather, projection and gate give the recorded streams; image tokens pass unchanged."""
    data = conformance("engram")
    rows = ops.engram_gather(data["table"], data["table_scale"], data["hash_masked"][:, :, 0], torch.float32)
    key, value = (rows @ data["wkv"].T).split([512, 128], -1)
    args = data["x"], key.unflatten(-1, (4, 128)), value, data["q_weight"], data["k_weight"]
    out = ops.engram_gate(*args, data["token_mask"], 1e-20)
    torch.testing.assert_close(out, data["y"], rtol=1e-5, atol=1e-5)
    image = ~data["token_mask"]
    assert image.any() and torch.equal(out[image], data["x"][image])
    poisoned = value.masked_fill(image.unsqueeze(-1), float("nan"))
    assert torch.equal(ops.engram_gate(*args[:2], poisoned, *args[3:], data["token_mask"], 1e-20), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_decodes_every_scale(dtype: torch.dtype) -> None:
    table = torch.randn(300, 64).clamp(-4, 4).to(torch.float8_e4m3fn)
    scales = torch.arange(600, dtype=torch.int64).view(300, 2).remainder(254).to(torch.uint8)
    rows = torch.randint(0, 300, (2, 5, 3))
    powers = 2.0 ** (scales.double() - 127)
    values = (table.double().unflatten(1, (2, 32)) * powers.unsqueeze(-1)).flatten(1)[rows].flatten(-2)
    out = ops.engram_gather(table, scales.view(torch.float8_e8m0fnu), rows, dtype)
    finite = values.abs() < torch.finfo(dtype).max
    assert out.shape == (2, 5, 192) and out.dtype == dtype
    torch.testing.assert_close(out[finite], values.to(dtype)[finite], rtol=0, atol=0)
    assert torch.equal(ops.engram_gather(table.view(torch.uint8), scales, rows, dtype), out)


def test_gather_of_a_plain_table() -> None:
    table, rows = torch.randn(7, 4), torch.tensor([[0, 6], [3, 3]])
    want = torch.cat((table[rows[:, 0]], table[rows[:, 1]]), -1)
    assert torch.equal(ops.engram_gather(table, None, rows, torch.float32), want)


def test_gate_matches_float64() -> None:
    x, key, value = torch.randn(3, 2, 16), torch.randn(3, 2, 16), torch.randn(3, 16)
    qw, kw = torch.randn(2, 16), torch.randn(2, 16)
    key[0, 0] = 0.0  # score 0: the sign is 0, so the gate is a half
    xd, kd = x.double(), key.double()
    score = (xd * qw.double() * kw.double() * kd).sum(-1) / 4
    score = score / ((xd**2).mean(-1) + 1e-12).sqrt() / ((kd**2).mean(-1) + 1e-12).sqrt()
    gate = 1 / (1 + torch.exp(-score.sign() * score.abs().clamp_min(1e-6).sqrt()))
    assert gate[0, 0] == 0.5
    want = xd + gate[..., None] * value.double()[:, None]
    torch.testing.assert_close(ops.engram_gate(x, key, value, qw, kw, None, 1e-12).double(), want, rtol=1e-5, atol=1e-5)


def test_engram_checks_its_arguments() -> None:
    table, scales, rows = (
        torch.zeros(5, 64, dtype=torch.uint8),
        torch.zeros(5, 2, dtype=torch.uint8),
        torch.zeros(1, 2).long(),
    )
    for bad in (5, -1):
        with pytest.raises(IndexError, match=rf"dsv4::engram_gather: rows is {bad}; allowed: 0 <= rows < 5"):
            ops.engram_gather(table, scales, rows + bad, torch.float32)
    with pytest.raises(
        ValueError, match=r"scales a row \(axis 1 of scales\) is 3; allowed: a divisor of row length 64"
    ):
        ops.engram_gather(table, torch.zeros(5, 3, dtype=torch.uint8), rows, torch.float32)
    with pytest.raises(TypeError, match=r"dtype of table is torch.uint8; allowed: .*torch.float8_e4m3fn"):
        ops.engram_gather(table, None, rows, torch.float32)
    x = torch.ones(2, 4, 8)
    with pytest.raises(ValueError, match=r"dsv4::engram_gate: shape of value is \[2, 7\]; allowed: \[2, 8\]"):
        ops.engram_gate(x, x, torch.ones(2, 7), x[0], x[0], None, 1e-6)
    with pytest.raises(TypeError, match=r"dtype of mask is torch.float32; allowed: torch.bool"):
        ops.engram_gate(x, x, x[:, 0], x[0], x[0], torch.ones(2), 1e-6)
