"""Bytes that exchanges put on the wire, counted as they happen."""

from __future__ import annotations

from dataclasses import dataclass

from dscompile.distributed.routing import Spec


@dataclass
class Traffic:
    """Of one group, from this rank to others.

    exchanges: how many were started. rows: rows sent. dispatch_bytes: their values. label_bytes: the slots and weights
    beside them. combine_bytes: the sums that come back for them. Rows to this rank itself are not counted; in the
    padded form unused rows are, as they travel too.
    """

    exchanges: int = 0
    rows: int = 0
    dispatch_bytes: int = 0
    label_bytes: int = 0
    combine_bytes: int = 0


_COUNTED: dict[str, Traffic] = {}


def record(spec: Spec, rows: int, payload: int, labels: int, sums: int) -> None:
    """Count one exchange: rows that leave the rank, and the bytes of each."""
    counted = traffic(spec.group)
    counted.exchanges += 1
    counted.rows += rows
    counted.dispatch_bytes += rows * payload
    counted.label_bytes += rows * labels
    counted.combine_bytes += rows * sums


def traffic(group: str) -> Traffic:
    """What was counted for a group (by its name) since the process started or `reset`."""
    return _COUNTED.setdefault(group, Traffic())


def reset(group: str) -> None:
    """Start to count anew."""
    _COUNTED.pop(group, None)
