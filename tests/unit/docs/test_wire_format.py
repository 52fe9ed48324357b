"""A reader that follows the table of docs/api.md, with msgpack and struct alone, reads what the SDK writes."""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tests.support.groups import make_group

from gristmill import TrajectoryGroup
from gristmill.internal.calls import decode_batch
from gristmill_api.http.framing import array_header, bin_header

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
OBJECTS = {"int": int, "str": str, "map": dict, "list": list}


def _types() -> dict[str, str]:
    """Returns the type of each key in the table of the page."""
    section = PAGE.read_text().partition("### The bytes of groups and batches\n")[2].partition("\n## ")[0]
    types: dict[str, str] = {}
    for keys, kinds in re.findall(r"^\| (`.*?) \| (.*?) \|", section, re.MULTILINE):
        names, given = re.findall(r"`(\w+)`", keys), kinds.split(", ")
        types |= dict(zip(names, given if len(given) == len(names) else given * len(names), strict=True))
    return types


def _read(body: bytes) -> dict[str, Any]:
    """Decodes a group as the page describes it."""
    wire, types = msgspec.msgpack.decode(body), _types()
    size = len(wire["lengths"]) // 4
    total = sum(struct.unpack(f"<{size}i", wire["lengths"]))
    found: dict[str, Any] = {}
    for key, kind in types.items():
        value = wire.get(key)
        if value is None:
            assert kind.endswith("?"), key
        elif kind == "bit[N]":
            found[key] = [bool(value[place // 8] >> place % 8 & 1) for place in range(total)]
        elif array := re.fullmatch(r"(i|f)32\[(G|N|N\*K)\]\??", kind):
            count = {"G": size, "N": total}.get(array[2], len(value) // 4)
            found[key] = list(struct.unpack(f"<{count}{array[1]}", value))
        else:
            assert isinstance(value, OBJECTS[kind.removesuffix("?")])
            found[key] = value
    return found


def _group() -> TrajectoryGroup:
    group = make_group(lengths=[(2, 3), (3, 2)], rewards=[1, 0], rollouts=[0, 1])
    ones = np.ones(10, np.float32)
    return dataclasses.replace(
        group, advantages=ones, ref_logprobs=-ones, distill_ids=np.arange(20, dtype=np.int32),
        distill_logprobs=-np.ones(20, np.float32), overrides={"a": 1}, meta={"b": 2}, messages=[[], []],
    )  # fmt: skip


def test_page_describes_every_key_of_a_group() -> None:
    body = _group().encode()
    assert {*_types()} == {*msgspec.msgpack.decode(body)}


def test_reader_that_follows_the_page_reads_a_group() -> None:
    group = _group()
    for name, value in _read(group.encode()).items():
        if name == "format":
            assert value == 1
            continue
        expected = getattr(group, name)
        if isinstance(expected, np.ndarray):
            assert value == expected.tolist(), name
        else:
            assert value == msgspec.to_builtins(expected), name


def test_writer_that_follows_the_page_writes_a_group_and_a_batch() -> None:
    body = msgspec.msgpack.encode(
        {
            "format": 1, "group_id": "g00000001", "run_id": "sums", "env_id": "env-1", "row": 1,
            "lengths": struct.pack("<1i", 3), "tokens": struct.pack("<3i", 5, 6, 7),
            "logprobs": struct.pack("<3f", 0, 0, -0.5), "mask": bytes([0b100]), "rewards": struct.pack("<1f", 1),
            "reward_parts": {}, "finish_reasons": ["stop"], "sampling": {"temperature": 1.0, "max_tokens": 1},
            "versions": [[["1.0", 0, 1]]],
        }
    )  # fmt: skip
    group = TrajectoryGroup.decode(body)
    assert group.mask.tolist() == [False, False, True]
    batch = array_header(1) + bin_header(len(body)) + body
    assert msgspec.msgpack.decode(batch) == [body]
    assert [one.group_id for one in decode_batch(batch)] == ["g00000001"]
