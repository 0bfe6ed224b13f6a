"""What runs while rows travel, as plain data for the report."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One step of the schedule: work of one half of the batch in one layer, or the start or end of an exchange.

    half: 0 or 1; 0 where the batch is not split. kind: "work", "start" or "wait". what: the operations, or "dispatch"
    or "combine". pending: exchanges that are under way while this runs, such as "dispatch layers.0".
    """

    half: int
    kind: str
    layer: str
    what: str
    pending: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cover:
    """One exchange: its start and wait as positions of rows, and the rows of work in between."""

    exchange: str
    half: int
    start: int
    wait: int
    work: tuple[int, ...]


@dataclass
class Schedule:
    """One graph in the order in which it runs, as far as exchanges are concerned.

    halves: into how many parts the batch is split.
    """

    halves: int = 1
    rows: list[Row] = field(default_factory=list)
    covers: list[Cover] = field(default_factory=list)

    @property
    def bare(self) -> list[Cover]:
        """Exchanges that nothing runs beside."""
        return [cover for cover in self.covers if not cover.work]

    def summary(self) -> str:
        """One line."""
        halves = "" if self.halves == 1 else f", {self.halves} halves of the batch"
        return f"{len(self.covers)} exchanges{halves}, {len(self.bare)} with nothing that runs meanwhile"
