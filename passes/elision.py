"""What was left out of a prefill graph, as plain data for the report."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Elision:
    """Which layers of one graph run on the last tokens of each sequence only.

    mode: "exact" or "bounded", as asked for. tail: the most tokens per sequence that any of them runs on; None where
    nothing was left out, and `reason` says why. needed: tokens per sequence that an exact result takes. window: rows of
    the widest ring that decoding reads. layers: layer -> tokens of each sequence that its part of an exact result
    takes. partial: those of them that run on all tokens in part, to store rows of all. exact: whether logits and caches
    equal those of a run over all tokens.
    """

    mode: str
    tail: int | None = None
    needed: int | None = None
    window: int | None = None
    layers: dict[str, int] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    reason: str = ""
    exact: bool = True

    def lines(self) -> list[str]:
        """The record as text, a line each."""
        if self.tail is None:
            return [f"elision ({self.mode}): all layers run on all tokens: {self.reason}"]
        how = "exact" if self.exact else f"APPROXIMATE, exact from {self.needed} tokens on"
        head = f"elision ({self.mode}): {len(self.layers)} layers run on at most the last {self.tail} tokens, {how}"
        needs = ", ".join(f"{layer} {tokens}" for layer, tokens in self.layers.items())
        some = f"; of {', '.join(self.partial)} only a part" if self.partial else ""
        return [head, f"tokens needed for an exact result: {needs}{some}"]
