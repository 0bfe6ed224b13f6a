"""Ranks that must run the same thing say so to each other before the first exchange.

Compiling calls no collective, so ranks may compile when they like. What has to be equal is announced then, and compared
when a group exchanges tokens under it for the first time: there every rank has arrived anyway.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from dscompile import compat


class AgreementError(RuntimeError):
    """Ranks of one group run different things; the message names the fact and each rank's value."""


_ANNOUNCED: dict[str, dict[str, str]] = {}
_AGREED: set[tuple[str, str]] = set()


def announce(facts: Mapping[str, Any]) -> str:
    """Note facts (name -> what prints alike on ranks that agree); returns their key, 16 hex digits."""
    plain = {name: str(value) for name, value in facts.items()}
    key = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
    _ANNOUNCED[key] = plain
    return key


def ensure(group: str, key: str) -> None:
    """On the first call for a group and key: compare what the ranks announced.

    Raises:
        AgreementError: see there; on every rank.
    """
    if (group, key) in _AGREED:
        return
    found: Any = compat.process_group(group)
    if dist.get_backend(found) == "fake":
        return
    everyone: list[Any] = [None] * dist.get_world_size(found)
    dist.all_gather_object(everyone, _ANNOUNCED.get(key, {}), group=found)
    if message := difference(everyone):
        raise AgreementError(message)
    _AGREED.add((group, key))


def difference(everyone: list[dict[str, str]]) -> str:
    """What the ranks' facts differ in, one line a fact; "" if in nothing."""
    lines = []
    for name in sorted({name for facts in everyone for name in facts}):
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            values.setdefault(facts.get(name, "(nothing)"), []).append(rank)
        if len(values) > 1:
            said = "; ".join(f"{_ranks(ranks)}: {value}" for value, ranks in values.items())
            lines.append(f"ranks differ in {name}: {said}")
    return "\n".join(lines) + ("; allowed: the same on every rank" if lines else "")


def forget(group: str) -> None:
    """Compare again: for a group that is about to be destroyed, whose name another may get."""
    _AGREED.difference_update({pair for pair in _AGREED if pair[0] == group})


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
