"""The work and the waits of a step, in a real Chromium."""

from __future__ import annotations

import re
from typing import Any

from tests.browser.conftest import Demo
from tests.support.chromium import Seen, settled


def test_step_shows_the_phases_of_the_trainer_and_the_groups_of_the_environment(page: Any, demo: Demo) -> None:
    page.goto(demo.url + "/view/quickstart/step/30")
    settled(page)
    assert page.locator(".lane > b").all_inner_texts() == ["trainer", "env-1"]
    trainer, env = page.locator(".lane [role=img]").all()
    phases = [span.split()[0] for span in trainer.get_attribute("aria-label").removeprefix("trainer: ").split(", ")]
    assert phases == ["checkpoint", "publish", "wait", "pack", "train"]
    whole = trainer.bounding_box()
    boxes = [part.bounding_box() for part in trainer.locator("i").all()]
    assert abs(boxes[0]["x"] - whole["x"]) < 1
    assert abs(sum(box["width"] for box in boxes) - whole["width"]) < 3
    wait, work = boxes[2], env.locator("i.line-5").bounding_box()
    assert wait["x"] - 1 <= work["x"] < work["x"] + work["width"] < wait["x"] + wait["width"], "it works meanwhile"
    assert page.locator(".lane .groups a").count() == 16
    page.locator(".lane .groups a").nth(3).click()
    page.wait_for_url(re.compile("/view/quickstart/group/g00000467$"))


def test_lane_with_a_hostile_name_stays_text(page: Any, demo: Demo) -> None:
    name = "<img src=x onerror=window.__owned=1>"
    span = {"start": 0, "end": 1, "what": name, "row": 0}
    lane = {"name": name, "waited": 0, "spans": [span], "groups": [span]}
    found = {"start_ms": 0, "seconds": 1, "lanes": [lane], "complete": False}
    page.route(re.compile("/timeline$"), lambda route: route.fulfill(json=found))
    page.goto(demo.url + "/view/quickstart/step/30")
    settled(page)
    assert page.locator(".lane > b").inner_text() == name
    assert "More groups" in page.locator(".timeline").inner_text()
    assert page.evaluate("() => window.__owned") is None
    assert page.locator("main img").count() == 0


def test_step_without_times_shows_its_groups_all_the_same(page: Any, demo: Demo, seen: Seen) -> None:
    missing = {"error": {"code": "timeline_missing", "message": "It has no time <b>.", "remedy": "Train again."}}
    page.route(re.compile("/timeline$"), lambda route: route.fulfill(status=404, json=missing))
    page.goto(demo.url + "/view/quickstart/step/30")
    settled(page)
    assert page.locator(".timeline p").inner_text() == "It has no time <b>. Train again."
    assert page.locator("tbody tr").count() == 16
    seen.problems.clear()  # Chromium logs the status 404
