"""The page in a real Chromium, over synthetic runs."""

from __future__ import annotations

import importlib.resources
import re
import time
from typing import Any

import pytest
from tests.browser.conftest import Demo, Server
from tests.support.chromium import Seen, fact, settled
from tests.support.demo_runs import HOSTILE, DemoSource
from tests.support.grids import rest_is_long

from gristmill_view.app import create_app
from gristmill_view.source import News

VIEWS = (
    "/view",
    "/view/quickstart",
    "/view/crashed",
    "/view/quickstart/metrics?m=loss&m=entropy_mean&smooth=0.9",
    "/view/quickstart/step/30",
    "/view/quickstart/group/g00000203#s3t2",
    "/view/hostile/group/g00000001",
    "/view/hostile/prompt/g00000001",
    "/view/quickstart/prompt/g00000203?runs=quickstart-lr3",
    "/view/agents/group/g00000000#s5",
    "/view/agents/group/g00000001",
    "/view/quickstart/rollouts?outcome=dropped",
    "/view/compare?runs=quickstart,quickstart-lr3,quickstart-seed2&by=seeds",
)


def opened(page: Any, demo: Demo, path: str) -> None:
    page.goto(demo.url + path)
    settled(page)


def test_overview_shows_progress_reward_and_services(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/quickstart")
    assert fact(page, "progress") == "60 / 60"
    assert float(fact(page, "reward")) > 0.8
    assert page.locator(".services li").count() == 4
    assert page.locator(".panel canvas").count() >= 14
    curves = page.locator(".panel", has_text="Reward by source")
    assert {"sums", "programs"} <= set(curves.inner_text().split())
    assert page.locator(".receipts").all_inner_texts() == [
        "61 of 61 publications proven",
        "http://model:9001 1.60 ok, log-probabilities differ by 2.9e-7 nats, changed by 0.031, 12 ms",
    ]
    assert "Finished" in page.locator(".banner").inner_text()


def test_reward_rises_on_the_screen_while_the_run_trains(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/training")
    page.wait_for_selector(".connection.live")
    before = float(fact(page, "reward"))
    label = page.locator(".panel:first-child .plot").get_attribute("aria-label")
    demo.clock.now += 200  # 100 steps
    page.wait_for_function("() => document.querySelector('.facts b').textContent === '124 / 200'")
    page.wait_for_function(
        "label => document.querySelector('.panel:first-child .plot').getAttribute('aria-label') !== label", arg=label
    )
    assert float(fact(page, "reward")) > before + 0.3


def test_killed_environment_shows_and_the_page_stays_in_place(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/training")
    page.wait_for_selector(".banner.calm")
    height = page.locator("main").bounding_box()["height"]
    demo.source.env_down = True
    page.wait_for_selector(".banner.trouble")
    assert "env-1" in page.locator(".banner").inner_text()
    assert page.locator(".dot.down").count() == 1
    assert abs(page.locator("main").bounding_box()["height"] - height) < 2, "the banner moved the page"


def test_page_connects_again_after_the_server_was_away(page: Any, seen: Seen) -> None:
    source = DemoSource(time.monotonic)
    server = Server(create_app(source))
    page.goto(server.url + "/view/training")
    page.wait_for_selector(".connection.live")
    server.stop()
    page.wait_for_selector(".connection.lost")
    page.goto("about:blank")  # it tries again and again
    seen.problems.clear()  # Chromium itself reports the refused connections


@pytest.mark.parametrize(
    "lost", rest_is_long("**/static/format.js", "**/static/style.css", "**/view/api/runs/quickstart")
)
def test_page_survives_requests_that_the_browser_ended(page: Any, demo: Demo, seen: Seen, lost: str) -> None:
    """As Chromium does to all open requests when a container starts on the machine."""
    page.route(lost, lambda route: route.abort("connectionreset"), times=2)
    page.goto(demo.url + "/view/quickstart", wait_until="commit")
    shown = "() => !sessionStorage.length && document.querySelector('main:not([aria-busy]) canvas')"
    page.wait_for_function(shown, timeout=30_000)
    assert fact(page, "progress") == "60 / 60"
    assert sum("CONNECTION_RESET" in failed for failed in seen.failed) == 2
    seen.problems.clear()  # Chromium logs the requests


@pytest.mark.long
def test_file_that_is_missing_does_not_reload_the_page_for_ever(page: Any, demo: Demo, seen: Seen) -> None:
    address = demo.url + "/view/quickstart"
    page.route("**/static/format.js", lambda route: route.abort("connectionreset"))
    page.clock.install(time=0)
    page.clock.pause_at(1000)
    page.goto(address)
    for loads in ("1", "2", "3"):
        assert page.evaluate("() => sessionStorage.getItem('gristmill-loads')") == loads
        with page.expect_navigation(url=address):
            page.clock.fast_forward(2000)
    page.clock.fast_forward(60_000)
    page.evaluate("() => fetch('/view/static/icon.svg')")  # a reload would be asked for before this
    assert seen.asked.count(address) == 4
    seen.problems.clear()


@pytest.mark.long
def test_hidden_tab_ends_its_stream_and_begins_it_again(page: Any, demo: Demo, seen: Seen) -> None:
    opened(page, demo, "/view/training")
    page.wait_for_selector(".connection.live")
    page.clock.install()
    show = "(hidden) => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
    show += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(show, True)
    page.clock.fast_forward(20_000)
    assert not [failed for failed in seen.failed if "/events" in failed], "a short look at another tab"
    with page.expect_event("requestfailed", lambda request: "/events" in request.url):
        page.clock.fast_forward(11_000)
    assert len([failed for failed in seen.failed if "ERR_ABORTED" in failed and "/events" in failed]) == 1
    demo.clock.now += 20
    page.evaluate(show, False)
    page.clock.resume()
    page.wait_for_function("() => document.querySelector('.facts b').textContent === '34 / 200'")
    assert len([asked for asked in seen.asked if "/events" in asked]) == 2


class Fast(DemoSource):
    """A run that does 450 steps in each second."""

    async def news(self, run: str, after_step: int) -> News:
        found = await super().news(run, 0)
        row = found["steps"][-1]
        steps = range(after_step + 1, after_step + 451)
        return {**found, "steps": [{**row, "step": step} for step in steps], "last_step": after_step + 450}


@pytest.mark.long
def test_tab_that_is_open_for_long_keeps_a_bounded_number_of_points(page: Any, seen: Seen) -> None:
    server = Server(create_app(Fast()))
    page.goto(server.url + "/view/training")
    page.wait_for_selector(".connection.live")
    watched = """() => {
        const points = document.querySelector('.panel .plot').chart.plot.data[0].length;
        window.most = Math.max(window.most ?? 0, points);
        return performance.getEntriesByType('resource').filter(({ name }) => name.includes('/series?')).length > 1;
    }"""
    page.wait_for_function(watched, timeout=60_000)
    most = page.evaluate("() => window.most")
    page.goto("about:blank")
    server.stop()
    assert 400 < most < 3000


@pytest.mark.long
def test_click_on_a_point_opens_its_step(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/quickstart")
    plot = page.locator(".panel .u-over").first
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 60)
    page.wait_for_url(re.compile("/view/quickstart/step/3[01]"))
    settled(page)
    assert page.locator("tbody tr").count() == 16


@pytest.mark.long
def test_drag_zooms_all_charts_and_double_click_shows_all(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/quickstart")
    page.clock.install()
    box = page.locator(".panel .u-over").first.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 60, steps=4)
    page.mouse.up()
    page.clock.fast_forward(400)
    assert page.url.endswith("/view/quickstart"), "a drag is not a click"
    zoomed = [first_step(page, at) for at in (0, 5)]
    assert zoomed[0] == zoomed[1] > 5
    page.mouse.dblclick(box["x"] + 150, box["y"] + 50)
    page.clock.fast_forward(400)
    assert page.url.endswith("/view/quickstart"), "a double click is not a click"
    assert [first_step(page, at) for at in (0, 5)] == [0, 0]


def first_step(page: Any, chart: int) -> int:
    """Returns the step at the left edge of a chart, rounded: the charts of a run with an evaluation begin at 0."""
    low = page.evaluate("(at) => document.querySelectorAll('.panel .plot')[at].chart.plot.scales.x.min", chart)
    return int(low)


def test_step_shows_groups_and_its_histogram_filters_them(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/quickstart/step/30")
    assert page.locator("tbody tr").count() == 16
    bars = page.locator(".bars button:not([disabled])")
    bars.first.click()
    fewer = page.locator("tbody tr").count()
    assert "low=" in page.url
    page.reload()
    settled(page)
    assert page.locator("tbody tr").count() == fewer, "the filter is in the address"
    page.locator("select[name=order]").select_option("worst")
    assert "order=worst" in page.url


def test_rollout_opens_from_the_list_and_from_its_link(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/quickstart/rollouts?step=12")
    page.locator("tbody tr a:not(.second)").nth(3).click()
    page.wait_for_url(re.compile(r"/view/quickstart/group/g\d{8}#s\d"))
    settled(page)
    link, chosen = page.url, page.locator(".card.named").get_attribute("id")
    page.goto(demo.url + "/view")
    page.goto(link)
    settled(page)
    page.wait_for_selector(".card.named")
    assert page.locator(".card.named").get_attribute("id") == chosen


def test_token_link_opens_the_strip_at_the_token(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/quickstart/group/g00000203#s3t2")
    page.wait_for_selector("#s3 .strip canvas")
    assert page.locator("#s3 .picked").count() == 1
    assert "entropy" in page.locator("#s3 .readout").inner_text()
    page.locator("#s3 canvas").focus()
    page.keyboard.press("ArrowRight")
    assert page.url.endswith("#s3t3")


def test_filters_are_in_the_address_and_lead_to_the_same_list(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/quickstart/rollouts")
    page.keyboard.press("/")
    page.keyboard.type("maybe")
    page.wait_for_url(re.compile("text=maybe"))
    page.locator("select[name=outcome]").select_option("trained")
    page.wait_for_url(re.compile("outcome=trained"))
    page.wait_for_function("() => !document.querySelector('.list[aria-busy]')")
    total = page.locator("output").inner_text()
    page.reload()
    settled(page)
    assert page.locator("output").inner_text() == total
    assert "maybe" in page.locator("tbody tr").first.inner_text()


def test_invalid_filter_shows_its_remedy_and_keeps_the_list(page: Any, demo: Demo, seen: Seen) -> None:
    opened(page, demo, "/view/quickstart/rollouts")
    page.locator("input[name=step]").fill("twelve")
    page.wait_for_selector("[role=alert] .trouble")
    assert "10-20" in page.locator("[role=alert]").inner_text()
    assert page.locator("tbody tr").count() == 50
    seen.problems.clear()  # Chromium logs the status 400


@pytest.mark.long
def test_list_of_a_hundred_thousand_rollouts_is_paged(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/long/rollouts?reward_max=0.1")
    assert page.locator("tbody tr").count() == 50
    first = page.locator("tbody tr").first.inner_text()
    page.keyboard.press("n")
    page.wait_for_url(re.compile("offset=50"))
    page.wait_for_function("(text) => document.querySelector('tbody tr').innerText !== text", arg=first)


@pytest.mark.long
def test_compare_shows_both_runs_and_the_settings_that_differ(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/compare?runs=quickstart,quickstart-lr3")
    assert page.locator(".panel canvas").count() >= 8
    assert page.locator("[aria-label='Settings that differ'] tbody th").all_inner_texts() == [
        "trainer.learning_rate",
        "trainer.seed",
        "trainer.clip_grad_norm",
    ]


@pytest.mark.parametrize(
    "path",
    [
        "/view/hostile/group/g00000001",
        "/view/agents/group/g00000001",
        "/view/hostile/rollouts?text=%3Cscript",
        "/view/hostile/step/3",
    ],
)
def test_hostile_output_stays_text(page: Any, demo: Demo, path: str) -> None:
    opened(page, demo, path)
    assert page.evaluate("() => window.__owned") is None
    assert page.locator("#owned, main script, main style, main img, main iframe").count() == 0
    assert "owned" not in page.title()


@pytest.mark.long
def test_invisible_characters_are_shown(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/hostile/group/g00000000")
    text = page.locator("#s4").inner_text()
    assert "U+202E" in text
    assert "\u202e" not in text
    assert HOSTILE[0] in page.locator("#s0").inner_text()


def test_policy_allows_only_the_pages_own_files(page: Any, demo: Demo, seen: Seen) -> None:
    answer = page.goto(demo.url + "/view/hostile")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    settled(page)
    assert {url.split("/")[2] for url in seen.asked} == {demo.url.split("/")[2]}
    page.evaluate(
        "() => document.body.append(Object.assign(document.createElement('script'), {text: 'window.__owned = 1'}))"
    )
    assert page.evaluate("() => window.__owned") is None
    seen.problems.clear()  # Chromium reports what the policy stopped


VIEWS_OFTEN = rest_is_long(*sorted(VIEWS, key=lambda path: path != "/view/agents/group/g00000000#s5"))
"""All views. `make test` examines the one with the most parts."""


@pytest.mark.parametrize("path", VIEWS_OFTEN)
def test_page_has_no_serious_accessibility_fault_in_either_theme(page: Any, demo: Demo, path: str) -> None:
    axe = importlib.resources.files(pytest.importorskip("axe_playwright_python")) / "axe.min.js"
    opened(page, demo, path)
    page.evaluate(axe.read_text())
    backgrounds = set()
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        backgrounds.add(page.evaluate("() => getComputedStyle(document.body).backgroundColor"))
        found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        faults = [
            (fault["id"], [node["html"][:120] for node in fault["nodes"][:3]])
            for fault in found["violations"]
            if fault["impact"] in ("serious", "critical")
        ]
        assert faults == [], theme
    assert len(backgrounds) == 2, "the page has followed the theme"


@pytest.mark.parametrize("path", VIEWS_OFTEN)
def test_page_fits_400_pixels(page: Any, demo: Demo, path: str) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    opened(page, demo, path)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 400


@pytest.mark.long
def test_keyboard_walks_from_the_overview_to_a_group(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/quickstart")
    for key in ("j", "j", "j", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url(re.compile("/step/3$"))
    settled(page)
    for key in ("j", "j", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url(re.compile("/group/"))
    settled(page)
    page.keyboard.press("u")
    page.wait_for_url(re.compile("/step/3$"))
    page.keyboard.press("?")
    assert page.locator("dialog.help").is_visible()


@pytest.mark.long
def test_theme_changes_and_is_kept(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/quickstart")
    paper = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    dark = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert dark != paper
    page.reload()
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == dark


@pytest.mark.long
def test_unknown_addresses_show_not_here(page: Any, demo: Demo, seen: Seen) -> None:
    for path in ("/view/nothing", "/view/quickstart/step/999", "/view/quickstart/group/x", "/view/a/b/c"):
        page.goto(demo.url + path)
        page.wait_for_selector("main .empty h1")
        assert page.locator("main h1").inner_text() == "Not here"
    seen.problems.clear()  # Chromium logs the status 404


def test_group_removed_from_the_archive_shows_that_it_is_gone(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/quickstart/group/g00000019")
    assert "let it go" in page.locator("main .empty").inner_text()


def test_dropped_group_shows_its_errors_and_the_row_of_the_file(page: Any, demo: Demo) -> None:
    failed: dict[str, Any] = {
        "text": "7",
        "reward": None,
        "parts": {"near": None},
        "tokens": [],
        "error": "near: <b>ZeroDivisionError",
    }
    kept: dict[str, Any] = {"outcome": "dropped", "reason": "reward_error", "index": 41, "step": None, "error": None}
    left_out = [{"reason": "agent_timeout", "error": "<b>900 s"}]
    changed(page, "/view/api/runs/quickstart/groups/g00000203$", **kept, completions=[failed], left_out=left_out)
    opened(page, demo, "/view/quickstart/group/g00000203")
    assert "41 of the data" in page.locator("main .sub").inner_text()
    assert page.locator("main > .cut").inner_text().split() == ["left", "out", "agent", "timeout:", "<b>900", "s"]
    assert page.locator(".card .cut").inner_text() == "near: <b>ZeroDivisionError"
    bare: dict[str, Any] = {"prompt": None, "question": None, "messages": None, "completions": []}
    changed(page, "/view/api/runs/quickstart/groups/g00000203$", **{**kept, **bare, "error": "field 'gold' is None"})
    opened(page, demo, "/view/quickstart/group/g00000203")
    assert "field 'gold' is None" in page.locator("main > .cut").inner_text()
    assert "not kept" not in page.locator("main").inner_text()


def changed(page: Any, pattern: str, **values: object) -> None:
    """Replaces values in the answers of the demo."""

    def fulfill(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), **values})

    page.route(re.compile(pattern), fulfill)


def test_run_without_step_records_names_the_missing_setting(page: Any, demo: Demo) -> None:
    changed(page, "/view/api/runs/quickstart/steps/3$", groups=[], recorded=False)
    opened(page, demo, "/view/quickstart/step/3")
    assert "record_rollouts" in page.locator("main .empty").inner_text()
    page.locator("main .empty a").click()
    settled(page)
    assert page.locator(".list tbody tr").count() == 50
    changed(page, r"/view/api/runs/quickstart/rollouts\?", rows=[], total=0, recorded=False)
    opened(page, demo, "/view/quickstart/rollouts?step=3")
    assert "record_rollouts" in page.locator("main .empty").inner_text()


def test_group_shows_the_turns_of_a_conversation_and_folds_its_thinking(page: Any, demo: Demo) -> None:
    turns = [
        {"role": "assistant", "content": "5", "thinking": "the middle"},
        {"role": "environment", "content": "<b>higher</b>\u202e"},
        {"role": "assistant", "content": "7"},
    ]
    completion = {"text": "5 higher 7", "turns": turns, "reward": 1.0, "parts": {}, "tokens": []}
    changed(page, "/view/api/runs/quickstart/groups/g00000203$", completions=[completion])
    opened(page, demo, "/view/quickstart/group/g00000203")
    shown = page.locator(".card .turn")
    assert [shown.nth(at).locator("h3").inner_text().lower() for at in range(3)] == [
        "assistant",
        "environment",
        "assistant",
    ]
    assert page.locator(".card .thinking[open]").count() == 0
    assert page.locator(".card .thinking").count() == 1
    assert "<b>higher</b>" in shown.nth(1).inner_text()


# --- Rollouts of agents ----------------------------------------------------------------------------------------
def test_rollout_with_three_branches_is_one_entry_with_a_tree(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/agents/group/g00000000")
    assert page.locator(".card .nth").all_inner_texts() == ["#0", "#1", "#2"]
    assert page.locator(".card > header .chip").all_inner_texts() == ["0.00", "1.00", "0.50"]
    card = page.locator("#s3")
    assert "3 branches" in card.locator(".facts-line").inner_text()
    assert card.locator(".branch").count() == 4, "the shared beginning, and three branches"
    shared = card.locator(".tree > .branch").first
    assert shared.locator(":scope > summary b").inner_text() == "2 branches begin like this"
    assert shared.locator(".branch > summary b").all_inner_texts() == ["branch 0", "branch 1"]
    assert card.locator(".tree > .branch").nth(1).locator(":scope > summary").inner_text().startswith("branch 2")
    assert card.locator(".call h4 code").all_inner_texts() == ["add", "note"], "the shared reply is shown once"
    assert card.locator(".call dt").all_inner_texts() == ["left", "right", "arguments"]
    assert card.locator(".call dd").all_inner_texts() == ["26", "[31]", "{not JSON"]
    results = shared.locator(":scope > .by-tool h3 code")
    assert results.all_inner_texts() == ["note", "add"], "each result names the call that it answers"
    assert card.locator(".turn .trained").all_inner_texts() == ["trained"] * 4


def test_reply_with_tool_calls_shows_them_without_branches(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/agents/group/g00000000")
    card = page.locator("#s0")
    assert card.locator(".call h4 code").all_inner_texts() == ["add", "note"]
    assert card.locator(".turn").first.locator("pre.nothing").count() == 0, "a call is not empty"
    assert card.locator(".tree, .trained").count() == 0


def test_replies_that_are_not_trained_are_marked(page: Any, demo: Demo) -> None:
    turns = [{"role": "assistant", "content": text, "trained": text == "b"} for text in "ab"]
    branch = {"sequence": 0, "tokens": [], "finish_reason": "stop"}
    nodes = [{"parent": None, "sequences": [0], "continues": True, "turns": turns}]
    completion = {"sequence": 0, "reward": 1.0, "branches": [branch, {**branch, "sequence": 1}], "tree": nodes}
    changed(page, "/view/api/runs/agents/groups/g00000000$", completions=[completion])
    opened(page, demo, "/view/agents/group/g00000000")
    assert page.locator(".turn .trained").all_inner_texts() == ["not trained", "trained"]
    assert page.locator(".turn.untrained pre").all_inner_texts() == ["a"]


@pytest.mark.long
def test_tree_opens_and_folds_by_keyboard(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/agents/group/g00000000")
    for key in ("j", "j", "j", "Tab"):
        page.keyboard.press(key)
    assert page.evaluate("() => document.activeElement.innerText") == "2 branches begin like this"
    branch = page.locator("#s3 .branch .branch").first
    assert branch.is_visible()
    page.keyboard.press("Enter")
    assert not branch.is_visible()
    page.keyboard.press("Space")
    assert branch.is_visible()


def test_token_link_opens_the_branch_and_its_strip(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/agents/group/g00000000#s4t1")
    page.wait_for_selector("#s3 .strip canvas")
    assert page.locator(".card.named").get_attribute("id") == "s3"
    assert page.locator(".strip").count() == 1
    assert page.locator("#s3 [data-sequence='4'] .readout b").first.inner_text() == "1"
    page.locator("#s3 canvas").focus()
    page.keyboard.press("ArrowRight")
    assert page.url.endswith("#s4t2")


@pytest.mark.long
def test_part_of_a_tree_that_is_too_deep_is_not_inside_another(page: Any, demo: Demo) -> None:
    """400 pixels have no room for 300 boxes inside each other."""
    branches = [{"sequence": at, "tokens": [], "finish_reason": "stop"} for at in range(300)]
    reply = [{"role": "assistant", "content": "a", "trained": True}]
    nodes = [
        {"parent": at - 1 if at else None, "sequences": list(range(at, 300)), "continues": True, "turns": reply}
        for at in range(300)
    ]
    completion = {"sequence": 0, "reward": 1.0, "branches": branches, "tree": nodes}
    changed(page, "/view/api/runs/agents/groups/g00000000$", completions=[completion])
    page.set_viewport_size({"width": 400, "height": 800})
    opened(page, demo, "/view/agents/group/g00000000")
    assert page.locator(".branch").count() == 300
    assert page.locator(" ".join([".branch"] * 6)).count() == 0
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 400


def test_list_of_rollouts_and_step_link_to_a_rollout_with_branches(page: Any, demo: Demo) -> None:
    row = {"step": 1, "group_id": "g00000000", "sequence": 4, "rollout": 2, "branches": 3, "reward": 0.5}
    row |= {"completion": "x", "prompt": "y", "outcome": "trained", "reward_parts": {}, "seconds": 1, "error": None}
    changed(page, r"/view/api/runs/agents/rollouts\?", rows=[row], total=1, histogram=[])
    opened(page, demo, "/view/agents/rollouts")
    assert "g00000000 #2" in page.locator("tbody tr").inner_text()
    assert "3 branches" in page.locator("tbody tr").inner_text()
    page.locator("tbody a:not(.second)").click()
    page.wait_for_selector("#s3.named")
    group = {"group_id": "g00000000", "row": 0, "rewards": [0, 1, 0.5], "sequences": [0, 1, 3], "outcome": "trained"}
    changed(page, "/view/api/runs/agents/steps/1$", groups=[group])
    opened(page, demo, "/view/agents/step/1")
    links = page.locator(".chips a").evaluate_all("(all) => all.map((one) => one.hash)")
    assert links == ["#s0", "#s1", "#s3"]


def test_curves_of_a_long_run_have_fewer_points_than_steps(page: Any, demo: Demo) -> None:
    page.goto(demo.url + "/view/long")
    settled(page)
    points = page.evaluate("() => document.querySelector('.panel .plot').chart.plot.data[0].length")
    assert 100 <= points <= 2000, "of 10,000 steps"
    assert page.evaluate("() => performance.getEntriesByName('first-contentful-paint').length") == 1
