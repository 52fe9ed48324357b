"""The servers' interfaces, as the measurements use them: submit a round's groups, draw batches, and empty the queue."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from benchmarks.api.clients import Answer, Http, Request, UnexpectedAnswer
from benchmarks.api.payloads import Payload, Shape, group_id

from gristmill import GROUP_MEDIA_TYPE, TrajectoryGroup

BATCH_GROUPS = 8
"""Groups per batch."""
_JSON = {"Content-Type": "application/json"}


class Interface(Protocol):
    """One interface of a server."""

    name: str
    port: int

    def prepare(self, payloads: Sequence[Payload], count: int) -> list[Request]:
        """Empties the queue. Returns the requests that submit `count` groups with the payloads' contents in turn."""

    def draw(self, http: Http) -> Answer:
        """Returns the next batch of BATCH_GROUPS groups."""

    def settle(self, http: Http) -> None:
        """Reports that the batch drawn last is trained, if the protocol has such a request."""

    def holds(self, answer: Answer, payloads: Sequence[Payload]) -> bool:
        """Returns whether the batch is BATCH_GROUPS groups, each with the content of a payload."""


class AtroposInterface:
    """Atropos' protocol: the reference server, or the root of Gristmill's API."""

    def __init__(self, name: str, port: int, shape: Shape, *, gzipped: bool) -> None:
        self.name = name
        self.port = port
        self._shape = shape
        self._gzip = gzipped

    def prepare(self, payloads: Sequence[Payload], count: int) -> list[Request]:
        http = Http(self.port)
        http.ok(Request("GET", "/reset_data"))
        trainer = {
            "wandb_group": "bench", "wandb_project": "bench", "checkpoint_dir": "", "max_token_len": self._shape.tokens,
            "batch_size": BATCH_GROUPS * self._shape.sequences, "save_checkpoint_interval": 0, "starting_step": 0,
            "num_steps": 1_000_000,
        }  # fmt: skip
        env = {"max_token_length": self._shape.tokens, "desired_name": "bench", "weight": 1.0,
               "group_size": self._shape.sequences}  # fmt: skip
        http.ok(_post("/register", trainer))
        http.ok(Request("GET", "/batch"))  # environments may register after a trainer's first request
        http.ok(_post("/register-env", env))
        http.close()
        if self._gzip:
            headers = {**_JSON, "Content-Encoding": "gzip"}
            sent = [Request("POST", "/scored_data", (payload.gzipped,), headers) for payload in payloads]
        else:
            sent = [Request("POST", "/scored_data", (payload.plain,), _JSON) for payload in payloads]
        return list(itertools.islice(itertools.cycle(sent), count))

    def draw(self, http: Http) -> Answer:
        return http.ok(Request("GET", "/batch", headers={"Accept-Encoding": "gzip"} if self._gzip else {}))

    def settle(self, http: Http) -> None:
        """Does nothing, because the protocol has no request after a batch was sent."""

    def holds(self, answer: Answer, payloads: Sequence[Payload]) -> bool:
        batch = atropos_batch(answer)
        sent = [json.loads(payload.plain) for payload in payloads]
        return len(batch) == BATCH_GROUPS and all(
            any(all(group[key] == content[key] for key in content) for content in sent) for group in batch
        )


class NativeInterface:
    """/v1 of Gristmill's API, with one separate run."""

    name = "native"

    def __init__(self, port: int, shape: Shape, run_id: str) -> None:
        self.port = port
        self.run_id = run_id
        self.at = f"/v1/runs/{run_id}"
        self._shape = shape
        self._batch = itertools.count()
        self.incarnation = 0

    def open(self) -> None:
        """Opens the run and takes it, with capacity for any number of groups."""
        http = Http(self.port)
        trainer = {
            "batch_size": self._shape.sequences, "gradient_accumulation_steps": 1,
            "training_steps": 10**9, "max_staleness": 10**8,
        }  # fmt: skip
        http.ok(_post("/v1/runs", {"run_id": self.run_id, "env": {}, "group_size": self._shape.sequences}))
        answer = http.ok(_post(f"{self.at}/take", {"trainer": trainer, "covered": []}))
        self.incarnation = json.loads(answer.body)["incarnation"]
        http.ok(_post(f"{self.at}/version", {"incarnation": self.incarnation, "step": 0}))
        http.close()

    def close(self) -> None:
        """Ends the run, so that the next run may open."""
        http = Http(self.port)
        http.ok(_post(f"{self.at}/close", {}))
        http.close()

    def prepare(self, payloads: Sequence[Payload], count: int) -> list[Request]:
        http = Http(self.port)
        for groups in (BATCH_GROUPS, 1):
            while self.lease(http, groups, wait=0).status == 200:
                self.settle(http)
        rows = self.permits(http, "bench", count)
        http.close()
        return [
            self.submission("bench", row, payload)
            for row, payload in zip(rows, itertools.cycle(payloads), strict=False)
        ]

    def permits(self, http: Http, holder: str, count: int) -> list[int]:
        """Requests `count` permits and returns their rows."""
        rows: list[int] = []
        while len(rows) < count:
            ask = {"holder": holder, "count": min(count - len(rows), 256), "wait": 0}
            rows += [permit["row"] for permit in json.loads(http.ok(_post(f"{self.at}/permits", ask)).body)["permits"]]
        return rows

    def submission(self, holder: str, row: int, payload: Payload) -> Request:
        path = f"{self.at}/groups/{group_id(row)}?holder={holder}"
        return Request("PUT", path, payload.native(self.run_id, row, holder), {"Content-Type": GROUP_MEDIA_TYPE})

    def draw(self, http: Http) -> Answer:
        answer = self.lease(http, BATCH_GROUPS, wait=0)
        if answer.status != 200:
            raise UnexpectedAnswer(f"no batch was ready: {answer.status}")
        return answer

    def settle(self, http: Http) -> None:
        http.ok(_post(f"{self.at}/ack", {"incarnation": self.incarnation, "batch_ids": [self._last]}))

    def holds(self, answer: Answer, payloads: Sequence[Payload]) -> bool:
        batch = native_batch(answer)
        return len(batch) == BATCH_GROUPS and all(any(payload.holds(group) for payload in payloads) for group in batch)

    def lease(self, http: Http, groups: int, wait: float) -> Answer:
        """Leases a batch of `groups` groups under a new id. The status is 204 if fewer groups are ready."""
        self._last = f"b{next(self._batch)}"
        ask = {"incarnation": self.incarnation, "batch_id": self._last, "groups": groups, "wait": wait}
        return http.ok(_post(f"{self.at}/lease", ask))


def _post(path: str, body: Mapping[str, Any]) -> Request:
    return Request("POST", path, (json.dumps(body).encode(),), _JSON)


def native_batch(answer: Answer) -> list[TrajectoryGroup]:
    """Returns the groups of a lease."""
    return [TrajectoryGroup.decode(body) for body in msgspec.msgpack.decode(answer.body, type=list[bytes])]


def atropos_batch(answer: Answer) -> list[dict[str, Any]]:
    """Returns the groups of a GET /batch."""
    body = gzip.decompress(answer.body) if answer.headers.get("content-encoding") == "gzip" else answer.body
    batch: list[dict[str, Any]] | None = json.loads(body)["batch"]
    return batch or []
