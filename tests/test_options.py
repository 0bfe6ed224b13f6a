"""Options: what is accepted, how a wrong value is refused, and the cache key."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from dscompile.options import OptionError, Options
from dscompile.targets import TARGETS
from tests.support.ranks import fake_group

# One other-than-default value per field, so that a new field cannot be forgotten. The mesh is made by `mesh`.
CHANGED: dict[str, object] = {
    "target": "sm_103a",
    "strict": True,
    "disable": ("some_pass",),
    "dump_dir": "dumps",
    "inductor": False,
    "verify": True,
    "share": False,
    "lower": False,
    "report": "report.json",
    "role": "prefill",
    "elide": "bounded",
    "elide_tail": 128,
    "mesh": None,
    "expert_parallel": "ep",
    "expert_exchange": "exact",
    "expert_capacity": 8,
    "expert_overflow": "exact",
    "expert_payload": "fp8",
    "expert_transport": "deep_ep",
    "expert_load": True,
    "micro_batches": 2,
    "inductor_options": {"max_autotune": True},
}
# What a field is only allowed with.
NEEDS: dict[str, dict[str, object]] = {
    "elide": {"role": "prefill"},
    "elide_tail": {"role": "prefill", "elide": "bounded"},
}
PADDED: dict[str, object] = {"expert_exchange": "padded", "expert_capacity": 4}
NOT_KEYED = {"dump_dir", "report"}


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[None]:
    """A mesh of ranks that do not exist, in `CHANGED` and wherever an option needs one."""
    with fake_group(1, 4):
        CHANGED["mesh"] = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        for name in CHANGED:
            if name.startswith("expert_") or name == "micro_batches":
                NEEDS[name] = {"mesh": CHANGED["mesh"]}
        NEEDS["expert_capacity"] |= PADDED
        NEEDS["expert_overflow"] |= PADDED
        yield


def test_changed_values_cover_every_field():
    assert set(CHANGED) == {field.name for field in dataclasses.fields(Options)}
    for name, value in CHANGED.items():
        assert getattr(Options(), name) != value


def test_defaults_and_nothing_given_are_the_same():
    assert Options.from_user(None, None) == Options.from_user({}, "default") == Options()


def test_options_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().strict = True  # type: ignore[misc]


def test_given_settings_are_copied():
    settings = {"max_autotune": True}
    options = Options.from_user({"inductor_options": settings})
    settings["max_autotune"] = False
    assert options.inductor_options == {"max_autotune": True}


@pytest.mark.parametrize("form", ["b", ["b"], ("b", "b"), {"b"}])
def test_disable_takes_a_name_or_names(form: object):
    assert Options.from_user({"disable": form}).disable == ("b",)


def test_paths_become_text(tmp_path):
    assert Options(report=tmp_path / "r.json").report == str(tmp_path / "r.json")


def test_inductor_names_may_have_dashes():
    assert Options(inductor_options={"max-autotune": True}).inductor_options == {"max_autotune": True}


@pytest.mark.parametrize(
    ("given_options", "words"),
    [
        ({"stirct": True}, ["'stirct'", "True", "did you mean 'strict'", "inductor_options"]),
        ({"qqqqqq": 3}, ["'qqqqqq'", "3", "allowed: target, strict"]),
        ({"strict": "yes"}, ["'strict'", "'yes'", "True or False"]),
        ({"strict": 1}, ["'strict'", "1 (int)", "True or False"]),
        ({"lower": None}, ["'lower'", "None"]),
        ({"target": "sm_103"}, ["'target'", "'sm_103'", *TARGETS, "did you mean 'sm_103a'"]),
        ({"target": ["cpu"]}, ["'target'", "['cpu']", *TARGETS]),
        ({"disable": 5}, ["'disable'", "5", "pass name"]),
        ({"disable": ["a", ""]}, ["'disable'", "''"]),
        ({"dump_dir": 7}, ["'dump_dir'", "7", "path"]),
        ({"report": ""}, ["'report'", "''", "path"]),
        ({"inductor_options": ["max_autotune"]}, ["'inductor_options'", "dict"]),
        ({"inductor_options": {"max_autotun": True}}, ["'max_autotun'", "True", "did you mean 'max_autotune'"]),
        ({"inductor": False, "inductor_options": {"debug": True}}, ["'inductor_options'", "'debug'", "'inductor'"]),
        ([("strict", True)], ["[('strict', True)]", "dict"]),
        ({"role": "prefil"}, ["'role'", "'prefil'", "prefill, decode, mixed", "did you mean 'prefill'"]),
        ({"role": "prefill", "elide": "all"}, ["'elide'", "'all'", "exact, bounded"]),
        ({"role": "decode", "elide": "exact"}, ["'elide'", "'exact'", "'decode'", "allowed: the role 'prefill'"]),
        ({"role": "prefill", "elide": "bounded", "elide_tail": 0}, ["'elide_tail'", "0 (int)", ">= 1"]),
        ({"role": "prefill", "elide": "exact", "elide_tail": 9}, ["'elide_tail'", "9", "elide='bounded'"]),
        ({"role": "prefill", "elide": "exact", "verify": True}, ["'verify'", "'exact'", "one of them"]),
    ],
)
def test_errors_name_the_option_the_value_and_what_is_allowed(given_options: object, words: list[str]):
    with pytest.raises(OptionError) as caught:
        Options.from_user(given_options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_modes():
    tuned = Options.from_user(None, "max-autotune-no-cudagraphs")
    assert tuned.inductor_options["max_autotune"] is True
    explicit = Options.from_user({"inductor_options": {"max_autotune": False}}, "max-autotune-no-cudagraphs")
    assert explicit.inductor_options["max_autotune"] is False
    assert explicit.inductor_options["coordinate_descent_tuning"] is True
    with pytest.raises(OptionError, match="unknown mode 'max-autotun'; did you mean 'max-autotune'; allowed: default"):
        Options.from_user(None, "max-autotun")


def test_unknown_pass_names():
    Options(disable=("a",)).check_passes(["a", "b"])
    with pytest.raises(OptionError, match="'share_rop'; did you mean 'share_rope'; allowed: share_rope, other"):
        Options(disable=("share_rop",)).check_passes(["share_rope", "other"])


@pytest.mark.parametrize("name", CHANGED)
def test_each_field_changes_the_key_unless_it_only_names_an_output(name: str):
    needed = NEEDS.get(name, {})
    changed = Options.from_user({**needed, name: CHANGED[name]})
    assert (changed.cache_key() == Options.from_user(needed).cache_key()) == (name in NOT_KEYED)


@given(st.permutations(sorted(CHANGED)), st.permutations(["a", "b", "c"]))
def test_key_does_not_depend_on_order(order: list[str], passes: list[str]):
    together = {"inductor": True, "verify": False, "micro_batches": 1, "expert_exchange": "padded"}
    values = {**CHANGED, **together, "disable": passes}
    settings = [("max_autotune", True), ("debug", False), ("cpp.threads", 2)]
    straight = Options.from_user({**values, "inductor_options": dict(settings)})
    shuffled = Options.from_user({**{n: values[n] for n in order}, "inductor_options": dict(reversed(settings))})
    assert straight.cache_key() == shuffled.cache_key()


def test_key_tells_values_of_different_type_apart():
    keys = {Options(inductor_options={"cpp.threads": value}).cache_key() for value in (1, True, 1.0, "1", [1], None)}
    assert len(keys) == 6


def test_key_is_the_same_in_another_process():
    given_options = {"strict": True, "disable": {"b", "a", "c"}, "target": "sm_90a", "report": "r.json"}
    program = f"from dscompile.options import Options; print(Options.from_user({given_options!r}).cache_key())"
    # Sets of text iterate in another order under another hash seed.
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "1"}
    )
    assert done.stdout.strip() == Options.from_user(given_options).cache_key()


def test_custom_passes_are_keyed_by_their_own_identity():
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Identified(CustomGraphPass):
        def __init__(self, identity: str) -> None:
            self.identity = identity

        def __call__(self, graph: torch.fx.Graph) -> None: ...

        def uuid(self) -> str:
            return self.identity

    def key(value: object) -> str:
        return Options(inductor_options={"post_grad_custom_pre_pass": value}).cache_key()

    assert key(Identified("a")) == key(Identified("a")) != key(Identified("b"))
    # Functions have no stable identity: equal only to themselves.
    assert key(print) == key(print) != key(repr)
