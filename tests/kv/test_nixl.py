"""The NIXL transport against a fake that records its calls: nothing here ran on NIXL itself."""

import json
import threading
import time
from collections import defaultdict
from typing import Any

import pytest
import torch

from dscompile.kv.bundle import export_kv
from dscompile.kv.cache import PagedCache
from dscompile.kv.nixl_transport import NixlTransport, nixl_available
from dscompile.kv.transfer import TransferError
from support.paged import tiny_layout
from support.transfers import both, stored_request


class FakeAgent:
    """The calls of `nixl_agent` that the transport makes, within one process. Descriptors name tensors by address."""

    def __init__(self, name: str, world: dict[str, "FakeAgent"], state: str = "DONE") -> None:
        self.name, self.world, self.state = name, world, state
        self.calls: list[str] = []
        self.memory: list[torch.Tensor] = []
        self.notifs: dict[str, list[bytes]] = defaultdict(list)
        self.peers: set[str] = set()
        self.lock = threading.Lock()  # of its notifications
        world[name] = self

    def register_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append("register_memory")
        self.memory.append(tensor)
        return tensor

    def deregister_memory(self, tensor: torch.Tensor) -> None:
        self.calls.append("deregister_memory")
        self.memory = [other for other in self.memory if other is not tensor]

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.peers.add(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.peers.remove(name)

    def get_xfer_descs(self, tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
        return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]

    def get_serialized_descs(self, descs: list[tuple[int, int]]) -> bytes:
        return json.dumps(descs).encode()

    def deserialize_descs(self, data: bytes) -> Any:
        return json.loads(data)

    def send_notif(self, name: str, message: bytes) -> None:
        assert name in self.peers
        self.world[name].notify(self.name, message)

    def notify(self, sender: str, message: bytes) -> None:
        with self.lock:
            self.notifs[sender].append(message)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        with self.lock:
            out, self.notifs = self.notifs, defaultdict(list)
        return out

    def initialize_xfer(self, operation: str, local: Any, remote: Any, name: str, message: bytes) -> Any:
        assert operation == "READ" and name in self.peers
        return [local, remote, name, message, 0]

    def transfer(self, handle: Any) -> str:
        self.calls.append("transfer")
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        if self.state == "DONE":
            (into, size), (where, count) = handle[0][0], handle[1][0]
            assert size == count
            self._at(self, into, size).copy_(self._at(self.world[handle[2]], where, size))
            self.world[handle[2]].notify(self.name, handle[3])
        return self.state

    def release_xfer_handle(self, handle: Any) -> None:
        self.calls.append("release_xfer_handle")

    @staticmethod
    def _at(agent: "FakeAgent", where: int, size: int) -> torch.Tensor:
        """Registered memory only, as NIXL demands."""
        for tensor in agent.memory:
            start = where - tensor.data_ptr()
            if 0 <= start and start + size <= tensor.numel():
                return tensor[start : start + size]
        raise AssertionError("memory that was not registered")


def pair(state: str = "DONE", message_bytes: int = 8192) -> tuple[NixlTransport, NixlTransport]:
    world: dict[str, FakeAgent] = {}
    ends = [NixlTransport(name, FakeAgent(name, world, state), message_bytes) for name in ("prefill", "decode")]
    ends[0].connect(ends[1].metadata)
    ends[1].connect(ends[0].metadata)
    return ends[0], ends[1]


def test_a_bundle_goes_over_in_one_sided_reads() -> None:
    cache, number = stored_request(120)
    mine = PagedCache(tiny_layout(), requests=2, token_pages=40)
    out, back = pair()
    out.frame_bytes = 500
    sent, got = both(lambda: out.send(export_kv(cache, number), 20), lambda: back.receive(mine, 20))
    assert sent is None
    for name, rows in mine.state_bytes(got).items():
        assert rows.equal(cache.state_bytes(number)[name])
    for end in (out, back):
        calls = end._agent.calls
        assert calls[:2] == ["register_memory"] * 2
        assert calls.count("transfer") == calls.count("release_xfer_handle") > 0
        end.close()
        assert not end._agent.memory and not end._agent.peers


@pytest.mark.parametrize(("state", "message"), [("ERR", "read from prefill failed"), ("PROC", "not done within")])
def test_a_read_that_fails(state: str, message: str) -> None:
    mine = PagedCache(tiny_layout(), requests=2, token_pages=40)
    out, back = pair(state)
    sent, got = both(lambda: out.send(export_kv(*stored_request()), 5), lambda: back.receive(mine, 0.2))
    assert isinstance(got, TransferError) and message in str(got)
    assert isinstance(sent, TransferError) and "decode could not read a message of" in str(sent)
    assert mine.pages.used_bytes == 0 and "release_xfer_handle" in back._agent.calls


def test_silence_and_refusals() -> None:
    out, back = pair()
    with pytest.raises(TransferError, match="prefill sent nothing for 0.05 s"):
        back.read(0.05)
    with pytest.raises(TransferError, match="message of 9000 bytes, allowed: 1 to 8192"):
        out.write(bytes(9000), 1)
    with pytest.raises(TransferError, match="after `connect`"):
        NixlTransport("lonely", FakeAgent("lonely", {})).read(0.1)
    if not nixl_available():
        with pytest.raises(ImportError, match="pip install nixl"):
            NixlTransport("nobody")


def test_an_agent_with_two_transports() -> None:
    """Each gets what its own peer sent, whichever asks first; notes that come before `connect` are kept."""
    world: dict[str, FakeAgent] = {}
    agents = {name: FakeAgent(name, world) for name in ("prefill", "first", "second")}
    ends = {name: NixlTransport(name, agents[name], 8192) for name in ("first", "second")}
    mine = {name: NixlTransport(name, agents["prefill"], 8192) for name in ends}
    for name, end in ends.items():
        end.connect(agents["prefill"].get_agent_metadata())
        with pytest.raises(TransferError, match="prefill took nothing"):
            end.write(b"from " + name.encode(), 0.01)
    mine["first"].connect(agents["first"].get_agent_metadata())
    assert mine["first"].read(1) == b"from first"
    with pytest.raises(TransferError, match="first sent nothing"):
        mine["first"].read(0.01)
    mine["second"].connect(agents["second"].get_agent_metadata())
    assert mine["second"].read(1) == b"from second"
    results: list[bytes] = []
    readers = [threading.Thread(target=lambda end=end: results.append(end.read(5))) for end in ends.values()]
    for reader in readers:
        reader.start()
    writers = [threading.Thread(target=end.write, args=(name.encode(), 5)) for name, end in mine.items()]
    for thread in writers:
        thread.start()
    for thread in (*readers, *writers):
        thread.join(10)
    assert sorted(results) == [b"first", b"second"]
    again = NixlTransport("again", agents["prefill"], 8192)
    with pytest.raises(ValueError, match="peer: first, allowed: none that another open transport"):
        again.connect(agents["first"].get_agent_metadata())
    mine["first"].close()
    mine["first"].close()
    with pytest.raises(TransferError, match="before `close`"):
        mine["first"].read(0.01)
    again.connect(agents["first"].get_agent_metadata())
    with pytest.raises(ValueError, match="again is connected, allowed: connect once"):
        again.connect(agents["first"].get_agent_metadata())


def test_a_message_stays_until_it_was_taken() -> None:
    """Also after its sender stopped waiting; the next one waits for it."""
    out, back = pair()
    with pytest.raises(TransferError, match="decode took nothing for 0.01 s"):
        out.write(b"one", 0.01)
    for _ in range(2):
        with pytest.raises(TransferError, match="decode took nothing, the message before included, for 0.01 s"):
            out.write(b"another", 0.01)
    assert back.read(1) == b"one"
    sent, got = both(lambda: out.write(b"two", 5), lambda: back.read(5))
    assert sent is None and got == b"two"


def test_both_sides_write_at_once() -> None:
    """As a receiver that answers a try whose sender is at its next one."""
    out, back = pair()

    def write(end: NixlTransport) -> list[bytes]:
        for index in range(5):
            end.write(b"%d" % index, 5)
        return [end.read(5) for _ in range(5)]

    assert both(lambda: write(out), lambda: write(back)) == ([b"0", b"1", b"2", b"3", b"4"],) * 2


def test_a_second_try() -> None:
    cache, number = stored_request()
    bundle, (out, back) = export_kv(cache, number), pair()
    mine = PagedCache(tiny_layout(), requests=2, token_pages=40)
    for _ in range(2):
        with pytest.raises(TransferError, match="decode took nothing"):
            out.send(bundle, 0.01)
    sent, got = both(lambda: out.send(bundle, 10), lambda: back.receive(mine, 10))
    assert sent is None and list(mine.pages.requests) == [got]


def test_offers_of_a_transport_that_was_given_up() -> None:
    """They point at memory that is not there: the newest counts, and a number is not taken twice."""
    out, back = pair()
    with pytest.raises(TransferError):
        out.write(b"old", 0.01)
    offer = back._agent.notifs["prefill"][0]
    out.close()
    out = NixlTransport("prefill", out._agent, 8192)
    out.connect(back.metadata)
    sent, got = both(lambda: out.write(b"new", 5), lambda: (time.sleep(0.05), back.read(5))[1])
    assert sent is None and got == b"new"
    back._agent.notifs["prefill"].append(offer)
    with pytest.raises(TransferError, match="prefill sent nothing"):
        back.read(0.01)


def test_message_bytes_are_checked_before_memory_is_registered() -> None:
    agent = FakeAgent("prefill", {})
    with pytest.raises(ValueError, match="message_bytes: 4096, allowed: > 4096"):
        NixlTransport("prefill", agent, 4096)
    assert not agent.memory
