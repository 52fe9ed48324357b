"""One prompt over steps and runs, in a real Chromium."""

from __future__ import annotations

import re
from typing import Any

from tests.browser.conftest import Demo
from tests.support.chromium import settled


def test_group_leads_to_its_prompt_over_all_steps_and_in_another_run(page: Any, demo: Demo) -> None:
    page.goto(demo.url + "/view/quickstart/group/g00000203")
    settled(page)
    question = page.locator(".turn pre").last.inner_text()
    page.locator("main .sub a:has-text('over all steps')").click()
    page.wait_for_url(re.compile("/view/quickstart/prompt/g00000203$"))
    settled(page)
    assert question in page.locator(".prompt pre").inner_text()
    steps = [str(1 + number // 16) for number in range(203 % 64, 960, 64)]
    assert page.locator("tbody td:first-child").all_inner_texts() == steps
    lines = "() => document.querySelector('.plot').chart.data.lines.map(({label, values}) => [label, values.length])"
    assert page.evaluate(lines) == [["quickstart", len(steps)]]
    page.locator(".picker input[value='quickstart-lr3']").check()
    page.wait_for_url(re.compile("runs=quickstart-lr3$"))
    page.wait_for_function("() => document.querySelectorAll('.legend .label').length === 2")
    assert page.locator("tbody tr").count() == 2 * len(steps)
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/view/quickstart/group/g00000011$"))


def test_hostile_prompt_and_completions_stay_text(page: Any, demo: Demo) -> None:
    page.goto(demo.url + "/view/hostile/prompt/g00000001")
    settled(page)
    assert page.evaluate("() => window.__owned") is None
    assert page.locator("#owned, main script, main style, main img, main iframe").count() == 0
    assert "<img src=x" in page.locator(".prompt pre").inner_text()


def test_group_without_a_prompt_on_disk_shows_the_remedy(page: Any, demo: Demo, seen: Any) -> None:
    missing = {"error": {"code": "prompt_missing", "message": "It is not on disk.", "remedy": "Choose another <b>."}}
    page.route(re.compile("/prompt\\?"), lambda route: route.fulfill(status=404, json=missing))
    page.goto(demo.url + "/view/quickstart/prompt/g00000203")
    page.wait_for_selector("main .empty h1")
    assert "Choose another <b>." in page.locator("main .empty").inner_text()
    seen.problems.clear()  # Chromium logs the status 404
