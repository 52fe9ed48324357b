"""A trainer without weights: the trainer service's order of lease, step, checkpoint, ack and publish.

Its weights are the list of the groups they were trained on. As a process:
`python -m tests.support.scripted_trainer API RUN CHECKPOINT STEPS GROUPS_PER_STEP LINGER_S [RECORDS]`. RECORDS is the
folder of the trainer's records.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support.run_folder import record_of
from tests.support.scripted_run import GROUPS_PER_STEP, expected_group, plan

from gristmill import Client, PolicyVersion, RunState
from gristmill.archive.trained import TRAINED_SCHEMA
from gristmill.internal.archive_writer import RunWriter

CHECKPOINT_INTERVAL = 3


@dataclass(frozen=True)
class Checkpoint:
    step: int = 0
    trained: list[str] = field(default_factory=list)
    """Every group the weights were trained on, in order."""
    covered: list[str] = field(default_factory=list)
    """The groups since the previous checkpoint. The run's next trainer settles them."""
    creation: str | None = None
    """Of the run."""

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def save(self, path: Path) -> None:
        """Saves the checkpoint: it is durable under its name, or does not exist."""
        partial = path.with_suffix(".partial")
        with partial.open("w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


async def train(
    client: Client,
    run_id: str,
    path: Path,
    steps: int,
    groups: int = GROUPS_PER_STEP,
    linger_s: float = 0.0,
    records: Path | None = None,
) -> None:
    """Resumes from the checkpoint at `path` and trains to the end of the run. It waits before and after each
    checkpoint, so that some kills happen at that moment."""
    resumed = Checkpoint.load(path)
    incarnation, run = await client.take(run_id, plan(steps, groups), resumed.covered, creation=resumed.creation)
    weights, step = list(resumed.trained), resumed.step
    batches: list[str] = []
    covered: list[str] = []
    writer = None if records is None else RunWriter(records, run_id, round(run.created_at * 1000), 1 << 30)
    await client.record_version(run_id, PolicyVersion(incarnation, step))
    while step < steps:
        batch_id = f"{incarnation}.{step + 1}"
        batch = await client.lease(run_id, incarnation, batch_id, groups, wait=1)
        if batch is None:
            continue
        for group in batch:
            expected = expected_group(run_id, group.group_id, group.env_id)
            assert group.encode() == expected.encode(), "not what was submitted"
        ids = [group.group_id for group in batch]
        assert len(ids) == groups
        assert not {*ids} & {*covered}, "its own groups again: their lease ran out"
        step += 1
        if writer is not None:
            for group in batch:
                record = record_of(group, step, str(PolicyVersion(incarnation, step)))
                writer.append(group.group_id, TRAINED_SCHEMA, record.encode())
        batches.append(batch_id)
        covered += ids
        if step % CHECKPOINT_INTERVAL == 0 or step == steps:
            weights += covered
            await asyncio.sleep(linger_s)
            Checkpoint(step, weights, covered, run.creation).save(path)
            await asyncio.sleep(linger_s)
            await client.ack(run_id, incarnation, batches)
            await asyncio.sleep(linger_s)
            batches, covered = [], []
        await client.record_version(run_id, PolicyVersion(incarnation, step))
    assert (await client.finish(run_id, incarnation)).state is RunState.FINISHED


async def _main(
    api: str, run_id: str, checkpoint: str, steps: str, groups: str, linger_s: str, records: str = ""
) -> None:
    folder = Path(records) if records else None
    async with Client(api, patience=60, timeout=10) as client:
        await train(client, run_id, Path(checkpoint), int(steps), int(groups), float(linger_s), folder)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
