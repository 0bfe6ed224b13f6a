"""Bundles from several senders between the steps of a decode rank, which none of them can hold up or end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dscompile.kv.bundle import BundleRefused
from dscompile.kv.pages import OutOfPages
from dscompile.kv.transfer import MessageTransport, TransferError
from dscompile.serving.decode import DecodeLoop
from dscompile.serving.requests import Finished

_QUIET_SECONDS = 0.02  # between messages, before a step is made instead of waiting: a busy sender is quicker
_POLL_SECONDS = 0.0005


@dataclass(frozen=True)
class SenderGone:
    """Word from a decode rank: it does not listen to this sender any more. What had come from it goes on."""

    sender: int
    text: str


@dataclass(frozen=True)
class Refused:
    """Word from a decode rank: it refused a bundle, for a reason of `BundleRefused`. The sender knows and goes on."""

    sender: int
    reason: str
    text: str


class _NothingYet(TransferError):
    """No bundle has begun, and no message is there to begin one."""


class _StepFailed(Exception):
    """A step that was made during a hand-over failed, which is nothing that the sender did."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _BetweenSteps(MessageTransport):
    """A sender's way for one `receive`: while the next message has not come, the rank does something else.

    The cache is not for several threads, so that the rank receives and steps in the same one: `read` makes steps.
    What is coming in meanwhile has pages but is no request yet, and no step sees it.
    """

    def __init__(self, way: MessageTransport, stall: float, meanwhile: Callable[[], object]) -> None:
        self._way, self._stall, self._meanwhile = way, stall, meanwhile
        self._begun = False

    def write(self, message: bytes, timeout: float) -> None:
        """The first is the answer to a header."""
        self._begun = True
        self._way.write(message, min(timeout, self._stall))

    def read(self, timeout: float) -> bytes | bytearray:
        """Bears `timeout` seconds of silence before a message, and `stall` within it: that wait cannot be put off."""
        began = quiet = time.monotonic()
        while not self._way.ready():
            if not self._begun:
                raise _NothingYet("no message of a bundle")
            now = time.monotonic()
            if now - began > timeout:
                raise TransferError(f"nothing from the sender for {timeout:.3g} s in the middle of a bundle")
            if now - quiet < min(_QUIET_SECONDS, self._stall):
                time.sleep(_POLL_SECONDS)
                continue
            try:
                self._meanwhile()
            except Exception as error:
                raise _StepFailed(error) from error
        return self._way.read(min(timeout, self._stall))

    def ready(self) -> bool:
        """As the sender's."""
        return self._way.ready()


class Senders:
    """The ways into a decode rank. A sender that fails is given up, with a word, and the others are not."""

    def __init__(
        self, loop: DecodeLoop, ways: Sequence[MessageTransport], tell: Callable[[object], None], timeout: float,
        stall: float,
    ) -> None:  # fmt: skip
        """timeout: seconds of silence between the messages of a bundle after which a sender counts as gone. stall: the
        same in the middle of a message, where no step is made meanwhile.
        """
        if timeout <= 0 or stall <= 0:
            raise ValueError(f"timeout: {timeout} s and stall: {stall} s, allowed: > 0")
        self._loop, self._ways, self._tell = loop, dict(enumerate(ways)), tell
        self._timeout, self._stall = timeout, stall
        self._coming: set[int] = set()

    @property
    def busy(self) -> bool:
        """Whether a bundle is coming in."""
        return bool(self._coming)

    def receive(self, meanwhile: Callable[[], object]) -> None:
        """Take in what has come, from every sender a bundle; `meanwhile` makes a step, and may call this again."""
        for sender, way in list(self._ways.items()):
            if sender in self._coming or sender not in self._ways:  # this may be a call from within another one
                continue
            self._coming.add(sender)
            try:
                done = self._next(sender, way, meanwhile)
            finally:
                self._coming.remove(sender)
            for each in done:
                self._tell(each)

    def _next(self, sender: int, way: MessageTransport, meanwhile: Callable[[], object]) -> list[Finished]:
        try:
            return self._loop.receive(_BetweenSteps(way, self._stall, meanwhile), self._timeout)
        except (OutOfPages, _NothingYet):  # the sender keeps the request; or passed over what was left of a bundle
            return []
        except _StepFailed as failed:
            raise failed.error from failed.error.__cause__
        except BundleRefused as error:
            self._tell(Refused(sender, error.reason, str(error)))
        except (TransferError, ValueError, TypeError, KeyError, AttributeError) as error:
            # Besides silence: headers with their own digest that are of another kind than this rank can read.
            del self._ways[sender]
            self._tell(SenderGone(sender, f"{type(error).__name__}: {error}"))
        return []
