"""What expert parallelism would cost on a cluster: the published numbers, an oracle for the ranks, bad input."""

import json
import math
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dscompile.cli import app
from dscompile.distributed.cluster import CLUSTERS, ClusterError, read_cluster
from dscompile.distributed.placement import PlacementError
from dscompile.distributed.plan import ExpertNumbers, distinct_ranks, exchange_plan, exchange_plans

V41 = ExpertNumbers(384, 6, 5120, 2304, 40)
RACK = CLUSTERS["gb300-nvl72"]


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_distinct_ranks_are_those_of_counting(ranks: int, held: int, data: st.DataObject) -> None:
    experts = ranks * held
    k = data.draw(st.integers(1, min(4, experts)))
    choices = list(combinations(range(experts), k))
    mean = sum(len({expert // held for expert in choice}) for choice in choices) / len(choices)
    assert distinct_ranks(experts, k, ranks) == pytest.approx(mean)


@pytest.mark.parametrize(("ranks", "met"), [(2, 1.97), (4, 3.30), (8, 4.43), (16, 5.17), (32, 5.58), (64, 5.81)])
def test_published_numbers_of_the_release(ranks: int, met: float) -> None:
    assert distinct_ranks(384, 6, ranks) == pytest.approx(met, abs=0.006)


def test_a_step_on_the_rack() -> None:
    """64 ranks, 256 tokens each: 5.72 remote ranks, 5,280 bytes there and 10,240 back for each, 1.0 ms in 40 layers."""
    plan = exchange_plan(V41, RACK, 64, 256)
    assert plan.remote_ranks == pytest.approx(5.72, abs=0.005)
    assert plan.dispatch_bytes == pytest.approx(256 * plan.remote_ranks * 5280)
    assert plan.combine_bytes == pytest.approx(256 * plan.remote_ranks * 10240)
    assert 40 * (plan.dispatch_us + plan.combine_us) == pytest.approx(1000, rel=0.02)
    assert plan.weight_bytes == pytest.approx(288.8e9 / 64, rel=0.01) and plan.fits and plan.limit == "link"
    # Arithmetic takes longer than reading six experts; with a small batch it is the other way round.
    assert plan.experts_us == pytest.approx(6 * 256 * 6 * 5120 * 2304 / 5e15 * 1e6)
    small = exchange_plan(V41, RACK, 64, 16)
    assert small.experts_us == pytest.approx(6 * 3 * 5120 * 2304 * 17 / 32 / 8e12 * 1e6, rel=0.01)
    assert plan.layer_us == plan.dispatch_us + plan.experts_us + plan.combine_us
    few = exchange_plan(V41, RACK, 2, 1)
    assert few.experts_us < exchange_plan(V41, RACK, 2, 256).experts_us  # not every expert is touched


def test_ranks_that_do_not_divide_get_redundant_slots() -> None:
    (plan,) = exchange_plans(V41, RACK, [72], [8])
    assert plan.slots == 6 and plan.weight_bytes > 384 / 72 * 3 * 5120 * 2304 * 17 / 32 * 40
    with pytest.raises(PlacementError, match="384 experts and 0 redundant slots on 72 ranks"):
        exchange_plan(V41, RACK, 72, 8)
    with pytest.raises(PlacementError, match="batch: 0, allowed: >= 1"):
        exchange_plan(V41, RACK, 8, 0)


def test_over_the_network(tmp_path: Path) -> None:
    """Two boxes of eight: 8 of a rank's 15 peers are behind its adapter."""
    path = tmp_path / "two.yaml"
    path.write_text("target: sm_90a\ngpus: 16\nnetwork_bytes_per_s: 50.0e+9\n")
    cluster = read_cluster(str(path))
    assert (cluster.name, cluster.domain) == ("two", 8)
    rate, over = cluster.rate(16)
    assert over == "network" and rate == pytest.approx(50e9 * 15 / 8)
    assert cluster.rate(8) == (0.45e12, "link")
    path.write_text("target: sm_90a\ngpus: 16\nlink_bytes_per_s: 10.0e+9\nnetwork_bytes_per_s: 50.0e+9\n")
    rate, over = read_cluster(str(path)).rate(16)
    assert over == "link" and rate == pytest.approx(10e9 * 15 / 7)
    with pytest.raises(ClusterError, match="32 ranks on two, allowed: 1 to 16"):
        cluster.rate(32)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a", "holds list, allowed: a mapping"), ("target: sm_90a", "gpus is missing"),
        ("target: sm_9\ngpus: 8", "target is 'sm_9', allowed: cpu, sm_90a"),
        ("target: sm_90a\ngpus: 0", "gpus is 0, allowed: a whole number >= 1"),
        ("target: sm_90a\ngpus: 12", "gpus is 12, allowed: a multiple of domain 8"),
        ("target: sm_90a\ngpus: 8\nlinks: 3", "unknown field 'links'"),
        ("target: sm_90a\ngpus: 8\nlink_bytes_per_s: fast", "link_bytes_per_s is 'fast', allowed: a number > 0"),
        ("target: [", "is no YAML"), ("target: cpu\ngpus: 1\ndomain: 1", "link_bytes_per_s is unknown"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=words):
        read_cluster(str(path))


def test_unknown_network_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("target: sm_90a\ngpus: 16")
    with pytest.raises(ClusterError, match="network_bytes_per_s is unknown, needed for 16 ranks, over 8"):
        read_cluster(str(path)).rate(16)
    with pytest.raises(ClusterError, match="'dgx' is no file; allowed: gb300-nvl72, hgx-h200"):
        read_cluster("dgx")


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "240", "TERM": "dumb"})
    assert result.exit_code == status, result.output
    return result.output


def test_the_command() -> None:
    said = run("--batch", "256", "--ranks", "64,72")
    assert "modelled" in said and "GB300" in said and "5.81" in said and "dispatch bytes = B x" in said
    found = json.loads(run("--cluster", "hgx-h200", "--json"))
    assert found["status"] == "modelled" and {p["ranks"] for p in found["plans"]} == {2, 4, 8}
    assert all(
        math.isclose(p["layer_us"], p["dispatch_us"] + p["experts_us"] + p["combine_us"]) for p in found["plans"]
    )
    assert {p["fits"] for p in found["plans"] if p["ranks"] == 2} == {False}  # 144 GB of experts in 141 GB
    assert "allowed: 1 to 8" in run("--cluster", "hgx-h200", "--ranks", "16", status=2)
    assert "is no file; allowed" in run("--cluster", "dgx", status=2)
