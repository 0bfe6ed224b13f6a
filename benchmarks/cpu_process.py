"""The parent's side of a worker: start it, ask it, end it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from cpu_cases import Setup
from cpu_worker import serve


class WorkerError(Exception):
    """A request had no result; the message says why. `gone`: the process has ended with it."""

    def __init__(self, message: str, gone: bool) -> None:
        super().__init__(message)
        self.gone = gone


class Worker:
    """One process with one model. `cache` is its folder for compiled code, `log` the file its output goes to."""

    def __init__(self, setup: Setup, cache: Path, log: Path) -> None:
        self.setup = setup
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, setup, str(log)), daemon=False)
        with _environment(setup, cache):
            self._process.start()
        theirs.close()

    def ask(self, command: str, argument: Any = None, timeout: float = 3600.0) -> Any:
        """The worker's result.

        Raises:
            WorkerError: it failed, died, or took longer than `timeout` seconds, which ends it.
        """
        try:
            self._connection.send((command, argument))
            if not self._connection.poll(timeout):
                self.end()
                raise WorkerError(f"did not finish in {timeout:.0f} s", gone=True)
            status, result = self._connection.recv()
        except (EOFError, OSError) as error:
            self.end()
            code = self._process.exitcode
            raise WorkerError(f"the process ended ({_exit(code)}); out of memory?", gone=True) from error
        if status == "failed":
            raise WorkerError(result, gone=False)
        return result

    def end(self) -> None:
        """Ends the process and what it started."""
        if self._connection.closed:
            return
        self._connection.close()
        assert self._process.pid is not None
        wait([self._process.sentinel], timeout=5)  # it leaves by itself now, unless it is busy
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # before join, which frees its number for another process
        self._process.kill()
        self._process.join()


def _exit(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"


@contextlib.contextmanager
def _environment(setup: Setup, cache: Path) -> Iterator[None]:
    """A spawned process inherits the environment of its parent at that moment."""
    wanted = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "OMP_NUM_THREADS": str(setup.threads),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "HF_HUB_OFFLINE": "1",
        "TRITON_DEFAULT_FP_FUSION": "0",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def cache_root(keep: Path | None) -> Iterator[Path]:
    """The folder under which every worker has its own for compiled code: a temporary one, or `keep`."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="dsv4-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
