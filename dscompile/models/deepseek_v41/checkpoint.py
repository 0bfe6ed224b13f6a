"""Reading a checkpoint folder: safetensors under the release's names, plain or in its FP8 and FP4 form (section 4)."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from dscompile.models.deepseek_v41.checkpoint_names import Stored, held_elsewhere, ignored_part, stored_tensors
from dscompile.models.deepseek_v41.config import DeepseekV41Config
from dscompile.models.deepseek_v41.moe import holding
from dscompile.models.deepseek_v41.token_map import check_token_map, token_map_from_folder

if TYPE_CHECKING:
    from dscompile.distributed.placement import Placement
    from dscompile.models.deepseek_v41.model import Activations, DeepseekV41ForCausalLM, Weights

log = logging.getLogger("dscompile.models")

_SHOWN = 8  # names listed per kind of problem


class CheckpointError(ValueError):
    """A checkpoint that does not hold the tensors its configuration asks for."""


@dataclass(frozen=True)
class Header:
    """Where a tensor is, and what its file's header says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load(
    folder: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    weights: Weights = "dequantised",
    token_map: Tensor | None = None,
    progress: bool = True,
    activations: Activations = "plain",
    expert_mesh: Any = None,
    expert_parallel: str | None = None,
    placement: Placement | None = None,
) -> DeepseekV41ForCausalLM:
    """The model in `folder`, with a progress bar on stderr unless `progress` is False.

    The folder holds config.json, inference/config.json or inference_config.json, and safetensors files: those of
    model.safetensors.index.json, else model.safetensors, else every *.safetensors. Files are read one after another, so
    that the peak is the model and one tensor. FP8 and FP4 tensors are dequantised to `dtype`, or kept in their bytes
    with `weights="packed"`; Engram tables always stay as they are stored. Vision and draft tensors are left out with a
    note in the log.

    `token_map` int64 [vocab_size] gives Engram's compressed id of every token; without it, it is worked out from the
    folder's tokenizer.json (needs the tokenizers package).

    With `expert_mesh`, a DeviceMesh (and its dimension `expert_parallel`) or a process group, only the experts that
    `placement` gives to this rank are made room for and read; the model then runs as after
    `dscompile.shard_experts`.

    Raises `CheckpointError` with every missing, extra or misshapen tensor, `FileNotFoundError` for a folder without a
    configuration or without tensors, `ValueError` for an invalid configuration.
    """
    from dscompile.models.deepseek_v41.model import DeepseekV41ForCausalLM

    folder = Path(folder)
    config = DeepseekV41Config.from_file(folder)
    headers = read_headers(folder)
    tables = [f"layers.{layer}.engram.embed.weight" for layer in config.engram_layer_ids]
    packed_tables = any(headers[name].dtype == "F8_E4M3" for name in tables if name in headers)

    def make() -> DeepseekV41ForCausalLM:
        return DeepseekV41ForCausalLM(
            config, dtype, weights, packed_tables=packed_tables, random=False, activations=activations
        )

    if expert_mesh is None:
        model = make()
    else:
        from dscompile.distributed.mesh import ranks_of
        from dscompile.distributed.sharding import placement_for, take_over

        ranks = ranks_of(expert_mesh, expert_parallel)
        where = placement_for("experts", placement, config.n_routed_experts, ranks.size)
        with holding(where.on_rank(ranks.rank)):
            model = make()
        take_over(model, ranks, where)
    wanted = stored_tensors(model)
    _check(wanted, headers, folder, held_elsewhere(model))
    _note_ignored(headers)
    if config.engram_layer_ids:
        found = token_map_from_folder(folder, config) if token_map is None else token_map
        model.token_map.copy_(check_token_map(found, config))
    _read(wanted, headers, progress)
    return model


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, in order."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no *.safetensors")
    return files


def read_headers(folder: Path) -> dict[str, Header]:
    """Every tensor of the folder by name; reads headers only."""
    headers: dict[str, Header] = {}
    for file in tensor_files(folder):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                part = handle.get_slice(name)
                headers[name] = Header(file, tuple(part.get_shape()), part.get_dtype())
    return headers


def _check(wanted: dict[str, Stored], headers: dict[str, Header], folder: Path, elsewhere: set[str]) -> None:
    missing, wrong, used = [], [], set()
    for name, stored in wanted.items():
        header = headers.get(name)
        if header is None:
            missing.append(name)
            continue
        used.add(name)
        if header.dtype not in stored.shapes:
            wrong.append(f"{name}: {header.dtype}, allowed: {' or '.join(stored.shapes)}")
            continue
        shape, scale_shape = stored.shapes[header.dtype]
        if header.shape != shape:
            wrong.append(f"{name}: {list(header.shape)}, allowed: {list(shape)}")
        if scale_shape is None:
            continue
        scale = headers.get(stored.scale_name)
        if scale is None:
            missing.append(stored.scale_name)
            continue
        used.add(stored.scale_name)
        if scale.shape != scale_shape or scale.dtype not in ("F8_E8M0", "U8"):
            wrong.append(
                f"{stored.scale_name}: {scale.dtype} {list(scale.shape)}, allowed: F8_E8M0 {list(scale_shape)}"
            )
    used |= elsewhere
    extra = [name for name in headers if name not in used and ignored_part(name) is None]
    problems = [_listed("missing", missing), _listed("extra", extra), _listed("wrong shape or dtype", wrong)]
    if missing or extra or wrong:
        raise CheckpointError(f"{folder}: " + "; ".join(problem for problem in problems if problem))


def _listed(kind: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {kind}: {', '.join(sorted(names)[:_SHOWN])}{more}"


def _note_ignored(headers: dict[str, Header]) -> None:
    parts = Counter(part for part in map(ignored_part, headers) if part)
    if parts:
        listed = ", ".join(f"{count} {part}" for part, count in sorted(parts.items()))
        log.warning("left out, as this model has no such part: %s tensors", listed)


def _read(wanted: dict[str, Stored], headers: dict[str, Header], progress: bool) -> None:
    by_file: dict[Path, list[str]] = {}
    for name in wanted:
        by_file.setdefault(headers[name].file, []).append(name)
    with ExitStack() as stack, _progress(len(wanted), progress) as advance:
        handles: dict[Path, Any] = {}

        def tensor(name: str) -> Tensor:
            file = headers[name].file
            if file not in handles:
                handles[file] = stack.enter_context(safe_open(file, framework="pt"))
            return handles[file].get_tensor(name)

        for file, names in sorted(by_file.items()):
            for name in names:
                stored = wanted[name]
                _, scale_shape = stored.shapes[headers[name].dtype]
                scale = None if scale_shape is None else tensor(stored.scale_name).view(torch.uint8)
                stored.put(tensor(name), scale)
                advance(file.name)


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[str], None]]:
    if not shown:
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("reading", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)
