"""Engram's token map: tokens whose text has the same normal form share a compressed id (model_v41 2.8)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from dscompile.models.deepseek_v41.config import DeepseekV41Config

_WHITESPACE = re.compile(r"[ \t\r\n]+")


def normal_form(text: str) -> str:
    """Compatibility form, no accents, lower case, runs of white space as one space, none at the ends.

    Text of white space alone becomes one space.
    """
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(char for char in text if unicodedata.category(char) != "Mn").lower()
    text = _WHITESPACE.sub(" ", text)
    return text if text == " " else text.strip()


def build_token_map(tokens: Iterable[tuple[str, str]]) -> Tensor:
    """(decoded text, raw token) of every token id in order -> compressed ids int64 [vocab], numbered as they appear.

    A token that is not whole UTF-8 by itself (its text has U+FFFD) is keyed by its raw form, one whose normal form is
    empty by its text.
    """
    seen: dict[tuple[bool, str], int] = {}
    ids = []
    for text, raw in tokens:
        partial = "�" in text
        key = (partial, raw if partial else normal_form(text) or text)
        ids.append(seen.setdefault(key, len(seen)))
    return torch.tensor(ids, dtype=torch.int64)


def token_map_from_folder(folder: Path, config: DeepseekV41Config) -> Tensor:
    """The map of the folder's tokenizer.json, padded with the last id of `engram_pad_token_id` up to the vocabulary."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder}: the Engram layers {list(config.engram_layer_ids)} need tokenizer.json, or pass token_map"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError("reading tokenizer.json needs the tokenizers package, or pass token_map") from error
    tokenizer = Tokenizer.from_file(str(file))
    size = tokenizer.get_vocab_size()
    pairs = ((tokenizer.decode([i], skip_special_tokens=False), tokenizer.id_to_token(i) or "") for i in range(size))
    found = build_token_map(pairs)
    if size >= config.vocab_size:
        return found[: config.vocab_size]
    return torch.cat((found, found[config.engram_pad_token_id].expand(config.vocab_size - size)))


def check_token_map(token_map: Tensor, config: DeepseekV41Config) -> Tensor:
    """`token_map` itself; TypeError or ValueError if it does not fit `config`."""
    if token_map.dtype != torch.int64:
        raise TypeError(f"token_map has dtype {token_map.dtype}, allowed: torch.int64")
    if token_map.shape != (config.vocab_size,):
        raise ValueError(f"token_map has shape {tuple(token_map.shape)}, allowed: ({config.vocab_size},)")
    ids, allowed = int(token_map.max()) + 1, config.engram_compressed_vocab_size
    if ids != allowed or int(token_map.min()) < 0:
        raise ValueError(f"token_map has {ids} compressed ids, allowed: engram_compressed_vocab_size {allowed}")
    return token_map
