"""Fixtures and settings that every test shares."""

import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# Before torch is imported: a spinning OpenMP pool slows small operations badly on shared cores, and compiled kernels
# should land where `make clean` finds them. Values that the caller set stay.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".cache" / "inductor"))
os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / ".cache" / "triton"))

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
# Kernels of one process are either compiled or interpreted: `make test` runs pytest twice.
collect_ignore = [] if INTERPRETING else ["interpreted"]

# Files that take longest, of those with few tests: processes get them first, so that none is left alone with one at
# the end. (pytest-xdist's own order is by number of tests.)
LONG = (
    "distributed/test_expert_parallel.py", "backend/test_elide.py", "backend/test_decode_role.py",
    "cases/test_v41.py", "cases/test_cache.py", "passes/deepseek_v41/test_model.py", "models/test_capture.py",
    "passes/test_elide.py", "distributed/test_micro_batches.py", "cases/test_decoding.py", "kv/test_compile.py",
    "distributed/test_padded_reads.py", "tuning/test_inputs.py", "integrations/test_v4_compiled.py",
)  # fmt: skip

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

# Shared machines are too noisy for deadlines, and a failure must come back on the next run.
settings.register_profile("dscompile", deadline=None, max_examples=50, derandomize=True, print_blob=True)
settings.load_profile("dscompile")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not INTERPRETING:
        terminalreporter.write_line("tests/interpreted is not among these: make test-kernels")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        tests = Counter(item.path for item in items)
        first = {ROOT / "tests" / name: place for place, name in enumerate(LONG)}
        # Sorting is stable: tests of a file stay together, and in order, also if another has as many.
        items.sort(key=lambda item: (first.get(item.path, len(LONG)), -tests[item.path], item.path))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test starts from the same random state, whatever ran before it in the process."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def fresh_dynamo() -> Iterator[None]:
    """Forget what a test module compiled, so that no later module runs into Dynamo's recompile limit."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The top folder of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def conformance_dir() -> Path:
    """The folder with the reference numbers; its README lists the files."""
    return ROOT / "tests" / "data" / "conformance"


@pytest.fixture(scope="session")
def conformance(conformance_dir: Path) -> Callable[[str], dict[str, torch.Tensor]]:
    """`conformance("parts")` loads `parts.safetensors` once a session. Treat the tensors as read-only."""
    loaded: dict[str, dict[str, torch.Tensor]] = {}

    def load(name: str) -> dict[str, torch.Tensor]:
        if name not in loaded:
            loaded[name] = load_file(conformance_dir / f"{name}.safetensors")
        return loaded[name]

    return load
