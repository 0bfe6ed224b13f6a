"""What a cache consists of, as data: its pools, their row formats, and what a page of each holds.

Two kinds of pages. A *state page* is what a request has once, whatever its length: rings of its last tokens. A *token
page* holds the rows of `page_tokens` tokens. A page is one number for all pools of its kind, so that a request has one
state page and one list of token pages.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from dscompile.formats import FORMATS
from dscompile.formats.record import PLAIN_DTYPES

Kind = Literal["ring", "rows", "open"]
INT64 = "int64"  # a pool of token ids: the one row that is no number format


@dataclass(frozen=True)
class PoolSpec:
    """One tensor of a cache.

    Attributes:
        part: what it holds, such as "window".
        layer: whose rows they are.
        kind: "ring" = the last `width` tokens of a request, position p at row p % rows of its state page;
            "open" = the same, of which only the tokens of a group that is not complete count (`ratio` tokens a group);
            "rows" = one row per `ratio` tokens, in token pages.
        format: a name of `dscompile.formats.FORMATS` with rows one after the other, or "int64".
        dim: values of a row.
        rows: rows of a page.
        ratio: tokens per row ("rows") or per group ("open"); 1 for a ring.
        width: "ring": how many tokens are read; `rows` above it keep what a rollback may need again.
        blank: what a page is filled with before it is used.
    """

    part: str
    layer: int
    kind: Kind
    format: str
    dim: int
    rows: int
    ratio: int = 1
    width: int = 0
    blank: int = 0

    def __post_init__(self) -> None:
        if self.format != INT64 and FORMATS[self.format].page.order != "rows":
            raise ValueError(f"{self.name}: format {self.format!r}, allowed: formats whose rows follow one another")
        if self.rows < max(self.width, 1):
            raise ValueError(f"{self.name}: {self.rows} rows a page, allowed: >= {max(self.width, 1)}")

    @property
    def name(self) -> str:
        """Part and layer, unique in a cache."""
        return f"{self.part}.{self.layer}"

    @property
    def in_state(self) -> bool:
        """Whether a request has it once, in its state page."""
        return self.kind != "rows"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return 8 * self.dim if self.format == INT64 else FORMATS[self.format].row_bytes(self.dim)

    @property
    def dtype(self) -> torch.dtype:
        """Of the pool: bytes for packed rows, else the values' own."""
        if self.format == INT64:
            return torch.int64
        return PLAIN_DTYPES.get(FORMATS[self.format].payload, torch.uint8)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in this pool."""
        return self.rows * self.row_bytes

    def held(self, length: int) -> range:
        """Which rows of a request of `length` tokens are ever read again, by group ("rows") or by position."""
        if self.kind == "rows":
            return range(length // self.ratio)
        count = length % self.ratio if self.kind == "open" else min(self.width, length)
        return range(length - count, length)


@dataclass(frozen=True)
class RequestBytes:
    """What a request of `length` tokens costs, by part; `pages` counts whole pages, the rest rows that are read."""

    length: int
    parts: dict[str, int]
    growing: int
    window: int
    pages: int

    @property
    def total(self) -> int:
        """Bytes of all rows that are read: what a hand-over sends."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size}" for name, size in self.parts.items())
        return f"{self.length} tokens: {self.total} bytes ({parts}), {self.pages} in whole pages"


@dataclass(frozen=True)
class CacheLayout:
    """All pools of a cache.

    Attributes:
        pools: in the order of a hand-over.
        page_tokens: tokens of a token page; a multiple of every ratio.
        model: fingerprint of the model whose rows these are.
        layers: of the model.
        revision: a name for its weights, part of `model`.
    """

    pools: tuple[PoolSpec, ...]
    page_tokens: int
    model: str
    layers: int
    revision: str = ""

    def __post_init__(self) -> None:
        for spec in self.pools:
            if spec.kind == "rows" and spec.rows * spec.ratio != self.page_tokens:
                raise ValueError(f"{spec.name}: {spec.rows} rows of {spec.ratio} tokens, allowed: {self.page_tokens}")
        names = [spec.name for spec in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools {names}, allowed: no name twice")

    @property
    def state_page_bytes(self) -> int:
        """Bytes of a state page."""
        return sum(spec.page_bytes for spec in self.pools if spec.in_state)

    @property
    def token_page_bytes(self) -> int:
        """Bytes of a token page."""
        return sum(spec.page_bytes for spec in self.pools if not spec.in_state)

    @property
    def window(self) -> int:
        """Tokens that a ring of the attention window reads."""
        return max((spec.width for spec in self.pools if spec.part == "window"), default=0)

    @property
    def fingerprint(self) -> str:
        """Of everything that bytes depend on, page sizes left out: two caches with the same one hold equal rows."""
        return fingerprint([(s.part, s.layer, s.kind, s.format, s.dim, s.ratio, s.width) for s in self.pools])

    def pages_for(self, tokens: int) -> int:
        """Token pages of a request of `tokens` tokens. TypeError for what is no int."""
        try:
            return -(-operator.index(tokens) // self.page_tokens)
        except TypeError:
            raise TypeError(f"tokens: {tokens!r}, allowed: an int") from None

    def bytes_for(self, length: int) -> RequestBytes:
        """What a request of `length` tokens costs."""
        parts: dict[str, int] = {}
        for spec in self.pools:
            parts[spec.part] = parts.get(spec.part, 0) + len(spec.held(length)) * spec.row_bytes
        return RequestBytes(
            length=length,
            parts=parts,
            growing=sum(len(s.held(length)) * s.row_bytes for s in self.pools if not s.in_state),
            window=parts.get("window", 0),
            pages=self.state_page_bytes + self.pages_for(length) * self.token_page_bytes,
        )

    def report(self, lengths: Iterable[int] = (1 << 10, 8 << 10, 128 << 10, 1 << 20)) -> str:
        """A table of `bytes_for` of several lengths."""
        rows = [self.bytes_for(length) for length in lengths]
        head = f"{'tokens':>9}{'growing B':>13}{'window B':>11}{'other B':>9}{'total B':>13}{'in pages B':>13}"
        lines = [
            f"{r.length:>9}{r.growing:>13}{r.window:>11}{r.total - r.growing - r.window:>9}{r.total:>13}{r.pages:>13}"
            for r in rows
        ]
        return "\n".join([head, *lines])

    def as_data(self) -> list[dict[str, object]]:
        """The pools for JSON."""
        return [asdict(spec) for spec in self.pools]


def fingerprint(value: object) -> str:
    """Of anything that JSON can write: 16 hexadecimal digits, the same in every process."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
