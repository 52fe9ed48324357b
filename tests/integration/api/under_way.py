"""A store in the middle of its life, built over HTTP, so that random requests find existing ids."""

from __future__ import annotations

from typing import Any, Final

import httpx
from tests.integration.api.store_harness import RUN, trainer
from tests.support.groups import make_group

from gristmill import GROUP_MEDIA_TYPE

FINISHED = "run-0"
HOLDER, OTHER = "env-1", "env-2"
FENCED, INCARNATION = 1, 2
TRAINED, DEAD, LEASED, READY, DROPPED, HELD, GIVEN_BACK = (f"g{row:08d}" for row in (0, 1, 2, 4, 6, 7, 8))
ACKED_BATCH, LEASED_BATCH = "b0", "b1"
LIMITS = {"API_MAX_ATTEMPTS": "1", "API_PERMIT_TTL_S": "3600", "API_LEASE_TTL_S": "3600", "API_ENV_TTL_S": "3600"}
"""For the API: one delivery makes a dead letter, and nothing expires while a test checks it."""


ATROPOS: Final[dict[str, dict[str, Any]]] = {
    "/register": {
        **{"wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 64, "checkpoint_dir": "c"},
        **{"save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10},
    },
    "/register-env": {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 2},
    "/disconnect-env": {"env_id": 0},
    "/status-env": {"env_id": 0},
    "/scored_data": {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [0.0, 1.0], "env_id": 0},
}
"""Valid bodies, by endpoint."""


def put_under_way(url: str) -> None:
    """Creates a finished run, and an open run whose groups are in every possible state."""
    with httpx.Client(base_url=url) as http:
        _post(http, "/v1/runs", run_id=FINISHED, env={"dataset": "d"}, group_size=2)
        _post(http, f"/v1/runs/{FINISHED}/close")
        _post(http, "/v1/runs", run_id=RUN, env={"dataset": "d"}, group_size=2)
        at = f"/v1/runs/{RUN}"
        for incarnation in (FENCED, INCARNATION):
            taken = _post(http, f"{at}/take", trainer=trainer(staleness=3))
            assert taken["incarnation"] == incarnation
        _post(http, f"{at}/version", incarnation=INCARNATION, step=0)
        _post(http, f"{at}/envs", env_id=HOLDER, weight=1.0)
        http.post(f"{at}/metrics", json={"source": "trainer", "step": 0, "values": {"loss": 1.0}}).raise_for_status()
        permits = _post(http, f"{at}/permits", holder=HOLDER, count=9)["permits"]
        for permit in permits[:6]:
            submit(http, permit["group_id"]).raise_for_status()
        trainer_side = {"incarnation": INCARNATION}

        def lease(batch_id: str, groups: int) -> None:
            http.post(f"{at}/lease", json={**trainer_side, "batch_id": batch_id, "groups": groups}).raise_for_status()

        lease(ACKED_BATCH, 1)
        _post(http, f"{at}/ack", **trainer_side, batch_ids=[ACKED_BATCH])
        lease("b-nacked", 1)
        _post(http, f"{at}/nack", **trainer_side, batch_ids=["b-nacked"])
        lease(LEASED_BATCH, 2)
        _post(http, f"{at}/permits/return", holder=HOLDER, group_id=DROPPED, reason="too_long")
        _post(http, f"{at}/permits/return", holder=HOLDER, group_id=GIVEN_BACK, reason="abandoned")
        audit = http.get(f"{at}/groups").raise_for_status().json()
        assert audit == {
            "trained": [TRAINED],
            "dead": [DEAD],
            "leased": [LEASED, "g00000003"],
            "ready": [READY, "g00000005"],
            "dropped": {DROPPED: "too_long"},
            "outstanding": [HELD],
        }


def put_atropos_under_way(url: str) -> None:
    """Registers a trainer and an environment at the root, and submits one of their groups."""
    with httpx.Client(base_url=url) as http:
        _post(http, "/register", **ATROPOS["/register"])
        http.get("/batch").raise_for_status()
        assert _post(http, "/register-env", **ATROPOS["/register-env"])["env_id"] == 0
        assert _post(http, "/scored_data", **ATROPOS["/scored_data"]) == {"status": "received"}


def submit(http: httpx.Client, group_id: str, body: bytes | None = None) -> httpx.Response:
    """Sends a PUT with the group, or with `body` under its id."""
    content = make_group(group_id, RUN, version=f"{INCARNATION}.0").encode() if body is None else body
    return http.put(
        f"/v1/runs/{RUN}/groups/{group_id}",
        params={"holder": HOLDER},
        content=content,
        headers={"Content-Type": GROUP_MEDIA_TYPE},
    )


def _post(http: httpx.Client, path: str, **body: Any) -> Any:
    return http.post(path, json=body).raise_for_status().json()
