"""The batch body is plain msgpack: list[bytes]."""

from __future__ import annotations

import msgspec
import pytest

from gristmill_api.http import framing


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65535, 65536])
def test_array_headers_are_valid_msgpack_at_their_bounds(count: int) -> None:
    body = framing.array_header(count) + framing.bin_header(0) * count
    assert msgspec.msgpack.decode(body, type=list[bytes]) == [b""] * count
    assert framing.length([0] * count) == len(body)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65535, 65536, 1 << 20])
def test_bin_headers_are_the_shortest_msgpack_at_their_bounds(size: int) -> None:
    group = b"x" * size
    body = framing.array_header(2) + (framing.bin_header(size) + group) * 2
    assert msgspec.msgpack.decode(body, type=list[bytes]) == [group, group]
    assert framing.length([size, size]) == len(body)
    assert body == msgspec.msgpack.encode([group, group]), "headers are the shortest that fit"


def test_parts_keep_the_order_and_are_one_group_or_at_most_the_part_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "PART_BYTES", 10)
    assert framing.parts([4, 6, 1, 11, 3, 7, 1], int) == [[4, 6], [1], [11], [3, 7], [1]]
    assert framing.parts([], int) == []
