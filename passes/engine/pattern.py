"""Patterns: mathematics to find, written as plain PyTorch, and what to put in its place.

A pattern is traced once per combination of activation dtype and number of batch dimensions ("variant"), on fake
tensors whose named sizes are distinct large primes, and brought to canonical form exactly like a user graph. See
``docs/patterns.md`` for how to write one.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from .normalise import normalise
from .optable import COMMON, LAYOUT
from .records import Match, Reject
from .tracing import trace

#: Sizes for named dims: primes far from any literal that a graph contains.
PRIMES = (503, 541, 587, 631, 673, 719, 761, 809, 853, 907, 953, 997, 1049, 1097, 1153, 1201, 1249, 1297, 1361, 1409)
SIZE_FLOOR = 400  #: an unnamed int at least this large in a pattern's shape was computed from named sizes
DTYPES = {
    "f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e8m0": torch.float8_e8m0fnu,
}  # fmt: skip
#: Narrow ones first: with the casts around it, the float32 form is the inner part of the others.
ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
_SPEC = re.compile(r"^\s*(\w+)\s*\[(.*)\]\s*$")
NAME = re.compile(r"[A-Za-z_]\w*")


class PatternError(ValueError):
    """A pattern is written wrongly; the message names the pattern and what to change."""


@dataclass(frozen=True)
class Structural:
    """A replacement that edits the graph itself: ``fn(gm, match) -> Reject | None``.

    It must redirect the users of ``match.outputs``; matched nodes that become unused are removed afterwards.
    """

    fn: Callable[[GraphModule, Match], Reject | None]


@dataclass(frozen=True)
class Pattern:
    """Mathematics to recognise and its replacement; fields are explained in ``docs/patterns.md``.

    name, family, dialect: unique name; what is computed; whose spelling it is.
    search, replace: functions of the inputs and scalars by name; replace may also take ``dims`` (name -> size).
    inputs: name -> ``"dtype[dims]"``, e.g. ``"act[*B n D]"``, ``"f32[(2+n)*n n*D]"``, ``"i64[*B]"``.
    scalars: name -> sentinel number that occurs nowhere else in the search function.
    sizes: name -> size to trace with (small ones, or ones that the code loops over, are matched literally below 5).
    dtypes: class -> dtypes to trace with; ``act`` (f32, bf16, f16) and ``w`` (as act, or f32) are there already.
    ranks: how many dims ``*B`` may stand for.
    guard: ``Match -> Reject | None``. key: operator of every match; where it stands, a near miss is looked for.
    share: least share of the operators that a near miss has.
    required: outputs that must be present; others may be absent in a graph that does not use them.
    shared: further operators that may keep users outside a match (they are then computed twice).
    needs: operators of other libraries (``"namespace::name"``) without which the pattern cannot occur or be traced.
    """

    name: str
    family: str
    dialect: str
    search: Callable[..., Any]
    replace: Callable[..., Any] | Structural
    inputs: Mapping[str, str]
    scalars: Mapping[str, float | int] = field(default_factory=dict)
    guard: Callable[[Match], Reject | None] | None = None
    tolerance: float = 1e-5
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtypes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ranks: tuple[int, ...] = (1, 2, 3)
    key: Any = None
    share: float = 0.6
    required: tuple[int, ...] = (0,)
    shared: frozenset[Any] = frozenset()
    needs: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def available(self) -> bool:
        """Whether all operators that it needs are registered by now."""
        return all(hasattr(getattr(torch.ops, ns), op) for ns, op in (name.split("::") for name in self.needs))

    def variants(self) -> Iterator[tuple[dict[str, torch.dtype], int]]:
        """All (dtype class -> dtype, batch rank) combinations, without tracing anything."""
        classes = {m[1] for s in self.inputs.values() if (m := _SPEC.match(s))} - DTYPES.keys()
        table = {"act": ACTIVATIONS, "w": ("act", torch.float32), **self.dtypes}
        for name in classes:
            if name not in table:
                known = sorted(DTYPES.keys() | table.keys())
                raise PatternError(f"pattern {self.name}: unknown dtype class {name!r}; known: {known}")
        order = sorted(classes | ({"act"} if "w" in classes else set()), key=lambda c: (c != "act", c))
        starred = any(t.startswith("*") for s in self.inputs.values() for t in re.split(r"[\s,\[\]]+", s))
        seen = set()
        for combo in itertools.product(*(table[c] for c in order)):
            chosen: dict[str, torch.dtype] = {}
            for name, dtype in zip(order, combo):
                chosen[name] = chosen[dtype] if isinstance(dtype, str) else dtype
            if (key := tuple(chosen.items())) in seen:
                continue
            seen.add(key)
            for rank in self.ranks if starred else (0,):
                yield chosen, rank

    def variant(self, dtypes: Mapping[str, torch.dtype], rank: int) -> Variant:
        """The traced and normalised pattern for one combination (cached)."""
        return _variant(self, tuple(sorted(dtypes.items())), rank)


@dataclass(eq=False)
class Variant:
    """A pattern traced for one dtype combination and batch rank."""

    pattern: Pattern
    dtypes: dict[str, torch.dtype]
    rank: int
    gm: GraphModule
    inputs: dict[Node, str]
    outputs: tuple[Node, ...]
    sizes: dict[str, int]
    names: dict[int, str]
    unnamed: set[int]
    core: tuple[Node, ...]

    @property
    def graph(self) -> Graph:
        return self.gm.graph

    @functools.cached_property
    def key(self) -> Any:
        """The operator whose presence hints at this pattern; None if it has only everyday operators."""
        if self.pattern.key is not None:
            return self.pattern.key
        rare = [n.target for n in self.core if n.target not in COMMON]
        return min(rare, key=rare.count) if rare else None

    def is_size(self, value: int) -> bool:
        """Whether an int of the pattern stands for a size (then it binds) or for itself."""
        return value in self.names or value in self.unnamed

    def evaluate(self, value: int, dims: Mapping[str, Any]) -> Any:
        """A size of the pattern under bound names, None if it involves an unbound one."""
        code = self.names.get(value)
        if code is None or any(n not in dims for n in NAME.findall(code)):
            return None
        return eval(code, {"__builtins__": {}}, dict(dims))  # noqa: S307  (text made by this module)


def _dims(spec: str, rank: int) -> tuple[str, list[str]]:
    found = _SPEC.match(spec)
    if not found:
        raise PatternError(f"input spec {spec!r}: expected 'dtype[dim dim ..]'")
    tokens: list[str] = []
    for token in found[2].replace(",", " ").split():
        tokens += [f"{token[1:]}{i}" for i in range(rank)] if token.startswith("*") else [token]
    return found[1], tokens


@functools.cache
def _variant(pattern: Pattern, dtypes: tuple, rank: int) -> Variant:
    chosen = dict(dtypes)
    sizes, names, shapes = _assign(pattern, rank)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    scalars = dict(pattern.scalars)
    with mode, torch.no_grad():
        args = {name: torch.empty(shape, dtype=DTYPES.get(cls) or chosen[cls]) for name, (cls, shape) in shapes.items()}
        try:
            gm = trace(pattern.search, args, scalars)
        except Exception as error:
            raise PatternError(f"pattern {pattern.name}: search failed on {_shown(args)}: {error}") from error
    normalise(gm, is_pattern=True)
    inputs = dict(zip((n for n in gm.graph.nodes if n.op == "placeholder"), args))
    outputs = gm.graph.output_node().args[0]
    outputs = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
    for i, out in enumerate(outputs):
        if not isinstance(out, Node) or out in inputs:
            raise PatternError(f"pattern {pattern.name}: output {i} is not computed by the search function")
    _check_scalars(pattern, gm)
    if pattern.key is not None and not gm.graph.find_nodes(op="call_function", target=pattern.key):
        raise PatternError(f"pattern {pattern.name}: its key {pattern.key} does not occur in its canonical form")
    core = tuple(n for n in gm.graph.nodes if n.op == "call_function" and n.target not in LAYOUT)
    unnamed = _name_derived(gm, sizes, names)
    return Variant(pattern, chosen, rank, gm, inputs, outputs, sizes, names, unnamed, core or outputs)


def _assign(pattern: Pattern, rank: int) -> tuple[dict[str, int], dict[int, str], dict[str, tuple[str, list[int]]]]:
    """Sizes for all names, the names of sizes, and each input's dtype class and shape."""
    sizes: dict[str, int] = dict(pattern.sizes)
    sizes |= {k: v for k, v in pattern.scalars.items() if isinstance(v, int) and not isinstance(v, bool)}
    free = iter(p for p in PRIMES if p not in sizes.values())
    parsed = {name: _dims(spec, rank) for name, spec in pattern.inputs.items()}
    for _, tokens in parsed.values():
        for name in NAME.findall(" ".join(tokens)):
            if name not in sizes:
                sizes[name] = next(free)
    names = {v: k for k, v in sizes.items() if v >= 5}
    shapes: dict[str, tuple[str, list[int]]] = {}
    for name, (cls, tokens) in parsed.items():
        shape = [int(eval(t, {"__builtins__": {}}, dict(sizes))) for t in tokens]  # noqa: S307  (author's own text)
        for size, token in zip(shape, tokens):
            if size >= 5 and not token.isdigit():
                names.setdefault(size, token)
        shapes[name] = (cls, shape)
    return sizes, names, shapes


def _check_scalars(pattern: Pattern, gm: GraphModule) -> None:
    found: set[Any] = set()
    for node in gm.graph.nodes:
        torch.fx.node.map_aggregate((node.args, node.kwargs), lambda a: found.add(a) if type(a) in (int, float) else a)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            found.update(value.shape)
    for name, sentinel in pattern.scalars.items():
        if sentinel not in found and -sentinel not in found:
            raise PatternError(
                f"pattern {pattern.name}: scalar {name}={sentinel!r} does not appear in the traced search function; "
                "it must be used as it is (not folded into another constant)"
            )


def _name_derived(gm: GraphModule, sizes: dict[str, int], names: dict[int, str]) -> set[int]:
    """Write sizes that the search function computes as expressions in the named ones; the rest is returned."""
    big = {k: v for k, v in sizes.items() if v >= SIZE_FLOOR}
    unnamed: set[int] = set()

    def visit(value: Any, in_shape: bool) -> Any:
        if type(value) is int and value >= (5 if in_shape else SIZE_FLOOR) and value not in names:
            if (text := _express(value, big)) is not None:
                names[value] = text
            elif in_shape and value >= SIZE_FLOOR:
                unnamed.add(value)
        return value

    for node in gm.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            for size in value.shape:
                visit(size, True)
    for node in gm.graph.nodes:
        torch.fx.node.map_aggregate((node.args, node.kwargs), lambda a: visit(a, False))
    return unnamed


def _express(value: int, sizes: dict[str, int]) -> str | None:
    """``a*b*k``, ``a+b``, ``a-b``, ``a+c`` or ``a//k`` for small k, c; None if nothing fits."""
    factors, rest = [], value
    for name, size in sizes.items():
        while rest % size == 0:
            factors.append(name)
            rest //= size
    if factors and rest <= 64:
        return "*".join(factors + ([str(rest)] if rest > 1 else []))
    for a, x in sizes.items():
        if 0 < abs(value - x) <= 4:
            return f"{a}+{value - x}" if value > x else f"{a}-{x - value}"
        if (k := next((k for k in (2, 4, 8) if value == x // k), None)) is not None:
            return f"{a}//{k}"
    for (a, x), (b, y) in itertools.product(sizes.items(), repeat=2):
        if value in (x + y, x - y):
            return f"{a}+{b}" if value == x + y else f"{a}-{b}"
    return None


def _shown(args: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{k} {str(v.dtype).removeprefix('torch.')}{list(v.shape)}" for k, v in args.items())
