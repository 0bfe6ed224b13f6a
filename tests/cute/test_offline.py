"""What stands between a template and the compiler, where there is no compiler or no GPU to compile for."""

import pytest

from dscompile import compat
from dscompile.targets import TARGETS
from dscompile.templates.cute import attention, experts, rows
from dscompile.templates.cute.record import STATUS, Request
from dscompile.templates.triton.record import config
from dscompile.tuning.cute_offline import compile_request
from dscompile.tuning.offline import OfflineCompileError

TEMPLATES = (*rows.TEMPLATES, *experts.TEMPLATES, *attention.TEMPLATES)


def unreachable() -> tuple:
    raise AssertionError("must not be asked for")


def test_a_cpu_is_no_target() -> None:
    with pytest.raises(OfflineCompileError, match="'cpu' is no GPU"):
        compile_request(Request("k", unreachable, config(1, 1), 32), TARGETS["cpu"])


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.EXTRAS, "gpu", ("no_such_module", "nvidia-cutlass-dsl"))
    with pytest.raises(compat.MissingExtraError) as caught:
        compile_request(Request("k", unreachable, config(1, 1), 32), TARGETS["sm_90a"])
    assert str(caught.value) == "this needs nvidia-cutlass-dsl, which is not installed: pip install 'dscompile[gpu]'"


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_every_template_says_what_is_known_about_it(template) -> None:
    assert template.status == STATUS == "compiled only"
    assert template.op.startswith("dsv4::") and template.name in template.op
