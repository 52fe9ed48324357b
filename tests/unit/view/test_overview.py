"""The state of a run, computed from recorded values: of a live API, and of files alone."""

from __future__ import annotations

import json
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import convert
from tests.support.errors import raises
from tests.unit.view.recorded import LOGS, record, rows, status, write_run

from error_codes import PACKAGES
from gristmill import GristmillError, RunState
from gristmill.archive.drops import Drop, append_drops
from gristmill.archive.run_file import write_run_file
from gristmill.folders import RunFolder
from gristmill.internal.receipts import Receipt
from gristmill.internal.trouble import CODES, ServerFacts
from gristmill_view.facts import Facts, Service, read_files
from gristmill_view.overview import evaluation_point, overview, to_json


def live(**changes: Any) -> Facts:
    """Returns the facts of a running quickstart after step 8."""
    facts = Facts(
        run="quickstart", state=RunState.OPEN, rows=rows(), record=record(), status=status(), version="1.8", steps=60,
        settings=record().env, started=1795412941.0,
    )  # fmt: skip
    return replace(facts, **changes)


def receipt(version: str, state: str, **changes: Any) -> Receipt:
    step = int(version.partition(".")[2])
    values = {"step": step, "version": version, "server": "http://127.0.0.1:9001", "bound": 1e-5, "difference": 1e-6}
    return convert({**values, "state": state, **changes}, Receipt)


def test_overview_counts_proven_publications_by_file_or_else_by_metrics() -> None:
    receipts = [
        receipt("1.0", "ok"),
        receipt("1.1", "failed"),
        receipt("1.1", "ok", attempt=2),
        receipt("1.2", "failed", server="http://gpu2:9001", seconds=0.5, change=None, difference=None),
    ]
    found = to_json(overview(live(receipts=receipts)))["receipts"]
    assert (found["proven"], found["publications"]) == (2, 3)
    assert [(one["server"], one["version"], one["state"], one["seconds"]) for one in found["newest"]] == [
        ("http://127.0.0.1:9001", "1.1", "ok", 0.0),
        ("http://gpu2:9001", "1.2", "failed", 0.5),
    ]
    assert overview(live()).receipts is None
    counted = overview(live(rows=rows(receipts={"ok": 2}))).receipts
    assert counted is not None
    assert counted.proven == counted.publications == 8
    doubtful = overview(live(rows=rows(receipts={"ok": 1, "unproven": 1}, receipt_difference=1e-6))).receipts
    assert doubtful is not None
    assert doubtful.proven == 0
    assert [(one.server, one.state, one.difference) for one in doubtful.newest] == [("", "unproven", 1e-6)]


def test_trouble_of_a_receipt_ends_when_the_server_proves_a_later_version() -> None:
    found = overview(live(receipts=[receipt("1.7", "failed", cause="tied_head_stale"), receipt("1.8", "ok")]))
    assert found.trouble is None


def test_overview_of_a_live_run_has_progress_speed_and_remaining_time() -> None:
    found = overview(live())
    assert (found.step, found.steps, found.state, found.phase) == (8, 60, "open", "training step 9")
    assert found.reward == 0.5203
    assert found.reward_parts == {"format": 0.75, "accuracy": 0.2}
    assert found.seconds_per_step == pytest.approx(1.1)
    assert found.seconds_left == pytest.approx(52 * 1.1)
    assert found.tokens_per_second == pytest.approx(2000)
    assert (found.queue.ready, found.queue.trained, found.live) == (4, 128, True)
    assert found.settings["trainer.learning_rate"] == 1e-4
    assert found.trouble is None


def test_rows_of_steps_that_a_resumed_trainer_repeats_do_not_count() -> None:
    found = overview(live(version="2.3", record=record(version="2.3", incarnation=2)))
    assert found.step == 4, "the row of step 4 may be newer than its publication"
    assert found.reward == 0.4016


def test_json_has_the_keys_of_the_page_and_no_number_that_json_cannot_hold() -> None:
    values = to_json(overview(live(rows=rows(reward_mean=math.nan, rollout_logprob_diff_mean=math.inf))))
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert {
        "run", "state", "protocol", "step", "steps", "tokens_per_second", "seconds_left", "services", "queue",
        "waiting", "trouble", "settings", "evaluations",
    } <= {*values}  # fmt: skip
    assert values["queue"] == {"ready": 4, "leased": 0, "dead": 0, "trained": 128, "dropped": 0}
    assert values["waiting"][0] == {"who": "trainer", "for": "groups: 4 of 16 are ready"}
    assert values["reward"] is None


@pytest.mark.parametrize(
    ("changes", "who"),
    [
        ({"record": record(trainer=None, version=None), "version": None, "rows": ()}, ["environment"]),
        ({"record": record(version=None), "version": None, "rows": ()}, ["environment"]),
        ({"status": status(ready=4, leased=0, outstanding=12)}, ["trainer", "environment"]),
        ({"status": status(ready=0, leased=16, outstanding=0)}, ["environment"]),
        ({"status": status(ready=0, leased=16, outstanding=16)}, []),
        ({"status": status(ready=4, leased=32, trained=96, outstanding=12)}, ["trainer", "environment"]),
        ({"status": status(ready=0, leased=48, trained=96, outstanding=0)}, ["environment"]),
        ({"state": RunState.FINISHED}, []),
        ({"status": None}, []),
    ],
)
def test_overview_names_each_service_that_waits(changes: dict[str, Any], who: list[str]) -> None:
    assert [waiting.who for waiting in overview(live(**changes)).waiting] == who


# --- Trouble ---------------------------------------------------------------------------------------------------
SERVER = "http://127.0.0.1:9001"
BUSY = ServerFacts(SERVER, problem="timed out", busy=True)


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("no_environment", {"status": status(ready=0, outstanding=0, envs=0, last_asked_s=80.0)}),
        ("no_environment", {"status": status(ready=0, outstanding=0, envs=0, last_asked_s=None)}),
        ("no_environment", {"status": status(ready=0, outstanding=0, envs=0, last_asked_s=80.0, leased=80)}),
        ("no_groups_come", {"status": status(ready=0, outstanding=0, last_asked_s=150.0, last_submit_s=160.0)}),
        ("environment_silent", {"services": [Service(name="env vm-1", state="down", heartbeat_s=8.0)]}),
        ("no_trainer", {"status": status(ready=16, outstanding=0, oldest_ready_s=90.0)}),
        ("no_groups_come", {"status": status(last_submit_s=300.0)}),
        ("no_groups_come", {"status": status(last_submit_s=5591.0, last_registered_s=300.0)}),
        ("model_server_unreachable", {"servers": [ServerFacts(SERVER, problem="refused")]}),
        ("model_server_unreachable", {"servers": [BUSY], "status": status(last_submit_s=900.0, outstanding=0)}),
        ("model_server_paused", {
            "servers": [ServerFacts(SERVER, version="1.8", paused=True)], "status": status(last_submit_s=70.0),
        }),
        ("receipt_failed", {"servers": [ServerFacts(SERVER, version="unproven")]}),
        ("receipt_failed", {"receipts": [receipt("1.8", "failed")]}),
        ("server_behind", {"servers": [ServerFacts(SERVER, version="1.5")]}),
        ("server_behind", {"servers": [ServerFacts(SERVER, version="default")]}),
        ("scores_equal", {"rows": rows(zero_advantage_share=1.0)}),
        ("rewards_failing", {"dropped": {"reward_error": 20}}),
        ("groups_dropped", {"dropped": {"same_scores": 200}}),
        ("dead_letters", {"status": status(dead=3)}),
        ("archive_lost", {"status": status(archive_lost=5)}),
        ("disk_floor", {"free_bytes": 1024**3}),
        ("step_skipped", {"rows": rows(skipped="loss is nan")}),
        ("logprob_diff", {"rows": rows(rollout_logprob_diff_mean=0.4)}),
    ],
)  # fmt: skip
def test_trouble_has_a_code_a_text_and_a_remedy(code: str, changes: dict[str, Any]) -> None:
    found = overview(live(**changes))
    assert [trouble.code for trouble in found.troubles] == [code]
    assert found.trouble == found.troubles[0]
    assert found.trouble.text
    assert found.trouble.remedy


def test_environment_that_evaluates_for_a_minute_is_no_trouble() -> None:
    evaluating = status(ready=0, outstanding=0, last_asked_s=80.0, last_submit_s=80.0)
    assert not overview(live(status=evaluating)).troubles


def test_step_that_rejected_every_group_is_shown() -> None:
    """Its shares are NaN, which is null in the file."""
    nothing = rows(1, zero_advantage_share=None, skipped="nothing is left", seconds={"train": None}, tokens=None)
    for listed in (nothing, 3 * nothing, [*nothing, *rows(zero_advantage_share=1.0)[1:3]]):
        overview(live(rows=listed))
    assert [trouble.code for trouble in overview(live(rows=nothing)).troubles] == ["step_skipped"]


def test_password_in_the_address_of_a_server_is_not_shown() -> None:
    failed = msgspec.structs.replace(receipt("1.8", "failed"), server="http://user:password-of-mine@host:9001")
    assert "password-of-mine" not in json.dumps(to_json(overview(live(receipts=[failed]))))


@pytest.mark.parametrize(
    "changes",
    [
        {"servers": [ServerFacts(SERVER, version="1.7")]},  # it is being published to
        {"servers": [ServerFacts(SERVER, version="1.8", paused=True)]},  # during a publication
        {"servers": [BUSY], "status": status(last_submit_s=4.0)},  # a server that generates answers late
        {"servers": [ServerFacts(SERVER, version="default")], "record": record(trainer={"publisher": "none"})},
        {"status": status(last_submit_s=5591.0, last_registered_s=4.0)},  # the environment has just started again
        {"rows": [*rows(5), *rows(zero_advantage_share=1.0)[5:7], *rows()[7:]]},
        {"rows": rows(rollout_logprob_diff_mean=0.4, staleness_mean=1.0)},
        {"dropped": {"reward_error": 3}},
        {"free_bytes": 50 * 1024**3},
        {"status": status(ready=0, outstanding=0, last_asked_s=15.0, leased=16, last_submit_s=900.0)},  # a long step
        {"services": [Service(name="env vm-1", state="down", heartbeat_s=300.0)]},  # another one works
        {"services": [Service(name="env vm-1", state="waiting", heartbeat_s=8.0)]},
        {"servers": [ServerFacts(SERVER, version="invalid")]},  # vLLM's label during a publication
        {"status": status(ready=0, outstanding=0, last_asked_s=80.0), "state": RunState.FINISHED},
    ],
)
def test_normal_states_are_not_reported_as_trouble(changes: dict[str, Any]) -> None:
    assert overview(live(**changes)).troubles == []


def test_steps_of_equal_scores_are_trouble_from_the_third_on() -> None:
    for count, codes in ((1, []), (2, []), (3, ["scores_equal"])):
        found = overview(live(rows=rows(count, zero_advantage_share=1.0)))
        assert [trouble.code for trouble in found.troubles] == codes


def test_share_of_failed_rewards_is_the_same_from_the_api_and_from_files() -> None:
    trained = sum(sum(row["staleness"].values()) for row in live().rows)
    live_facts = live(dropped={"reward_error": 40}, status=status(accepted=trained))
    for facts in (live_facts, replace(live_facts, status=None)):
        assert facts.accepted == trained
        texts = [trouble.text for trouble in overview(facts).troubles if trouble.code == "rewards_failing"]
        assert f" 40 of {trained + 40} " in texts[0]


def test_most_important_trouble_comes_first() -> None:
    found = overview(live(status=status(dead=3), dropped={"reward_error": 100}, rows=rows(zero_advantage_share=1.0)))
    assert [trouble.code for trouble in found.troubles] == ["rewards_failing", "scores_equal", "dead_letters"]


def test_table_has_the_codes_that_the_rules_report_and_no_other() -> None:
    sources = [path for folder in PACKAGES.values() for path in folder.rglob("*.py")]
    named = {code for path in sources for code in re.findall(r'Trouble\.of\(\s*"(\w+)"', path.read_text())}
    assert named == {*CODES}


# --- Evaluations ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("row", "low", "high"),
    [
        ({"pass@1": 0.5, "pass@1_stderr": 0.05, "prompts": 100}, 0.402, 0.598),
        ({"pass@1": 0.99, "pass@1_stderr": 0.02, "prompts": 100}, 0.9508, 1.0),
        ({"pass@1": 0.0, "pass@1_stderr": 0.0, "prompts": 100}, 0.0, 0.03699),
        ({"pass@1": 1.0, "pass@1_stderr": 0.0, "prompts": 100}, 0.96301, 1.0),
        ({"pass@1": 0.5, "prompts": 1}, None, None),
    ],
)
def test_evaluation_has_the_interval_that_evaluate_reports(
    row: dict[str, Any], low: float | None, high: float | None
) -> None:
    point = evaluation_point({"step": 0, **row})
    assert point is not None
    assert point.low == pytest.approx(low, abs=1e-4)
    assert point.high == pytest.approx(high, abs=1e-4)


def test_evaluations_with_names_have_the_point_of_their_mean() -> None:
    row = {"a/pass@1": 0.25, "a/prompts": 4, "b/pass@1": 0.75, "b/prompts": 100, "c/prompts": 3}
    point = evaluation_point({"step": 3, **row})
    assert point is not None
    assert (point.step, point.score, point.n, point.low) == (3, 0.5, 104, None)


def test_evaluation_without_a_judged_completion_has_no_point() -> None:
    assert evaluation_point({"step": 0, "seconds": 1.0}) is None


# --- Files alone -----------------------------------------------------------------------------------------------
def test_overview_of_a_crashed_run_is_read_from_its_files(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "quickstart", rows())
    (folder / "logs" / "trainer.log").open("a").write("05:49:09 trainer CRITICAL no progress for 1800 s\n  File x\n")
    old = time.time() - 600
    for path in folder.rglob("*"):
        os.utime(path, (old, old))
    found = overview(read_files("quickstart", [tmp_path / "elsewhere", tmp_path]))
    assert (found.state, found.step, found.steps, found.live) == ("stopped", 8, 60, False)
    assert found.queue.trained == 8 * 16
    assert [(service.name, service.state) for service in found.services] == [
        ("redis", "down"), ("api", "down"), ("model", "down"), ("trainer", "down"), ("env", "down"),
    ]  # fmt: skip
    trainer = found.services[3]
    assert trainer.detail == "no progress for 1800 s"
    assert trainer.heartbeat_s == pytest.approx(600, abs=30)


def test_run_whose_services_have_all_ended_is_stopped_at_once(tmp_path: Path) -> None:
    started, ended = "--- started 2026-01-02 03:04:05, process 7\n", "--- ended 2026-01-02 03:05:05\n"
    folder = write_run(tmp_path / "quickstart", rows(), logs={})

    def found(**texts: str) -> tuple[str, list[str]]:
        for name, text in texts.items():
            (folder / "logs" / f"{name}.log").write_text(text)
        facts = read_files("quickstart", [tmp_path])
        return facts.state, [service.state for service in facts.services]

    assert found(trainer=started + ended, env=started) == ("open", ["down", "up"])
    assert found(env=started + ended) == ("stopped", ["down", "down"])
    assert found(trainer=started + ended + started) == ("open", ["up", "down"])


def test_run_whose_steps_take_minutes_is_open_between_its_rows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "quickstart", rows(seconds={"train": 100.0}), logs={})
    old = time.time() - 200
    for path in folder.rglob("*"):
        os.utime(path, (old, old))
    assert read_files("quickstart", [tmp_path]).state == "open"
    write_run(tmp_path / "quickstart", rows(seconds={"train": 10.0}), logs={})
    for path in folder.rglob("*"):
        os.utime(path, (old, old))
    assert read_files("quickstart", [tmp_path]).state == "stopped"


def test_files_of_an_earlier_run_with_the_same_id_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "quickstart", rows())
    values = {"step": 8, "version": "1.8", "server": "http://m", "bound": 1e-5, "difference": 1e-6, "state": "ok"}
    (folder / "receipts.jsonl").write_text(json.dumps(values) + "\n")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    earlier = time.time() - 86400
    for path in folder.rglob("*"):
        os.utime(path, (earlier, earlier))
    write_run_file(folder, record(created_at=time.time() - 3600, creation="b"))
    facts = read_files("quickstart", [tmp_path])
    assert (facts.state, facts.rows, facts.version, facts.receipts) == ("stopped", [], None, [])
    assert (facts.services, facts.warnings, facts.started) == ([], [], facts.record and facts.record.created_at)
    of_api = live(record=facts.record).with_files(RunFolder.open(folder))
    assert (of_api.receipts, of_api.warnings) == ([], [])

    (folder / "receipts.jsonl").write_text(json.dumps(values) + "\n")
    write_run(folder, rows(2))
    facts = read_files("quickstart", [tmp_path])
    assert (facts.state, len(facts.rows), len(facts.receipts)) == ("open", 2, 1)
    (folder / "model" / "model.safetensors").write_text("")
    assert read_files("quickstart", [tmp_path]).state == "finished"


def test_file_of_this_run_counts_before_an_earlier_runs_file_in_another_root(tmp_path: Path) -> None:
    old, new = (write_run(tmp_path / root / "quickstart", rows(count)) for root, count in (("a", 8), ("b", 2)))
    os.utime(old / "metrics.jsonl", (1.0, 1.0))
    write_run_file(new, record())
    assert len(read_files("quickstart", [tmp_path / "a", tmp_path / "b"]).rows) == 2


def test_warnings_of_processes_before_the_run_are_left_out_of_its_logs(tmp_path: Path) -> None:
    def started(at: float) -> str:
        return f"--- started {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}, process 1\n"

    def warning(text: str) -> str:
        return f"05:49:05 env     WARNING {text}\n"

    created = 1795412941.0
    log = started(created - 86400) + warning("of the earlier run") + started(created - 9) + warning("first process")
    log += started(created + 60) + warning("second process")
    folder = write_run(tmp_path / "quickstart", [], {"env": log})
    write_run_file(folder, record(created_at=created))
    assert read_files("quickstart", [tmp_path]).warnings == ["env: first process", "env: second process"]


def test_files_of_a_starting_run_show_its_phase(tmp_path: Path) -> None:
    write_run(tmp_path / "new", [], {"model": LOGS["model"]})
    found = overview(read_files("new", [tmp_path]))
    assert (found.state, found.phase, found.step) == ("open", "loading the weights 2/2", 0)


def test_overview_of_a_finished_run_is_read_from_its_files(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "quickstart", rows())
    (folder / "model").mkdir()
    dropped = Drop(creation=1, group_id="g1", row=1, what="dropped", reason="same_scores", time_ms=1)
    append_drops(folder, [dropped, dropped, Drop(creation=1, group_id="g2", row=2, what="let_go", time_ms=1)])
    evaluation = folder / "evaluations" / "1.0-0badcafe"
    evaluation.mkdir(parents=True)
    results = {"figures": {"pass@1": 0.04, "pass@1_stderr": 0.014}, "prompts": 200}
    (evaluation / "results.json").write_text(json.dumps(results))
    for number, name in enumerate("ab"):
        named = folder / "evaluations" / f"1.5-{name}badcafe"
        named.mkdir()
        results = {"figures": {"pass@1": float(number)}, "prompts": 10, "settings": {"evaluation": name}}
        (named / "results.json").write_text(json.dumps(results))
    facts = read_files("quickstart", [tmp_path])
    found = overview(facts)
    assert (found.state, found.seconds_left) == ("finished", 0.0)
    assert found.dropped == {"same_scores": 1}
    assert [(point.step, point.score, point.n) for point in found.evaluations] == [(0, 0.04, 200), (5, 0.5, 20)]
    assert {service.state for service in found.services} == {"done"}
    assert any("same_scores" in warning for warning in facts.warnings)


def test_run_without_files_is_an_error_with_a_code(tmp_path: Path) -> None:
    with raises(GristmillError, "run_folder_missing"):
        read_files("nowhere", [tmp_path])


@pytest.mark.parametrize(
    ("recorded", "state", "steps"),
    [("open", "stopped", 60), ("suspended", "suspended", 60), ("finished", "finished", 60)],
)
def test_files_with_the_runs_record_have_its_settings_and_its_state(
    tmp_path: Path, recorded: str, state: str, steps: int
) -> None:
    folder = write_run(tmp_path / "quickstart", rows())
    write_run_file(folder, record(state=recorded))
    old = time.time() - 600
    for path in folder.rglob("*"):
        os.utime(path, (old, old))
    found = overview(read_files("quickstart", [tmp_path]))
    assert (found.state, found.steps, found.started_ms) == (state, steps, 1795412941000)
    assert found.settings == {
        "model": "tiny", "dataset.temperature": 1.0, "trainer.learning_rate": 1e-4, "trainer.publisher": "filesystem",
    }  # fmt: skip


def test_damaged_record_of_a_run_is_a_warning_and_the_run_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(tmp_path / "quickstart", rows())
    (folder / "run.json").write_text("{")
    found = overview(read_files("quickstart", [tmp_path]))
    assert (found.step, found.settings) == (8, {})
    assert "run.json" in caplog.text
