"""Freed memory is kept: the second large block costs no page faults."""

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from dscompile.templates.cpu.memory import keep_freed_blocks
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(64 << 20, dtype=torch.uint8).zero_()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
plain = [faults(), faults()][1]
assert keep_freed_blocks() and keep_freed_blocks()
kept = [faults(), faults()][1]
print(plain, kept)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_a_second_block_is_reused(repo_root: object) -> None:
    assert resource.getpagesize() > 0
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=str(repo_root), check=True
    )
    plain, kept = map(int, run.stdout.split())
    assert plain > 1000 and kept < plain / 10
