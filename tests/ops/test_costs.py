"""Costs of V4.1's real sizes against the published cost model, and the behaviour of Cost."""

import pytest
import sympy

from dscompile.ops import OPS, Cost

D, H, DH, EXPERTS, K, INTER = 5120, 64, 512, 384, 6, 2304


def flops(name: str, **sizes: object) -> float:
    return OPS[name].cost(**sizes).numbers()["flops"]


def test_flops_of_a_token_and_layer() -> None:
    sizes = {
        "B": 1,
        "T": 1,
        "H": H,
        "D": DH,
        "S": 128,
        "window": 128,
        "C": 4096,
        "window_row_bytes": 528,
        "comp_row_bytes": 288,
    }
    assert flops("sparse_attention", **sizes, K=512) == 131072 * 640
    assert flops("sparse_attention", **sizes, K=0) == 131072 * 128
    assert flops("index_topk", B=1, T=1, H=32, d=128, S=9, k=9, scored=1, key_row_bytes=68) == 8192
    assert flops("router", N=1, D=D, E=EXPERTS, k=K) == 2 * 1_966_080
    routed = flops("experts", N=1, k=K, E=EXPERTS, D=D, I=INTER)
    assert routed == pytest.approx(495e6 * 6 / 7, rel=1e-3)  # the seventh expert is the shared one
    assert 2 * flops("hc_pre", N=1, n=4, D=D) == pytest.approx(2.0e6, rel=0.02)
    assert flops("grouped_output", N=1, G=8, Din=4096, R=1024, Dout=D) == pytest.approx(
        2 * (33.55e6 + 41.94e6), rel=1e-3
    )


def test_cache_read_of_a_decode_step() -> None:
    """38 layers with 512 rows of 288 bytes, 40 windows of 128 rows of 528 bytes: 8.31 MB a query."""
    sizes = {
        "B": 1,
        "T": 1,
        "H": H,
        "D": DH,
        "S": 128,
        "window": 128,
        "C": 100_000,
        "K": 512,
        "x_bytes": 0,
        "index_bytes": 0,
    }
    both = OPS["sparse_attention"].cost(**sizes, window_row_bytes=528, comp_row_bytes=288)
    window = OPS["sparse_attention"].cost(**sizes, window_row_bytes=528, comp_row_bytes=0)
    assert (both * 38 + window * 2).numbers()["read_bytes"] == 38 * 512 * 288 + 40 * 128 * 528
    keys = OPS["index_topk"].cost(B=1, T=1, H=32, d=128, S=1000, k=512, scored=1000)
    assert sympy.diff(keys.read_bytes, sympy.Symbol("key_row_bytes", positive=True, integer=True)) == 1000


def test_bytes_written_a_token() -> None:
    """2.5 compressed rows of 288 + 68 bytes are 890 bytes."""
    row = OPS["quant_pack"].cost(N=1, D=512, row_bytes=288).write_bytes
    index = OPS["quant_pack"].cost(N=1, D=128, row_bytes=68).write_bytes
    assert (row + index) * sympy.Rational(5, 2) == 890
    assert OPS["engram_gather"].cost(N=1, R=24, d=256, row_bytes=264).read_bytes == 24 * (264 + 8)


def test_expert_weights_and_links() -> None:
    fp4 = {"D": D, "I": INTER, "E": EXPERTS, "k": K, "weight_bytes": sympy.Rational(17, 32)}
    full = OPS["experts"].cost(N=100_000, **fp4, x_bytes=0).numbers()["read_bytes"] - 100_000 * K * 12
    assert full == pytest.approx(7.219e9, rel=1e-3)  # every expert touched
    one = OPS["experts"].cost(N=1, **fp4).numbers()["read_bytes"]
    assert one == pytest.approx(6 * 18_800_640, rel=1e-3)  # exactly the six of one token
    for ranks, met in ((2, 1.97), (4, 3.30), (8, 4.43), (16, 5.17), (32, 5.58), (64, 5.81)):
        link = OPS["experts"].cost(N=1, ranks=ranks, **fp4).numbers()["link_bytes"]
        assert link / (5120 + 160 + 10240) == pytest.approx(met * (ranks - 1) / ranks, abs=0.01)
    assert OPS["experts"].cost(N=1, **fp4).link_bytes == 0


def test_cost_arithmetic() -> None:
    cost = OPS["router"].cost(E=EXPERTS, k=K)
    assert {str(s) for s in cost.flops.free_symbols} == {"N", "D"}
    with pytest.raises(ValueError, match="cost is symbolic in D, N"):
        cost.numbers()
    assert cost.subs({"N": 3, "D": 4, "unused": 1}).numbers()["flops"] == 2 * 3 * 4 * EXPERTS
    assert (cost + cost).flops == (cost * 2).flops == (2 * cost).flops
    assert Cost(1, 2, 3).link_bytes == 0
    with pytest.raises(TypeError, match=r"unknown size hidden; known: N, D, E, k, "):
        OPS["router"].cost(hidden=1)
