"""The `dsv4` vocabulary: one record per operation of DeepSeek-V4 and V4.1, in `OPS`.

Importing this package registers `torch.ops.dsv4.*`. The kernel of each operation, on every device, is its plain
reference: right and slow. Fast forms live in `dscompile.templates` and are tested against these.
"""

from dscompile.ops import (  # noqa: F401 - importing a module registers its operations
    attention,
    attention_paged,
    compress,
    engram,
    exchange,
    experts,
    experts_packed,
    gather,
    index,
    linear,
    linear_packed,
    mhc,
    mhc_fused,
    moe,
    moe_packed,
    norm,
    output,
    quant,
    rope,
    router,
    sinkhorn,
    store,
)
from dscompile.ops.cost import Cost
from dscompile.ops.registry import FAMILIES, NAMESPACE, OPS, OpSpec

__all__ = ["FAMILIES", "NAMESPACE", "OPS", "Cost", "OpSpec"]
