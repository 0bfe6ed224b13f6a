"""From Dynamo's graph to a functional ATen graph.

Dynamo's graph is traced once by AOTAutograd without decompositions, so that patterns meet `aten._softmax` and not its
pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

Inner = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def functionalise(gm: fx.GraphModule, example_inputs: Sequence[Any], inner: Inner) -> Callable[..., Any]:
    """Traces `gm` to a functional ATen graph, hands it to `inner` and returns a callable with `gm`'s own signature.

    `inner(graph_module, fake_inputs)` returns what runs it, called with positional arguments. Writes to inputs appear
    in the graph as `aten.copy_(placeholder, value)` at its end. Only inference graphs: see `needs_gradients`.
    """

    def compiler(gm: Any, example_inputs: Sequence[Any]) -> Any:
        return make_boxed_func(inner(gm, list(example_inputs)))

    return aot_module_simplified(
        gm,
        list(example_inputs),
        fw_compiler=compiler,
        inference_compiler=compiler,
        decompositions={},
        keep_inference_input_mutations=True,
    )


def needs_gradients(example_inputs: Sequence[Any]) -> bool:
    """True where AOTAutograd would take its training path: gradients are on and an input asks for them."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)


def specialise_module_floats(gm: fx.GraphModule) -> None:
    """Makes float attributes of modules constants again, with a guard each.

    `torch.compile(dynamic=True)` turns every float that a module holds (an epsilon, a softmax scale) into an input,
    which no pattern can tell from data. Floats that the user passes as arguments stay inputs.
    """
    for item in gm.graph.find_nodes(op="call_method", target="item"):
        source, value = item.args[0], item.meta.get("example_value")
        if isinstance(value, torch.SymFloat) and _is_module_attribute(source):
            item.replace_all_uses_with(float(value))  # adds the guard
            gm.graph.erase_node(item)
    gm.recompile()


def _is_module_attribute(node: fx.Node) -> bool:
    source = getattr(node.meta.get("grapharg"), "source", None)
    kind = getattr(source, "guard_source", None)
    kind = kind() if callable(kind) else kind
    return kind is not None and kind.is_unspecialized_nn_module()


def placeholder_names(gm: fx.GraphModule) -> list[str]:
    """The user's name of every graph input, such as `layers.3.attn.wq_a.weight`, in order.

    Dynamo keeps where an argument came from as a source expression; the attribute path is what is left after the
    guards' spelling is removed. Inputs without a source keep their placeholder name.
    """
    names = []
    for node in gm.graph.find_nodes(op="placeholder"):
        grapharg = node.meta.get("grapharg")
        source = getattr(grapharg, "source", None)
        names.append(_plain_path(_source_name(source)) if source is not None else str(node.target))
    return names


def placeholder_values(gm: fx.GraphModule) -> list[Any]:
    """What Dynamo saw for every graph input, in order: the user's own parameters and buffers; None where unknown."""
    graphargs = [node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder")]
    return [getattr(grapharg, "example", None) for grapharg in graphargs]


def argument_positions(gm: fx.GraphModule) -> list[int]:
    """Positions of the inputs that the user hands in with each call: no parameters, no buffers."""
    positions = []
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = _source_name(source) if source is not None else str(node.target)
        if not re.search(r"_(?:modules|parameters|buffers)\b", name):
            positions.append(position)
    return positions


def _source_name(source: Any) -> str:
    name = source.name
    return str(name() if callable(name) else name)


def _plain_path(source_name: str) -> str:
    path = re.sub(r"L\['(\w+)'\]", r"\1", source_name)
    path = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    return path.removeprefix("self.")
