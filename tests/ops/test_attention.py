"""Sparse attention: released numbers, a float64 loop over keys, masks, sinks, head counts."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dscompile.ops  # noqa: F401

ops = torch.ops.dsv4
NAN = float("nan")
ARGUMENTS = ("q", "window_kv", "q_pos", "window_start", "window", "comp_kv", "comp_idx", "n_visible", "sink", "scale",
             "cos", "sin", "rope_q", "window_format", "comp_format")  # fmt: skip


def attention(**given_arguments: Any) -> Tensor:
    """The op with defaults: no window rows, nothing optional."""
    q = given_arguments["q"]
    batch, tokens, _, dim = q.shape
    defaults = {
        "window_kv": q.new_zeros(batch, 0, dim),
        "q_pos": torch.zeros(batch, tokens, dtype=torch.long),
        "window_start": torch.zeros(batch, dtype=torch.long),
        "window": 4,
        "scale": dim**-0.5,
        "rope_q": False,
        "window_format": "none",
        "comp_format": "none",
    }
    arguments = defaults | given_arguments
    return ops.sparse_attention(*(arguments.get(name) for name in ARGUMENTS))


def turn64(v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One vector, tail of 2 * len(cos) values rotated pair by pair."""
    out = v.clone()
    first = len(v) - 2 * len(cos)
    for i, (c, s) in enumerate(zip(cos.tolist(), sin.tolist(), strict=True)):
        a, b = float(v[first + 2 * i]), float(v[first + 2 * i + 1])
        out[first + 2 * i], out[first + 2 * i + 1] = a * c - b * s, b * c + a * s
    return out


def oracle(**a: Any) -> Tensor:
    """Per query and head, over the Python list of the keys it sees."""
    q = a["q"].double()
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            keys, pos = [], int(a["q_pos"][b, t])
            for j in range(a["window_kv"].shape[1]):
                at = int(a["window_start"][b]) + j
                if at >= 0 and 0 <= pos - at < a["window"]:
                    keys.append(a["window_kv"][b, j].double())
            if a.get("comp_idx") is not None:
                keys += [a["comp_kv"][b, j].double() for j in a["comp_idx"][b, t].tolist() if j >= 0]
            elif a.get("comp_kv") is not None:
                count = min(int(a["n_visible"][b, t]), a["comp_kv"].shape[1])
                keys += [a["comp_kv"][b, j].double() for j in range(max(count, 0))]
            for h in range(q.shape[2]):
                query = q[b, t, h]
                if a.get("rope_q"):
                    query = turn64(query, a["cos"][b, t], a["sin"][b, t])
                if keys:
                    z = [float(query @ key) * a["scale"] for key in keys]
                    sink = [] if a.get("sink") is None else [float(a["sink"][h])]
                    top = max(z + sink)
                    total = sum(math.exp(v - top) for v in z + sink)
                    out[b, t, h] = sum(math.exp(v - top) / total * key for v, key in zip(z, keys, strict=True))
                if a.get("cos") is not None:
                    out[b, t, h] = turn64(out[b, t, h], a["cos"][b, t], -a["sin"][b, t])
    return out


def test_released_numbers(conformance: Callable[[str], dict[str, Tensor]]) -> None:
    data = {k: v for k, v in conformance("parts").items() if k.startswith("attn.")}
    out = attention(q=data["attn.q"], comp_kv=data["attn.kv"], comp_idx=data["attn.idxs"], sink=data["attn.sink"],
                    scale=float(data["attn.scale"]))  # fmt: skip
    torch.testing.assert_close(out, data["attn.out"], rtol=1e-5, atol=1e-5)


@given(st.data())
def test_attention_matches_float64(data: st.DataObject) -> None:
    tokens, heads, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), data.draw(st.integers(0, 9))
    comp, mode = data.draw(st.integers(0, 5)), data.draw(st.sampled_from(["none", "indices", "visible"]))
    starts = st.lists(st.integers(-4, 12), min_size=2, max_size=2)
    args: dict[str, Any] = {
        "q": torch.randn(2, tokens, heads, 8),
        "window_kv": torch.randn(2, rows, 8),
        "q_pos": torch.tensor(data.draw(starts))[:, None] + torch.arange(tokens),
        "window_start": torch.tensor(data.draw(starts)),
        "window": data.draw(st.integers(1, 10)),
        "scale": 0.4,
        "sink": torch.randn(heads) if data.draw(st.booleans()) else None,
    }
    if mode != "none":
        args["comp_kv"] = torch.randn(2, comp, 8)
    if mode == "indices":
        picks = st.lists(st.integers(-1, comp - 1), min_size=2 * tokens * 3, max_size=2 * tokens * 3)
        args["comp_idx"] = torch.tensor(data.draw(picks)).view(2, tokens, 3)
    elif mode == "visible":
        counts = st.lists(st.integers(-2, comp + 2), min_size=2 * tokens, max_size=2 * tokens)
        args["n_visible"] = torch.tensor(data.draw(counts)).view(2, tokens)
    if data.draw(st.booleans()):
        angle = torch.rand(2, tokens, data.draw(st.integers(0, 4))) * 6
        args |= {"cos": angle.cos(), "sin": angle.sin(), "rope_q": data.draw(st.booleans())}
    torch.testing.assert_close(attention(**args).double(), oracle(**args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [16, 32, 48, 64])
@pytest.mark.parametrize("sink", [None, -2.0, 60.0, 500.0])
def test_masked_first_blocks(masked: int, sink: float | None) -> None:
    """Case R14: leading -1 entries, a row without any valid key, a huge sink: no NaN, and 0 where nothing is seen."""
    q, kv = torch.randn(1, 2, 3, 8), torch.randn(1, 80, 8)
    index = torch.randint(0, 80, (1, 2, 64))
    index[0, 0, :masked] = -1
    index[0, 1] = -1
    sinks = None if sink is None else torch.full((3,), sink)
    args = {"q": q, "comp_kv": kv, "comp_idx": index, "sink": sinks, "scale": 1.0}
    out = attention(**args)
    empty = {"window_kv": q.new_zeros(1, 0, 8), "window": 1, "q_pos": torch.zeros(1, 2), "window_start": torch.zeros(1)}
    torch.testing.assert_close(out.double(), oracle(**args, **empty), rtol=1e-5, atol=1e-6)
    assert torch.equal(out[0, 1], torch.zeros(3, 8))


def test_masked_rows_may_hold_anything() -> None:
    """NaN and infinity in rows that a query does not see never reach it; in rows that it sees they do."""
    args: dict[str, Any] = {
        "q": torch.randn(1, 3, 2, 8),
        "window_kv": torch.randn(1, 6, 8),
        "q_pos": torch.tensor([[2, 3, 4]]),
        "window_start": torch.tensor([0]),
        "window": 2,
        "comp_kv": torch.randn(1, 5, 8),
        "sink": torch.randn(2),
        "comp_idx": torch.tensor([[[0, -1, 1], [-1, -1, -1], [4, 4, 0]]]),
    }
    clean = attention(**args)
    for name, row, hit in (("window_kv", 0, None), ("window_kv", 5, None), ("comp_kv", 3, None), ("comp_kv", 2, None),
                           ("window_kv", 4, 2), ("comp_kv", 1, 0)):  # fmt: skip
        for junk in (NAN, float("inf")):
            dirty = args[name].clone()
            dirty[0, row] = junk
            out = attention(**(args | {name: dirty}))
            same = [t for t in range(3) if t != hit]
            assert torch.equal(out[:, same], clean[:, same]), (name, row)
            assert hit is None or out[0, hit].isnan().any()


@pytest.mark.parametrize("form", ["indices", "visible", "window"])
def test_a_bad_row_reaches_only_the_queries_that_see_it(form: str) -> None:
    """Rows are also read for queries that do not see them (skipped entries, masked keys): 0 * NaN must not show."""
    args: dict[str, Any] = {"q": torch.randn(1, 4, 2, 8), "sink": torch.randn(2)}
    rows = torch.randn(1, 4, 8)
    if form == "window":
        args |= {"q_pos": torch.arange(4)[None], "window": 4}
    elif form == "visible":
        args["n_visible"] = torch.arange(4)[None]
    else:
        args["comp_idx"] = torch.tensor([[[0, -1], [-1, -1], [1, -1], [3, 1]]])
    name = "window_kv" if form == "window" else "comp_kv"
    clean = attention(**args, **{name: rows})
    seen_by = {"indices": {0: [0], 1: [2, 3], 2: [], 3: [3]},
               "visible": {0: [1, 2, 3], 1: [2, 3], 2: [3], 3: []},
               "window": {0: [0, 1, 2, 3], 1: [1, 2, 3], 2: [2, 3], 3: [3]}}[form]  # fmt: skip
    for row, hit in seen_by.items():
        dirty = rows.clone()
        dirty[0, row] = NAN
        out = attention(**args, **{name: dirty})
        others = [t for t in range(4) if t not in hit]
        assert torch.equal(out[:, others], clean[:, others])
        assert out[:, hit].isnan().all()


def test_padding_queries_see_nothing() -> None:
    out = attention(
        q=torch.randn(1, 2, 2, 8),
        window_kv=torch.randn(1, 6, 8),
        q_pos=torch.tensor([[-1, -1]]),
        window_start=torch.tensor([-3]),
        comp_kv=torch.randn(1, 3, 8),
        n_visible=torch.zeros(1, 2).long(),
    )
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 12, 16, 20, 32, 64, 128])
def test_any_number_of_heads(heads: int) -> None:
    """Case R15: heads are independent; a shard of them computes exactly its part."""
    args: dict[str, Any] = {
        "q": torch.randn(1, 2, heads, 8),
        "window_kv": torch.randn(1, 4, 8),
        "q_pos": torch.tensor([[2, 3]]),
        "window_start": torch.tensor([0]),
        "comp_kv": torch.randn(1, 5, 8),
        "comp_idx": torch.randint(-1, 5, (1, 2, 4)),
    }
    sink = torch.randn(heads)
    out = attention(**args, sink=sink)
    for h in {0, heads // 2, heads - 1}:
        one = attention(**(args | {"q": args["q"][:, :, h : h + 1]}), sink=sink[h : h + 1])
        torch.testing.assert_close(out[:, :, h : h + 1], one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window_rows", [5, 40])
def test_packed_rows_read_as_their_values(window_rows: int) -> None:
    """Both ways of reading a pool: gather then decode, and decode then gather."""
    window, comp = torch.randn(2, window_rows, 64), torch.randn(2, 30, 64)
    fp8, fp4 = "fp8_g32_ue8m0", "fp4_g16_e4m3"
    args: dict[str, Any] = {
        "q": torch.randn(2, 3, 2, 64).bfloat16(),
        "q_pos": torch.arange(3)[None] + torch.tensor([[2], [30]]),
        "window_start": torch.tensor([0, 1]),
        "window": 4,
        "comp_idx": torch.randint(-1, 30, (2, 3, 20)),
        "sink": torch.randn(2),
    }
    packed = attention(**args, window_kv=ops.quant_pack(window, fp8), comp_kv=ops.quant_pack(comp, fp4),
                       window_format=fp8, comp_format=fp4)  # fmt: skip
    plain = attention(**args, window_kv=ops.fake_quant(window, fp8), comp_kv=ops.fake_quant(comp, fp4))
    assert torch.equal(packed, plain)


def test_probabilities_are_rounded_to_the_dtype_of_q() -> None:
    q, kv = torch.randn(1, 1, 2, 8).bfloat16(), torch.randn(1, 6, 8).bfloat16()
    out = attention(q=q, comp_kv=kv, comp_idx=torch.arange(6).view(1, 1, 6), scale=0.5)
    z = q[0, 0].float() @ kv[0].float().T * 0.5
    p = torch.exp(z - z.amax(-1, keepdim=True))
    want = p.bfloat16().float() @ kv[0].float() / p.sum(-1, keepdim=True)
    torch.testing.assert_close(out[0, 0], want.bfloat16(), rtol=2**-8, atol=1e-6)


def test_long_prompts_are_cut_into_chunks_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    args: dict[str, Any] = {
        "q": torch.randn(2, 11, 2, 64),
        "window_kv": ops.quant_pack(torch.randn(2, 11, 64), "fp8_g32_ue8m0"),
        "q_pos": torch.arange(11).repeat(2, 1),
        "window_start": torch.tensor([0, 0]),
        "window": 3,
        "comp_kv": torch.randn(2, 5, 64),
        "n_visible": torch.arange(11).repeat(2, 1) // 2,
        "window_format": "fp8_g32_ue8m0",
    }
    whole = attention(**args)
    monkeypatch.setattr("dscompile.ops.attention._CHUNK_ELEMENTS", 2 * 8 * 64 * 2)
    torch.testing.assert_close(attention(**args), whole, rtol=1e-6, atol=1e-6)


def test_arguments_are_checked() -> None:
    q, kv = torch.ones(1, 2, 4, 8), torch.ones(1, 5, 8)
    index, count = torch.zeros(1, 2, 3, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long)

    def fails(error: type[Exception], message: str, **change: Any) -> None:
        with pytest.raises(error, match=message):
            attention(**({"q": q} | change))

    fails(ValueError, r"dsv4::sparse_attention: shape of sink is \[3\]; allowed: \[4\]", sink=torch.ones(3))
    fails(ValueError, r"window is 0; allowed: > 0", window=0)
    fails(ValueError, r"shape of window_kv is \[1, 5, 7\]; allowed: last axis 8", window_kv=torch.ones(1, 5, 7))
    fails(ValueError, r"shape of window_kv is \[2, 5, 8\]; allowed: \[1, S, row\]", window_kv=torch.ones(2, 5, 8))
    fails(ValueError, r"window_format is 'fp8_g32_ue8m0'; allowed: .*multiple of the group 32",
          window_format="fp8_g32_ue8m0")  # fmt: skip
    fails(ValueError, r"comp_format is 'x'; allowed: 'none', ", comp_kv=kv, comp_idx=index, comp_format="x")
    fails(ValueError, "comp_idx is given; allowed: None without comp_kv", comp_idx=index)
    fails(ValueError, "comp_idx and n_visible is both None; allowed: exactly one", comp_kv=kv)
    fails(ValueError, "is both given; allowed: exactly one", comp_kv=kv, comp_idx=index, n_visible=count)
    fails(ValueError, r"rope_q is True; allowed: False without cos and sin", rope_q=True)
    fails(ValueError, r"2 \* last axis of cos is 10; allowed: <= head size 8", cos=torch.ones(1, 2, 5),
          sin=torch.ones(1, 2, 5))  # fmt: skip
    fails(IndexError, r"comp_idx is 5; allowed: -1 <= comp_idx < 5", comp_kv=kv, comp_idx=index + 5)
    fails(IndexError, r"comp_idx is -2; allowed", comp_kv=kv, comp_idx=index - 2)
    fails(TypeError, r"dtype of q_pos is torch.float32", q_pos=torch.zeros(1, 2))


def test_window_rows_of_a_pool() -> None:
    """Slots in any order, shared rows, and -1: the keys that are left, each where it stands, as a list of window rows
    in which the others are too old or too new to be seen."""
    pool, q = torch.randn(11, 8), torch.randn(2, 3, 2, 8)
    pool[10] = NAN
    slots = torch.tensor([[3, -1, 3, 0, 9, -1], [-1, 8, 7, -1, -1, 1]])
    pos, start, sink = torch.tensor([[4, 5, 6], [2, 3, 9]]), torch.tensor([1, -2]), torch.randn(2)
    comp, picks = torch.randn(2, 4, 8), torch.randint(-1, 4, (2, 3, 2))
    rest = (comp, picks, None, sink, 0.3, None, None, False, "none", "none")
    for window in (2, 4, 20):
        got = ops.sparse_attention_paged(q, pool, slots, pos, start, window, *rest)
        for b in range(2):
            for t in range(3):
                at = [int(slots[b, j]) for j in range(6)
                      if start[b] + j >= 0 and 0 <= pos[b, t] - start[b] - j < window and slots[b, j] >= 0]  # fmt: skip
                keys = torch.cat((pool[at], comp[b, picks[b, t][picks[b, t] >= 0]])).double()
                z = q[b, t].double() @ keys.T * 0.3
                p = torch.cat((z, sink.double()[:, None]), 1).softmax(1)[:, :-1]
                torch.testing.assert_close(got[b, t].double(), p @ keys, rtol=1e-5, atol=1e-5)


def test_a_pool_without_visible_rows() -> None:
    q, pos, start = torch.randn(1, 2, 3, 8), torch.tensor([[1, 2]]), torch.tensor([0])
    rest = (4, None, None, None, None, 0.3, None, None, False, "none", "none")
    for pool in (torch.empty(0, 8), torch.full((3, 8), NAN)):
        out = ops.sparse_attention_paged(q, pool, torch.full((1, 5), -1), pos, start, *rest)
        assert torch.equal(out, torch.zeros_like(q))
    out = ops.sparse_attention_paged(q, torch.randn(3, 8), torch.empty(1, 0, dtype=torch.long), pos, start, *rest)
    assert torch.equal(out, torch.zeros_like(q))


def test_a_pool_checks_its_arguments() -> None:
    q, pool = torch.randn(1, 2, 3, 8), torch.randn(3, 8)
    slots, pos, start = torch.zeros(1, 5, dtype=torch.long), torch.tensor([[1, 2]]), torch.tensor([0])
    rest = (4, None, None, None, None, 0.3, None, None, False, "none", "none")
    for bad in (3, -2):
        with pytest.raises(IndexError, match=rf"sparse_attention_paged: window_slots is {bad}; allowed: -1 <= .* < 3"):
            ops.sparse_attention_paged(q, pool, slots.index_fill(1, torch.tensor([2]), bad), pos, start, *rest)
    with pytest.raises(ValueError, match=r"shape of window_slots is \[2, 5\]; allowed: \[1, S\]"):
        ops.sparse_attention_paged(q, pool, slots.repeat(2, 1), pos, start, *rest)
    with pytest.raises(ValueError, match=r"shape of window_pool is \[3, 7\]"):
        ops.sparse_attention_paged(q, pool[:, :7], slots, pos, start, *rest)
    with pytest.raises(TypeError, match=r"dtype of window_slots is torch.float32"):
        ops.sparse_attention_paged(q, pool, slots.float(), pos, start, *rest)
