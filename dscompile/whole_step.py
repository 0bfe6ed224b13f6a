"""What of a compiled step is not in its graph, for the role "decode": breaks, and state that a step replaces.

Dynamo cuts a function where it cannot go on (a value that the host reads), and each piece looks like a step of its own.
What it knows of that is read off the compilation that is going on. All of it is private to torch: what a release does
not have counts as not there.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx

from dscompile.capture import placeholder_names
from dscompile.passes.decoding import Obstacle
from dscompile.passes.engine.fxutil import same_shape, same_size, source_line, storage

_TORCH = str(Path(torch.__file__).parent)
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")


def outside_of_graph(gm: fx.GraphModule) -> tuple[Obstacle, ...]:
    """Why Dynamo's graph `gm` is not a whole step, or does not read where the last step wrote. For use in a backend."""
    found = [*_break_behind(gm), *(_break_before(gm) or _called_by_python())]
    return (*found, *_replaced(gm))


def _stack(gm: fx.GraphModule) -> list[Any]:
    """Where Dynamo is in the user's code, outermost first."""
    return list(getattr(getattr(gm, "compile_subgraph_reason", None), "user_stack", None) or ())


def _break_behind(gm: fx.GraphModule) -> Iterator[Obstacle]:
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if getattr(reason, "graph_break", False):
        stack = _stack(gm)
        own = [frame for frame in stack if not frame.filename.startswith(_TORCH)] or stack
        where = _line(own[-1].filename, own[-1].lineno) if own else ""
        yield Obstacle("", "", where, f"the step is not one graph, it breaks here ({_said(reason.reason)})")


def _break_before(gm: fx.GraphModule) -> list[Obstacle]:
    for frame in _stack(gm):
        if resumed := _RESUMED.match(frame.name):
            where = _line(frame.filename, int(resumed[2]))
            return [Obstacle("", "", where, f"the step is not one graph, this is what follows a break in {resumed[1]}")]
    return []


def _called_by_python() -> list[Obstacle]:
    """A frame between the compiled function and this one runs eagerly: Dynamo gave it up and compiles what it calls."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not _in_dynamo(frame, "convert_frame.py"):
        frame = frame.f_back
    while frame is not None and not _in_dynamo(frame, "eval_frame.py"):
        if _traceable(frame):
            name, where = frame.f_code.co_name, _line(frame.f_code.co_filename, frame.f_lineno)
            reason = f"the step is not one graph, this is a part that {name} calls, which runs eagerly"
            return [Obstacle("", "", where, reason)]
        frame = frame.f_back
    return []


def _in_dynamo(frame: FrameType, file: str) -> bool:
    return Path(frame.f_code.co_filename) == Path(_TORCH, "_dynamo", file)


def _traceable(frame: FrameType) -> bool:
    """Whether Dynamo would have compiled this frame: no code of torch, nor of what its rules leave to Python."""
    code = frame.f_code
    return not code.co_filename.startswith(_TORCH) and not torch._dynamo.trace_rules.check(code)


def _replaced(gm: fx.GraphModule) -> Iterator[Obstacle]:
    """Tensors of a model or cache that the step reads and replaces by others, such as a pool that grows."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        effects = InstructionTranslator.current_tx().output.side_effects
        changed = {each.source: each for each in effects._get_modified_vars() if each.source is not None}
        attributes = effects.store_attr_mutations
    except AttributeError:  # another release, or no compilation of Dynamo's is going on
        return
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), placeholder_names(gm), strict=True):
        held = _at_the_end(getattr(node.meta.get("grapharg"), "source", None), changed, attributes)
        new = getattr(getattr(held, "proxy", None), "node", None)
        if isinstance(new, fx.Node) and not _same_tensor(node, new):
            reason = f"{name} is another tensor after the step: a recorded step reads the first one again"
            yield Obstacle("", "", source_line(new), f"{reason} (allowed: writes into it)")


def _at_the_end(source: Any, changed: dict[Any, Any], attributes: Any) -> Any:
    """What stands, behind the step, where `source` was read: a variable of Dynamo's; None if the step left it alone."""
    base, index = getattr(source, "base", None), getattr(source, "index", None)
    if base is None:
        return None
    holder = changed.get(base) or _at_the_end(base, changed, attributes)
    items = getattr(holder, "items", None)
    if holder is None or (member := getattr(source, "member", None)):
        return None if holder is None else attributes.get(holder, {}).get(member)
    if isinstance(items, dict) and isinstance(index, str | int):
        return {getattr(getattr(key, "vt", None), "value", None): value for key, value in items.items()}.get(index)
    return items[index] if isinstance(items, list) and isinstance(index, int) and index < len(items) else None


def _same_tensor(old: fx.Node, new: fx.Node) -> bool:
    """The same memory, seen the same way: what an operation in place returns."""
    a, b = old.meta.get("example_value"), new.meta.get("example_value")
    if old is new or not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return True
    views = same_shape(a.shape, b.shape) and same_shape(a.stride(), b.stride())
    return storage(a) == storage(b) and views and same_size(a.storage_offset(), b.storage_offset())


def _line(file: str, number: int | None) -> str:
    """``file.py:12 code``."""
    return f"{Path(file).name}:{number} {linecache.getline(file, number or 0).strip()}".strip()


def _said(reason: str) -> str:
    """What Dynamo says, without its hints."""
    lines = [line.strip() for line in str(reason).strip().splitlines()]
    if not lines or lines[0].startswith("generic_jump"):
        return "a branch on a tensor's value"
    why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return f"Dynamo: {lines[0]}" + (f": {why}" if why else "")
