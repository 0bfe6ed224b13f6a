"""The row writer's arithmetic and layout on a CPU: every thread's bytes, put where the thread would put them."""

import pytest
import torch

from dscompile.formats import FORMATS
from dscompile.ops.store import norm_rope_store
from dscompile.targets import TARGETS
from dscompile.templates.cute.host import Host
from dscompile.templates.cute.record import UnsuitableError
from dscompile.templates.cute.rows import TEMPLATES, RowSpec, row, spec_of
from dscompile.templates.triton.record import config

(WRITER,) = TEMPLATES
ROWS = {"fp8_g32_ue8m0": 512, "fp4_g16_e4m3": 512, "fp4_g32_ue8m0": 128}
SM90 = TARGETS["sm_90a"]


def example(name: str, dim: int, count: int = 40, rotated: int = 64, normed: bool = True) -> dict:
    generator = torch.Generator().manual_seed(dim)
    angle = torch.rand(count, rotated // 2, generator=generator) * 6
    x = torch.randn(count, dim, generator=generator).bfloat16()
    x[0], x[1] = 0, x[1] * 1e4
    return {
        "pool": torch.zeros(64, FORMATS[name].row_bytes(dim), dtype=torch.uint8), "x": x,
        "weight": 1 + torch.rand(dim, generator=generator) if normed else None, "cos": angle.cos(), "sin": angle.sin(),
        "slots": torch.arange(count), "eps": 1e-6, "format": name,
    }  # fmt: skip


def simulated(args: dict, spec: RowSpec) -> torch.Tensor:
    """The rows that the kernel's threads would write; every byte must be written exactly once."""
    count, lanes, values = args["x"].shape[0], spec.lanes, spec.values
    words = list(args["x"].view(torch.int32).view(count, lanes, values // 2).unbind(-1))
    weight = None if args["weight"] is None else list(args["weight"].view(1, lanes, values).unbind(-1))
    turn = (torch.arange(lanes) - spec.first_rotated).clamp(min=0)
    angles = [
        list(args[n].view(count, -1, values // 2)[:, turn].unbind(-1)) if spec.rotated else [] for n in ("cos", "sin")
    ]
    turns = torch.arange(lanes) >= spec.first_rotated
    payload, scales = row(Host, spec, words, weight, tuple(angles), turns, args["eps"])
    payload = torch.stack(payload, -1).view(torch.uint8)
    stored = scales.contiguous().view(count, lanes, 1).view(torch.uint8)
    rows, written = (
        torch.zeros(count, spec.row_bytes, dtype=torch.uint8),
        torch.zeros(spec.row_bytes, dtype=torch.int32),
    )
    for lane in range(lanes):
        at, scale_at = spec.place(lane)
        rows[:, at.start : at.stop] = payload[:, lane]
        rows[:, scale_at.start : scale_at.stop] = stored[:, lane, : len(scale_at)]
        written[list(at) + list(scale_at)] += 1
    assert torch.equal(written, torch.ones_like(written))
    return rows


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("rotated", [64, 0])
def test_without_a_norm_rows_are_those_of_the_operation(name: str, rotated: int) -> None:
    args = example(name, ROWS[name], rotated=rotated, normed=False)
    spec = spec_of(args, config(1, 1), SM90)
    assert torch.equal(simulated(args, spec), norm_rope_store(**args))


@pytest.mark.parametrize("name", ROWS)
def test_with_a_norm_only_last_bits_differ(name: str) -> None:
    """Sums are added in another order: a bf16 may come out one unit off, and then a code."""
    args = example(name, ROWS[name])
    got, expected = simulated(args, spec_of(args, config(1, 1), SM90)), norm_rope_store(**args)
    assert (got != expected).float().mean() < 0.002
    a, b = (FORMATS[name].unpack(rows, ROWS[name]) for rows in (got, expected))
    assert (a - b).abs().max() <= 0.3 * b.abs().max()


@pytest.mark.parametrize(("dim", "name"), [(16, "fp8_g32_ue8m0"), (1024, "fp4_g16_e4m3"), (256, "fp8_g32_ue8m0")])
def test_other_widths(dim: int, name: str) -> None:
    if dim < FORMATS[name].group:
        with pytest.raises(UnsuitableError, match="groups of 32 values"):
            WRITER.requests(example(name, 32, rotated=0) | {"x": torch.zeros(2, 16).bfloat16()}, config(1, 1), SM90)
        return
    args = example(name, dim, normed=False)
    assert torch.equal(simulated(args, spec_of(args, config(1, 1), SM90)), norm_rope_store(**args))


def test_constants_of_the_release() -> None:
    window, compressed, index = (spec_of(example(n, d), config(1, 1), SM90) for n, d in ROWS.items())
    assert [s.lanes for s in (window, compressed, index)] == [32, 16, 4]
    assert [s.rows for s in (window, compressed, index)] == [1, 2, 8]
    assert [s.row_bytes for s in (window, compressed, index)] == [528, 288, 68]
    assert [s.rows_unit for s in (window, compressed, index)] == [16, 16, 4]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "fp8_g64_ue8m0_tail64"}, "no unquantised tail"),
        ({"format": "none"}, "allowed: a quantised one"),
        ({"x": torch.zeros(40, 512)}, "torch.bfloat16"),
        ({"x": torch.zeros(40, 480).bfloat16()}, "rows of 480 values"),
        ({"x": torch.zeros(40, 1024).bfloat16()[:, ::2]}, "strides of x"),
        ({"cos": torch.zeros(40, 20), "sin": torch.zeros(40, 20)}, "40 rotated values of 512"),
        ({"weight": torch.ones(512).bfloat16()}, "allowed: torch.float32"),
        ({"pool": torch.zeros(64, 530, dtype=torch.uint8)[:, :528]}, "strides of pool"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_it_cannot_serve_it_says(change: dict, reason: str) -> None:
    with pytest.raises(UnsuitableError, match=reason):
        WRITER.requests(example("fp8_g32_ue8m0", 512) | change, config(1, 1), SM90)
