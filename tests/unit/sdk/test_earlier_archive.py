"""Archives that the trajectory API wrote at f365baa are still read: plain, compressed, and of Atropos' protocol."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.groups import make_group

from gristmill import read_archive, read_rollouts

FILES = Path(__file__).parents[2] / "support" / "earlier_files"


@pytest.mark.parametrize(("run", "length"), [("run-1", 5), ("run-2", 60)], ids=["plain", "compressed"])
def test_archive_of_an_earlier_version_returns_its_groups(run: str, length: int) -> None:
    read = list(read_rollouts(FILES / run))
    assert [group.group_id for group in read] == ["g00000000", "g00000001"]
    for row, group in enumerate(read):
        written = make_group(group.group_id, run, lengths=[(3, length)] * 2, seed=row)
        for name in ("lengths", "tokens", "logprobs", "mask", "rewards"):
            np.testing.assert_array_equal(getattr(group, name), getattr(written, name), err_msg=name)
        assert (group.run_id, group.env_id, group.row) == (run, "env-1", row)
        assert (group.reward_parts, group.finish_reasons) == (written.reward_parts, written.finish_reasons)
        assert (group.sampling, group.versions) == (written.sampling, written.versions)
        assert (group.rollouts, group.rollout_count) == (None, 2)


def test_archive_of_an_earlier_version_returns_the_bodies_of_atropos_clients() -> None:
    archived = list(read_archive(FILES / "default"))
    assert {group.schema for group in archived} == {"atropos"}
    bodies = [json.loads(group.body) for group in archived]
    assert [body["tokens"] for body in bodies] == [[[1, 2, 3], [1, 2, 4]]] * len(bodies)
    assert [body["scores"] for body in bodies] == [[1.0, 0.0]] * len(bodies)
