"""`serve` against the real API over Redis and a real vLLM. The test acts as the run's trainer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import httpx
import pytest
import wandb
from tests.integration.env.conftest import Environments, HandTrainer
from tests.support.errors import raises

from gristmill import ApiError, Manifest, VersionSpan
from gristmill_env.rollouts.prompts import PromptBuilder, load_tokenizer
from gristmill_env.saved import read_groups


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_serve_runs_from_the_first_permit_to_the_end_of_the_run(
    environments: Environments, trainer: HandTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    env = environments.here(trainer.url, "--no-shuffle_dataset", "--testing")
    trainer.take()
    groups = trainer.train(until=4)
    while caplog.text.count("submit run=sums group=g0000000") < 8:  # It may come after the trainer has the group.
        time.sleep(0.05)
    trainer.api.finish("sums", trainer.incarnation)
    env.join()

    assert sorted(group.row for group in groups) == list(range(8))
    prompts = PromptBuilder(load_tokenizer(Manifest.read(environments.vllm.models_dir).tokenizer_path))
    for number, group in enumerate(groups):
        prompt = prompts.build(f"What is {group.row} + 1?").token_ids
        ends = group.lengths.cumsum()
        for index, (first, end) in enumerate(zip(ends - group.lengths, ends, strict=True)):
            completion = first + len(prompt)
            assert tuple(group.tokens[first:completion]) == prompt
            assert not group.mask[first:completion].any()
            assert group.mask[completion:end].all()
            # max_staleness 0: only the version just before a step samples the step's groups.
            assert group.versions[index] == [VersionSpan(f"1.{number // 2}", 0, end - completion)]
        assert group.logprobs[group.mask].max() < 0
        assert not group.logprobs[~group.mask].any()
        for total, long, shaped in zip(group.rewards, *group.reward_parts.values(), strict=True):
            assert long is not None
            assert shaped is not None
            assert total == pytest.approx(0.5 * long + 0.25 * shaped)
    status = trainer.api.status("sums")
    assert (status.trained, status.outstanding, status.dead, status.dropped) == (8, 0, 0, {})

    for text in ("completion prompt=g00000000 n=0 tokens=", "seconds=", "score prompt=g00000000 n=1 length=", "total="):
        assert text in caplog.text
    assert caplog.text.count("submit run=sums group=g0000000") == 8
    assert "prompt prompt=g00000000 row=0 text=" in caplog.text
    assert ("gristmill_env.serve", ("sums",)) in [(record.name, record.args) for record in caplog.records]


def test_serve_saves_groups_as_text_if_configured(environments: Environments, trainer: HandTrainer) -> None:
    path = environments.folder / "kept" / "groups.jsonl"
    env = environments.here(trainer.url, "--data_path_to_save_groups", str(path))
    trainer.take()
    groups = trainer.train(until=2)
    while not path.exists() or len(path.read_text().splitlines()) < len(groups):  # Groups are saved after their submit.
        time.sleep(0.05)
    trainer.api.finish("sums", trainer.incarnation)
    env.join()
    saved = {group.row: group for group in read_groups(path)}
    for group in groups:
        kept = saved[group.row]
        assert [completion.total for completion in kept.completions] == pytest.approx(list(group.rewards))
        assert kept.versions == [str(group.oldest_version)]
        assert sum(completion.tokens or 0 for completion in kept.completions) == group.mask.sum()


def test_a_full_disk_and_a_failing_wandb_do_not_end_a_training(
    environments: Environments, trainer: HandTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: object, **named: object) -> None:
        raise wandb.Error("the run is gone")

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb.Run, "log", fails)
    flags = "--use_wandb --min_items_sent_before_logging 1 --data_path_to_save_groups /dev/full"
    env = environments.here(trainer.url, *flags.split())
    trainer.take()
    trainer.train(until=4)
    trainer.api.finish("sums", trainer.incarnation)
    env.join()
    assert trainer.api.status("sums").trained == 8
    assert "No space left on device" in caplog.text
    assert "the run is gone" in caplog.text


def test_unpublished_weights_are_never_trained_on(
    environments: Environments, trainer: HandTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    environments.here(trainer.url)
    trainer.take(label="default")  # as after a restart of the model server
    _until(lambda: "state=unpublished" in caplog.text)
    time.sleep(1.0)
    assert trainer.api.status("sums").ready == 0
    trainer.label("1.0")
    assert _versions(trainer) == {"1.0"}


def test_serve_accepts_any_weights_if_the_trainer_never_publishes(
    environments: Environments, trainer: HandTrainer
) -> None:
    trainer.trainer["publisher"] = "none"
    environments.here(trainer.url)
    trainer.take(label="default")
    assert _versions(trainer) == {"1.0"}


def test_groups_with_equal_scores_are_dropped_and_counted(
    environments: Environments, trainer: HandTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    # Completions of one token: all score 1/128.
    environments.here(trainer.url, "--ensure_scores_are_not_same", "--max_tokens", "1", "--reward_functions", "length")
    trainer.take()
    _until(lambda: trainer.api.status("sums").dropped.get("same_scores", 0) > 60)
    status = trainer.api.status("sums")
    assert (status.ready, status.accepted) == (0, 0)
    hints = [record.args for record in caplog.records if record.name == "gristmill_env.progress"]
    assert hints
    assert all("same_scores" in (hint or ()) for hint in hints)


@pytest.mark.long
def test_a_reward_that_fails_on_most_completions_ends_the_process_with_its_error(
    environments: Environments, trainer: HandTrainer
) -> None:
    (environments.folder / "judge.py").write_text(
        "def judge(completion: str) -> float:\n    raise RuntimeError('the judge does not answer')\n"
    )
    env = environments.process(trainer.url, "--reward_functions", "length", "judge.py:judge")
    trainer.take()
    assert environments.ends(env) == 1
    last = env.last_line
    assert "[too_many_failures] " in last
    assert "'judge'" in last
    assert "the judge does not answer" in last


def test_prompts_that_leave_no_room_are_dropped_and_counted(environments: Environments, trainer: HandTrainer) -> None:
    environments.here(trainer.url, "--max_token_length", "3")
    trainer.take()
    _until(lambda: trainer.api.status("sums").dropped.get("too_long", 0) > 4)


def test_group_of_one_completion_keeps_its_raw_reward(
    environments: Environments, trainer: HandTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.trainer["batch_size"] = 2
    environments.here(trainer.url, "--group_size", "1", "--ensure_scores_are_not_same")
    trainer.take()
    assert [group.size for group in trainer.train(until=2)] == [1] * 4
    assert caplog.text.count("group_size is 1") == 1


def test_serve_reports_a_finished_run_and_refuses_other_settings(
    environments: Environments, trainer: HandTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    env = environments.here(trainer.url)
    trainer.take()
    with raises(ApiError, "config_differs") as raised:
        environments.here(trainer.url, "--temperature", "0.5").join()
    assert "dataset.temperature: 1.0 -> 0.5" in str(raised.value)
    trainer.api.finish("sums", trainer.incarnation)
    env.join()
    environments.here(trainer.url).join()
    told = [record.args for record in caplog.records if record.name == "gristmill_env.serve"]
    (finished,) = [args for args in told if isinstance(args, tuple) and args and "RUN_ID=" in str(args[-1])]
    assert [str(value) for value in finished[:2]] == ["sums", "1.0"]


def _versions(trainer: HandTrainer) -> set[str]:
    """Returns the versions of the next step's groups."""
    return {span.version for group in trainer.lease() for spans in group.versions for span in spans}


def _until(true: Callable[[], bool], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def test_serve_holds_its_weight_and_share_until_it_ends(environments: Environments, trainer: HandTrainer) -> None:
    env = environments.here(trainer.url, "--inference_weight", "2")
    trainer.take()
    trainer.train(until=2)
    (share,) = httpx.get(f"{trainer.url}/v1/runs/sums/envs").json()
    assert (share["weight"], share["alive"]) == (2.0, True)
    groups = trainer.train(until=4)
    assert {group.env_id for group in groups} == {share["env_id"]}
    trainer.api.finish("sums", trainer.incarnation)
    env.join()
    assert httpx.get(f"{trainer.url}/v1/runs/sums/envs").json() == []
