"""What the role "decode" made of one graph, as plain data for the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Obstacle:
    """Something that a CUDA graph cannot record.

    node: its name in the graph, "" for what is not in it; layer, source: as in a near miss.
    """

    layer: str
    node: str
    source: str
    reason: str

    def __str__(self) -> str:
        place = [self.layer or "outside layers", self.node] if self.node else []
        where = ", ".join([*place, *([self.source] if self.source else [])])
        return f"{where}: {self.reason}" if where else self.reason


@dataclass(frozen=True)
class Decoding:
    """How the steps of one decode graph run.

    variants: operation -> what runs it, and how often; empty where references run. exchange: how tokens travel to
    experts; "" where they do not. obstacles: why it cannot be captured, if it cannot. sizes: inputs of several sizes,
    for each of which it has to be captured.
    """

    variants: dict[str, str]
    exchange: str = ""
    obstacles: tuple[Obstacle, ...] = ()
    sizes: tuple[str, ...] = ()

    @property
    def captured(self) -> bool:
        """Whether one CUDA graph can record a whole step."""
        return not self.obstacles

    def lines(self) -> list[str]:
        """The record as text, a line each."""
        parts = [f"{name} by {what}" for name, what in self.variants.items()]
        head = "decode: " + ", ".join([*parts, f"exchange {self.exchange or 'none'}"])
        if self.captured:
            names = ", ".join(self.sizes[:4]) + ", ..." * (len(self.sizes) > 4)
            once = f", once for each size of {names}" if names else ""
            can = "decode: can be captured, one graph in which the host reads nothing and no size depends on values"
            return [head, can + once]
        return [head, *(f"decode: cannot be captured, {obstacle}" for obstacle in self.obstacles)]
