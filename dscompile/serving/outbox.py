"""Finished prompts on their way to a decode rank that has room for them, beside the steps of a prefill rank."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dscompile.kv.bundle import KVBundle
from dscompile.kv.transfer import TransferRefused, Transport

_POLL_SECONDS = 0.001  # between looks at an empty queue


@dataclass
class Sent:
    """Bundles that arrived, their bytes and stored tokens, how often a receiver had no room, seconds of all tries."""

    bundles: int = 0
    bytes: int = 0
    tokens: int = 0
    refused: int = 0
    seconds: float = 0.0


class Outbox:
    """A thread that offers each bundle to the receivers in turn until one takes it.

    The first in is the first out: what nobody has room for now holds up what comes after it, and, as its pages are not
    free before, in the end the prompts that wait for pages. Any failure but a lack of room stops the thread; it is
    raised by the next call of `arrived`, and no request is reported as arrived that is not.
    """

    def __init__(self, receivers: Sequence[Transport], timeout: float, pause: float = 0.01) -> None:
        """timeout: seconds of silence that are enough. pause: seconds before full receivers are asked again."""
        if not receivers:
            raise ValueError("no receivers, allowed: at least one")
        self.sent = Sent()
        self._receivers, self._timeout, self._pause = list(receivers), timeout, pause
        self._waiting: deque[KVBundle] = deque()
        self._arrived: deque[int] = deque()
        self._unwanted: set[int] = set()
        self._error: BaseException | None = None
        self._stop = False
        self._next = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Bundles that have not arrived."""
        return len(self._waiting)

    def put(self, bundle: KVBundle) -> None:
        """Send a bundle, whose note has the request's name."""
        self._waiting.append(bundle)

    def arrived(self) -> list[int]:
        """Names of the requests that have left since the last call: they arrived, or were aborted."""
        if self._error is not None:
            raise RuntimeError("a hand-over failed") from self._error
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def abort(self, name: int) -> None:
        """Do not send a request any more, unless it is on its way right now."""
        if any(bundle.header.note["name"] == name for bundle in list(self._waiting)):
            self._unwanted.add(name)

    def close(self) -> None:
        """Stop after the try that is under way. Bundles that have not arrived stay where they are."""
        self._stop = True
        self._thread.join(self._timeout)

    def _run(self) -> None:
        try:
            while not self._stop:
                if not self._waiting:
                    time.sleep(_POLL_SECONDS)
                elif self._offer(self._waiting[0]):
                    self._arrived.append(self._waiting.popleft().header.note["name"])
                else:
                    time.sleep(self._pause)
        except BaseException as error:
            self._error = error

    def _offer(self, bundle: KVBundle) -> bool:
        """Whether it is gone: somebody took it, or nobody wants it."""
        for turn in range(len(self._receivers)):
            if bundle.header.note["name"] in self._unwanted:
                self._unwanted.remove(bundle.header.note["name"])
                return True
            which = (self._next + turn) % len(self._receivers)
            began = time.perf_counter()
            try:
                self._receivers[which].send(bundle, self._timeout)
            except TransferRefused as error:
                if error.reason != "pages":
                    raise
                self.sent.refused += 1
                continue
            finally:
                self.sent.seconds += time.perf_counter() - began
            self.sent.bundles += 1
            self.sent.bytes += bundle.bytes
            self.sent.tokens += bundle.header.length
            self._next = which + 1
            return True
        return False
