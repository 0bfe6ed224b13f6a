"""Finished prompts on their way to a decode rank that has room for them, beside the steps of a prefill rank."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dscompile.kv.bundle import KVBundle
from dscompile.kv.transfer import TransferError, TransferRefused, Transport
from dscompile.serving.requests import Failed

_POLL_SECONDS = 0.001  # between looks at an empty queue
_TRIES = 3  # of a bundle at a receiver, where it was spoilt on its way


@dataclass
class Sent:
    """Bundles that arrived, with bytes and stored tokens. refused: how often a receiver had no room. failed: bundles
    that nobody can take. seconds: of all tries.
    """

    bundles: int = 0
    bytes: int = 0
    tokens: int = 0
    refused: int = 0
    failed: int = 0
    seconds: float = 0.0


class Outbox:
    """A thread that offers each bundle to the receivers in turn until one takes it.

    The first in is the first out: what nobody has room for now holds up what comes after it, and, as its pages are not
    free before, in the end the prompts that wait for pages. What each receiver refuses for good, as its ranks may have
    unlike limits, is given up when the last one has: `failed`. A receiver that gave up a bundle ("aborted") or gives no
    answer counts as gone, and gets no others; the bundle goes to another one. If it was the answer that was lost, both
    have the request then, and generate the same tokens. No receiver that is left, or any other failure, stops the
    thread; it is raised by the next call of `arrived`, and no request is reported as arrived that is not.
    """

    def __init__(self, receivers: Sequence[Transport], timeout: float, pause: float = 0.01) -> None:
        """timeout: seconds of silence that are enough. pause: seconds before full receivers are asked again."""
        if not receivers:
            raise ValueError("no receivers, allowed: at least one")
        self.sent = Sent()
        self._receivers, self._timeout, self._pause = list(receivers), timeout, pause
        self._waiting: deque[KVBundle] = deque()
        self._arrived: deque[int] = deque()
        self._failed: deque[Failed] = deque()
        self._unwanted: set[str] = set()  # ids of bundles: a name may come again
        self._refusals: dict[int, list[TransferRefused]] = {}  # by receiver, of the first bundle
        self._gone: dict[int, TransferError] = {}  # by receiver that does not listen any more
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

    def failed(self) -> list[Failed]:
        """Requests that no receiver will ever take, since the last call. They are not sent any more."""
        return [self._failed.popleft() for _ in range(len(self._failed))]

    def abort(self, name: int) -> None:
        """Do not send a request any more, unless it is on its way right now."""
        self._unwanted |= {each.header.id for each in list(self._waiting) if each.header.note["name"] == name}

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
                    self._refusals.clear()
                    self._unwanted.discard(self._waiting.popleft().header.id)
                else:
                    time.sleep(self._pause)
        except BaseException as error:
            self._error = error

    def _offer(self, bundle: KVBundle) -> bool:
        """Whether nothing is to be done for it any more: somebody took it, nobody ever will, or nobody wants it."""
        for turn in range(len(self._receivers)):
            if bundle.header.id in self._unwanted:
                self._arrived.append(bundle.header.note["name"])
                return True
            which = (self._next + turn) % len(self._receivers)
            if which not in self._gone and not self._hopeless(which) and self._send(which, bundle):
                self._arrived.append(bundle.header.note["name"])
                self._next = which + 1
                return True
        if len(self._gone) == len(self._receivers):
            said = "; ".join(f"receiver {which}: {error}" for which, error in sorted(self._gone.items()))
            raise TransferError(f"none of {len(self._receivers)} receivers listens any more: {said}")
        left = set(range(len(self._receivers))) - self._gone.keys()
        if all(self._hopeless(which) for which in left):
            last = {which: self._refusals[which][-1] for which in sorted(left)}
            reason = ", ".join(sorted({error.reason for error in last.values()}))
            text = "; ".join(f"receiver {which}: {error}" for which, error in last.items())
            self._failed.append(Failed(bundle.header.note["name"], reason, text))
            self.sent.failed += 1
            return True
        return False

    def _send(self, which: int, bundle: KVBundle) -> bool:
        """Whether a receiver took it. What it says otherwise is kept, but for a lack of room."""
        began = time.perf_counter()
        try:
            self._receivers[which].send(bundle, self._timeout)
        except TransferRefused as error:
            if error.reason == "pages":
                self.sent.refused += 1
            elif error.reason == "aborted":
                self._gone[which] = error
            else:
                self._refusals.setdefault(which, []).append(error)
            return False
        except TransferError as error:
            self._gone[which] = error
            return False
        finally:
            self.sent.seconds += time.perf_counter() - began
        self.sent.bundles += 1
        self.sent.bytes += bundle.bytes
        self.sent.tokens += bundle.header.length
        return True

    def _hopeless(self, which: int) -> bool:
        """Whether a receiver has refused the first bundle for good: at once, or too often if it was spoilt."""
        said = self._refusals.get(which, [])
        return len(said) >= _TRIES or any(error.reason not in ("damaged", "truncated") for error in said)
