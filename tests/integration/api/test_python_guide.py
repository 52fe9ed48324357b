"""The blocks of docs/look-at-a-run.md, "From Python", work in their order, as one program, on a finished run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.integration.api.store_harness import trainer
from tests.support.api_server import ApiServer
from tests.support.groups import make_group
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gristmill import PolicyVersion, SyncClient, read_rollouts
from gristmill.archive import ArchiveError

GUIDE = (Path(__file__).parents[3] / "docs" / "look-at-a-run.md").read_text().partition("\n## From Python\n")[2]
RUN, STEPS, GROUPS = "quickstart", 2, 2
VOCABULARY = 64


def _train(client: SyncClient, folder: Path) -> None:
    """Trains a run of `STEPS` steps to its end, without a model."""
    client.create_run(RUN, {"dataset": "sums"}, 2)
    incarnation, _ = client.take(RUN, trainer(steps=STEPS, groups=GROUPS), [])
    client.record_version(RUN, PolicyVersion(incarnation, 0))
    lines = []
    for step in range(1, STEPS + 1):
        for permit in client.permits(RUN, "env-1", GROUPS, wait=5).permits:
            group = make_group(permit.group_id, RUN, seed=permit.row, vocabulary=VOCABULARY, version=f"1.{step - 1}")
            client.submit(group, "env-1")
        assert client.lease(RUN, incarnation, f"b{step}", GROUPS, wait=5) is not None
        values = {"reward_mean": step / 4, "reward_parts": {"length": 0.5}, "tokens": 40, "seconds": {"train": 0.5}}
        client.report_metrics(RUN, "trainer", step, values)
        lines.append(json.dumps({"step": step, "policy_version": f"1.{step}", **values}) + "\n")
        client.ack(RUN, incarnation, [f"b{step}"])
        client.record_version(RUN, PolicyVersion(incarnation, step))
    client.finish(RUN, incarnation)
    deadline = time.monotonic() + 30
    while _archived(folder) < STEPS * GROUPS:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "model").mkdir()


def _archived(folder: Path) -> int:
    try:
        return sum(1 for _ in read_rollouts(folder))
    except ArchiveError:
        return 0


def test_blocks_of_the_page_show_a_finished_run(redis_url: str, tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    folder = tmp_path / "runs" / RUN
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL))
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path / "runs")) as api:
        with SyncClient(api.url, patience=10) as client:
            _train(client, folder)
        places = {"API": api.url, "TOKENIZER": str(tmp_path / "tokenizer.json"), "RUN_FOLDER": str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **places}, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in (
        "quickstart finished 1.2",
        "step 2 of 2, reward 0.5, parts {'length': 0.5}",
        "80.0 tokens/s, 0.0 s left",
        "0 groups are ready, 4 trained, {} dropped",
        "submitted g00000003 by env-1",
        "finished 2 None",
    ):
        assert line in done.stdout.splitlines(), done.stdout
    assert "trainer" in done.stdout, "the error names the sources of the run"
    assert len(re.findall(r"^-?\d\.\d\d  '[w\d ]+' -> '[w\d ]+'$", done.stdout, re.MULTILINE)) == 8, done.stdout
    assert "<TrajectoryGroup g00000099 of quickstart, row 99: 2 sequences, 7 tokens, " in done.stdout
    assert re.search(r"^<TrajectoryGroup g00000000 of quickstart, row 0: 2 sequences, ", done.stdout, re.MULTILINE)
