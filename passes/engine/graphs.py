"""Graph questions that several passes ask: submodules and their calls, walking, order, dominance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import networkx as nx
import torch
from torch.fx import Graph, GraphModule, Node

from .optable import LAYOUT, VIEWS

_HOPS = ("invoke_subgraph", "with_effects", "cond", "while_loop", "map_impl")


@dataclass(frozen=True)
class Subgraph:
    """A graph module with its place: ``path`` is "" for the outermost, ``sites`` the nodes that call it."""

    gm: GraphModule
    path: str = ""
    sites: tuple[Node, ...] = ()

    @property
    def calls(self) -> int:
        """How often one run of the whole model goes through it."""
        return max(1, len(self.sites))


def subgraphs(gm: GraphModule) -> list[Subgraph]:
    """The module and every graph module that its graphs call, each once, callers first.

    Calls are nodes of higher-order operators (``invoke_subgraph`` and its like) or ``call_module`` whose arguments are
    ``get_attr`` nodes of graph modules; several attributes that hold one module count as one.
    """
    found: dict[int, tuple[GraphModule, str, list[Node]]] = {id(gm): (gm, "", [])}
    todo = [(gm, "")]
    while todo:
        owner, prefix = todo.pop(0)
        for node in owner.graph.nodes:
            if node.op not in ("get_attr", "call_module"):
                continue
            try:
                inner = owner.get_submodule(str(node.target))
            except AttributeError:
                continue
            if not isinstance(inner, GraphModule):
                continue
            path = f"{prefix}.{node.target}" if prefix else str(node.target)
            if id(inner) not in found:
                found[id(inner)] = (inner, path, [])
                todo.append((inner, path))
            found[id(inner)][2].extend([node] if node.op == "call_module" else node.users)
    return [Subgraph(m, path, tuple(sites)) for m, path, sites in found.values()]


def strip_views(node: Node, kinds: Iterable = LAYOUT) -> Node:
    """Walk up through layout operators (or ``kinds``) to the node whose elements these are."""
    kinds = frozenset(kinds)
    while node.op == "call_function" and node.target in kinds and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def users_through_views(node: Node, kinds: Iterable = LAYOUT) -> list[Node]:
    """Users of a node, those of its views instead of the views themselves."""
    kinds, out, todo = frozenset(kinds), dict[Node, None](), [node]
    while todo:
        for user in todo.pop().users:
            if user.op == "call_function" and user.target in kinds:
                todo.append(user)
            else:
                out[user] = None
    return list(out)


def find(graph: Graph, target: object) -> list[Node]:
    """Call nodes of one operator, in graph order."""
    return list(graph.find_nodes(op="call_function", target=target))  # type: ignore[arg-type]


def producers(node: Node, until: Callable[[Node], bool] = lambda n: False) -> list[Node]:
    """All that ``node`` depends on, in graph order; not beyond nodes for which ``until`` holds (they are included)."""
    out: set[Node] = set()
    todo = [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in out:
                out.add(source)
                if not until(source):
                    todo.append(source)
    return sorted(out)


def depends_on(node: Node, other: Node) -> bool:
    """Whether ``other`` reaches ``node`` by data flow."""
    todo, seen = [node], {node}
    while todo:
        for source in todo.pop().all_input_nodes:
            if source is other:
                return True
            if source not in seen and other < source:
                seen.add(source)
                todo.append(source)
    return False


def after(nodes: Iterable[Node]) -> Node:
    """The node in front of which something that needs all ``nodes`` can be inserted (``graph.inserting_before``)."""
    point = max(nodes).next
    while point.op == "placeholder":
        point = point.next
    return point


def digraph(graph: Graph) -> nx.DiGraph:
    """The data flow as a networkx graph of nodes, edges from producer to user."""
    g = nx.DiGraph()
    for node in graph.nodes:
        g.add_node(node)
        g.add_edges_from((source, node) for source in node.all_input_nodes)
    return g


def dominators(graph: Graph, start: Node) -> dict[Node, Node]:
    """Immediate dominators of everything reached from ``start``."""
    return dict(nx.immediate_dominators(digraph(graph), start))


def is_view(node: Node) -> bool:
    return node.op == "call_function" and node.target in VIEWS


def output_values(gm: GraphModule) -> list[Node]:
    """The nodes that a graph returns."""
    out = gm.graph.output_node().args[0]
    return [n for n in torch.utils._pytree.tree_leaves(out) if isinstance(n, Node)]
