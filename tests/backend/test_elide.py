"""A prefill that runs its last layers on each prompt's tail, beside one that runs everything."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import dscompile
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM
from dscompile.models.deepseek_v41.cache import DeepseekV41Cache
from dscompile.models.deepseek_v41.generate import prefill, prompt_positions
from support.elision import SMALL, WINDOW, cache_rows, small_model

CAPACITY, TAIL = 128, 29  # the exact form's tail for the small model

#: Lengths of the prompts in a batch, and the size of the chunks.
PROMPTS = {
    "two lengths": ((60, 40), None),
    "one is shorter than the tail": ((60, 12), None),
    "one is a single token": ((60, 1), None),
    "one is as long as the tail": ((60, TAIL), None),
    "all are shorter than the tail": ((20, 9), None),
    "the last chunk is shorter than the tail": ((90, 70), 50),
    "the last chunk is shorter than the window": ((94, 64), 45),
    "every chunk is shorter than the tail": ((90, 71), 20),
    "one ends in an earlier chunk": ((90, 35), 45),
}


class Forms(NamedTuple):
    """The model, compiled to run everything, and with tails."""

    model: DeepseekV41ForCausalLM
    plain: Any
    exact: Any
    bounded: Any
    report: dscompile.Report

    def prefill(self, form: str, lengths: tuple[int, ...], chunk: int | None) -> tuple[Tensor, DeepseekV41Cache]:
        """Logits after each prompt's last token, and the caches."""
        width = max(lengths)
        ids = torch.randint(SMALL["vocab_size"], (len(lengths), width), generator=torch.Generator().manual_seed(5))
        cache = self.model.new_cache(len(lengths), CAPACITY)
        positions = prompt_positions(torch.tensor(lengths), width)
        return prefill(getattr(self, form), ids, positions, cache, chunk), cache


@pytest.fixture(scope="module")
def forms() -> Any:
    model = small_model()
    torch._dynamo.reset()

    def compiled(**options: Any) -> Any:
        return torch.compile(model, backend="dsv4", options={"inductor": False, **options}, fullgraph=True)

    with torch._dynamo.config.patch(recompile_limit=32), dscompile.collect() as report:
        exact = compiled(role="prefill", elide="exact")
        yield Forms(model, compiled(), exact, compiled(role="prefill", elide="bounded"), report)


def differing(a: DeepseekV41Cache, b: DeepseekV41Cache) -> list[str]:
    """Pools of which a row that can be read differs: bytes must be equal, floats nearly."""
    pairs = zip(cache_rows(a).items(), cache_rows(b).values(), strict=True)
    return [name for (name, x), y in pairs if not torch.allclose(x.float(), y.float(), atol=1e-5, rtol=1e-5)]


# One more graph to compile, for calls no longer than the tail. Decoding goes on with such a call, of one token.
_LONG = (
    "all are shorter than the tail", "the last chunk is shorter than the window",
    "every chunk is shorter than the tail",
)  # fmt: skip
_CASES = [pytest.param(case, marks=pytest.mark.slow) if case in _LONG else case for case in PROMPTS]


@pytest.mark.parametrize("case", _CASES)
def test_the_exact_form_gives_the_same_logits_and_caches(forms: Forms, case: str) -> None:
    lengths, chunk = PROMPTS[case]
    want, want_cache = forms.prefill("plain", lengths, chunk)
    got, got_cache = forms.prefill("exact", lengths, chunk)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert differing(want_cache, got_cache) == []


def test_decoding_goes_on_as_after_a_full_prefill(forms: Forms) -> None:
    """Also with the graph that was asked to leave tokens out: a step of one token leaves out nothing."""
    lengths = (60, 12)
    _, want_cache = forms.prefill("plain", lengths, None)
    _, got_cache = forms.prefill("exact", lengths, None)
    for step in range(WINDOW + 2):
        ids, positions = torch.tensor([[step], [step + 7]]), torch.tensor(lengths)[:, None] + step
        with torch.no_grad():
            want = forms.model(ids, positions, want_cache)
            got = (forms.exact if step == 0 else forms.model)(ids, positions, got_cache)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_the_exact_graph_says_what_it_left_out(forms: Forms) -> None:
    forms.prefill("exact", (60, 40), None)
    found = [graph.elision for graph in forms.report.graphs if graph.elision and graph.elision.mode == "exact"]
    assert [each.tail for each in found if each.tail] == [TAIL]
    assert all(each.exact for each in found) and "run on at most the last 29 tokens, exact" in str(forms.report)


def test_logits_keep_their_shape_and_are_zero_where_they_were_not_computed(forms: Forms) -> None:
    ids = torch.randint(SMALL["vocab_size"], (2, 50))
    positions = prompt_positions(torch.tensor([50, 33]), 50)
    torch._dynamo.mark_dynamic(ids, 1)
    torch._dynamo.mark_dynamic(positions, 1)
    with torch.no_grad():
        logits = forms.exact(ids, positions, forms.model.new_cache(2, CAPACITY))
    assert logits.shape == (2, 50, SMALL["vocab_size"])
    assert (logits != 0).any(-1).nonzero().tolist() == [[0, 49], [1, 32]]


@pytest.mark.slow
def test_the_bounded_form_is_near_and_says_that_it_is_approximate(forms: Forms) -> None:
    lengths = (60, 40)
    want, want_cache = forms.prefill("plain", lengths, None)
    got, got_cache = forms.prefill("bounded", lengths, None)
    assert 1e-4 < (got - want).norm() / want.norm() < 0.3
    bad = differing(want_cache, got_cache)
    assert bad and set(bad) <= {f"window {layer}" for layer in (3, 4, 5)}  # what the tail's own input stores is exact
    assert f"run on at most the last {WINDOW} tokens, APPROXIMATE, exact from {TAIL} tokens on" in str(forms.report)


@pytest.mark.slow
def test_the_bounded_form_is_exact_for_prompts_no_longer_than_its_tail(forms: Forms) -> None:
    want, want_cache = forms.prefill("plain", (8, 5), None)
    got, got_cache = forms.prefill("bounded", (8, 5), None)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert differing(want_cache, got_cache) == []


@pytest.mark.slow
def test_the_bounded_form_does_not_see_what_another_sequence_left_in_a_ring(forms: Forms) -> None:
    """Windows end where the tail begins: stale rows in front of it are hidden."""
    ids, positions = torch.randint(SMALL["vocab_size"], (1, 60)), torch.arange(60)[None]
    fresh, used = forms.model.new_cache(1, CAPACITY), forms.model.new_cache(1, CAPACITY)
    for pool in used.window.values():
        pool.random_(0, 100)
    got = [prefill(forms.bounded, ids, positions, cache) for cache in (fresh, used)]
    torch.testing.assert_close(got[0], got[1], atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_through_inductor() -> None:
    model = small_model(num_hidden_layers=4, compress_ratios=(0, 1, 1, 1), kv_source_layer_ids=(1,),
                        index_source_layer_ids=(1,), candidate_source_layer_id=None)  # fmt: skip
    ids, positions = torch.randint(SMALL["vocab_size"], (2, 50)), prompt_positions(torch.tensor([50, 33]), 50)
    torch._dynamo.reset()
    run = torch.compile(model, backend="dsv4", options={"role": "prefill", "elide": "exact"}, fullgraph=True)
    caches = [model.new_cache(2, CAPACITY) for _ in range(2)]
    want, got = (prefill(form, ids, positions, cache) for form, cache in zip((model, run), caches, strict=True))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert dscompile.last_report().graphs[-1].elision.tail == 2 * WINDOW - 1 + WINDOW - 1  # type: ignore[union-attr]
    for name, rows in cache_rows(caches[0]).items():
        share = (rows.float() - cache_rows(caches[1])[name].float()).abs().gt(1e-4).float().mean()
        assert share < 0.01, name
