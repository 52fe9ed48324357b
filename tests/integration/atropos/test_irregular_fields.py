"""Groups whose fields do not fit their tokens: atroposlib's own server accepts all of them.

Our API accepts groups with an irregular optional field, and stores them without that field. It refuses only irregular
tokens, masks and scores, which no trainer could use.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis
from tests.integration.atropos.conversation import KEYS
from tests.support.api_server import ApiServer
from tests.support.atropos_reference import FRESH, AtroposReference
from tests.support.grids import rest_is_long
from tests.support.redis_server import RedisServer

REGISTRATION = {
    **{"wandb_group": "", "wandb_project": "", "checkpoint_dir": ""},
    **{"batch_size": 2, "max_token_len": 512, "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 9},
}
GROUP: dict[str, Any] = {
    **dict.fromkeys(KEYS),
    "tokens": [[1, 2, 3], [1, 4]],
    "masks": [[-100, 2, 3], [-100, 4]],
    "scores": [1.0, 0.0],
    "inference_logprobs": [[1.0, -0.5, -0.25], [1.0, -0.5]],
}
BY_TOKEN = {
    "too long": "[[0.5, 0.5, 0.5, 0.5], [0.5, 0.5]]",
    "too short": "[[0.5, 0.5], [0.5, 0.5]]",
    "of ints, too long": "[[0, 0, 0, 0], [0, 0]]",
    "only of the last token": "[[0.5], [0.5]]",
    "one sequence too few": "[[0.5, 0.5, 0.5]]",
    "one sequence too many": "[[0.5, 0.5, 0.5], [0.5, 0.5], [0.5]]",
    "lists without entries": "[[], []]",
    "NaN": "[[0.5, NaN, 0.5], [0.5, 0.5]]",
    "infinity": "[[0.5, -Infinity, 0.5], [0.5, 0.5]]",
    "beyond a float": "[[0.5, 1e999, 0.5], [0.5, 0.5]]",
}
CASES: dict[str, dict[str, str]] = {
    **{
        f"{field}: {how}": {field: value}
        for field in ("advantages", "ref_logprobs", "inference_logprobs")
        for how, value in BY_TOKEN.items()
    },
    "messages: one too many": {"messages": "[[], [], []]"},
    "messages: half a character": {"messages": r'[[{"role": "user", "content": "\ud800"}]]'},
    "overrides: one too many": {"overrides": "[{}, {}, {}]"},
    "overrides: NaN": {"overrides": '[{"a": NaN}]'},
    "group_overrides: infinity": {"group_overrides": '{"a": Infinity}'},
    "generation_params: NaN": {"generation_params": '{"temperature": NaN}'},
    "images: half a character": {"images": r'"\ud800"'},
    "distill_token_ids: too short": {"distill_token_ids": "[[[1], [2]], [[1], [2]]]"},
    "distill_logprobs: one sequence too few": {"distill_logprobs": "[[[-1.0], [-2.0], [-1.0]]]"},
    "distill_logprobs: NaN": {
        "distill_token_ids": "[[[1], [2], [3]], [[1], [2]]]",
        "distill_logprobs": "[[[-1.0], [NaN], [-1.0]], [[-1.0], [-2.0]]]",
    },
    "distill_logprobs: more than ids": {
        "distill_token_ids": "[[[1], [2], [3]], [[1], [2]]]",
        "distill_logprobs": "[[[-1.0], [-1.0, -2.0], [-1.0]], [[-1.0], [-2.0]]]",
    },
    "two fields at once": {"advantages": "[[1.0]]", "messages": "[[], [], []]"},
}
REFUSED: dict[str, dict[str, str]] = {
    "no sequences": {"tokens": "[]", "masks": "[]", "scores": "[]"},
    "masks too short": {"masks": "[[-100, 2], [-100, 4]]"},
    "one mask too few": {"masks": "[[-100, 2, 3]]"},
    "one score too few": {"scores": "[1.0]"},
    "one score too many": {"scores": "[1.0, 0.0, 0.5]"},
    "scores: NaN": {"scores": "[1.0, NaN]"},
}
REFUSED_BY_BOTH: dict[str, dict[str, str]] = {
    "advantages: one per sequence": {"advantages": "[1.0, 0.0]"},
    "inference_logprobs: null inside": {"inference_logprobs": "[[null, 1.0, 1.0], [1.0, 1.0]]"},
    "messages without a role": {"messages": '[[{"content": "a"}]]'},
    "env_id: a fraction": {"env_id": "1.5"},
    "overrides: a dict": {"overrides": "{}"},
}


def body(irregular: dict[str, str], **group: Any) -> bytes:
    texts = {name: json.dumps(value) for name, value in {**GROUP, **group}.items()} | irregular
    return ("{" + ",".join(f'"{name}":{text}' for name, text in texts.items()) + "}").encode()


def post(http: httpx.Client, irregular: dict[str, str], **group: Any) -> httpx.Response:
    """Sends on a connection for this request alone, because the reference breaks the connection with every 500."""
    headers = {"Content-Type": "application/json", "Connection": "close"}
    return http.post("/scored_data", content=body(irregular, **group), headers=headers)


def get(http: httpx.Client, path: str) -> Any:
    return http.get(path, headers={"Connection": "close"}).json()


@pytest.fixture(scope="module")
def _reference() -> Iterator[httpx.Client]:
    with AtroposReference() as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def server(shared_redis: RedisServer) -> Iterator[ApiServer]:
    with ApiServer(shared_redis.api_url) as server:
        yield server


@pytest.fixture
def reference(_reference: httpx.Client) -> httpx.Client:
    _reference.post(FRESH).raise_for_status()
    _reference.post("/register", json=REGISTRATION).raise_for_status()
    return _reference


@pytest.fixture
def ours(server: ApiServer, shared_redis: RedisServer) -> Iterator[httpx.Client]:
    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
    with httpx.Client(base_url=server.url, timeout=30) as client:
        client.post("/register", json=REGISTRATION).raise_for_status()
        yield client


def status(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = get(http, "/v1/runs/default/status")
    return found


@pytest.mark.parametrize("irregular", rest_is_long(*CASES.values(), first=14), ids=CASES)
def test_irregular_optional_field_is_accepted_by_both_and_left_out_by_ours(
    irregular: dict[str, str], reference: httpx.Client, ours: httpx.Client
) -> None:
    theirs, mine = post(reference, irregular), post(ours, irregular)
    assert (theirs.status_code, theirs.json()) == (mine.status_code, mine.json()) == (200, {"status": "received"})
    assert get(ours, "/latest_example") == {**GROUP, **dict.fromkeys(irregular)}
    assert get(ours, "/batch") == {"batch": [{**GROUP, **dict.fromkeys(irregular)}]}, "a trainer gets the group"
    assert status(ours)["left_out"] == dict.fromkeys(irregular, 1)


@pytest.mark.parametrize("irregular", REFUSED.values(), ids=REFUSED)
def test_irregular_required_field_is_refused_by_ours_alone(
    irregular: dict[str, str], reference: httpx.Client, ours: httpx.Client
) -> None:
    assert post(reference, irregular).status_code == 200
    answer = post(ours, irregular)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"][:2] in [["body", name] for name in irregular]


@pytest.mark.parametrize("irregular", REFUSED_BY_BOTH.values(), ids=REFUSED_BY_BOTH)
def test_field_of_another_type_is_refused_by_both(
    irregular: dict[str, str], reference: httpx.Client, ours: httpx.Client
) -> None:
    theirs, mine = post(reference, irregular), post(ours, irregular)
    assert theirs.status_code == mine.status_code == 422
    assert theirs.json() == mine.json()


def test_list_of_groups_is_stored_with_the_fields_that_fit(reference: httpx.Client, ours: httpx.Client) -> None:
    texts = [body({"advantages": BY_TOKEN["too long"]}), body({}), body({"images": "NaN"})]
    for http in (reference, ours):
        answer = http.post(
            "/scored_data_list", content=b"[" + b",".join(texts) + b"]", headers={"Content-Type": "application/json"}
        )
        assert (answer.status_code, answer.json()) == (200, {"status": "received", "groups_processed": 3})
    assert [get(ours, "/batch")["batch"] for _ in range(3)] == [[GROUP], [GROUP], [GROUP]]
    assert status(ours)["left_out"] == {"advantages": 1, "images": 1}


def test_left_out_fields_are_counted_for_each_group_and_logged_once_per_environment(
    server: ApiServer, ours: httpx.Client
) -> None:
    before = len(server.log())
    for env in (77, 77, 79, 78, 77, 79):
        assert post(ours, {"ref_logprobs": BY_TOKEN["too short"]}, env_id=env).status_code == 200
    assert post(ours, {"advantages": BY_TOKEN["NaN"]}, env_id=77).status_code == 200
    assert status(ours)["left_out"] == {"ref_logprobs": 6, "advantages": 1}
    metrics = ours.get("/metrics").text
    assert 'gristmill_api_left_out_fields_total{field="ref_logprobs",run="default"} 6.0' in metrics
    logged = [text for text in server.log()[before:].splitlines() if " left_out " in text]
    named = [text.partition("run=default ")[2].partition(" why=")[0] for text in logged]
    assert named == ["env=77 fields=ref_logprobs", "env=79 fields=ref_logprobs", "env=78 fields=ref_logprobs",
                     "env=77 fields=advantages"]  # fmt: skip


def test_refused_groups_are_counted_by_code_and_logged(server: ApiServer, ours: httpx.Client) -> None:
    def submits() -> Counter[str]:
        found = re.findall(r'submits_total\{outcome="(\w+)"\} (\S+)', ours.get("/metrics").text)
        return Counter({outcome: int(float(count)) for outcome, count in found})

    before, logged = submits(), len(server.log())
    for wrong in (REFUSED["one score too few"], REFUSED_BY_BOTH["inference_logprobs: null inside"]):
        assert post(ours, wrong).status_code == 422
    ours.post("/v1/runs/default/close").raise_for_status()
    answer = ours.post("/scored_data_list", json=[GROUP, GROUP])
    assert (answer.status_code, answer.json()["code"]) == (409, "finished")
    assert submits() - before == {"bad_request": 2, "finished": 2}
    assert server.log()[logged:].count("code=bad_request") == 2


def test_group_without_a_field_that_did_not_fit_is_leased_as_a_binary_group(ours: httpx.Client) -> None:
    """Reads over `/v1`, as Gristmill's own trainer does."""
    assert post(ours, {"advantages": BY_TOKEN["too long"]}).status_code == 200
    run = "/v1/runs/default"
    settings = {"batch_size": 2, "gradient_accumulation_steps": 1, "training_steps": 9, "max_staleness": 1}
    taken = ours.post(f"{run}/take", json={"trainer": settings, "covered": []})
    assert taken.status_code == 200, taken.text
    incarnation = taken.json()["incarnation"]
    answer = ours.post(f"{run}/lease", json={"incarnation": incarnation, "batch_id": "b", "groups": 1})
    assert answer.status_code == 200
    assert status(ours)["dead"] == 0
