"""Which rank holds which experts: what is refused, tables, copies between placements."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dscompile.distributed.placement import Copy, Placement, PlacementError, copies


@st.composite
def placements(draw: st.DrawFn, ranks: int | None = None, experts: int | None = None) -> Placement:
    ranks = ranks or draw(st.integers(1, 5))
    experts = experts or draw(st.integers(1, 12))
    per_rank = draw(st.integers(-(-experts // ranks), -(-experts // ranks) + 3))
    extra = draw(st.lists(st.integers(0, experts - 1), min_size=ranks * per_rank - experts,
                          max_size=ranks * per_rank - experts))  # fmt: skip
    return Placement(tuple(draw(st.permutations([*range(experts), *extra]))), experts, ranks)


@given(placements())
def test_tables_and_text(placement: Placement) -> None:
    for expert in range(placement.experts):
        slots = [slot for slot, held in enumerate(placement.slots) if held == expert]
        assert placement.replicas[expert] == len(slots)
        assert placement.slots_of[expert].tolist() == slots + [-1] * (placement.slots_of.shape[1] - len(slots))
    assert [e for rank in range(placement.ranks) for e in placement.on_rank(rank)] == list(placement.slots)
    again = Placement.from_data(json.loads(json.dumps(placement.as_data())))
    assert again == placement and again.fingerprint == placement.fingerprint
    assert Placement.of_ranks([placement.on_rank(r) for r in range(placement.ranks)], placement.experts) == placement
    assert placement.redundant == len(placement.slots) - placement.experts


@given(placements(), st.data())
def test_loads(placement: Placement, data: st.DataObject) -> None:
    load = np.array(data.draw(st.lists(st.integers(0, 99), min_size=placement.experts, max_size=placement.experts)))
    loads = placement.rank_loads(load)
    assert loads.sum() == pytest.approx(load.sum())
    assert 1 / placement.ranks - 1e-9 <= placement.balance(load) <= 1 + 1e-9


@given(st.data())
def test_copies_make_one_placement_of_the_other(data: st.DataObject) -> None:
    ranks, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    old = data.draw(placements(ranks, experts))
    new = data.draw(placements(ranks, experts).filter(lambda p: len(p.slots) == len(old.slots)))
    held = [set(old.on_rank(rank)) for rank in range(ranks)]
    for copy in copies(old, new):
        assert copy.expert in held[copy.source] and copy.expert not in held[copy.slot // new.slots_per_rank]
        assert new.slots[copy.slot] == copy.expert
    arrived = [set(old.on_rank(rank)) for rank in range(ranks)]
    for copy in copies(old, new):
        arrived[copy.slot // new.slots_per_rank].add(copy.expert)
    assert all(set(new.on_rank(rank)) <= arrived[rank] for rank in range(ranks))
    assert copies(old, old) == []


def test_holders_take_turns() -> None:
    old, new = Placement((0, 1, 0, 2, 3, 3, 3, 3), 4, 4), Placement((3, 1, 0, 2, 0, 3, 0, 3), 4, 4)
    assert copies(old, new) == [Copy(0, 3, 2), Copy(4, 0, 0), Copy(6, 0, 1)]


def test_the_simple_placement() -> None:
    assert Placement.contiguous(6, 3).on_rank(1) == (2, 3)
    with pytest.raises(PlacementError, match="6 experts on 4 ranks, allowed without a placement: a number of ranks"):
        Placement.contiguous(6, 4)


@pytest.mark.parametrize(
    ("slots", "experts", "ranks", "words"),
    [
        ((0, 1, 2), 3, 2, "3 slots on 2 ranks, allowed: a multiple of the ranks"),
        ((), 1, 1, "0 slots on 1 ranks"),
        ((0, 4), 2, 2, "slots hold experts 4, allowed: 0 to 1"),
        ((0, -1), 1, 1, "slots hold experts -1, allowed: 0 to 0"),
        ((0, 0), 3, 2, "experts 1, 2 of 3 have no slot"),
        ((0,), 1, 0, "ranks: 0, allowed: >= 1"),
        ((0,), 0, 1, "experts: 0, allowed: >= 1"),
    ],
)
def test_what_cannot_be(slots: tuple[int, ...], experts: int, ranks: int, words: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(words)):
        Placement(slots, experts, ranks)


def test_other_bad_input() -> None:
    with pytest.raises(PlacementError, match="ranks with 1, 2 slots, allowed: the same number each"):
        Placement.of_ranks([[0], [1, 0]], 2)
    with pytest.raises(PlacementError, match="rank 3, allowed: 0 to 1"):
        Placement.contiguous(2, 2).on_rank(3)
    with pytest.raises(PlacementError, match="needs experts, ranks and slots; 'slots' is missing"):
        Placement.from_data({"experts": 1, "ranks": 1})
    with pytest.raises(PlacementError, match="slots 'ab', allowed: ints, a list of ints"):
        Placement.from_data({"experts": 1, "ranks": 1, "slots": "ab"})
    with pytest.raises(PlacementError, match=re.escape("load of shape [3], allowed: [2]")):
        Placement.contiguous(2, 2).rank_loads(np.ones(3))
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(PlacementError, match=f"load of expert 1 is {bad}, allowed: finite and >= 0"):
            Placement.contiguous(2, 2).rank_loads(np.array([1.0, bad]))
    with pytest.raises(PlacementError, match="4 experts in 4 slots on 2 ranks, allowed: the same numbers as before"):
        copies(Placement.contiguous(2, 2), Placement.contiguous(4, 2))
