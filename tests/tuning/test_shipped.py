"""The tuning records that come with the package: for the kernels as they are, and found by calls that they are for."""

from collections import Counter

import pytest

from dscompile.lowering.template import triton_templates
from dscompile.targets import get_target
from dscompile.tuning.database import read_lines, shipped_paths
from dscompile.tuning.selection import source_hash

NAMES = [f"{model}_{target}" for model in ("v41", "v4-flash") for target in ("sm_103a", "sm_100a", "sm_90a")]


def test_every_model_and_target_is_there() -> None:
    assert sorted(path.stem for path in shipped_paths()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_records_are_for_the_kernels_as_they_are(name: str) -> None:
    """If this fails after a change to a kernel: `make tuning-records` tunes what changed."""
    templates = {t.name: t for found in triton_templates().values() for t in found}
    (path,) = (path for path in shipped_paths() if path.stem == name)
    records = list(read_lines(path))
    stale = {r.key.template for r in records if source_hash(templates[r.key.template]) != r.key.source_hash}
    assert not stale
    assert {record.kind for record in records} == {"modelled"}
    assert len({record.key for record in records}) == len(records)
    target = get_target(name.split("_", 1)[1])
    assert {record.key.target for record in records} == {target.name}
    # Attention and experts of six batch sizes.
    counts = Counter(record.key.template for record in records)
    attention = counts["sparse_attention_paged"] if name.startswith("v41") else counts["sparse_attention"]
    assert attention >= 6 and counts["moe"] >= 6 and counts["router"] >= 6
