"""Which calls a step of a model makes, found by capturing one layer of every kind on fake tensors."""

from collections import Counter

import pytest
import torch

from dscompile.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dscompile.tuning.calls import Call, TensorSpec, merged
from dscompile.workload import WorkloadError, capture_calls, representative, v41_calls

RELEASED = DeepseekV41Config.released()
# Every kind of layer more than once, as in the release.
REPEATED = DeepseekV41Config.miniature(
    num_hidden_layers=11, compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1), kv_source_layer_ids=(2, 4, 6),
    index_source_layer_ids=(2, 4, 6, 8, 9), candidate_source_layer_id=6, hc_sinkhorn_iters=2,
)  # fmt: skip


def test_one_layer_of_every_kind_stands_for_all() -> None:
    small, counts = representative(RELEASED)
    assert sum(counts.values()) == RELEASED.num_hidden_layers + 1  # -1 stands for what is outside layers
    assert small.num_hidden_layers == 8
    kinds = Counter((RELEASED.kind(layer), RELEASED.ratio(layer)) for layer in range(40))
    found: Counter[tuple[str, int]] = Counter()
    for layer in range(small.num_hidden_layers):
        found[small.kind(layer), small.ratio(layer)] += counts[layer]
    assert found == kinds
    assert [small.kind(layer) for layer in small.engram_layer_ids] == ["window", "full"]
    assert small.engram_num_embeddings == RELEASED.engram_num_embeddings
    assert small.candidate_source_layer_id == 5 and small.uses_candidates(7)


@pytest.mark.slow
def test_counts_are_those_of_the_whole_model() -> None:
    """The same calls, with the same counts, as a capture of every layer."""
    calls = v41_calls(REPEATED, "sm_103a", "decode", batch=2, context=32)
    model = DeepseekV41ForCausalLM(REPEATED, dtype=torch.bfloat16).eval()
    ids = positions = torch.zeros(2, 1, dtype=torch.int64)
    whole = [call for _, call in capture_calls("sm_103a", model, ids, positions, model.new_cache(2, 32))]
    assert {str(c): c.count for c in calls} == {str(c): c.count for c in merged(whole)}
    per_op = Counter[str]()
    for call in calls:
        per_op[call.op] += call.count
    assert per_op["sparse_attention_paged"] == per_op["moe"] == per_op["router"] == 11
    assert per_op["hc_pre"] == per_op["hc_post_pre"] == 11
    assert per_op["index_topk"] + per_op["index_topk_candidates"] == 5


def test_stored_weights_have_calls_of_their_own() -> None:
    config = DeepseekV41Config.miniature(
        num_hidden_layers=2, compress_ratios=(0, 1), kv_source_layer_ids=(1,), index_source_layer_ids=(1,),
        candidate_source_layer_id=None, hc_sinkhorn_iters=2,
    )  # fmt: skip
    per_op = Counter[str]()
    for call in v41_calls(config, "sm_103a", "decode", batch=2, context=32, stored=True):
        per_op[call.op] += call.count
    assert per_op["moe_packed"] == per_op["grouped_output_packed"] == per_op["sparse_attention_paged"] == 2
    assert per_op["linears_packed"] == 2 + 1 and per_op["linear_packed"] == 1  # the indexer's queries beside a layer's
    # What the release does not quantise: the rows of the compressor beside the head weights, the index keys.
    assert per_op["linears"] == per_op["norm_linear"] == 1 and not per_op["moe"]


def test_what_cannot_be_captured_says_why() -> None:
    with pytest.raises(ValueError, match="batch: 0, allowed: >= 1"):
        v41_calls(REPEATED, "sm_103a", "decode", batch=0, context=32)
    with pytest.raises(ValueError, match="tokens: 64, allowed: <= context 32"):
        v41_calls(REPEATED, "sm_103a", "prefill", batch=1, context=32, tokens=64)
    with pytest.raises(WorkloadError, match="made no graph"):
        list(capture_calls("cpu", lambda x: x, torch.ones(2)))


def test_calls_are_data() -> None:
    """With meta tensors of the same strides, sizes and costs; equal calls join."""
    x = torch.empty(4, 64, dtype=torch.bfloat16)[:, :32]
    call = Call("rms_norm", (TensorSpec.of(x), None, 1e-6, "fp32"))
    args = call.meta_args()
    assert args[0].stride() == (64, 1) and args[0].device.type == "meta" and args[0].dtype == torch.bfloat16
    assert call.sizes()["N"] == 4 and call.named()["mode"] == "fp32"
    assert call.cost().numbers()["write_bytes"] == 4 * 32 * 2
    assert [c.count for c in merged([call, call])] == [2]
    assert str(call) == "dsv4::rms_norm(bfloat16[4, 32], None, 1e-06, fp32)"
