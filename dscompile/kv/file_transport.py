"""Bundles as safetensors files, one file each: for a shared folder, and to keep or look at a request."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dscompile.kv.bundle import BundleRefused, Header, KVBundle, Room, import_kv
from dscompile.kv.cache import PagedCache
from dscompile.kv.transfer import TransferError

_SUFFIX = ".kv.safetensors"
_POLL_SECONDS = 0.02


def save_bundle(bundle: KVBundle, path: str | Path) -> None:
    """Write a bundle; the file appears under its name only when it is whole."""
    path = Path(path)
    tensors = {part.pool: rows for part, rows in zip(bundle.header.parts, bundle.payload)}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, unfinished, metadata={"header": bundle.header.to_json()})
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_bundle(path: str | Path) -> KVBundle:
    """Read a bundle. BundleRefused for a file that is not one; rows are checked when they are imported."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "header" not in metadata:
                raise BundleRefused("damaged", f"{path} has no header of a bundle")
            header = Header.from_json(metadata["header"])
            there = set(file.keys())
            missing = [part.pool for part in header.parts if part.pool not in there]
            if missing:
                raise BundleRefused("truncated", f"{path} lacks {missing}")
            payload = tuple(file.get_tensor(part.pool) for part in header.parts)
    except SafetensorError as error:
        raise BundleRefused("truncated", f"{path} is not a whole safetensors file ({error})") from error
    if any(rows.dtype != torch.uint8 for rows in payload):
        raise BundleRefused("damaged", f"{path} has tensors of another dtype, allowed: torch.uint8")
    return KVBundle(header, payload)


class FileTransport:
    """`Transport` through a folder that both sides see. The sender does not wait for the receiver.

    A file that was taken is deleted; one that was refused is renamed to `*.refused`. Where pages are missing it stays,
    to be received later. Half-written files of a sender that died are never seen.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"folder {folder}, allowed: a folder that exists")

    def send(self, bundle: KVBundle, timeout: float = 0.0) -> None:
        """Write the bundle into the folder; it takes what the disk takes."""
        save_bundle(bundle, self.folder / f"{time.time_ns():020d}-{bundle.header.id}{_SUFFIX}")

    def receive(self, cache: PagedCache, timeout: float, convert: bool = False, room: Room = None) -> int:
        """The oldest bundle as a request. TransferError if there is none for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            paths = sorted(path for path in self.folder.glob(f"*{_SUFFIX}") if not path.name.startswith("."))
            if paths:
                break
            if time.monotonic() > deadline:
                raise TransferError(f"no bundle in {self.folder} for {timeout} s")
            time.sleep(_POLL_SECONDS)
        try:
            number = import_kv(cache, load_bundle(paths[0]), convert, room)
        except BundleRefused:
            paths[0].rename(f"{paths[0]}.refused")
            raise
        paths[0].unlink()
        return number

    def close(self) -> None:
        """Nothing is held."""
