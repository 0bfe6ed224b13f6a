"""Help for tests of passes: the functional ATen graph of a function or module, as a backend would get it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx import GraphModule


def functional_graph(fn: Callable[..., Any], *example_inputs: Any, dynamic: bool | None = False, **kwargs: Any
                     ) -> GraphModule:  # fmt: skip
    """Functional ATen graph of ``fn(*example_inputs, **kwargs)`` without decompositions (Dynamo, then AOTAutograd).

    Runs ``fn`` once. The result's ``meta["inputs"]`` holds the graph's flat inputs as they were before that run (so
    ``gm(*inputs)`` repeats it), ``meta["outputs"]`` what the compiled function returned. Raises if there is more than
    one graph.
    """
    graphs: list[GraphModule] = []

    def compiler(gm: Any, example_inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)

        def run(*flat: Any) -> Any:
            flat = tuple(flat[0]) if len(flat) == 1 and isinstance(flat[0], list) else flat
            gm.meta.setdefault("inputs", [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in flat])
            return gm.forward(*flat)

        return run

    def backend(gm: GraphModule, args: list[Any]) -> Callable[..., Any]:
        return aot_module_simplified(
            gm, args, fw_compiler=compiler, decompositions={}, keep_inference_input_mutations=True
        )

    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):
        out = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*example_inputs, **kwargs)
    torch._dynamo.reset()
    if len(graphs) != 1:
        raise RuntimeError(f"expected one graph, got {len(graphs)}")
    graphs[0].meta["outputs"] = out
    return graphs[0]


def run_flat(gm: GraphModule, inputs: list[Any] | None = None) -> list[Any]:
    """Run a graph on copies of its recorded inputs: returned tensors, then the inputs as they are afterwards."""
    flat = [a.clone() if isinstance(a, torch.Tensor) else a for a in (inputs or gm.meta["inputs"])]
    with torch.no_grad():
        out = gm(*flat)
    leaves = torch.utils._pytree.tree_leaves(out)
    return [x for x in leaves if isinstance(x, torch.Tensor)] + [a for a in flat if isinstance(a, torch.Tensor)]
