"""Building generated C++: found again on disk, errors in the compiler's words, and plain PyTorch without a compiler."""

import threading
import warnings
from pathlib import Path

import pytest
import torch

from dscompile.formats import FORMATS
from dscompile.ops import OPS
from dscompile.templates.cpu import native
from dscompile.templates.cpu.hc import sinkhorn
from dscompile.templates.cpu.index_topk import index_topk, index_topk_candidates
from dscompile.templates.cpu.linear import grouped_output, mm, mm_many
from dscompile.templates.cpu.rows import norm_rope_store, quant_pack, store_rows, unpack
from dscompile.templates.cpu.sparse_attention import sparse_attention

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where nothing can be compiled and nothing was."""
    monkeypatch.setattr(native, "compiler", lambda: None)
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_functions", {})
    monkeypatch.setattr(native, "_missing", None)


def test_without_a_compiler_every_op_still_runs_and_one_warning_says_so(no_compiler: None) -> None:
    q, kv = torch.randn(1, 3, 2, 32), torch.randn(1, 3, 32)
    pos, start = torch.arange(3)[None], torch.zeros(1, dtype=torch.long)
    weights = torch.randn(1, 3, 2)
    pool, slots = torch.zeros(4, 33, dtype=torch.uint8), torch.tensor([2, -1, 0])
    angle = torch.rand(3, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        packed = quant_pack(kv, "fp8_g32_ue8m0")
        assert torch.equal(packed, FORMATS["fp8_g32_ue8m0"].pack(kv))
        assert torch.equal(
            unpack(packed, "fp8_g32_ue8m0", 32, torch.float32), FORMATS["fp8_g32_ue8m0"].unpack(packed, 32)
        )
        args = (q, packed, pos, start, 2, None, None, None, None, 1.0, None, None, False, "fp8_g32_ue8m0", "none")
        assert torch.equal(sparse_attention(*args), OPS["sparse_attention"].reference(*args))
        topk = (q, kv, weights, pos + 1, None, 2, 1.0, "none", True)
        assert torch.equal(index_topk(*topk), OPS["index_topk"].reference(*topk))
        index_topk_candidates(q, kv, weights, pos + 1, 2, 1.0, "none", True, 1, 2)
        assert torch.equal(sinkhorn(torch.zeros(2, 2, 2), 3, 0.0), torch.full((2, 2, 2), 0.5))
        norm_rope_store(pool, kv[0], torch.rand(32), angle.cos(), angle.sin(), slots, 1e-6, "fp8_g32_ue8m0")
        store_rows(pool, pool[:3].clone(), slots)
        x, w = torch.randn(1, 64).bfloat16(), torch.randn(8, 64).bfloat16()
        assert torch.equal(mm(x, w.t()), torch.mm(x, w.t()))
        assert torch.equal(mm_many(x, [w.t(), w.t()])[1], torch.mm(x, w.t()))
        grouped_output(x.view(1, 2, 32), w.view(2, 8, 32), torch.randn(4, 16).bfloat16())
    messages = [str(w.message) for w in caught if "plain PyTorch" in str(w.message)]
    assert len(messages) == 1 and "no C++ compiler found" in messages[0]


@needs_compiler
def test_a_refused_text_is_reported_in_the_compilers_words() -> None:
    with pytest.raises(native.NativeError, match="not_a_type"):
        native.build('extern "C" int f(not_a_type x) { return 0; }')


@needs_compiler
def test_a_library_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "_folder", lambda: tmp_path)
    text = 'extern "C" int answer() { return 42; }'
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(native.build(text))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1 and len(list(tmp_path.glob("*.so"))) == 1
    built = paths[0].stat().st_mtime_ns
    assert native.build(text).stat().st_mtime_ns == built
    assert native.build(text.replace("42", "43")) != paths[0]


@needs_compiler
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    q, kv = torch.randn(1, 40, 4, 64).bfloat16(), torch.randn(1, 40, 64).bfloat16()
    args = (q, kv, torch.arange(40)[None], torch.zeros(1, dtype=torch.long), 8, None, None, None, None, 0.1, None, None,
            False, "none", "none")  # fmt: skip
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(sparse_attention(*args))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
