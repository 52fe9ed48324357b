"""A real W&B run, offline, read back from its file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.groups import make_group
from tests.support.http_server import Answer, HttpServer, Request
from tests.support.rollouts import scored_group
from tests.support.wandb_file import WandbRun, read_wandb

from gristmill.internal.tracking import has_credentials, start_wandb
from gristmill_env.errors import DropReason
from gristmill_env.progress import Tally
from gristmill_env.rewards import Score, correctness_reward, create_reward
from gristmill_env.rollouts.groups import RolloutGroup
from gristmill_env.settings.run import EnvConfig
from gristmill_env.tracking import WandbTracker

pytestmark = pytest.mark.slow


class Told:
    """A tracker that gets the same calls as from the worker, and the entries that it wrote."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.tally = Tally()
        self._folder = folder
        config = EnvConfig.model_validate(settings)
        environ = {"NETRC": str(folder / "netrc")}
        correctness, recorded = (
            correctness_reward([create_reward("accuracy")]),
            {"group_size": 2, "dataset": {"seed": 7}},
        )
        self.tracker = WandbTracker("sums", config, recorded, folder, environ, correctness={None: correctness})

    def dropped(self, step: int = 0) -> None:
        self.tracker.scored(scored(0.0, 0.0), step)
        self.tally.add(DropReason.SAME_SCORES)

    def submitted(self, number: int, step: int = 0, rewards: Sequence[float] = (0.0, 1.0)) -> None:
        self.tracker.scored(scored(*rewards), step)
        self.tally.add(None)
        lengths = [(3, 4)] * len(rewards)
        group = make_group(f"g{number:08}", "sums", lengths=lengths, rewards=rewards, version=f"1.{step}")
        self.tracker.group(group, [f"{number} is {reward}" for reward in rewards], self.tally)

    def read(self) -> WandbRun:
        self.tracker.close()
        return read_wandb(self._folder / "sums")


def scored(*totals: float) -> RolloutGroup:
    return scored_group([Score(total, {"accuracy": total}) for total in totals], [4] * len(totals))


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def test_wandb_tracker_without_credentials_logs_offline_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Told(tmp_path, wandb_name="my run").read()
    assert f"wandb sync {tmp_path}/sums/wandb/offline-run-*" in caplog.text
    assert (run.name, run.group) == ("my run", "sums")
    assert {key: value for key, value in run.config.items() if key != "_wandb"} == {
        "group_size": 2,
        "dataset": {"seed": 7},
    }


def test_wandb_tracker_without_a_name_uses_the_runs_name(tmp_path: Path) -> None:
    assert Told(tmp_path).read().name == "sums"


def test_wandb_tracker_logs_metrics_every_n_groups(tmp_path: Path) -> None:
    told = Told(tmp_path, min_items_sent_before_logging=2)
    for number in range(5):
        told.dropped(step=number // 2)
        told.submitted(number, step=number // 2)
    history = told.read().history
    assert [entry["policy_step"] for entry in history] == [0, 1, 2]
    assert [entry["train/items_sent_to_api"] for entry in history] == [2, 2, 1]  # the rest is logged at the end
    assert [entry["train/items_rejected"] for entry in history] == [2, 2, 1]
    assert [entry["groups/submitted"] for entry in history] == [2, 4, 5]
    assert [entry["groups/dropped_same_scores"] for entry in history] == [2, 4, 5]
    # Each prompt once: two dropped with none right, two submitted with one of two right.
    assert [entry["train/percent_correct"] for entry in history] == [0.25] * 3
    assert [entry["train/rewards_mean"] for entry in history] == [0.25] * 3


def test_wandb_tracker_logs_every_group_if_configured(tmp_path: Path) -> None:
    told = Told(tmp_path, min_items_sent_before_logging=0)
    for number, step in enumerate((0, 1, 0)):  # the last was slow
        told.submitted(number, step)
    history = told.read().history
    assert [entry["train/items_sent_to_api"] for entry in history] == [1, 1, 1]
    assert [entry["policy_step"] for entry in history] == [0, 1, 1]


def test_wandb_tracker_logs_a_run_whose_groups_are_all_dropped(tmp_path: Path) -> None:
    told = Told(tmp_path, min_items_sent_before_logging=2)
    for step in range(40):
        told.dropped(step)
    history = told.read().history
    assert [(entry["policy_step"], entry["train/rewards_max"]) for entry in history] == [(31, 0.0), (39, 0.0)]


def test_wandb_tracker_without_events_logs_nothing(tmp_path: Path) -> None:
    assert Told(tmp_path).read().history == []


def test_wandb_tracker_logs_rollouts_as_a_table(tmp_path: Path) -> None:
    told = Told(
        tmp_path, min_items_sent_before_logging=2, num_rollouts_to_keep=3, num_rollouts_per_group_for_logging=-1
    )
    for number in range(3):
        told.submitted(number, step=number)
    run = told.read()
    columns = ["text", "score", "group", "version"]
    assert [run.table(entry, "train/rollouts") for entry in run.history] == [
        [
            columns,
            ["0 is 1.0", 1, "g00000000", "1.0"],
            ["1 is 0.0", 0, "g00000001", "1.1"],
            ["1 is 1.0", 1, "g00000001", "1.1"],
        ],
        [columns, ["2 is 0.0", 0, "g00000002", "1.2"], ["2 is 1.0", 1, "g00000002", "1.2"]],
    ]


def test_wandb_tracker_logs_no_table_if_disabled(tmp_path: Path) -> None:
    told = Told(tmp_path, min_items_sent_before_logging=1, num_rollouts_to_keep=0)
    told.submitted(0)
    (entry,) = told.read().history
    assert "train/rollouts" not in entry


def test_wandb_tracker_logs_an_evaluation_at_once_at_its_step(tmp_path: Path) -> None:
    told = Told(tmp_path, min_items_sent_before_logging=9)
    told.submitted(0, step=3)
    told.tracker.evaluation({"mean_score": 0.25, "pass@4": 0.5}, step=2)
    first, second = told.read().history
    assert first == {"policy_step": 2, "eval/mean_score": 0.25, "eval/pass@4": 0.5}
    assert second["policy_step"] == 3


def test_credentials_are_a_key_or_a_netrc_entry(tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    netrc.chmod(0o600)
    assert has_credentials({"WANDB_API_KEY": "x", "NETRC": "/nowhere"})
    assert has_credentials({"NETRC": str(netrc)})
    assert not has_credentials({"NETRC": str(netrc), "WANDB_BASE_URL": "https://wandb.example.org"})
    assert not has_credentials({"NETRC": str(tmp_path / "none")})
    key = tmp_path / "key"
    key.write_text("")
    assert not has_credentials({"WANDB_API_KEY_FILE": str(key), "NETRC": "/nowhere"})
    key.write_text("x\n")
    assert has_credentials({"WANDB_API_KEY_FILE": str(key), "NETRC": "/nowhere"})


def test_wandb_key_is_read_from_its_file_and_not_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "0123456789abcdef" * 3
    key = tmp_path / "key"
    key.write_text(secret + "\n")
    keys: set[str] = set()

    def refuse(request: Request) -> Answer:
        kind, _, text = request.headers.get("Authorization", "").partition(" ")
        keys.add(base64.b64decode(text).decode() if kind == "Basic" else f"{kind} {text}")
        return Answer(403)

    with HttpServer(refuse) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        environ = {"WANDB_API_KEY_FILE": str(key), "WANDB_BASE_URL": server.url}
        start_wandb("sums", "env", {}, tmp_path / "sums", environ).finish()
    assert keys == {f"api:{secret}"}
    files = [path for path in (tmp_path / "sums").rglob("*") if path.is_file()]
    assert files, "the run is kept offline"
    assert not [path for path in files if secret.encode() in path.read_bytes()]
