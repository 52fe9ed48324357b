"""Batches of Atropos' environments are archived as groups, whichever trainer they went to."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
from tests.integration.api.store_harness import trainer as settings
from tests.integration.atropos.stock_trainer import StockTrainer
from tests.support.api_server import ApiServer

from gristmill import Client, read_rollouts
from gristmill.archive import ArchivedGroup, ArchiveError, read_archive
from gristmill_api.atropos.conversion import to_json


def group(number: int) -> dict[str, Any]:
    rows = [[number, 1, 2]] * 2
    return {"tokens": rows, "masks": rows, "scores": [0.0, 1.0]}


def archived(runs: Path) -> list[ArchivedGroup]:
    """Reads the archive of the only run; empty while the run has no folder."""
    try:
        return [group for run in runs.iterdir() for group in read_archive(run)]
    except ArchiveError:
        return []


def test_delivered_batches_are_archived(redis_url: str, tmp_path: Path) -> None:
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as api:
        trainer = StockTrainer(api.url, 4, 100)
        trainer.register()
        assert trainer.ask() is None
        for number in range(5):
            httpx.post(f"{api.url}/scored_data", json=group(number)).raise_for_status()
        assert trainer.ask() is not None
        assert trainer.ask() is not None
        assert trainer.ask() is None, "the fifth group is not delivered"
        deadline = time.monotonic() + 30
        while len(archived(tmp_path)) < 4:
            assert time.monotonic() < deadline, "the archiver wakes at an ack"
            time.sleep(0.05)
        found = archived(tmp_path)
    assert [json.loads(to_json(each.body))["tokens"] for each in found] == [
        group(number)["tokens"] for number in range(4)
    ]
    (run,) = tmp_path.iterdir()
    assert [each.group_id for each in read_rollouts(run)] == [f"a{number:08d}" for number in range(4)]


async def test_batches_that_a_trainer_of_v1_acked_are_archived_in_the_form_that_it_leased(
    redis_url: str, tmp_path: Path
) -> None:
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as api:
        async with httpx.AsyncClient(base_url=api.url) as http, Client(api.url, patience=10) as client:
            for number in range(3):
                (await http.post("/scored_data", json=group(number))).raise_for_status()
            incarnation, _ = await client.take("default", settings(), [])
            batch = await client.lease("default", incarnation, "b1", 3, wait=0)
            assert batch is not None
            await client.ack("default", incarnation, ["b1"])
        api.stop()
    assert [each.schema for each in archived(tmp_path)] == ["group"] * 3
    assert [each.encode() for each in read_rollouts(tmp_path / "default")] == [each.encode() for each in batch]
