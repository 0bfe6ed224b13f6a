"""transformers' V4 with the static cache, eager: the numbers of one forward over everything, however it is cut."""

import warnings

import pytest
import torch
from transformers import DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from dscompile.integrations.transformers import StaticV4Cache, prepare, unprepare
from support.v4 import tiny, token_ids

IDS = token_ids()
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model():
    return prepare(tiny())


@pytest.fixture(scope="module")
def one_shot(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def new_cache(model, batch=1, max_tokens=40):
    return StaticV4Cache(model.config, batch, max_tokens, model.dtype)


def run(model, ids, split, cache):
    assert sum(split) == ids.shape[1]
    return torch.cat([model(piece, cache=cache, use_cache=True).logits for piece in ids.split(split, dim=1)], dim=1)


@pytest.mark.parametrize(
    "split",
    [
        [40],
        [3, 5, 1, 7, 8, 16],  # pieces that end inside a ratio-4 group, on its edge, inside a ratio-8 group
        [24, 16],
        [39, 1],
        [7, 1, 1, 1, 30],
        [5, 35],  # a piece longer than four windows
        [1] * 9 + [31],
        [8] + [1] * 32,
        [5, 4, 2, 3, 5, 21],
    ],
    ids=lambda split: "-".join(map(str, split[:6])),
)
def test_any_split_equals_one_shot_and_the_growing_cache(model, one_shot, split):
    got = run(model, IDS, split, new_cache(model))
    torch.testing.assert_close(got, one_shot, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(got, run(model, IDS, split, DynamicCache(config=model.config)), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9])
def test_first_boundaries(length):
    """Hidden size 112 as well: not a power of two."""
    model = prepare(tiny(hidden_size=112))
    ids = IDS[:, :length]
    got = model(ids, cache=new_cache(model)).logits
    torch.testing.assert_close(got, model(ids, use_cache=False).logits, atol=TOLERANCE, rtol=0)


def test_batch_rows_are_independent(model):
    ids = torch.stack([IDS[0], IDS[0].flip(0), (IDS[0] * 5 + 3) % 64])
    got = run(model, ids, [6, 1, 1, 9, 23], new_cache(model, 3))
    torch.testing.assert_close(got, model(ids, use_cache=False).logits, atol=TOLERANCE, rtol=0)


def test_a_used_cache_is_as_good_as_new_after_reset(model, one_shot):
    cache = new_cache(model)
    run(model, IDS.flip(1), [11, 1, 28], cache)
    cache.reset()
    assert torch.equal(run(model, IDS, [6, 1, 33], cache), run(model, IDS, [6, 1, 33], new_cache(model)))


def test_the_size_of_the_cache_does_not_matter(model, one_shot):
    got = run(model, IDS, [6, 1, 1, 32], new_cache(model, max_tokens=333))
    torch.testing.assert_close(got, one_shot, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("index_topk", [2, 64])
def test_no_token_sees_a_later_one(index_topk):
    model = prepare(tiny(index_topk=index_topk))
    changed = IDS.clone()
    changed[0, 16] += 1
    split = [5, 14, 1, 20]  # 16 lies inside the second piece
    before, after = (run(model, ids, split, new_cache(model)) for ids in (IDS, changed))
    # Not bitwise: the token's experts change, and with them the row order inside the grouped matrix product.
    torch.testing.assert_close(before[:, :16], after[:, :16], atol=1e-5, rtol=0)
    assert (before[:, 16] - after[:, 16]).abs().max() > 0.1


def test_rows_that_are_not_written_yet_contribute_nothing(model, one_shot):
    """Decode reads whole pools: fill what is invisible with large values and nothing may change."""
    cache = new_cache(model)
    start = model(IDS[:, :13], cache=cache).logits
    for layer in cache.layers[1:]:
        for name, pool in layer.pool.items():
            pool[13 // layer.compress_rate :] = 1e4
            assert pool[: 13 // layer.compress_rate].any(), name
    rest = torch.cat([model(IDS[:, i : i + 1], cache=cache).logits for i in range(13, 40)], 1)
    torch.testing.assert_close(torch.cat([start, rest], 1), one_shot, atol=TOLERANCE, rtol=0)


# -- generate --------------------------------------------------------------------------------------------------------

PROMPT = (torch.arange(24) * 7 % 63 + 1).view(2, 12)
GREEDY = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def generated(model):
    return model.generate(PROMPT, **GREEDY)


@pytest.mark.filterwarnings(
    "ignore:generate.. is running this model uncompiled", "ignore:.past_key_values. is deprecated"
)
@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
def test_generate_by_either_name(model, generated, argument):
    assert torch.equal(model.generate(PROMPT, **{argument: new_cache(model, 2)}, **GREEDY), generated)


@pytest.mark.filterwarnings("ignore:generate.. is running this model uncompiled")
def test_generate_in_pieces_and_on_from_a_used_cache(model, generated):
    assert torch.equal(model.generate(PROMPT, cache=new_cache(model, 2), prefill_chunk_size=5, **GREEDY), generated)
    cache = new_cache(model, 2)
    first = model.generate(PROMPT, cache=cache, **{**GREEDY, "max_new_tokens": 4})
    assert torch.equal(model.generate(first, cache=cache, **{**GREEDY, "max_new_tokens": 5}), generated)


@pytest.mark.filterwarnings("ignore:generate.. is running this model uncompiled")
def test_beam_search_reorders_rows(model):
    want = model.generate(PROMPT, num_beams=3, **GREEDY)
    assert torch.equal(model.generate(PROMPT, num_beams=3, cache=new_cache(model, 6), **GREEDY), want)


def test_generate_says_once_that_nothing_is_compiled():
    model = prepare(tiny())
    with pytest.warns(UserWarning, match="uncompiled"):
        model.generate(PROMPT, cache=new_cache(model, 2), **GREEDY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(PROMPT, cache=new_cache(model, 2), **GREEDY)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_padding_is_refused_and_a_full_mask_is_named(model):
    mask = torch.ones_like(PROMPT)
    with pytest.warns(UserWarning, match="leave attention_mask out"):
        model(PROMPT, attention_mask=mask, cache=new_cache(model, 2))
    mask[0, :3] = 0
    with pytest.raises(ValueError, match="padding, which is not supported"):
        model.generate(PROMPT, attention_mask=mask, cache=new_cache(model, 2), **GREEDY)


def test_too_long_and_gradients_are_refused(model):
    cache = new_cache(model, max_tokens=12)
    model(IDS[:, :10], cache=cache)
    with pytest.raises(ValueError, match="max_tokens=12; 10 are cached and 3 more came"):
        model(IDS[:, 10:13], cache=cache)
    with torch.enable_grad(), pytest.raises(ValueError, match="no_grad"):
        model(IDS[:, 10:11], cache=cache)


def test_decoding_an_unprepared_model_is_refused():
    model = tiny()
    cache = new_cache(model)
    model(IDS[:, :6], cache=cache)
    with pytest.raises(RuntimeError, match=r"layer 2: .*prepare\(model\)"):
        model(IDS[:, 6:7], cache=cache)


def test_prepare_touches_only_its_instance_and_can_be_undone():
    classes = {
        name: vars(modeling)[name] for name in ("DeepseekV4DecoderLayer", "DeepseekV4Attention", "DeepseekV4Model")
    }
    forwards = {name: cls.forward for name, cls in classes.items()}
    model = tiny()
    model.set_experts_implementation("eager")
    keys = list(model.state_dict())
    assert prepare(prepare(model)) is model  # twice is once
    assert model.config._experts_implementation == "grouped_mm"
    assert len(model.model._forward_pre_hooks) == 1 and len(model.model.layers[2].self_attn._forward_pre_hooks) == 1
    assert isinstance(model.model.layers[0], classes["DeepseekV4DecoderLayer"]) and list(model.state_dict()) == keys
    assert {name: cls.forward for name, cls in classes.items()} == forwards
    unprepare(model)
    assert all(type(layer) is classes["DeepseekV4DecoderLayer"] for layer in model.model.layers)
    assert not model.model._forward_pre_hooks and not model.model.layers[2].self_attn._forward_pre_hooks


def test_prepare_refuses_other_models_and_unwraps_a_compiled_one():
    with pytest.raises(TypeError, match="got Linear"):
        prepare(torch.nn.Linear(2, 2))
    model = tiny()
    with pytest.warns(UserWarning, match=r"generate\(\) runs nothing compiled"):
        assert prepare(torch.compile(model, backend="eager")) is model
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="must be 'eager'.*'sdpa'"):
        prepare(model)
