"""Finished prompts stay finished: kills, torn lines, other settings, two processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.support.errors import raises
from tests.support.stack import ROOT

from gristmill.folders import EVALUATION_FILE, EVALUATION_GROUPS_FILE
from gristmill_env.errors import BusyEvaluationError, DropReason, EvaluationError
from gristmill_env.evaluation.folder import EvaluationFolder, read_evaluation, skipped
from gristmill_env.evaluation.run import _check_scored as check_scored

from .made import PLAN, judged, plan, prompt, sample

pytestmark = pytest.mark.slow


async def test_resumed_evaluation_keeps_finished_samples(tmp_path: Path) -> None:
    with EvaluationFolder(tmp_path / "e", PLAN, resume=False) as file:
        assert file.done == set()
        for number in (2, 0):
            await file.add(judged(number, 1, 0))
    with EvaluationFolder(tmp_path / "e", PLAN, resume=True) as file:
        assert file.done == {0, 2}
        await file.add(judged(1, 0, 0))
        assert [group.row for group in file.finish()] == [0, 1, 2]
    assert [group.row for group in read_evaluation(tmp_path / "e")] == [0, 1, 2]


async def test_what_may_work_in_a_later_process_is_evaluated_again(tmp_path: Path) -> None:
    failed = sample(None, errors={"accuracy": "401"}, scores={"accuracy": None})
    with EvaluationFolder(tmp_path, PLAN, resume=False) as file:
        for number, reason in enumerate((DropReason.TIMEOUT, DropReason.TOO_LONG, DropReason.ENVIRONMENT_ERROR)):
            await file.add(skipped(number, reason, "away", PLAN))
        await file.add(prompt(3, [failed, failed]))
        await file.add(prompt(4, [failed, sample(1)]))
    with EvaluationFolder(tmp_path, PLAN, resume=True) as file:
        assert file.done == {1, 4}
        await file.add(judged(0, 1))
        await file.add(judged(3, 0))
        groups = file.finish()
        assert [(group.row, group.reason, len(group.completions)) for group in groups] == [
            (0, None, 1), (1, "too_long", 0), (2, "environment_error", 0), (3, None, 1), (4, None, 2)
        ]  # fmt: skip
    with EvaluationFolder(tmp_path, PLAN, resume=True) as file:
        assert file.done == {0, 1, 3, 4}


def test_only_prompts_that_were_asked_without_an_answer_are_an_error(tmp_path: Path) -> None:
    late, long = (skipped(0, reason, "the words", PLAN) for reason in (DropReason.TIMEOUT, DropReason.TOO_LONG))
    with raises(EvaluationError, "nothing_scored", completions=0, folder=tmp_path) as raised:
        check_scored([long, late], tmp_path)
    assert "timeout: the words" in str(raised.value)
    check_scored([long, long], tmp_path)
    check_scored([late, judged(1, 0)], tmp_path)


async def test_torn_last_sample_is_evaluated_again(tmp_path: Path) -> None:
    with EvaluationFolder(tmp_path, PLAN, resume=False) as file:
        await file.add(judged(0, 1, 0))
        await file.add(judged(1, 1, 0))
    path = tmp_path / EVALUATION_GROUPS_FILE
    path.write_bytes(path.read_bytes()[:-20])
    with EvaluationFolder(tmp_path, PLAN, resume=True) as file:
        assert file.done == {0}
        await file.add(judged(1, 0, 0))
    assert read_evaluation(tmp_path) == [judged(0, 1, 0), judged(1, 0, 0)]


async def test_completions_may_hold_any_character(tmp_path: Path) -> None:
    text = "a\u2028b\x85c\x0cd\r\ne\x00\U0001f600"
    with EvaluationFolder(tmp_path, PLAN, resume=False) as file:
        await file.add(prompt(0, [sample(1, text=text)]))
        await file.add(judged(1, 1))
    with EvaluationFolder(tmp_path, PLAN, resume=True) as file:
        assert file.finish()[0].completions[0].text == text
        assert file.done == {0, 1}


def test_finished_samples_are_not_overwritten_without_resume(tmp_path: Path) -> None:
    EvaluationFolder(tmp_path, PLAN, resume=False).close()
    with raises(EvaluationError, "evaluation_exists", folder=tmp_path):
        EvaluationFolder(tmp_path, PLAN, resume=False)


def test_resume_with_other_settings_is_refused_and_names_them(tmp_path: Path) -> None:
    EvaluationFolder(tmp_path, PLAN, resume=False).close()
    hotter = msgspec.structs.replace(PLAN.sampling, temperature=0.5)
    changed = plan(sampling=hotter, settings=PLAN.settings | {"split": "train"})
    assert changed.digest != PLAN.digest
    named = ["sampling.temperature: 1.0 -> 0.5", "settings.split: test -> train"]
    with raises(EvaluationError, "config_differs", path=tmp_path, changed=named):
        EvaluationFolder(tmp_path, changed, resume=True)


@pytest.mark.parametrize("line", [b'{"prompt": "hello"}\n', b'{"prompt": "\xff"}\n'])
def test_sample_file_of_another_program_is_refused(tmp_path: Path, line: bytes) -> None:
    (tmp_path / EVALUATION_GROUPS_FILE).write_bytes(line)
    for resume in (False, True):
        with raises(EvaluationError, "samples_of_something_else", folder=tmp_path):
            EvaluationFolder(tmp_path, PLAN, resume=resume)
    (tmp_path / EVALUATION_FILE).write_bytes(msgspec.json.encode(PLAN))
    with raises(EvaluationError, "not_an_evaluation", path=tmp_path / EVALUATION_GROUPS_FILE):
        EvaluationFolder(tmp_path, PLAN, resume=True)


def test_two_processes_do_not_share_an_evaluation(tmp_path: Path) -> None:
    with (
        EvaluationFolder(tmp_path, PLAN, resume=False),
        raises(BusyEvaluationError, "evaluation_busy", folder=tmp_path),
    ):
        EvaluationFolder(tmp_path, PLAN, resume=True)


def test_evaluation_reports_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(EvaluationError, "output_unwritable", path=tmp_path / "file" / "e"):
        EvaluationFolder(tmp_path / "file" / "e", PLAN, resume=False)


APPENDS = """
import asyncio, sys
from pathlib import Path
from tests.unit.env.evaluation.made import PLAN, judged
from gristmill_env.evaluation.folder import EvaluationFolder

async def main():
    with EvaluationFolder(Path(sys.argv[1]), PLAN, resume=True) as file:
        while True:
            number = len(file.done)
            await file.add(judged(number, 1, 0))
            print(number, flush=True)

asyncio.run(main())
"""


def test_evaluation_keeps_samples_reported_as_done_after_a_kill(tmp_path: Path) -> None:
    told = -1
    for _ in range(3):
        command = [sys.executable, "-c", APPENDS, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
            assert process.stdout is not None
            for line in process.stdout:
                told = int(line)
                if told % 7 == 6:
                    break
            process.send_signal(signal.SIGKILL)
            told = max([told, *map(int, process.stdout.read().split())])
        numbers = [group.row for group in read_evaluation(tmp_path)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > told
