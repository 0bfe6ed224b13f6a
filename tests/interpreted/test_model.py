"""V4.1's miniature through the Triton kernels: every call that it makes, and the model as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import dscompile
from dscompile.kv.deepseek_v41 import PagedModel
from dscompile.lowering.template import choose, triton_templates
from dscompile.miniatures import token_ids, v41_model
from dscompile.models.deepseek_v41 import DeepseekV41Config
from dscompile.targets import get_target
from dscompile.tuning.calls import Call
from dscompile.tuning.inputs import make_inputs
from dscompile.tuning.measure import check
from dscompile.workload import v41_calls
from support.paged import scattered

TARGET = get_target("sm_103a")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in (("prefill", False), ("decode", True))]


@pytest.fixture(scope="module", params=[("decode", False), *SLOW], ids=str)
def calls(request: pytest.FixtureRequest) -> list[Call]:
    role, stored = request.param
    return v41_calls(DeepseekV41Config.miniature(), TARGET.name, role, batch=2, context=64, tokens=20, stored=stored)


def test_every_call_equals_its_reference(calls: list[Call]) -> None:
    """With arguments of the kind that the model hands in; the op that a template is missing for would be named."""
    for call in calls:
        choice = choose(triton_templates().get(f"dsv4::{call.op}", ()), call.named())
        assert choice.template is not None, f"{call}: {choice.reason}"
        template = choice.template
        (config, *_) = template.space(call.sizes(), TARGET)
        check(call.op, lambda args, t=template, c=config: t.fn(*args, config=c, target=TARGET), make_inputs(call))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_as_a_whole(dtype: torch.dtype) -> None:
    """A prompt, then single tokens; both graphs consist of kernels only, and the logits are those of eager."""
    model = v41_model(dtype)
    compiled = torch.compile(model, backend="dsv4", options={"target": "sm_103a", "inductor": False})
    ids = token_ids(24)
    ours, theirs = model.new_cache(1, 64), model.new_cache(1, 64)
    with dscompile.collect() as report:
        for start, stop in ((0, 19), (19, 20), (20, 21), (21, 22)):
            positions = torch.arange(start, stop)[None]
            got = compiled(ids[:, start:stop], positions, ours).float()
            want = model(ids[:, start:stop], positions, theirs).float()
            cosine = torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0)
            assert cosine > (0.99999 if dtype == torch.float32 else 0.99)
    for graph in report.graphs:
        assert not graph.misses
        assert not [low for low in graph.lowerings if low.kernel.startswith("reference")]


@pytest.mark.slow
def test_a_packed_batch() -> None:
    """Requests with one row and with several, over scattered pages."""
    model = v41_model(torch.float32, hc_sinkhorn_iters=2)
    compiled = torch.compile(model, backend="dsv4", options={"target": "sm_103a", "inductor": False})
    prompts, logits = [token_ids(length)[0].tolist() for length in (17, 3, 8)], []
    for forward in (model, compiled):
        run = PagedModel(model, scattered(model, 3, 120), rows=5, max_tokens=24, forward=forward)
        numbers = [run.cache.open(len(prompt)) for prompt in prompts]
        run.pack(numbers[:1], [prompts[0][:7]], 8)
        logits.append(run.pack(numbers, [prompts[0][7:], *prompts[1:]], 8))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-2, atol=1e-2)
