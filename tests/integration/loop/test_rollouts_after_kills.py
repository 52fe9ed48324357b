"""The table of rollouts after a kill storm: the rows of acked groups equal the acked groups, and the
rows of all other groups name the reason."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.support.kill_loop import RUN, KillLoop, Outcome
from tests.support.scripted_run import GROUP_SIZE, GROUPS_PER_STEP, expected_group

from gristmill_view import sql

pytest.importorskip("duckdb")
ROUNDS = 4
DROP_EVERY = 7


def storm(runs_dir: Path, **api: str) -> Outcome:
    given = os.environ.get("KILL_LOOP_SEED")
    seed = int(given) if given else random.SystemRandom().randrange(1 << 32)
    with KillLoop(rounds=ROUNDS, seed=seed, runs_dir=runs_dir, drop_every=DROP_EVERY, api=api) as kills:
        outcome = kills.run()
    assert outcome.ledger.problems() == {}, outcome.text()
    return outcome


def groups(runs_dir: Path, where: str) -> list[str]:
    query = f"SELECT DISTINCT group_id FROM rollouts WHERE {where} ORDER BY group_id"
    found: list[str] = sql(runs_dir / RUN, query)["group_id"].to_pylist()
    return found


@pytest.mark.long
def test_acked_groups_have_rows_after_a_kill_storm(tmp_path: Path) -> None:
    outcome = storm(tmp_path, API_ARCHIVE_MIN_FREE_BYTES="0")
    audit = outcome.ledger.audit
    assert groups(tmp_path, "acked") == audit.trained, outcome.text()
    assert groups(tmp_path, "outcome = 'dropped'") == sorted(audit.dropped), outcome.text()
    assert set(audit.dropped.values()) == {"same_scores"}
    rows = sql(tmp_path / RUN, "SELECT * FROM rollouts WHERE acked ORDER BY group_id, sequence").to_pylist()
    assert len(rows) == GROUP_SIZE * len(audit.trained)
    steps = {group_id: place // GROUPS_PER_STEP + 1 for place, group_id in enumerate(outcome.ledger.lineage)}
    for row in rows:
        assert (row["outcome"], row["step"]) == ("trained", steps[row["group_id"]]), outcome.text()
        assert row["trainer_logprobs"] is not None
        group = expected_group(RUN, row["group_id"])
        start = int(group.lengths[: row["sequence"]].sum())
        assert row["tokens"] == group.tokens[start : start + int(group.lengths[row["sequence"]])].tolist()


@pytest.mark.long
def test_groups_removed_from_a_small_archive_have_rows_with_outcome_lost(tmp_path: Path) -> None:
    outcome = storm(tmp_path, API_ARCHIVE_MIN_FREE_BYTES="0", API_ARCHIVE_MAX_BYTES="30000")
    audit = outcome.ledger.audit
    lost, kept = groups(tmp_path, "outcome = 'lost'"), groups(tmp_path, "outcome = 'trained'")
    assert sorted(lost + kept) == audit.trained, outcome.text()
    assert lost
    assert groups(tmp_path, "outcome = 'lost' AND outcome_reason <> 'max_bytes'") == []
    assert groups(tmp_path, "outcome = 'lost' AND step IS NULL") == []
