"""Writes docs/kernel_facts.md: what the machine code of the released V4.1's kernels says, for every target.

python tools/kernel_facts.py [--batch 8,256] [--context 8k]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

PLACE = Path(__file__).resolve().parent.parent / "docs" / "kernel_facts.md"
TARGETS = ("sm_90a", "sm_100a", "sm_103a")


def dscompile(*arguments: str) -> str:
    command = [sys.executable, "-m", "dscompile.cli", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", default="8,256")
    parser.add_argument("--context", default="8k")
    options = parser.parse_args()
    import triton

    parts = [
        "# Facts of the compiled kernels\n",
        "*Compiled only*, no GPU has run them. Written by `make kernel-facts`: every Triton kernel of a decoding step",
        f"of the released V4.1 (batch {options.batch}, room for {options.context} tokens), first config, Triton",
        f"{triton.__version__}. `loads` and `stores` are instructions by bytes per thread; asynchronous copies into",
        "shared memory are not among them. `limit` is what keeps another block off a multiprocessor.",
    ]
    for target in TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            dscompile(
                "build", "--model", "v41", "--target", target, "--batch", options.batch, "--context", options.context,
                "-o", folder,
            )  # fmt: skip
            parts += [f"\n## {target}\n", dscompile("inspect", folder, "--markdown").rstrip()]
    PLACE.write_text("\n".join(parts) + "\n")
    print(f"wrote {PLACE}")


if __name__ == "__main__":
    main()
