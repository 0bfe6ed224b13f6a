"""The backend as a user meets it: entry point, options, unchanged graphs, reports, verification, dumps."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dscompile
from dscompile.backend import DscompileWarning
from dscompile.options import OptionError
from dscompile.verify import FLIPS, Tolerance, VerificationError, compare, rounds

EAGER = {"inductor": False}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return (weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


class Stack(nn.Module):
    """Norms between linear layers: something to recognise in every layer."""

    def __init__(self, layers: int = 2, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.weights = nn.ParameterList(torch.rand(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer, weight in zip(self.layers, self.weights, strict=True):
            x = layer(rms_norm(x, weight))
        return x


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(model: nn.Module, x: Tensor, **options: object) -> tuple[Tensor, dscompile.Report]:
    with dscompile.collect() as report, torch.no_grad():
        return torch.compile(model, backend="dsv4", options={**EAGER, **options})(x), report


def test_the_entry_point_needs_no_import() -> None:
    assert "dsv4" in torch._dynamo.list_backends(exclude_tags=())


def test_recognises_and_equals_eager() -> None:
    model, x = Stack().eval(), torch.randn(3, 12)
    out, report = compiled(model, x)
    torch.testing.assert_close(out, model(x))
    assert report.counts() == {"norm": 2}
    assert "x: float32 3x12" in report.graphs[0].inputs
    assert {match.family for match in report.graphs[0].matches} == {"norm"}
    assert all("test_backend.py" in match.source for match in report.graphs[0].matches)


def test_nothing_to_recognise_is_said_and_left_alone() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()).eval(), torch.randn(2, 4)
    out, report = compiled(model, x, strict=True)
    torch.testing.assert_close(out, model(x))
    assert report.counts() == {} and "nothing matched" in str(report)


def test_gradients_are_left_to_inductor_with_a_warning() -> None:
    model, x = Stack(), torch.randn(3, 12)
    with pytest.warns(DscompileWarning, match="require gradients"), dscompile.collect() as report:
        out = torch.compile(model, backend="dsv4", options=EAGER)(x)
    torch.testing.assert_close(out, model(x))
    out.sum().backward()
    assert model.layers[0].weight.grad is not None
    assert report.counts() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strct": True}, "did you mean 'strict'"),
        ({"disable": ("nom",)}, "unknown pass 'nom'.*'norm'"),
        ({"verify": "yes"}, "verify"),
        ({"target": "sm_90"}, "sm_90"),
    ],
)
def test_bad_options_name_what_is_allowed(options: dict[str, object], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        compiled(Stack().eval(), torch.randn(3, 12), **options)
    assert isinstance(caught.value, OptionError) or "OptionError" in str(caught.value)


def test_passes_can_be_switched_off() -> None:
    assert compiled(Stack().eval(), torch.randn(3, 12), disable=("norm",))[1].counts() == {}


def test_a_report_can_be_written_in_three_forms(tmp_path: Path) -> None:
    _, report = compiled(Stack().eval(), torch.randn(3, 12), report=str(tmp_path / "live.json"))
    assert json.loads((tmp_path / "live.json").read_text())["graphs"][-1]["counts"] == {"norm": 2}
    for name in ("r.json", "r.html", "r.txt"):
        report.write(tmp_path / "deep" / name)
    assert "<table>" in (tmp_path / "deep" / "r.html").read_text()
    assert "rms_norm.fp32" in (tmp_path / "deep" / "r.txt").read_text()


def test_every_pass_can_be_dumped_with_its_difference(tmp_path: Path) -> None:
    compiled(Stack().eval(), torch.randn(3, 12), dump_dir=str(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert (folder / "00_captured.txt").is_file()
    (difference,) = folder.glob("*_norm.diff")
    assert "+" in difference.read_text() and "dsv4.rms_norm" in difference.read_text()


def test_verification_passes_and_catches_a_wrong_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Stack().eval(), torch.randn(3, 12)
    out, report = compiled(model, x, verify=True)
    assert any("verified" in note for note in report.graphs[0].notes)

    from dscompile.passes.dialects.common import norm

    def wrong(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.ops.dsv4.rms_norm(x, weight, eps + 0.5, "fp32")

    object.__setattr__(norm.RMS_NORM_FP32, "replace", wrong)
    monkeypatch.setattr(norm, "RMS_NORM_FP32", norm.RMS_NORM_FP32)
    try:
        torch._dynamo.reset()
        with pytest.raises(VerificationError, match=r"output 0 differs.*first wrong after: pass norm"):
            compiled(model, x, verify=True)
    finally:
        object.__setattr__(norm.RMS_NORM_FP32, "replace", norm._replace_fp32)


def test_verification_allows_a_code_next_to_a_boundary_and_no_more() -> None:
    """Only where the graph rounds to few bits; a wrong row or a wrong output is still found."""
    tolerance = Tolerance(flips=FLIPS)
    rows = torch.randint(0, 256, (40, 66), dtype=torch.uint8)
    flipped, wrong = rows.clone(), rows.clone()
    flipped[3, 5] ^= 1
    wrong[3] = ~wrong[3]
    assert compare([rows], [flipped], tolerance) is None
    assert compare([rows], [flipped]) is not None and compare([rows], [wrong], tolerance) is not None
    out = torch.randn(20, 50)
    moved, off = out.clone(), out * 1.01
    moved[7] += 0.05 * out[7]
    assert compare([out], [moved], tolerance) is None
    assert compare([out], [moved]) is not None and compare([out], [off], tolerance) is not None
    assert compare([torch.tensor([1, 2])], [torch.tensor([1, 3])], tolerance) is not None


class Quantised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x / 0.25).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * 0.25


def test_only_graphs_that_round_to_few_bits_are_given_that_allowance() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(3, 32)
    assert rounds(make_fx(Quantised(), tracing_mode="fake")(x))
    assert not rounds(make_fx(lambda x: x.relu() * 2, tracing_mode="fake")(x))


def test_a_warning_comes_before_the_recompile_limit() -> None:
    def grow(x: Tensor) -> Tensor:
        return x * len(x.shape) + x.shape[0]

    with (
        torch._dynamo.config.patch(recompile_limit=4, automatic_dynamic_shapes=False),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        function = torch.compile(grow, backend="dsv4", options=EAGER, dynamic=False)
        for size in range(2, 6):
            function(torch.ones(size))
    messages = [str(w.message) for w in caught if issubclass(w.category, DscompileWarning)]
    assert any("recompile_limit" in message and "StaticV4Cache" in message for message in messages)


def test_explain_reports_without_inductor() -> None:
    report = dscompile.explain(Stack().eval(), torch.randn(3, 12))
    assert report.counts() == {"norm": 2}
    assert report.graphs[0].compile_seconds == 0.0


def test_every_layer_says_what_runs_it_and_what_that_costs_at_least() -> None:
    """Layers that share a region have a line each; a packed row that is written in place is a cost as well."""
    model, x = nn.ModuleList(Region() for _ in range(3)).eval(), torch.randn(3, 12)
    dscompile.mark_regions(model, Region)

    def forward(x: Tensor) -> Tensor:
        for layer in model:
            x = layer(x)
        return x

    with torch.no_grad(), dscompile.collect() as report:
        torch.compile(forward, backend="dsv4", options=EAGER)(x)
    graph = report.graphs[0]
    assert graph.regions == 1 and graph.kernel_counts() == {("dsv4::rms_norm", "rms_norm"): 3}
    for lowering in graph.lowerings:
        assert lowering.read_bytes == str(4 * (3 * 12 + 12)) and lowering.write_bytes == str(4 * 3 * 12)
        assert lowering.reason == "fits"
    assert "dsv4::rms_norm │ rms_norm │ 3     │ 0.001008" in str(report)
    assert "bytes written" in report.to_html() and '"read_bytes": "192"' in report.to_json()


def test_costs_in_symbolic_sizes_are_formulas() -> None:
    model, x = Stack(1).eval(), torch.randn(6, 12)
    torch._dynamo.mark_dynamic(x, 0)
    _, report = compiled(model, x)
    (lowering,) = report.graphs[0].lowerings
    assert lowering.layer == "layers.0" or lowering.layer == ""
    assert "s" in lowering.read_bytes and "symbolic" in str(report)


def test_writes_in_place_have_a_cost() -> None:
    class Writer(nn.Module):
        def forward(self, pool: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
            torch.ops.dsv4.store_rows(pool, rows, slots)
            return pool.sum()

    with torch.no_grad(), dscompile.collect() as report:
        arguments = torch.zeros(8, 4), torch.ones(2, 4), torch.tensor([1, 3])
        torch.compile(Writer(), backend="dsv4", options=EAGER)(*arguments)
    (lowering,) = report.graphs[0].lowerings
    assert (lowering.operation, lowering.read_bytes, lowering.write_bytes) == ("dsv4::store_rows", "48", "32")


class Region(nn.Module):
    """A layer that writes to nothing: as a region, torch would remember it from the first trace."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(width, width), nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(rms_norm(x, self.weight))


@pytest.mark.parametrize("extra", [0.0, 0.5])
def test_through_inductor_regions_are_the_rewritten_ones(extra: float) -> None:
    """With a wrong replacement the result is wrong: what runs is what was rewritten, not what torch traced first."""
    from dscompile.passes.dialects.common import norm

    def replacement(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.ops.dsv4.rms_norm(x, weight, eps + extra, "fp32")

    torch.manual_seed(0)
    model, x = nn.ModuleList(Region() for _ in range(3)).eval(), torch.randn(3, 12)
    dscompile.mark_regions(model, Region)

    def forward(x: Tensor) -> Tensor:
        for layer in model:
            x = layer(x)
        return x

    object.__setattr__(norm.RMS_NORM_FP32, "replace", replacement)
    try:
        with torch.no_grad(), dscompile.collect() as report:
            out, expected = torch.compile(forward, backend="dsv4")(x), forward(x)
    finally:
        object.__setattr__(norm.RMS_NORM_FP32, "replace", norm._replace_fp32)
    assert torch.allclose(out, expected, atol=1e-5) is (extra == 0.0)
    assert report.counts() == {"norm": 3} and report.graphs[0].regions == 1
    assert report.graphs[0].compile_seconds > 0
