"""The NIXL transport against a fake that records its calls: nothing here ran on NIXL itself."""

import json
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
        self.world[name].notifs[self.name].append(message)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
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
            self.world[handle[2]].notifs[self.name].append(handle[3])
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
    sent, got = both(lambda: out.send(export_kv(*stored_request()), 0.3), lambda: back.receive(mine, 0.2))
    assert isinstance(got, TransferError) and message in str(got)
    assert isinstance(sent, TransferError) and "decode took nothing" in str(sent)
    assert mine.pages.used_bytes == 0 and "release_xfer_handle" in back._agent.calls


def test_silence_and_refusals() -> None:
    out, back = pair()
    with pytest.raises(TransferError, match="prefill sent nothing for 0.05 s"):
        back.read(0.05)
    with pytest.raises(TransferError, match="allowed: <= 8192"):
        out.write(bytes(9000), 1)
    with pytest.raises(TransferError, match="after `connect`"):
        NixlTransport("lonely", FakeAgent("lonely", {})).read(0.1)
    if not nixl_available():
        with pytest.raises(ImportError, match="pip install nixl"):
            NixlTransport("nobody")
