"""The trainer's display and its log of a step."""

from __future__ import annotations

import io
import logging
import re
import sys
from contextlib import closing

import pytest

from gristmill.internal.metrics import StepMetrics
from gristmill.internal.redaction import remember
from gristmill.internal.trouble import CODES
from gristmill_trainer.display import Display


def _step(step: int, zero_advantage_share: float) -> StepMetrics:
    return StepMetrics(
        step=step,
        policy_version=f"1.{step}",
        reward_mean=0.0,
        reward_std=0.0,
        loss=0.0,
        grad_norm=0.0,
        staleness_mean=0.0,
        completion_tokens_mean=1.0,
        rollout_logprob_diff_mean=0.0,
        rollout_logprob_diff_max=0.0,
        tokens=1,
        seconds={},
        zero_advantage_share=zero_advantage_share,
    )


def test_display_marks_each_step_of_equal_scores_and_warns_at_growing_distance(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    display = Display(20, 0)
    shares = [0.5, 1.0, 0.0, *[1.0] * 10, float("nan")]
    for step, share in enumerate(shares, start=1):
        display.step(_step(step, share))
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert [step for step, line in enumerate(lines, start=1) if "no gradient" in line] == [2, *range(4, 14)]
    # The first, second, fourth and eighth of them.
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    remedy = CODES["scores_equal"].remedy
    assert [record.args for record in warnings] == [(2, 1, remedy), (4, 2, remedy), (6, 4, remedy), (10, 8, remedy)]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_log_on_a_terminal_escapes_control_characters_and_masks_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
    monkeypatch.setenv("COLUMNS", "200")
    remember("hf_0123456789abcdef")
    with closing(Display(20, 0)):
        logging.getLogger("mine").warning("row \x1b]0;title\x07 of hf_0123456789abcdef\n12:00:00 forged")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())  # without rich's colours
    assert "row \\x1b]0;title\\x07 of ***\\n12:00:00 forged" in shown
    assert "\x1b]0;" not in shown
