"""Release differences: versions, features, extras and the small functions that hide them."""

import importlib.util
import subprocess
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor.custom_graph_pass import CustomGraphPass

from dscompile import compat


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("2.13.0", (2, 13, 0)),
        ("2.13.0+cpu", (2, 13, 0)),
        ("2.14.0a0+git1a2b3c4", (2, 14, 0)),
        ("3.9", (3, 9, 0)),
        ("0.2.3.post2", (0, 2, 3)),
        ("5.24.0rc1", (5, 24, 0)),
        ("v4", (4, 0, 0)),
    ],
)
def test_parse_version(text: str, parsed: compat.Version):
    assert compat.parse_version(text) == parsed


@given(st.tuples(*[st.integers(0, 400)] * 3), st.sampled_from(["", "+cu130", "rc2", ".dev20261101", "a0+git12"]))
def test_parse_version_keeps_the_three_numbers(numbers: tuple[int, int, int], tail: str):
    assert compat.parse_version("{}.{}.{}".format(*numbers) + tail) == numbers


def test_parse_version_refuses_other_text():
    with pytest.raises(ValueError, match="not a version: 'unknown'"):
        compat.parse_version("unknown")


def test_versions_agree_with_the_packages():
    assert compat.version("torch") == compat.parse_version(torch.__version__)
    assert compat.version("no-such-distribution") is None
    assert compat.version_text("no-such-distribution") is None


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """`installed(torch="2.11.0")` makes compat believe that exactly these distributions are there."""

    def pretend(**versions: str) -> None:
        monkeypatch.setattr(compat, "version_text", lambda name: versions.get(name))

    return pretend


@pytest.mark.parametrize(
    ("torch_version", "expected"),
    [
        ("2.11.0", set()),
        (
            "2.13.0+cpu",
            {"graph_pass_list", "compile_region_name", "aot_compile", "default_backend", "e4m3_cast_saturates"}
            | {"scaled_mm_rowwise_cpu"},
        ),
        ("2.14.1", {name.removeprefix("torch.") for name in compat.FEATURES if name.startswith("torch.")}),
    ],
)
def test_torch_features_by_release(installed, torch_version: str, expected: set[str]):
    installed(torch=torch_version)
    assert {name for name in compat.FEATURES if compat.has(name)} == {f"torch.{name}" for name in expected}


def test_triton_features_by_release(installed):
    installed(triton="3.7.1")
    assert not compat.has("triton.gluon")
    installed(triton="3.8.0")
    assert compat.has("triton.gluon") and not compat.has("triton.gluon_two_cta")


def test_unknown_feature():
    with pytest.raises(ValueError, match="'torch.nothing'; known: torch.aot_compile"):
        compat.has("torch.nothing")


def test_features_hold_for_the_installed_torch():
    """What the table claims, asked of the real thing."""
    assert compat.has("torch.precompile") == hasattr(torch.compiler, "precompile")
    assert compat.has("torch.default_backend") == hasattr(torch.compiler, "set_default_backend")
    large = torch.tensor([1e4]).to(torch.float8_e4m3fn).float()
    assert compat.has("torch.e4m3_cast_saturates") == bool(large == 448)


def test_nothing_heavy_is_imported_with_the_module():
    program = "import sys, dscompile.compat as c; c.has('torch.precompile'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_missing_extra_is_one_line_that_names_it(monkeypatch: pytest.MonkeyPatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "cutlass" else real(name, *rest)
    )
    assert not compat.has_extra("gpu")
    with pytest.raises(compat.MissingExtraError) as caught:
        compat.require_extra("gpu")
    assert str(caught.value) == "this needs nvidia-cutlass-dsl, which is not installed: pip install 'dscompile[gpu]'"
    assert isinstance(caught.value, ImportError)


def test_present_extra_is_imported():
    assert compat.has_extra("transformers")
    module = compat.require_extra("transformers")
    assert isinstance(module, types.ModuleType) and module.__name__ == "transformers"


def test_unknown_extra():
    with pytest.raises(ValueError, match="'vision'; dscompile has: gpu, transformers"):
        compat.require_extra("vision")
    assert not compat.has_extra("vision")


def test_register_fake_replaces_an_earlier_one():
    with torch.library._scoped_library("dscompile_compat_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        compat.register_fake(library, "dscompile_compat_test::twice", lambda x: x.new_empty(1))
        compat.register_fake(library, "dscompile_compat_test::twice", lambda x: x.new_empty(x.shape[0], 2))
        out = torch.ops.dscompile_compat_test.twice(torch.empty(3, device="meta"))
        assert out.shape == (3, 2)


class Recorder(CustomGraphPass):
    def __init__(self, name: str | None, log: list[str | None]) -> None:
        self.name, self.log = name, log

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.log.append(self.name)

    def uuid(self) -> str | None:
        return self.name


def test_graph_passes_in_the_form_of_the_release(installed):
    log: list[str | None] = []
    first, second, unnamed = Recorder("first", log), Recorder("second", log), Recorder(None, log)
    for release in ("2.11.0", "2.13.0"):
        installed(torch=release)
        assert compat.graph_passes([]) is None
        assert compat.graph_passes([first]) is first
    assert compat.graph_passes([first, second]) == [first, second]

    installed(torch="2.11.0")
    both = compat.graph_passes([first, second])
    assert isinstance(both, CustomGraphPass)
    both(torch.fx.Graph())
    assert log == ["first", "second"]
    assert both.uuid() == ("first", "second")
    assert compat.graph_passes([second, first]).uuid() != both.uuid()
    assert compat.graph_passes([first, unnamed]).uuid() is None


def test_compile_fx_drops_the_region_name_where_it_is_unknown(installed, monkeypatch: pytest.MonkeyPatch):
    seen: list[dict] = []

    def fake_compile_fx(module, inputs, **keywords):
        seen.append(keywords)
        return module

    inductor = importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(inductor, "compile_fx", fake_compile_fx)
    module = torch.fx.symbolic_trace(torch.nn.Identity())
    installed(torch="2.11.0")
    compat.compile_fx(module, [], region_name="layer")
    installed(torch="2.13.0")
    compat.compile_fx(module, (), config_patches={"debug": True}, region_name="layer")
    compat.compile_fx(module, [])
    assert seen == [
        {"config_patches": None},
        {"config_patches": {"debug": True}, "compile_region_name": "layer"},
        {"config_patches": None},
    ]
