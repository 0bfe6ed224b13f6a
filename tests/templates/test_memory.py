"""Freed memory is kept: a later large block costs no page faults."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, torch
from dscompile.templates.cpu.memory import keep_freed_blocks
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(64 << 20, dtype=torch.uint8).zero_()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
plain = min(faults() for _ in range(4))
assert keep_freed_blocks() and keep_freed_blocks()
print(plain, min(faults() for _ in range(16)))  # an aligned block may need a few rounds to find room
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_a_later_block_is_reused(repo_root: Path) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=repo_root, check=True)
    plain, kept = map(int, run.stdout.split())
    assert plain > 1000 and kept < plain / 10
