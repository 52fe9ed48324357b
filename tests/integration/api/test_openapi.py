"""Valid and invalid requests made from our OpenAPI document: no 5xx, and no answer that the document does not list.

Each request meets the same store in the middle of its life (under_way.py). So most requests use ids that exist, and a
failure is reproduced from its request alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import redis
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from schemathesis import Case, HookContext
from tests.integration.api import under_way
from tests.integration.api.store_harness import RUN, trainer
from tests.support.api_server import ApiServer
from tests.support.groups import make_group
from tests.support.redis_contents import Snapshot
from tests.support.redis_server import RedisServer

from gristmill import GROUP_MEDIA_TYPE
from gristmill_api.app import app

Request = Case[Any]

_GROUPS: Final = [
    *(under_way.TRAINED, under_way.DEAD, under_way.LEASED, under_way.READY, under_way.DROPPED),
    *(under_way.HELD, under_way.HELD, under_way.GIVEN_BACK, under_way.GIVEN_BACK, "g00000099"),
]
_BATCHES: Final = [under_way.ACKED_BATCH, under_way.LEASED_BATCH, "b2"]

_WORDS: Final[dict[str, list[Any]]] = {
    "run_id": [RUN, RUN, under_way.FINISHED],
    "group_id": _GROUPS,
    "group_ids[*]": _GROUPS,
    "covered[*]": _GROUPS,
    "batch_id": _BATCHES,
    "batch_ids[*]": _BATCHES,
    "holder": [under_way.HOLDER, under_way.HOLDER, under_way.OTHER],
    "incarnation": [under_way.INCARNATION, under_way.INCARNATION, under_way.FENCED],
    "group_size": [2],
    "reason": ["abandoned", "too_long"],
    "env_id": [under_way.HOLDER],
    "source": ["trainer"],
    "stack": ["default"],
}
"""The usual value of a field, so that a request passes its first guard."""

_OFTEN: Final = 0.9

_SETTINGS: Final[dict[str, dict[str, Any]]] = {"env": {"dataset": "d"}, "trainer": trainer(staleness=3)}
"""The values with which the run was opened and taken. The document leaves these objects open, so chance would never
find them."""

_AT: Final = "/v1/runs/{run_id}"
_FITTING: Final[dict[str, dict[str, Any]]] = {
    f"{_AT}/lease": {"incarnation": under_way.INCARNATION, "batch_id": under_way.LEASED_BATCH, "groups": 1},
    f"{_AT}/permits/return": {"holder": under_way.HOLDER, "group_id": under_way.HELD, "reason": "too_long"},
}
"""Bodies whose fields must be consistent with one another, which chance rarely produces."""

_UNTOLD: Final = ["POST /v1/runs/{run_id}/take", "PUT /v1/runs/{run_id}/groups/{group_id}"]
"""Operations whose bodies follow rules that JSON schema cannot express, so a body that looks valid may be refused. The
operations of Atropos' protocol also belong here, because it reads "1" and true as 1."""


def _config() -> schemathesis.Config:
    bound = {
        f"{place}.{field}": {"dictionary": field.removesuffix("[*]"), "probability": _OFTEN}
        for field in _WORDS
        for place in ("path", "query", "body")
        if place == "body" or not field.endswith("[*]")
    }
    off = {"enabled": False}
    accepted = {"expected-statuses": ["2xx", "401", "403", "404", "409", "410", "429", "503"]}
    return schemathesis.Config.from_dict(
        {
            "dictionaries": {field.removesuffix("[*]"): {"values": values} for field, values in _WORDS.items()},
            "parameters": bound,
            "checks": {"positive_data_acceptance": accepted},
            "operations": [{"include-name": name, "checks": {"positive_data_acceptance": off}} for name in _UNTOLD]
            # map_body makes an invalid request consistent again.
            + [{"include-path": path, "checks": {"negative_data_rejection": off}} for path in _FITTING]
            + [{"include-tag": "atropos", "checks": {"positive_data_acceptance": off, "negative_data_rejection": off}}],
        }
    )


schemathesis.openapi.media_type(
    GROUP_MEDIA_TYPE,
    st.one_of(
        st.sampled_from(_GROUPS).map(lambda name: make_group(name, RUN, version=f"{under_way.INCARNATION}.0").encode()),
        st.binary(max_size=64),
    ),
)
# The event stream never ends: test_journal_http.py tests it.
schema = schemathesis.openapi.from_dict(app.openapi(), config=_config()).exclude(path_regex=r"/events$")


@schema.hook
def map_body(context: HookContext, body: Any) -> Any:
    """Every other body is consistent, or gets the run's settings if the settings are free."""
    if len(str(body)) % 2 == 0:
        return body
    path = context.operation.path if context.operation else ""
    if path == "/scored_data_list":
        return [under_way.ATROPOS["/scored_data"]] * 2
    if path in under_way.ATROPOS:
        return under_way.ATROPOS[path]
    if path in _FITTING:
        return _FITTING[path]
    if isinstance(body, dict):
        # An invalid request stays invalid.
        return {name: _SETTINGS.get(name, value) if isinstance(value, dict) else value for name, value in body.items()}
    return body


@pytest.fixture(scope="module")
def api(shared_redis: RedisServer) -> Iterator[ApiServer]:
    """Long-polls end at once."""
    with ApiServer(shared_redis.api_url, API_MAX_WAIT_S="0.01", **under_way.LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def seeded(api: ApiServer, shared_redis: RedisServer) -> Iterator[Snapshot]:
    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
        under_way.put_under_way(api.url)
        under_way.put_atropos_under_way(api.url)
        yield Snapshot(client)


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


@pytest.fixture
def statuses() -> Iterator[set[int]]:
    """The answers of one operation. Requests that never pass a guard would test little."""
    statuses: set[int] = set()
    yield statuses
    assert any(status < 300 for status in statuses), f"only {sorted(statuses)}"


# The profile sets whether each run draws the same examples, and their number: 10 in `make test`.
@schema.parametrize()
@settings(max_examples=settings().max_examples * 2 // 5, suppress_health_check=list(HealthCheck))
def test_every_answer_is_documented(
    case: Request, api: ApiServer, seeded: Snapshot, session: requests.Session, statuses: set[int]
) -> None:
    seeded.put_back()
    answer = case.call_and_validate(base_url=api.url, session=session, timeout=10)
    statuses.add(answer.status_code)
