"""Symbolic costs: what an operation has to move and compute, whoever runs it.

Conventions, the same for every operation:

- `read_bytes` and `write_bytes` are the traffic of a perfectly fused kernel: each input byte that is needed is read
  once, each output byte is written once, no temporary leaves the chip. They are a floor, not an estimate.
- `flops` are 2 * multiply-accumulates of the matrix products. An operation without matrix product counts its
  elementwise arithmetic instead (each add, multiply, divide or transcendental is one).
- `link_bytes` are bytes that leave this device; only the experts have any, and only when spread over several ranks.

All four are sympy expressions over named sizes, so a report can print the formula as well as the number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import sympy

CostFunction = Callable[..., "Cost"]


@dataclass(frozen=True)
class Cost:
    """Bytes and floating-point operations of one call, as sympy expressions."""

    read_bytes: sympy.Expr
    write_bytes: sympy.Expr
    flops: sympy.Expr
    link_bytes: sympy.Expr = sympy.Integer(0)

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, sympy.sympify(getattr(self, field.name)))

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, count: int | sympy.Expr) -> Cost:
        return Cost(*(getattr(self, f.name) * count for f in fields(self)))

    __rmul__ = __mul__

    def subs(self, sizes: Mapping[str, Any]) -> Cost:
        """Replace sizes by name; names that do not occur are ignored."""
        values = {symbol(name): as_expr(value) for name, value in sizes.items()}
        return Cost(*(getattr(self, f.name).subs(values) for f in fields(self)))

    def numbers(self) -> dict[str, float]:
        """The four values as floats; ValueError names the sizes that are still symbols."""
        free = sorted({str(s) for f in fields(self) for s in getattr(self, f.name).free_symbols})
        if free:
            raise ValueError(f"cost is symbolic in {', '.join(free)}; give these sizes a value with subs()")
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}


def symbol(name: str) -> sympy.Symbol:
    """The symbol that stands for the size `name` in every cost."""
    return sympy.Symbol(name, positive=True, integer=True)


def as_expr(value: Any) -> sympy.Expr:
    """A sympy expression from an int, float, expression or symbolic torch size."""
    node = getattr(value, "node", None)
    return sympy.sympify(value if node is None else node.expr)


def costed(function: Callable[..., Cost]) -> CostFunction:
    """Let a cost function be called with any subset of its sizes.

    A size that is not given takes its default if the function has one (element widths do), else it stays a symbol.
    An unknown name raises TypeError that lists the known ones.
    """
    parameters = inspect.signature(function).parameters

    def cost(**sizes: Any) -> Cost:
        unknown = sorted(sizes.keys() - parameters.keys())
        if unknown:
            raise TypeError(f"{function.__module__}: unknown size {', '.join(unknown)}; known: {', '.join(parameters)}")
        values = {
            name: as_expr(sizes[name])
            if name in sizes
            else symbol(name)
            if parameter.default is inspect.Parameter.empty
            else as_expr(parameter.default)
            for name, parameter in parameters.items()
        }
        return function(**values)

    cost.__doc__ = function.__doc__
    return cost
