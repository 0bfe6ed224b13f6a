"""What prefill and decode would do on a cluster: the design's numbers from the configuration, oracles, bad input."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dscompile.distributed import costs, rack
from dscompile.distributed.cluster import CLUSTERS, ClusterError, read_cluster
from dscompile.distributed.costs import RoleError
from dscompile.distributed.roles import MEMORY_SHARE, Instance, decode_instance, instances, prefill_instance
from dscompile.distributed.roles import request_bytes as handed_over
from dscompile.distributed.steps import Step, Workload, decode_step, prefill_step, replayed, tail, times
from dscompile.kv.deepseek_v41 import cache_layout
from dscompile.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM

V41 = DeepseekV41Config.released()
RACK, BOX = CLUSTERS["gb300-nvl72"], CLUSTERS["hgx-h200"]
K = 1024


def flops(step: Step, *parts: str) -> float:
    return sum(line.flops for line in step.lines if line.part in parts)


def read(step: Step, *parts: str) -> float:
    return sum(line.hbm_bytes for line in step.lines if line.part in parts)


# The design's numbers (model_v41 7), computed from the configuration


def test_parameters_of_the_release() -> None:
    assert costs.total_parameters(V41) == pytest.approx(551.9e9, abs=0.05e9)
    assert costs.active_parameters(V41) == pytest.approx(16.13e9, abs=0.005e9)
    assert costs.active_parameters(V41, all_layers=False) == pytest.approx(7.90e9, abs=0.005e9)
    assert costs.expert_bytes(V41, 384) == pytest.approx(288.8e9, abs=0.05e9)
    assert costs.dense_bytes(V41) == pytest.approx(8.5e9 + 1.32e9, abs=0.05e9)  # there without the embedding


@pytest.mark.parametrize(
    ("length", "all_", "index", "cache", "prefill"),
    [
        (8, 35.9, 0.4, 11.9, 17.4), (32, 36.7, 1.2, 18.3, 17.5), (128, 38.7, 3.2, 35.0, 18.1),
        (1024, 57.5, 22.0, 191, 23.8),
    ],
)  # fmt: skip
def test_cost_of_a_token(length: int, all_: float, index: float, cache: float, prefill: float) -> None:
    """GF of a decoded token, of it for scoring, MB of cache read, GF of a prompt's token, for `length` K tokens."""
    step = decode_step(V41, 64, 1, length * K)
    assert step.flops / 1e9 == pytest.approx(all_, abs=0.051)
    assert flops(step, "index scoring") / 1e9 == pytest.approx(index, abs=0.051)
    # A ring's row is written too, which the design counts apart.
    written = V41.num_hidden_layers * 528
    assert (read(step, "sparse attention", "index scoring") - written) / 1e6 == pytest.approx(cache, rel=0.005)
    # The design leaves the tail out, and has every token of a prompt meet 640 keys; the first thousand meet fewer.
    prompt = costs.Span(8 * K, 1, 0, length * K)
    lines = [line for i in range(20) for line in costs.layer_lines(V41, i, prompt, 4, 96)]
    lines += costs.row_lines(V41, 20, prompt)
    before = sum(line.flops for line in lines) / (8 * K)
    assert before / 1e9 == pytest.approx(prefill, abs=0.1)
    whole = prefill_step(V41, Workload(input=length * K), 4)
    tails = 128 / (length * K) * decode_step(V41, 4, 1, length * K).flops / 2  # half of the layers
    assert whole.flops / whole.tokens - before == pytest.approx(tails, rel=0.15)


def test_a_step_reads_what_the_design_says() -> None:
    """64 ranks with every expert touched: 13.0 GB in 1.63 ms; four ranks 80.7 GB in 10.1 ms."""
    for ranks, size, took in ((64, 13.0, 1.63), (4, 80.7, 10.1)):
        step = decode_step(V41, ranks, 4096, 8 * K)
        weights = step.hbm_bytes - read(step, "sparse attention", "index scoring", "streams")
        assert weights / 1e9 == pytest.approx(size, rel=0.005)
        assert weights / RACK.target.hbm_bytes_per_s.value * 1e3 == pytest.approx(took, rel=0.01)  # type: ignore[operator]
    took_64 = times(decode_step(V41, 64, 256, 8 * K), RACK, 64)
    assert took_64.exchange_us == pytest.approx(1000, rel=0.02)
    assert took_64.peak_us == pytest.approx(1800, rel=0.2)  # there all of it at the FP8 peak


# Oracles


@given(st.integers(1, 60), st.integers(1, 3), st.integers(0, 50), st.integers(1, 50))
def test_mean_rows_is_the_mean(most: int, ratio: int, first: int, count: int) -> None:
    rows = [min(most, (p + 1) / ratio) for p in range(first, first + count)]
    assert costs.mean_rows(most, ratio, first, first + count) == pytest.approx(sum(rows) / count)


def test_parameters_are_those_of_the_module() -> None:
    """Matrices that meet activations, Engram's tables apart; what has one dimension is not counted."""
    config = DeepseekV41Config.miniature(engram_layer_ids=(1,))
    with torch.device("meta"):
        model = DeepseekV41ForCausalLM(config)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    apart = ("engrams.1.embed", "q_weight", "k_weight")
    counted = sum(
        tensor.numel()
        for name, tensor in tensors.items()
        if tensor.dim() > 1 and tensor.is_floating_point() and not any(word in name for word in apart)
    )
    assert costs.total_parameters(config) == counted


@pytest.mark.parametrize("length", [1, 8191, 8192, 1024 * K])
def test_hand_over_of_the_release(length: int) -> None:
    rows = 890 * length if length % 2 == 0 else 890 * (length - 1) + 356  # an open group has no row yet
    assert handed_over(V41, length) == rows + 40 * 528 * min(length, 128) + 12288 * (length % 2) + 8 * min(length, 3)


def test_balance_is_the_best_of_all_counts() -> None:
    work = Workload()
    found = list(instances(V41, RACK, work, [2, 4], [8, 16]))
    pairs = rack.balances(V41, RACK, work, found)
    assert len(pairs) == 4 and pairs == sorted(pairs, key=lambda each: -each.requests_per_s)
    for each in pairs:
        p, d = each.prefill, each.decode
        best = max(
            min(n * p.ranks * p.tokens_per_s / 8192, m * d.ranks * d.tokens_per_s / 1023)
            for n in range(1, 37) for m in range(1, 10) if n * p.ranks + m * d.ranks <= 72
        )  # fmt: skip
        assert each.requests_per_s == pytest.approx(best)
        assert each.prefill_count * p.ranks + each.decode_count * d.ranks + each.idle_gpus == 72
        assert max(each.prefill_busy, each.decode_busy) == pytest.approx(1)
        assert each.output_per_s == pytest.approx(best * 1024) and each.total_per_s == pytest.approx(best * 9216)
        assert each.handover_bytes == handed_over(V41, 8192) == 9_994_264
        assert each.out_share == pytest.approx(best * each.handover_bytes / (each.prefill_count * p.ranks) / 0.9e12)


# Properties of instances


def test_fewer_tokens_behind_the_source() -> None:
    """Window, 2414 tokens and all; a prompt that is shorter than the tail runs everywhere."""
    assert [tail(V41, elide) for elide in ("bounded", "exact", "none")] == [128, 128 + 18 * 127, None]
    works = [Workload(input=8 * K, elide=elide) for elide in ("bounded", "exact", "none")]
    bounded, exact, full = (prefill_step(V41, work, 4) for work in works)
    assert bounded.flops < exact.flops < full.flops and bounded.dispatch_bytes < exact.dispatch_bytes
    head = 2 * 129280 * 5120
    assert full.flops / 8192 > 2 * (costs.active_parameters(V41) - head / 2)
    short = [prefill_step(V41, replace(work, input=100), 4).flops for work in works]
    assert short[0] == pytest.approx(short[1]) == pytest.approx(short[2])


def test_hits_are_not_computed_but_replayed() -> None:
    cold, warm = Workload(input=128 * K), Workload(input=128 * K, hit=0.9)
    assert (warm.new, replayed(V41, warm), replayed(V41, cold)) == (13108, 128, 0)
    assert replayed(V41, replace(warm, elide="exact")) == 40 * 127
    assert replayed(V41, Workload(input=100, hit=0.5)) == 50  # no more than there is
    step = prefill_step(V41, warm, 4)
    assert step.tokens == pytest.approx(8192 * 13108 / 13236)
    # The new tokens come last, so that each scores more rows than the mean one of a cold prompt.
    a, b = (flops(prefill_step(V41, work, 4), "index scoring") for work in (warm, cold))
    assert a / b > 1.8


@pytest.mark.parametrize("cluster", [RACK, BOX])
def test_times_add_up(cluster: rack.Cluster) -> None:
    for each in instances(V41, cluster, Workload(), [4, 8], [8]):
        took = each.times
        assert took.overlapped_us <= took.serial_us and took.peak_us <= took.arithmetic_us + took.hbm_us
        assert each.step_us == took.overlapped_us and each.serial_tokens_per_s <= each.tokens_per_s
        assert each.tokens_per_s == pytest.approx(each.step.tokens / each.step_us * 1e6)
        assert each.step.hbm_bytes / cluster.target.hbm_bytes_per_s.value * 1e6 <= took.arithmetic_us + took.hbm_us  # type: ignore[operator]
        last = instances(V41, cluster, Workload(overlap=False), [4], [8])
        assert all(one.step_us == one.times.serial_us for one in last)


def test_what_binds() -> None:
    assert prefill_instance(V41, RACK, Workload(), 4).limit == "arithmetic"
    assert decode_instance(V41, RACK, Workload(batch=8), 8).limit == "HBM"
    slow = replace(RACK, link_bytes_per_s=replace(RACK.link_bytes_per_s, value=1e10))
    assert prefill_instance(V41, slow, Workload(), 4).limit == "link"
    assert prefill_instance(V41, slow, Workload(overlap=False), 4).limit == "link"


def test_memory() -> None:
    """154 GB of weights on two ranks fit into a GB300, not into an H200."""
    work = Workload()
    good, bad = prefill_instance(V41, RACK, work, 2), prefill_instance(V41, BOX, work, 2)
    assert good.weight_bytes == pytest.approx(288.8e9 / 2 + 9.85e9, rel=0.001) and good.problem is None
    assert (bad.capacity, bad.problem) == (0, "weights do not fit")
    decode = decode_instance(V41, RACK, work, 64)
    pages = cache_layout(V41).bytes_for(9216).pages
    assert decode.capacity == int((288e9 * MEMORY_SHARE - decode.weight_bytes) // pages) == 22225
    long = decode_instance(V41, BOX, Workload(input=1000 * K, batch=200), 8)
    assert long.capacity < 200 and long.problem == "200 requests do not fit"


@pytest.mark.parametrize("per_user", [20.0, 100.0, 300.0])
def test_the_largest_batch_that_is_fast_enough(per_user: float) -> None:
    def at(batch: int | None) -> Instance:
        return decode_instance(V41, RACK, Workload(batch=batch, per_user=None if batch else per_user), 64)

    found = at(None)
    assert found.per_user is not None and found.per_user >= per_user and found.problem is None
    more = at(found.batch + 1)
    assert found.batch == found.capacity or (more.per_user is not None and more.per_user < per_user)
    assert decode_instance(V41, RACK, Workload(batch=None, per_user=5000), 64).problem == "too slow for one request"


def test_instances_do_not_straddle_boxes(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("target: sm_90a\ngpus: 16\nnetwork_bytes_per_s: 50.0e+9\n")
    two, work = read_cluster(str(path)), Workload()
    found = list(instances(V41, two, work, [4], [8]))
    (pair,) = rack.balances(V41, two, work, found)
    assert (pair.prefill_count, pair.decode_count, pair.over) == (2, 1, "network")
    assert pair.in_share == pytest.approx(pair.requests_per_s * 9_994_264 / 8 / 50e9)
    assert rack._packs(two, [5, 5, 3, 3]) and not rack._packs(two, [6, 5, 4]) and not rack._packs(two, [16, 1])
    with pytest.raises(ClusterError, match="32 ranks on two"):
        decode_instance(V41, two, work, 32)
    assert not list(rack.implied(two, work, found, [pair]))


def test_published_figures_as_shares() -> None:
    """64.4K tokens of 17.6 GF are 23% of the FP8 peak (22% in the design, without the tail)."""
    work = Workload()
    found = list(instances(V41, RACK, work, [2, 4, 8], [8, 64]))
    pairs = rack.balances(V41, RACK, work, found)
    two, four, output, both = rack.implied(RACK, work, found, pairs)
    assert two.fp8 == pytest.approx(64.4e3 * found[0].step.flops / 8192 / 5e15) == pytest.approx(0.226, abs=0.001)
    assert (two.figure.ranks, four.figure.ranks) == (2, 4)
    assert two.of_model == pytest.approx(64.4e3 / found[0].tokens_per_s)
    assert output.tokens_per_s == 954e3 / 64 and output.fp8 == pytest.approx(954e3 / 64 * 35.94e9 / 5e15, rel=0.001)
    assert both.of_model == pytest.approx(954e3 / pairs[0].total_per_s) and both.tokens_per_s == 13250
    assert both.prefill_gpus == pytest.approx(954e3 / 9216 * 8192 / 64.4e3)
    for each in (two, four, output, both):
        assert 0 < each.link < each.of_model < 1 and each.fp8 < each.arithmetic < each.of_model


def test_the_documented_numbers(repo_root: Path) -> None:
    text, work = (repo_root / "docs" / "distributed.md").read_text(), Workload()
    found = list(instances(V41, RACK, work, [2, 4, 8], [8, 16, 32, 64]))
    for each in found:
        row = (
            f"| {each.role} DEP{each.ranks} | {each.step.flops / each.step.tokens / 1e9:.1f} | {each.limit} | "
            f"{each.tokens_per_s:,.0f} | {each.serial_tokens_per_s:,.0f} | {each.weight_bytes / 1e9:.1f} |"
        )
        assert row in text
    for figure in rack.implied(RACK, work, found, rack.balances(V41, RACK, work, found)):
        shares = (f"{100 * share:.1f}%" for share in (figure.fp8, figure.hbm, figure.link, figure.of_model))
        assert f"{figure.tokens_per_s:,.0f} | {' | '.join(shares)} |" in text


# Bad input


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": 0}, "input: 0, allowed: >= 1"), ({"output": 1}, "output: 1, allowed: >= 2"),
        ({"hit": 1.0}, "hit: 1.0, allowed: 0 to less than 1"), ({"chunk": 0}, "chunk: 0"), ({"batch": 0}, "batch: 0"),
        ({"elide": "some"}, "elide: 'some', allowed: exact, bounded, none"),
        ({"batch": None}, "batch: None, allowed: either a batch or per_user"), ({"batch": None, "per_user": -1}, "> 0"),
        ({"per_user": 10}, "batch: 256, allowed: either"),
    ],
)  # fmt: skip
def test_workloads_that_cannot_be(fields: dict[str, object], words: str) -> None:
    with pytest.raises(RoleError, match=words):
        Workload(**fields)  # type: ignore[arg-type]


def test_a_model_without_compressed_rows() -> None:
    none = {"compress_ratios": (0,) * 8, "kv_source_layer_ids": (), "index_source_layer_ids": ()}
    config = DeepseekV41Config.miniature(**none, candidate_source_layer_id=None)
    with pytest.raises(RoleError, match="kv_source_layer_ids"):
        prefill_step(config, Workload(), 2)


def test_a_target_without_rates(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("target: cpu\ngpus: 8\ndomain: 8\nlink_bytes_per_s: 1.0e+9\n")
    with pytest.raises(RoleError, match="cpu has no known HBM rate"):
        prefill_instance(V41, read_cluster(str(path)), Workload(), 2)
