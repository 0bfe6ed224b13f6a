"""Bundles as safetensors files, one file each: for a shared folder, and to keep or look at a request."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dscompile.kv.bundle import BundleRefused, Header, KVBundle, Room, check_room, import_kv
from dscompile.kv.cache import PagedCache
from dscompile.kv.transfer import TransferError

_SUFFIX = ".kv.safetensors"
_CLAIMED = ".claimed"  # .NAME.NANOSECONDS.RANDOM.claimed: hidden, and tells when it was claimed
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
    """`Transport` through a folder that both sides see; any number of either. The sender does not wait.

    A receiver claims a file before it reads it, by giving it a name of its own, which only one can. A file that was
    taken is deleted; one that was refused is renamed to `*.refused`. Where pages are missing, or anything else fails,
    it gets its name back, to be received later. So does a claim that is older than `claim_seconds` by the clock of
    whoever looks: its receiver has died. One that was only slow finds its claim gone and gives up what it made of it;
    thus a bundle is one request at most, and none is lost. Half-written files of a sender that died are never seen.
    """

    def __init__(self, folder: str | Path, claim_seconds: float = 300.0) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"folder {folder}, allowed: a folder that exists")
        if not 0 < claim_seconds < float("inf"):
            raise ValueError(f"claim_seconds: {claim_seconds}, allowed: > 0 and finite")
        self.claim_seconds = claim_seconds

    def send(self, bundle: KVBundle, timeout: float = 0.0) -> None:
        """Write the bundle into the folder; it takes what the disk takes."""
        save_bundle(bundle, self.folder / f"{time.time_ns():020d}-{bundle.header.id}{_SUFFIX}")

    def receive(self, cache: PagedCache, timeout: float, convert: bool = False, room: Room = None) -> int:
        """The oldest bundle that nobody else has claimed, as a request. TransferError if none for `timeout` seconds."""
        check_room(room)
        deadline = time.monotonic() + timeout
        while (claim := self._claim()) is None:
            if time.monotonic() > deadline:
                raise TransferError(f"no bundle in {self.folder} for {timeout} s")
            time.sleep(_POLL_SECONDS)
        path, claimed = claim
        try:
            bundle = load_bundle(claimed)
            number = import_kv(cache, bundle, convert, room)
        except FileNotFoundError as error:
            raise self._lost(path, error) from error
        except BaseException as error:
            with suppress(FileNotFoundError):  # the claim was lost: the file is not this receiver's any more
                claimed.rename(f"{path}.refused" if isinstance(error, BundleRefused) else path)
            raise
        try:
            claimed.unlink()
        except OSError as error:
            cache.close(number)
            cache.imported.pop(bundle.header.id, None)
            raise self._lost(path, error) from error
        return number

    def close(self) -> None:
        """Nothing is held."""

    def _claim(self) -> tuple[Path, Path] | None:
        """The oldest file that nobody else got first: its name, and the name that it has now."""
        self._put_back()
        for path in sorted(self.folder.glob(f"[!.]*{_SUFFIX}")):
            claimed = path.with_name(f".{path.name}.{time.time_ns()}.{secrets.token_hex(4)}{_CLAIMED}")
            with suppress(FileNotFoundError):
                path.rename(claimed)
                return path, claimed
        return None

    def _put_back(self) -> None:
        """Files whose receivers have died get their names back."""
        oldest = time.time_ns() - int(self.claim_seconds * 1e9)
        for claimed in self.folder.glob(f".*{_SUFFIX}.*{_CLAIMED}"):
            name, at, _ = claimed.name[1 : -len(_CLAIMED)].rsplit(".", 2)
            if at.isdecimal() and int(at) < oldest:
                with suppress(FileNotFoundError):
                    claimed.rename(self.folder / name)

    def _lost(self, path: Path, error: OSError) -> TransferError:
        limit = f"{self.claim_seconds:.6g} s or what others on this folder have as claim_seconds"
        return TransferError(f"the claim of {path} was lost while it was imported ({error}), allowed: {limit}")
