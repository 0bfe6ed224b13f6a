"""From the name of a model and its sizes, as they are given on the command line, to the calls of its steps."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from dscompile.models.deepseek_v41 import DeepseekV41Config
from dscompile.models.deepseek_v41.config import CONFIG_FILES
from dscompile.tuning.build import limit_threads
from dscompile.tuning.calls import Call
from dscompile.workload import Role, v41_calls
from dscompile.workload_batches import calls_of_batches

if TYPE_CHECKING:
    from transformers.models.deepseek_v4 import DeepseekV4Config

Config = Union[DeepseekV41Config, "DeepseekV4Config"]


class ModelError(ValueError):
    """A model or a size on the command line that cannot be used."""


def _v4_flash() -> Config:
    from dscompile.workload_v4 import v4_flash_config

    return v4_flash_config()


def _v4_miniature() -> Config:
    from dscompile.miniatures import v4_config

    return v4_config()


V41_TYPES = ("deepseek_v41", "deepseek_v41_text")
BUILT_IN: dict[str, Callable[[], Config]] = {
    "v41": DeepseekV41Config.released,
    "v4-flash": _v4_flash,
    "v41-miniature": DeepseekV41Config.miniature,
    "v4-miniature": _v4_miniature,
}


def read_config(model: str) -> Config:
    """A key of `BUILT_IN`, or a path to a config.json or a folder with one.

    Raises:
        ModelError: there is no such model or file, or the file is no configuration of V4 or V4.1.
        MissingExtraError: a V4, and transformers is not installed.
    """
    if model in BUILT_IN:
        return BUILT_IN[model]()
    path = Path(model)
    if not path.exists():
        raise ModelError(f"model {model!r} is no file or folder; allowed: {', '.join(BUILT_IN)}, or a path to a config")
    if path.is_dir():
        path = next((path / name for name in CONFIG_FILES if (path / name).is_file()), path)
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}") from error
    if not path.is_file() or not isinstance(content, dict):
        raise ModelError(f"{path} holds no configuration: allowed are a JSON object, or a folder with a config.json")
    kind = content.get("model_type")
    if kind == "deepseek_v4":
        return _transformers_config(path, content)
    if kind not in (None, *V41_TYPES):
        raise ModelError(f"{path} has model_type {kind!r}, allowed: {', '.join(('deepseek_v4', *V41_TYPES))}")
    try:
        return DeepseekV41Config.from_dict(content)
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path} is no configuration of DeepSeek-V4.1: {error}") from error


def _transformers_config(path: Path, content: dict[str, Any]) -> Config:
    from dscompile.compat import require_extra

    require_extra("transformers")
    from transformers.models.deepseek_v4 import DeepseekV4Config

    try:
        return DeepseekV4Config.from_dict(content)
    except Exception as error:  # transformers raises what its checks and huggingface_hub's give
        cause = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise ModelError(f"{path} is no configuration of DeepSeek-V4: {cause}") from error


def step_calls(
    config: Config, target: str, role: Role, context: int, tokens: int, batch: int, stored: bool = False
) -> list[Call]:
    """The calls of one step: `v41_calls` or `v4_calls`. ModelError for stored weights of a V4."""
    tokens = min(tokens, context)
    if stored and not isinstance(config, DeepseekV41Config):
        raise ModelError("weights 'stored' of a DeepSeek-V4, allowed: 'plain'; transformers' V4 has no other")
    try:
        if isinstance(config, DeepseekV41Config):
            return v41_calls(config, target, role, batch, context, tokens, stored=stored)
        from dscompile.workload_v4 import v4_calls

        return v4_calls(config, target, role, batch, context, tokens)
    except ValueError as error:  # what the model says of sizes that it cannot have
        raise ModelError(str(error)) from error


def workload_calls(
    config: Config,
    target: str,
    role: Role,
    shapes: Sequence[tuple[int, int]],
    tokens: int,
    processes: int = 1,
    stored: bool = False,
) -> Iterator[list[Call]]:
    """The calls of a step for each of `shapes`, (batch size, context), in an order of its own.

    Three and more batch sizes of a context are derived from two captures, see `workload_batches`. processes: that
    capture at the same time. stored: see `v41_calls`.
    """
    for context, group in itertools.groupby(sorted(shapes, key=lambda shape: shape[1]), key=lambda shape: shape[1]):
        capture = partial(step_calls, config, target, role, context, tokens, stored=stored)
        for _, calls in calls_of_batches((batch for batch, _ in group), partial(_captures, capture, processes)):
            yield calls


def _captures(
    capture: Callable[[int], list[Call]], processes: int, batches: Sequence[int]
) -> Iterator[tuple[int, list[Call]]]:
    """Processes are started afresh, so that one's Dynamo knows nothing of the other's."""
    if min(processes, len(batches)) <= 1:
        yield from ((batch, capture(batch)) for batch in batches)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(batches)), mp_context=context, initializer=limit_threads) as pool:
        waiting = {pool.submit(capture, batch): batch for batch in batches}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
