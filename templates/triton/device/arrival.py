"""The last of several programs goes on with what the others left behind: a second kernel without a second launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_last(counter, programs):
    """Whether this program is the last of `programs` to ask here, each of which asks once.

    counter: int32, 0 before the first asks and 0 again after the last has. What the others had stored before they
    asked can be read where the answer is true.
    """
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = before == programs - 1
    if last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return last
