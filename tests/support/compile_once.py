"""A process that compiles one V4 layer through Inductor and says whether Inductor's cache had it.

python compile_once.py CONFIG_FIELDS OPTIONS       (both JSON)
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    import torch
    from torch._dynamo.utils import counters

    from dscompile.miniatures import token_ids, v4_model

    fields, options = (json.loads(text) for text in sys.argv[1:])
    one_layer = {"num_hidden_layers": 1, "layer_types": ["compressed_sparse_attention"], "mlp_layer_types": ["moe"]}
    model = v4_model(**{**one_layer, "hc_sinkhorn_iters": 1, **fields})
    model.set_experts_implementation("grouped_mm")
    ids = token_ids(40)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        got = torch.compile(model, backend="dsv4", options=options)(ids, use_cache=False).logits
    seen = counters["inductor"]
    result = {
        "error": float((got - want).abs().max()),
        "logits": float(want.double().abs().sum()),
        "hits": seen["fxgraph_cache_hit"],
        "misses": seen["fxgraph_cache_miss"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
