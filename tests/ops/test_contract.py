"""What every operation of the vocabulary owes: schema, fake function, no aliasing, dense outputs, a numeric cost."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dscompile.ops import FAMILIES, OPS

BF16, FP32 = torch.bfloat16, torch.float32

SCHEMAS = """
rms_norm(Tensor x, Tensor? weight, float eps, str mode) -> Tensor
rope(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor
fake_quant(Tensor x, str format) -> Tensor
quant_pack(Tensor x, str format) -> Tensor
unpack(Tensor rows, str format, int dim, ScalarType dtype) -> Tensor
gather_rows(Tensor rows, Tensor indices, str format, int dim, ScalarType dtype) -> Tensor
unpack_used(Tensor rows, Tensor indices, str format, int dim, ScalarType dtype) -> Tensor
store_rows(Tensor(a!) pool, Tensor rows, Tensor slots) -> ()
norm_rope_store(Tensor(a!) pool, Tensor x, Tensor? weight, Tensor cos, Tensor sin, Tensor slots, float eps, str format) -> Tensor
hc_pre(Tensor streams, Tensor fn, Tensor scale, Tensor base, Tensor? pre_in, Tensor? norm_weight, float mix_eps, float hc_eps, int iters, float norm_eps, bool norm_first) -> (Tensor x, Tensor pre, Tensor post, Tensor comb)
hc_post(Tensor y, Tensor streams, Tensor post, Tensor comb, bool fp32) -> Tensor
hc_post_pre(Tensor y, Tensor streams, Tensor post, Tensor comb, bool fp32, Tensor fn, Tensor scale, Tensor base, Tensor? pre_in, Tensor? norm_weight, float mix_eps, float hc_eps, int iters, float norm_eps, bool norm_first) -> (Tensor streams, Tensor x, Tensor pre, Tensor post, Tensor comb)
hc_head(Tensor streams, Tensor fn, Tensor scale, Tensor base, float mix_eps, float hc_eps) -> Tensor
sinkhorn(Tensor logits, int iters, float eps) -> Tensor
router(Tensor x, Tensor weight, Tensor? bias, Tensor? forced_indices, int top_k, str score_fn, bool normalize, float norm_eps, float scale, bool fp32) -> (Tensor weights, Tensor indices)
experts(Tensor x, Tensor indices, Tensor weights, Tensor w13, Tensor w2, float limit, bool weight_before_down, ScalarType out_dtype) -> Tensor
experts_packed(Tensor x, Tensor indices, Tensor weights, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, float limit, str weight_format, ScalarType out_dtype) -> Tensor
moe(Tensor x, Tensor indices, Tensor weights, Tensor w13, Tensor w2, Tensor shared_gate, Tensor shared_up, Tensor shared_down, float limit, bool weight_before_down, ScalarType routed_dtype, Tensor? streams, Tensor? post, Tensor? comb, bool fp32) -> Tensor
moe_packed(Tensor x, Tensor indices, Tensor weights, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, Tensor shared_gate, Tensor shared_gate_scale, Tensor shared_up, Tensor shared_up_scale, Tensor shared_down, Tensor shared_down_scale, float limit, str weight_format, ScalarType routed_dtype, Tensor? streams, Tensor? post, Tensor? comb, bool fp32) -> Tensor
pack_rows(Tensor x, Tensor token, str format) -> Tensor
combine_rows(Tensor rows, Tensor slot, Tensor? weight) -> Tensor
compress(Tensor kv, Tensor gate, Tensor? ape, Tensor? prior_kv, Tensor? prior_gate, bool overlap) -> Tensor
index_topk(Tensor q, Tensor keys, Tensor head_weights, Tensor n_visible, Tensor? candidates, int top_k, float scale, str key_format, bool ascending, bool newest=False) -> Tensor
index_topk_candidates(Tensor q, Tensor keys, Tensor head_weights, Tensor n_visible, int top_k, float scale, str key_format, bool ascending, int candidate_blocks, int block_size, bool newest=False) -> (Tensor indices, Tensor candidates)
sparse_attention(Tensor q, Tensor window_kv, Tensor q_pos, Tensor window_start, int window, Tensor? comp_kv, Tensor? comp_idx, Tensor? n_visible, Tensor? sink, float scale, Tensor? cos, Tensor? sin, bool rope_q, str window_format, str comp_format) -> Tensor
sparse_attention_paged(Tensor q, Tensor window_pool, Tensor window_slots, Tensor q_pos, Tensor window_start, int window, Tensor? comp_kv, Tensor? comp_idx, Tensor? n_visible, Tensor? sink, float scale, Tensor? cos, Tensor? sin, bool rope_q, str window_format, str comp_format) -> Tensor
linears(Tensor x, Tensor w0, Tensor w1, Tensor? w2, Tensor? w3) -> Tensor
norm_linear(Tensor x, Tensor? norm_weight, float eps, str rounding, Tensor weight) -> (Tensor y, Tensor normed)
grouped_output(Tensor o, Tensor wo_a, Tensor wo_b) -> Tensor
linear_packed(Tensor x, Tensor weight, Tensor weight_scale) -> Tensor
linears_packed(Tensor x, Tensor w0, Tensor w0_scale, Tensor w1, Tensor w1_scale) -> Tensor
grouped_output_packed(Tensor o, Tensor wo_a, Tensor wo_b, Tensor wo_b_scale) -> Tensor
engram_gather(Tensor table, Tensor? scales, Tensor rows, ScalarType dtype) -> Tensor
engram_gate(Tensor streams, Tensor key, Tensor value, Tensor q_weight, Tensor k_weight, Tensor? mask, float eps) -> Tensor
""".strip().splitlines()  # noqa: E501


def rand(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape).to(dtype)


def packed(*shape: int, format: str) -> Tensor:
    return torch.ops.dsv4.quant_pack(torch.randn(shape), format)


def octets(*shape: int) -> Tensor:
    """As E2M1 pairs, as E4M3 (no NaN) or as UE8M0 near 1."""
    return torch.randint(118, 124, shape, dtype=torch.uint8)


def angles(*shape: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(shape) * 6
    return angle.cos(), angle.sin()


def examples(tokens: int) -> list[tuple[str, tuple[Any, ...]]]:
    """Calls of every operation with `tokens` tokens (or rows), every branch of the schema at least once."""
    n = tokens
    cos, sin = angles(n, 8)
    bcos, bsin = angles(2, n, 8)
    slots = torch.arange(n) - 1
    pos, start = torch.arange(n).repeat(2, 1) + 3, torch.tensor([0, -2])
    index = torch.randint(-1, 5, (2, n, 3))
    indices = torch.randint(0, 4, (n, 2))
    calls: list[tuple[str, tuple[Any, ...]]] = [
        *[("rms_norm", (rand(2, n, 32, dtype=BF16), rand(32), 1e-6, mode)) for mode in ("fp32", "scale_cast")],
        ("rms_norm", (rand(n, 32, dtype=BF16), rand(32, dtype=BF16), 1e-6, "cast_before_weight")),
        ("rms_norm", (rand(n, 32), None, 1e-6, "fp32")),
        ("rope", (rand(2, n, 3, 32, dtype=BF16), bcos.unsqueeze(2), bsin.unsqueeze(2), True)),
        ("rope", (rand(n, 32), cos[:, :0], sin[:, :0], False)),
        *[("fake_quant", (rand(n, 64, dtype=BF16), f)) for f in ("none", "bf16", "fp4_g16_e4m3")],
        *[("quant_pack", (rand(n, 64, dtype=BF16), f)) for f in ("none", "bf16", "fp8_g32_ue8m0")],
        ("unpack", (packed(n, 64, format="fp4_g16_e4m3"), "fp4_g16_e4m3", 64, BF16)),
        *[("unpack", (packed(n, 64, format="bf16"), "bf16", 64, d)) for d in (BF16, FP32)],
        ("unpack", (rand(n, 64), "none", 64, FP32)),
        ("gather_rows", (packed(2, 5, 64, format="fp4_g16_e4m3"), index[:, :, 0], "fp4_g16_e4m3", 64, BF16)),
        ("unpack_used", (packed(2, 5, 64, format="fp4_g16_e4m3"), index, "fp4_g16_e4m3", 64, BF16)),
        ("store_rows", (rand(n + 1, 8), rand(n, 8), slots)),
        ("norm_rope_store", (torch.zeros(n + 1, 66, dtype=torch.uint8), rand(n, 64, dtype=BF16), rand(64), cos, sin,
                             slots, 1e-6, "fp8_g32_ue8m0")),
        ("norm_rope_store", (rand(n + 1, 64), rand(n, 64), None, cos[:, :0], sin[:, :0], slots, 1e-6, "none")),
        ("hc_pre", (rand(2, n, 4, 16, dtype=BF16), rand(24, 64), rand(3), rand(24), None, rand(16), 1e-6, 1e-6, 3, 1e-6,
                    True)),
        ("hc_pre", (rand(n, 2, 16), rand(8, 32), rand(3), rand(8), rand(n, 2), None, 1e-20, 1e-6, 2, 1e-20, False)),
        *[("hc_post", (rand(n, 16, dtype=BF16), rand(n, 4, 16, dtype=BF16), rand(n, 4), rand(n, 4, 4), f))
          for f in (True, False)],
        *[("hc_post_pre", (rand(2, n, 16, dtype=BF16), rand(2, n, 4, 16, dtype=BF16), rand(2, n, 4), rand(2, n, 4, 4),
                           f, rand(24, 64), rand(3), rand(24), rand(2, n, 4) if f else None, rand(16), 1e-6, 1e-6, 3,
                           1e-6, f)) for f in (True, False)],
        ("hc_head", (rand(n, 4, 16, dtype=BF16), rand(4, 64), rand(1), rand(4), 1e-6, 1e-6)),
        ("sinkhorn", (rand(n, 4, 4), 20, 1e-6)),
        ("router", (rand(n, 16, dtype=BF16), rand(6, 16, dtype=BF16), rand(6), None, 2, "sqrtsoftplus", True, 1e-20,
                    1.5, True)),
        ("router", (rand(n, 16, dtype=BF16), rand(6, 16, dtype=BF16), None, indices, 2, "sigmoid", False, 0.0, 1.0,
                    False)),
        *[("experts", (rand(n, 16, dtype=BF16), indices, rand(n, 2), rand(4, 24, 16, dtype=BF16),
                       rand(4, 16, 12, dtype=BF16), 10.0, before, FP32)) for before in (True, False)],
        ("experts_packed", (rand(n, 32, dtype=BF16), indices, rand(n, 2), octets(4, 64, 16), octets(4, 64, 1),
                            octets(4, 32, 16), octets(4, 32, 1), 10.0, "e2m1_1x32", FP32)),
        ("experts_packed", (rand(n, 64, dtype=BF16), indices, rand(n, 2), octets(4, 64, 64), octets(4, 2, 2),
                            octets(4, 64, 32), octets(4, 2, 1), 0.0, "e4m3_32x32", BF16)),
        ("moe", (rand(n, 16, dtype=BF16), indices, rand(n, 2), rand(4, 24, 16, dtype=BF16),
                 rand(4, 16, 12, dtype=BF16), *[rand(20, 16, dtype=BF16) for _ in range(2)], rand(16, 20, dtype=BF16),
                 10.0, True, FP32, rand(n, 4, 16, dtype=BF16), rand(n, 4), rand(n, 4, 4), True)),
        ("moe", (rand(n, 16), indices, rand(n, 2), rand(4, 24, 16), rand(4, 16, 12), rand(12, 16), rand(12, 16),
                 rand(16, 12), 0.0, False, FP32, None, None, None, True)),
        ("moe_packed", (rand(n, 32, dtype=BF16), indices, rand(n, 2), octets(4, 64, 16), octets(4, 64, 1),
                        octets(4, 32, 16), octets(4, 32, 1), octets(64, 32), octets(2, 1), octets(64, 32),
                        octets(2, 1), octets(32, 64), octets(1, 2), 10.0, "e2m1_1x32", FP32,
                        rand(n, 4, 32, dtype=BF16), rand(n, 4), rand(n, 4, 4), False)),
        ("moe_packed", (rand(n, 64, dtype=BF16), indices, rand(n, 2), octets(4, 64, 64), octets(4, 2, 2),
                        octets(4, 64, 32), octets(4, 2, 1), octets(32, 64), octets(1, 2), octets(32, 64),
                        octets(1, 2), octets(64, 32), octets(2, 1), 0.0, "e4m3_32x32", BF16, None, None, None, True)),
        *[("pack_rows", (rand(n, 64, dtype=BF16), torch.arange(n) - 1, f)) for f in ("fp8_g32_ue8m0", "bf16")],
        *[("combine_rows", (rand(n, 24, dtype=BF16), (torch.arange(3 * n) % (n + 1) - 1).view(n, 3), w))
          for w in (rand(n, 3), None)],
        ("compress", (rand(2, n, 3, 8), rand(2, n, 3, 8), rand(3, 8), None, None, False)),
        ("compress", (rand(2, n, 3, 8, dtype=BF16), rand(2, n, 3, 8, dtype=BF16), rand(3, 8), rand(2, 3, 4),
                      rand(2, 3, 4), True)),
        ("index_topk", (rand(2, n, 3, 32), rand(2, 9, 32), rand(2, n, 3), torch.randint(-1, 10, (2, n)),
                        torch.rand(2, n, 9) > 0.3, 4, 0.1, "none", True)),
        ("index_topk", (rand(2, n, 3, 32), rand(2, 9, 32), rand(2, n, 3), torch.randint(-1, 10, (2, n)), None, 4, 0.1,
                        "none", True, True)),
        ("index_topk", (rand(2, n, 3, 32, dtype=BF16), packed(2, 5, 32, format="fp4_g32_ue8m0"), rand(2, n, 3),
                        torch.randint(-1, 6, (2, n)), None, 8, 0.1, "fp4_g32_ue8m0", False)),
        ("index_topk_candidates", (rand(2, n, 3, 32), rand(2, 9, 32), rand(2, n, 3), torch.randint(-1, 10, (2, n)), 4,
                                   0.1, "none", True, 2, 2)),
        ("sparse_attention", (rand(2, n, 3, 32, dtype=BF16), packed(2, 7, 32, format="fp8_g32_ue8m0"), pos, start, 4,
                              packed(2, 5, 32, format="fp4_g16_e4m3"), index, None, rand(3), 0.2, bcos, bsin, True,
                              "fp8_g32_ue8m0", "fp4_g16_e4m3")),
        ("sparse_attention", (rand(2, n, 3, 32), rand(2, 7, 32), pos, start, 9, rand(2, 5, 32), None,
                              torch.randint(-1, 6, (2, n)), None, 0.2, None, None, False, "none", "none")),
        ("sparse_attention", (rand(2, n, 3, 32), rand(2, 7, 32), pos, start, 4, None, None, None, rand(3), 0.2, bcos,
                              bsin, False, "none", "none")),
        ("sparse_attention_paged", (rand(2, n, 3, 32, dtype=BF16), packed(9, 32, format="fp8_g32_ue8m0"),
                                    torch.randint(-1, 9, (2, 7)), pos, start, 4,
                                    packed(2, 5, 32, format="fp4_g16_e4m3"), index, None, rand(3), 0.2, bcos, bsin,
                                    True, "fp8_g32_ue8m0", "fp4_g16_e4m3")),
        ("sparse_attention_paged", (rand(2, n, 3, 32), rand(9, 32), torch.randint(-1, 9, (2, 7)).int(), pos, start, 9,
                                    None, None, None, None, 0.2, None, None, False, "none", "none")),
        ("linears", (rand(n, 24, dtype=BF16), rand(6, 24, dtype=BF16), rand(10, 24, dtype=BF16), None, None)),
        ("linears", (rand(n, 24), rand(6, 24), rand(10, 24), rand(3, 24), rand(5, 24))),
        ("norm_linear", (rand(n, 24, dtype=BF16), rand(24), 1e-6, "fp32", rand(10, 24, dtype=BF16))),
        ("norm_linear", (rand(n, 24), rand(24), 1e-6, "cast_before_weight", rand(10, 24))),
        ("norm_linear", (rand(n, 24, dtype=BF16), None, 1e-6, "scale_cast", rand(10, 24, dtype=BF16))),
        ("grouped_output", (rand(2, n, 2, 12), rand(2, 5, 12), rand(16, 10))),
        ("linear_packed", (rand(2, n, 64, dtype=BF16), octets(96, 64), octets(3, 2))),
        ("linears_packed", (rand(n, 64), octets(32, 64), octets(1, 2), octets(96, 64), octets(3, 2))),
        ("grouped_output_packed", (rand(n, 2, 12), rand(2, 16, 12), octets(64, 32), octets(2, 1))),
        # as bytes: opcheck itself cannot multiply float8 tensors
        ("engram_gather", (rand(11, 64).to(torch.float8_e4m3fn).view(torch.uint8), torch.randint(120, 130, (11, 2),
                           dtype=torch.uint8), torch.randint(0, 11, (2, n, 3)), BF16)),
        ("engram_gather", (rand(11, 8, dtype=BF16), None, torch.randint(0, 11, (n, 3)), BF16)),
        ("engram_gate", (rand(2, n, 4, 16, dtype=BF16), rand(2, n, 4, 16), rand(2, n, 16), rand(4, 16), rand(4, 16),
                         torch.rand(2, n) > 0.5, 1e-20)),
    ]  # fmt: skip
    return calls


CALLS = examples(4)
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(CALLS)]


def outputs(result: Any) -> list[Tensor]:
    return [] if result is None else [result] if isinstance(result, Tensor) else list(result)


def test_the_vocabulary_is_complete() -> None:
    assert {OPS[name].schema for name in OPS} == set(SCHEMAS)
    assert {name for name, _ in CALLS} == set(OPS), "every operation has an example here"
    assert {spec.family for spec in OPS.values()} == set(FAMILIES)
    for name, spec in OPS.items():
        assert spec.name == name and spec.op is getattr(torch.ops.dsv4, name).default


@pytest.mark.parametrize(("name", "args"), CALLS, ids=IDS)
def test_torch_accepts_the_operator(name: str, args: tuple[Any, ...]) -> None:
    """Schema (mutation and aliasing as declared), fake against real, and tracing with dynamic shapes."""
    torch.library.opcheck(OPS[name].op, args)


@pytest.mark.parametrize(("name", "args"), examples(0), ids=IDS)
def test_zero_rows(name: str, args: tuple[Any, ...]) -> None:
    meta = OPS[name].op(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
    real = OPS[name].op(*args)
    for have, want in zip(outputs(real), outputs(meta), strict=True):
        assert have.shape == want.shape and have.dtype == want.dtype


@pytest.mark.parametrize(("name", "args"), CALLS, ids=IDS)
def test_strides_of_the_arguments_do_not_matter(name: str, args: tuple[Any, ...]) -> None:
    def spread(t: Any) -> Any:
        """The same values, axes in memory the other way round and gaps between the elements of every axis."""
        if not isinstance(t, Tensor):
            return t
        big = t.new_zeros([2 * n for n in reversed(t.shape)])
        view = big[tuple(slice(None, None, 2) for _ in t.shape)].permute(*reversed(range(t.dim())))
        view.copy_(t)
        return view

    def fresh(t: Any) -> Any:
        return t.clone() if isinstance(t, Tensor) else t

    dense, gaps = [fresh(a) for a in args], [spread(a) for a in args]
    first, second = OPS[name].op(*dense), OPS[name].op(*gaps)
    for have, want in zip(outputs(second), outputs(first), strict=True):
        assert have.is_contiguous() and want.is_contiguous()
        torch.testing.assert_close(have.float(), want.float(), rtol=1e-5, atol=1e-5)
    if name in ("store_rows", "norm_rope_store"):
        assert torch.equal(dense[0], gaps[0])


@pytest.mark.parametrize(("name", "args"), CALLS, ids=IDS)
def test_cost_of_a_call_is_a_number(name: str, args: tuple[Any, ...]) -> None:
    numbers = OPS[name].cost_of(*args).numbers()
    assert all(math.isfinite(v) and v >= 0 for v in numbers.values())
    assert numbers["read_bytes"] > 0 and numbers["write_bytes"] > 0
    formula = OPS[name].cost().read_bytes
    assert formula.free_symbols, "the formula names its sizes"


@pytest.mark.parametrize(("name", "args"), CALLS, ids=IDS)
def test_every_size_may_be_a_symbol(name: str, args: tuple[Any, ...]) -> None:
    """Fakes and costs of a graph with dynamic shapes: formulas that give the real values for the real sizes."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
    hints = {}
    for fake, real in zip(fakes, args, strict=True):
        if isinstance(real, Tensor):
            for symbolic, size in zip(fake.shape, real.shape, strict=True):
                if isinstance(symbolic, torch.SymInt):
                    hints[symbolic.node.expr] = size
    with mode:
        shapes = [t.shape for t in outputs(OPS[name].op(*fakes))]
    cost = OPS[name].cost_of(*fakes)
    want = outputs(OPS[name].op(*(a.clone() if isinstance(a, Tensor) else a for a in args)))
    for symbolic_shape, real in zip(shapes, want, strict=True):
        sizes = [s.node.expr.subs(hints) if isinstance(s, torch.SymInt) else s for s in symbolic_shape]
        assert sizes == list(real.shape)
    for field in ("read_bytes", "write_bytes", "flops"):
        value = float(getattr(cost, field).subs(hints))
        assert value == pytest.approx(float(getattr(OPS[name].cost_of(*args), field)), rel=1e-9)
