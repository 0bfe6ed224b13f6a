"""Running a Triton template beside the reference of its op."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from dscompile.ops import OPS
from dscompile.targets import Target
from dscompile.templates.triton.record import Config, TritonTemplate


def spec_of(template: TritonTemplate) -> Any:
    return OPS[template.op.removeprefix("dsv4::")]


def named(template: TritonTemplate, args: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments by name, as `applies` takes them."""
    names = [argument.name for argument in spec_of(template).op._schema.arguments]
    return dict(zip(names, args))


def space(template: TritonTemplate, args: tuple[Any, ...], target: Target) -> list[Config]:
    """The configs that may serve these arguments; the template must apply and have some."""
    refusal = template.applies(named(template, args))
    assert refusal is None, f"{template.name} refuses: {refusal}"
    found = template.space(spec_of(template).sizes(*args), target)
    assert found, f"{template.name} has no config for {spec_of(template).sizes(*args)} on {target.name}"
    return found


def runs(template: TritonTemplate, args: tuple[Any, ...], target: Target, most: int = 2) -> Iterator[Any]:
    """The template's result under its first configs, each on the arguments as they are."""
    for config in space(template, args, target)[:most]:
        yield template.fn(*args, config=config, target=target)


def reference(template: TritonTemplate, *args: Any) -> Any:
    return spec_of(template).reference(*args)


def parameters(template: TritonTemplate) -> list[str]:
    """Positional parameters of the template's function; must be those of the op."""
    return [p.name for p in inspect.signature(template.fn).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
