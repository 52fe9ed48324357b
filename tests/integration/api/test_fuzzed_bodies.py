"""Bodies that are not a valid group of this permit: the API answers 400 with the reason, and the store keeps its
contents.

The SDK decides. If TrajectoryGroup.decode reads the bytes, the ids, row and size match the permit, and the run
published the weights, the bytes are a group, however they were made. Anything else is not a group.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import numpy as np
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.api import under_way
from tests.integration.api.store_harness import RUN
from tests.support.api_server import ApiServer
from tests.support.groups import make_group
from tests.support.redis_contents import Snapshot, contents, wait_for_archiver
from tests.support.redis_server import RedisServer

from gristmill import GROUP_MEDIA_TYPE, GroupError, TrajectoryGroup
from gristmill.group_checks import check_submitted
from gristmill_api.http.error_handlers import Refusal

GROUP: Final = under_way.HELD
BODY: Final = make_group(GROUP, RUN, version=f"{under_way.INCARNATION}.0").encode()
WIRE: Final[dict[str, Any]] = msgspec.msgpack.decode(BODY)
PUBLISHED: Final = {f"{under_way.INCARNATION}.{step}" for step in (0, 1)}
"""The newest version, and the next one: a trainer publishes weights before it records their version."""
MANY: Final = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
MIB: Final = 1 << 20
MAX_BODY: Final = 8 * MIB
GROWTH: Final = 100 * MIB
"""The bound on the growth of the API's peak memory over all these requests: some copies of the largest body."""


class Door:
    """The URL to which bodies are submitted under the permit for GROUP."""

    def __init__(self, api: ApiServer, store: redis.Redis) -> None:
        under_way.put_under_way(api.url)
        self.http = httpx.Client(base_url=api.url, timeout=60)
        self._store = store
        wait_for_archiver(store)
        self._snapshot = Snapshot(store)
        self._before = contents(store)

    def judge(self, body: bytes, **how: Any) -> httpx.Response:
        """Submits the body and checks the answer. Removes a group that was stored."""
        answer = self.put(body, **how)
        after = contents(self._store)
        if after != self._before:
            self._snapshot.put_back()
        if not how and _is_ours(body):
            assert answer.status_code == 201, answer.text
            assert after != self._before
            return answer
        assert 400 <= answer.status_code < 500, answer.text[:2000]
        assert len(answer.content) < 4096, "the reason does not repeat the body"
        assert Refusal.model_validate(answer.json()).error.message
        assert after == self._before
        return answer

    def put(self, body: bytes, *, run: str = RUN, group: str = GROUP, media: str = GROUP_MEDIA_TYPE) -> httpx.Response:
        return self.http.put(
            f"/v1/runs/{run}/groups/{group}",
            params={"holder": under_way.HOLDER},
            content=body,
            headers={"Content-Type": media},
        )


def _is_ours(body: bytes) -> bool:
    try:
        group = TrajectoryGroup.decode(body)
        check_submitted(group)
    except GroupError:
        return False
    sent = (group.run_id, group.group_id, group.row, group.size, group.env_id)
    versions = {span.version for spans in group.versions for span in spans}
    return sent == (RUN, GROUP, WIRE["row"], 2, under_way.HOLDER) and versions <= PUBLISHED


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with (
        RedisServer() as server,
        redis.Redis.from_url(server.url) as store,
        ApiServer(server.url, API_MAX_BODY_BYTES=str(MAX_BODY), **under_way.LIMITS) as api,
    ):
        door = Door(api, store)
        before = _peak_memory(api.pid)
        yield door
        assert _peak_memory(api.pid) - before < GROWTH
        assert "Traceback" not in api.log()


def _peak_memory(pid: int) -> int:
    """Returns the peak memory of the process in bytes (VmHWM)."""
    line = next(text for text in Path(f"/proc/{pid}/status").read_text().splitlines() if text.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_unchanged_body_is_stored(door: Door) -> None:
    assert door.judge(BODY).status_code == 201


def test_body_truncated_at_any_byte_is_refused(door: Door) -> None:
    for length in range(len(BODY)):
        assert door.judge(BODY[:length]).status_code == 400, length


@MANY
@given(flips=st.lists(st.tuples(st.integers(0, len(BODY) - 1), st.integers(1, 255)), min_size=1, max_size=6))
def test_body_with_flipped_bytes_is_refused_unless_it_is_a_valid_group(
    door: Door, flips: list[tuple[int, int]]
) -> None:
    body = bytearray(BODY)
    for position, mask in flips:
        body[position] ^= mask
    door.judge(bytes(body))


@MANY
@given(position=st.integers(0, len(BODY)), end=st.integers(0, 40), junk=st.binary(max_size=40))
def test_body_with_replaced_bytes_is_refused_unless_it_is_a_valid_group(
    door: Door, position: int, end: int, junk: bytes
) -> None:
    door.judge(BODY[:position] + junk + BODY[position + end :])


@MANY
@given(body=st.binary(max_size=400))
def test_body_of_random_bytes_is_refused(door: Door, body: bytes) -> None:
    door.judge(body)


_NUMBERS = [0, 1, -1, 7, 2**31 - 1, -(2**31), 2**32, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, -0.0, 1e308, 5e-324]
_ODD = [
    float("nan"),
    float("inf"),
    float("-inf"),
    None,
    True,
    "",
    "x",
    "\x00",
    "1.0",
    "9" * 5000,
    "x" * 70_000,
    b"",
    b"x",
]
_SOME = st.sampled_from([*_NUMBERS, *_ODD])
_ARRAYS = st.one_of(
    st.lists(st.sampled_from([0, 1, -1, 4, 5, 7, 12, 2**31 - 1, -(2**31)]), max_size=14).map(
        lambda values: np.array(values, "<i4").tobytes()
    ),
    st.lists(st.sampled_from([0, -0.5, 0.5, 1e38, float("nan"), float("inf"), float("-inf")]), max_size=14).map(
        lambda values: np.array(values, "<f4").tobytes()
    ),
)
_SPANS = st.lists(st.lists(st.tuples(st.sampled_from(["1.0", "1", "1." + "9" * 400, ""]), _SOME, _SOME), max_size=2))
_VALUES = st.one_of(
    _SOME,
    _ARRAYS,
    _SPANS,
    st.recursive(_SOME, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)),
    st.fixed_dictionaries({"temperature": _SOME, "max_tokens": _SOME}, optional={"top_p": _SOME, "later": _SOME}),
    st.dictionaries(st.text(max_size=3), st.lists(_SOME, max_size=3), max_size=2),
)
_RESERVED = ["advantages", "ref_logprobs", "distill_ids", "distill_logprobs", "overrides", "messages", "meta"]


@MANY
@given(fields=st.dictionaries(st.sampled_from([*WIRE, *_RESERVED, "later"]), _VALUES, min_size=1, max_size=2))
def test_body_with_wrong_values_is_refused_unless_it_is_a_valid_group(door: Door, fields: dict[str, Any]) -> None:
    door.judge(msgspec.msgpack.encode({**WIRE, **fields}))


def test_body_without_a_field_is_refused_with_the_name_of_the_field(door: Door) -> None:
    for name in WIRE:
        answer = door.judge(msgspec.msgpack.encode({key: value for key, value in WIRE.items() if key != name}))
        assert f"`{name}`" in answer.json()["error"]["message"]


_HUGE = 0xFFFF_FFFF
_HEADERS = {
    "array": struct.pack(">BI", 0xDD, _HUGE),
    "map": struct.pack(">BI", 0xDF, _HUGE),
    "bin": struct.pack(">BI", 0xC6, _HUGE),
    "str": struct.pack(">BI", 0xDB, _HUGE),
    "ext": struct.pack(">BIb", 0xC9, _HUGE, 1),
    "array of a million": struct.pack(">BI", 0xDD, 1_000_000),
    "map of a million": struct.pack(">BI", 0xDF, 1_000_000),
}


@pytest.mark.parametrize("announced", _HEADERS)
@pytest.mark.parametrize("field", [None, *WIRE, *_RESERVED, "later"])
def test_body_that_only_announces_its_size_is_refused(door: Door, field: str | None, announced: str) -> None:
    header = _HEADERS[announced]
    assert door.judge(header if field is None else _with(field, header)).status_code == 400


_DEEP = {
    "arrays": lambda depth: b"\x91" * depth + b"\xc0",
    "maps": lambda depth: b"\x81\xa1a" * depth + b"\xc0",
    "arrays without an end": lambda depth: b"\xdd\xff\xff\xff\xff" * depth,
}


@pytest.mark.parametrize("depth", [100, 1000, 10_000, MIB])
@pytest.mark.parametrize("kind", _DEEP)
@pytest.mark.parametrize("field", [None, "messages", "overrides", "meta", "later", "versions", "reward_parts"])
def test_body_with_deep_nesting_is_refused_unless_it_is_a_valid_group(
    door: Door, field: str | None, kind: str, depth: int
) -> None:
    nested = _DEEP[kind](depth)
    door.judge(nested if field is None else _with(field, nested))


_COUNT = 7 * MIB
_WIDE = {
    "messages": struct.pack(">BI", 0xDD, _COUNT) + b"\x90" * _COUNT,
    "meta": b"\x81\xa1a" + struct.pack(">BI", 0xDD, _COUNT) + b"\x80" * _COUNT,
    "overrides": b"\x81\xa1a" + struct.pack(">BI", 0xDD, _COUNT) + b"\x90" * _COUNT,
    "versions": struct.pack(">BI", 0xDD, _COUNT) + b"\x90" * _COUNT,
    "finish_reasons": struct.pack(">BI", 0xDD, _COUNT) + b"\xa0" * _COUNT,
    "reward_parts": b"\x81\xa1a" + struct.pack(">BI", 0xDD, _COUNT) + b"\xc0" * _COUNT,
    "later": struct.pack(">BI", 0xDD, _COUNT) + b"\x90" * _COUNT,
}


@pytest.mark.parametrize("field", _WIDE)
def test_body_of_many_small_objects_is_refused_unless_it_is_a_valid_group(door: Door, field: str) -> None:
    """One byte on the wire can be an object of 64 bytes in memory, so the body's limit alone bounds nothing."""
    door.judge(_with(field, _WIDE[field]))


@pytest.mark.parametrize(
    "media", ["", "application/json", "application/octet-stream", "multipart/form-data", "x" * 2000]
)
def test_body_with_another_media_type_is_refused(door: Door, media: str) -> None:
    assert door.judge(BODY, media=media).status_code == 415


def test_group_sent_under_another_run_or_id_is_refused(door: Door) -> None:
    assert door.judge(BODY, group=under_way.GIVEN_BACK).status_code == 400
    assert door.judge(BODY, run=under_way.FINISHED).status_code == 400
    assert door.judge(make_group(GROUP, under_way.FINISHED).encode(), run=under_way.FINISHED).status_code == 409
    assert door.judge(make_group(GROUP, "nowhere").encode(), run="nowhere").status_code == 404
    for known, status in ((under_way.TRAINED, 409), (under_way.DROPPED, 410), ("g00000099", 410)):
        other = make_group(known, RUN, seed=9, version=f"{under_way.INCARNATION}.0").encode()
        assert door.judge(other, group=known).status_code == status


def _with(field: str, raw: bytes) -> bytes:
    """Returns the group with `raw` in place of one field's value."""
    return msgspec.msgpack.encode({**WIRE, field: msgspec.Raw(raw)})
