"""Bundles: what goes in comes out, what does not belong is refused with its reason, and nothing is left of it."""

import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dscompile.formats import FORMATS
from dscompile.kv.bundle import BundleRefused, Header, Incoming, KVBundle, _digest, as_buffer, export_kv, import_kv
from dscompile.kv.cache import PagedCache
from dscompile.kv.pages import OutOfPages
from support.paged import fill, tiny_layout


def cache_of(**changes: object) -> PagedCache:
    return PagedCache(tiny_layout(**changes), requests=3, token_pages=16)


def exported(length: int = 9) -> tuple[PagedCache, int, KVBundle]:
    cache = cache_of()
    cache.open(3)  # so that the pages of the next one are not the first
    number = cache.open(length)
    fill(cache, number, list(range(length)))
    return cache, number, export_kv(cache, number, note={"next": 7})


def unchanged(cache: PagedCache) -> bool:
    return cache.pages.used_bytes == 0 and not cache.pages.requests and not cache.imported


@settings(max_examples=30)
@given(st.integers(1, 40), st.sampled_from([2, 4, 8]))
def test_there_and_back(length: int, page_tokens: int) -> None:
    """Into a cache with other pages: what decoding reads is the same."""
    cache, number, bundle = exported(length)
    other = PagedCache(tiny_layout(page_tokens), requests=2, token_pages=40)
    other.open(5)
    arrived = import_kv(other, bundle, room=length + 6)
    assert other.request(arrived).length == length and other.room(arrived) >= length + 6
    for (name, got), want in zip(other.state_bytes(arrived).items(), cache.state_bytes(number).values()):
        assert got.equal(want), name
    assert bundle.bytes == cache.layout.bytes_for(length).total


def test_header_as_text() -> None:
    _, _, bundle = exported()
    header = Header.from_json(bundle.header.to_json())
    assert header == bundle.header and header.note == {"next": 7}
    for key, value in (("length", 8), ("model", "other"), ("note", {})):
        data = json.loads(bundle.header.to_json())
        data[key] = value
        with pytest.raises(BundleRefused, match="digest"):
            Header.from_json(json.dumps(data))
    for text in ("", "{}", "[]", "null", bundle.header.to_json()[:-9]):
        with pytest.raises(BundleRefused, match="damaged"):
            Header.from_json(text)
    with pytest.raises(BundleRefused, match="version: bundle of version 2, allowed: 1"):
        Header.from_json(replace(bundle.header, version=2).to_json())
    for change in ({"more": 1}, {"parts": 3}, {"parts": [{"name": "window.0"}]}):
        data = {**json.loads(bundle.header.to_json()), **change}
        del data["digest"]
        with pytest.raises(BundleRefused, match="damaged: header has other fields"):
            Header.from_json(json.dumps({**data, "digest": _digest(data)}))


def test_another_model_format_or_version() -> None:
    _, _, bundle = exported()
    other = cache_of(model="other")
    with pytest.raises(BundleRefused, match="rows of model tiny, allowed: other") as model:
        import_kv(other, bundle)
    assert model.value.reason == "model" and unchanged(other)
    other = cache_of(format="bf16")
    with pytest.raises(BundleRefused, match="unlike rows.*fp8_g32_ue8m0.*bf16") as format:
        import_kv(other, bundle)
    assert format.value.reason == "format" and unchanged(other)
    other = cache_of()
    with pytest.raises(BundleRefused) as version:
        import_kv(other, replace(bundle, header=replace(bundle.header, version=3)))
    assert version.value.reason == "version" and unchanged(other)


@pytest.mark.parametrize("part", range(5))
def test_damage_and_missing_bytes(part: int) -> None:
    _, _, bundle = exported()
    spoilt = [rows.clone() for rows in bundle.payload]
    spoilt[part].view(-1)[3] ^= 16
    other = cache_of()
    with pytest.raises(BundleRefused) as damaged:
        import_kv(other, replace(bundle, payload=tuple(spoilt)))
    assert damaged.value.reason == "damaged" and unchanged(other)
    spoilt[part] = bundle.payload[part].flatten()[:-1]
    with pytest.raises(BundleRefused) as truncated:
        import_kv(other, replace(bundle, payload=tuple(spoilt)))
    assert truncated.value.reason == "truncated" and unchanged(other)
    import_kv(other, bundle)  # the same one, whole, is still welcome


def test_twice() -> None:
    _, _, bundle = exported()
    other = cache_of()
    number = import_kv(other, bundle)
    for _ in range(2):
        used = other.pages.used_bytes
        with pytest.raises(BundleRefused, match="came before") as duplicate:
            import_kv(other, bundle)
        assert duplicate.value.reason == "duplicate" and other.pages.used_bytes == used
        if number in other.pages.requests:
            other.close(number)


def test_no_room_is_asked_before_anything_comes() -> None:
    _, _, bundle = exported(9)
    other = PagedCache(tiny_layout(), requests=1, token_pages=2)
    with pytest.raises(OutOfPages):
        Incoming(other, bundle.header)
    assert unchanged(other)


@settings(max_examples=30)
@given(st.integers(1, 700), st.integers(0, 10**6))
def test_pieces_in_any_order(size: int, seed: int) -> None:
    """And some of them twice; nothing is visible before the last one."""
    cache, number, bundle = exported(13)
    pieces = [
        (part, offset, as_buffer(rows)[offset : offset + size])
        for part, rows in enumerate(bundle.payload)
        for offset in range(0, rows.numel(), size)
    ]
    rng = random.Random(seed)
    pieces += rng.sample(pieces, len(pieces) // 2)
    rng.shuffle(pieces)
    other = cache_of()
    incoming = Incoming(other, bundle.header)
    for piece in pieces:
        assert not other.pages.requests
        incoming.put(*piece)
    assert incoming.missing == 0
    arrived = incoming.finish()
    for got, want in zip(other.state_bytes(arrived).values(), cache.state_bytes(number).values()):
        assert got.equal(want)


def test_an_aborted_bundle_leaves_nothing() -> None:
    _, _, bundle = exported()
    other = cache_of()
    incoming = Incoming(other, bundle.header)
    incoming.put(0, 0, as_buffer(bundle.payload[0]))
    assert other.pages.used_bytes > 0 and not other.pages.requests
    with pytest.raises(BundleRefused, match="came before"):
        Incoming(other, bundle.header)
    incoming.abort()
    incoming.abort()
    assert unchanged(other)
    for call in (incoming.finish, lambda: incoming.put(0, 0, b"1")):
        with pytest.raises(BundleRefused, match="no longer awaited"):
            call()


@pytest.mark.parametrize("where", ["adopt", "commit", "store", "slots"])
def test_a_failure_at_the_end_undoes_all_of_it(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The bundle may come again, and nothing of the request is left."""
    _, _, bundle = exported()
    other = cache_of()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of device memory")

    with monkeypatch.context() as patch:
        patch.setattr(other, where, fail)
        with pytest.raises(RuntimeError, match="out of device memory"):
            import_kv(other, bundle)
        assert unchanged(other) and not other._tables
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fail)
        with pytest.raises(RuntimeError, match="out of device memory"):
            import_kv(other, bundle)
        assert unchanged(other)
    import_kv(other, bundle)


@pytest.mark.parametrize(
    ("room", "message"),
    [
        (100.0, "room: 100.0, a float, allowed: int, None or a function of the header"),
        ("9", "room: '9', a str, allowed: int"),
        (True, "room: True, a bool, allowed: int"),
        (lambda header: header.length * 1.5, "room of the header: 13.5, a float, allowed: int"),
        (lambda header: int, "room of the header: <class 'int'>, a type, allowed: int"),
    ],
)
def test_room_that_is_no_number(room: object, message: str) -> None:
    _, _, bundle = exported()
    other = cache_of()
    with pytest.raises(TypeError, match=message):
        import_kv(other, bundle, room=room)
    assert unchanged(other) and other.pages.state.available == 3 and other.pages.tokens.available == 16


def test_pieces_that_do_not_belong() -> None:
    _, _, bundle = exported()
    for pieces, why in (
        ([(9, 0, b"1")], "part 9, allowed: 0 to 4"),
        ([(1, 10**6, b"1")], "allowed: 0 to"),
        ([(1, -1, b"1")], "allowed: 0 to"),
        ([(0, 0, b"12"), (0, 0, b"13")], "came twice and differ"),
        ([(0, 0, b"12"), (0, 1, b"3")], "overlap"),
    ):
        incoming = Incoming(cache_of(), bundle.header)
        with pytest.raises(BundleRefused, match=why):
            for piece in pieces:
                incoming.put(*piece)
        incoming.abort()


def test_conversion_between_formats() -> None:
    cache, number, bundle = exported()
    other = cache_of(format="bf16")
    arrived = import_kv(other, bundle, convert=True)
    was, now = cache.state_bytes(number)["window.0"], other.state_bytes(arrived)["window.0"]
    source = FORMATS["fp8_g32_ue8m0"]
    assert now.view(torch.bfloat16).equal(source.unpack(was, 32, torch.bfloat16)), "exact for this pair"
    for name in ("compressed.0", "index_keys.0", "open_groups.0", "tokens.0"):
        assert other.state_bytes(arrived)[name].equal(cache.state_bytes(number)[name])
    wide = replace(bundle.header, parts=tuple(replace(part, dim=64) for part in bundle.header.parts))
    with pytest.raises(BundleRefused, match="of 64 values, allowed"):
        import_kv(cache_of(format="bf16"), replace(bundle, header=wide), convert=True)


def test_an_empty_request_is_not_exported() -> None:
    cache = cache_of()
    with pytest.raises(ValueError, match="0 tokens stored, allowed: >= 1"):
        export_kv(cache, cache.open(4))
