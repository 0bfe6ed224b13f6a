"""The registry of the `dsv4` vocabulary: one record per operation, registered with torch's dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dscompile.ops.cost import Cost, CostFunction

NAMESPACE = "dsv4"
FAMILIES = (
    "mhc", "norm", "rope", "quant", "store", "compressor", "indexer", "attention", "router", "experts", "output",
    "engram", "linear",
)  # fmt: skip

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

OPS: dict[str, OpSpec] = {}


@dataclass(frozen=True)
class OpSpec:
    """All that is known of one operation.

    name: without namespace. schema: as given to torch. reference: the meaning, in plain eager PyTorch; also the kernel
    registered for every device. fake: shapes and dtypes only. cost: `cost(**sizes)`, see `dscompile.ops.cost`.
    family: one of `FAMILIES`. sizes: from the operation's arguments (real, fake or meta tensors) to the sizes that
    `cost` takes.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    cost: CostFunction
    family: str
    sizes: Callable[..., dict[str, Any]]

    @property
    def op(self) -> Any:
        """The registered overload, `torch.ops.dsv4.<name>.default`."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    def cost_of(self, *args: Any) -> Cost:
        """The cost of one call with these arguments (in schema order, every argument given)."""
        return self.cost(**self.sizes(*args))


def define(
    schema: str,
    *,
    family: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    cost: CostFunction,
    sizes: Callable[..., dict[str, Any]],
) -> OpSpec:
    """Register an operation and return its record, which is also put into `OPS`."""
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; allowed: {', '.join(FAMILIES)}")
    name = schema.split("(", 1)[0]
    if name in OPS:
        raise ValueError(f"dsv4::{name} is defined twice")
    kernel = _dense_outputs(reference)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    OPS[name] = OpSpec(name, schema, kernel, fake, cost, family, sizes)
    return OPS[name]


def _dense_outputs(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Outputs are always contiguous, so that fake functions need not follow the strides of the inputs."""

    @functools.wraps(reference)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        out = reference(*args, **kwargs)
        if isinstance(out, Tensor):
            return out.contiguous()
        return None if out is None else tuple(t.contiguous() for t in out)

    return kernel
