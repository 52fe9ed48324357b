"""A real quickstart run in Chromium: it learns, an environment is killed, a rollout is opened, the run ends.

One run serves all tests, in their order. They read what the page shows.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.chromium import Seen, chromium, fact, new_page, settled
from tests.support.ports import free_port
from tests.support.stack import Output, Vllm, start_api, start_redis

from gristmill_cli.local.processes import LocalStack, Service, answers

pytestmark = pytest.mark.long  # tests/browser has the pages in `make test`
STEPS = 20
RUN = "quickstart"
PYTHON = sys.executable
# The drawn line, as the y of its pixels at the left and at the right end of the canvas. 0 is the top.
LINE_ENDS = """(plot) => {
    const canvas = plot.querySelector('canvas');
    // style.css gives a colour for each theme, which a canvas cannot read.
    const styled = document.body.appendChild(document.createElement('i'));
    styled.style.color = 'var(--line-1)';
    const wanted = getComputedStyle(styled).color;
    styled.remove();
    const probe = document.createElement('canvas').getContext('2d');
    probe.fillStyle = wanted;
    probe.fillRect(0, 0, 1, 1);
    const color = probe.getImageData(0, 0, 1, 1).data;
    const {data, width, height} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    const columns = [];
    for (let x = 0; x < width; x++) {
        let [sum, count] = [0, 0];
        for (let y = 0; y < height; y++) {
            const at = 4 * (y * width + x);
            const far = [0, 1, 2].reduce((sum, part) => sum + Math.abs(data[at + part] - color[part]), 0);
            if (far < 60 && data[at + 3] > 200) { sum += y; count += 1; }
        }
        if (count) columns.push(sum / count);
    }
    const tenth = Math.ceil(columns.length / 10);
    const mean = (part) => part.reduce((sum, y) => sum + y, 0) / part.length;
    return [mean(columns.slice(0, tenth)), mean(columns.slice(-tenth))];
}"""


@dataclass
class Training:
    """The services of a run, and the browser."""

    stack: LocalStack
    browser: Any
    url: str
    folder: Path
    environ: dict[str, str]
    env: Service | None = None
    link: str = ""
    """Path of a group, from the list of rollouts."""
    text: str = ""
    """The first completion of that group, as the page showed it."""
    seen: Seen = field(default_factory=Seen)

    def start_env(self) -> Service:
        command = [PYTHON, "-m", "gristmill_env", "serve", "--config", RUN, "--total_steps", str(STEPS)]
        self.env = self.stack.start("env", command, self.environ)
        return self.env

    def page(self) -> Any:
        return new_page(self.browser, self.seen)


@pytest.fixture(scope="module")
def training(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    folder = tmp_path_factory.mktemp("watched")
    redis_port, api_port = free_port(), free_port()
    url = f"http://127.0.0.1:{api_port}"
    environ = vllm.environ(url, folder / "runs")
    with chromium() as browser, LocalStack(Output().add) as stack:
        start_redis(stack, folder / "redis", redis_port)
        start_api(
            stack, redis_port, api_port, GRISTMILL_RUNS_DIR=str(folder / "runs"), API_VIEW_SERVERS=vllm.url,
            GRISTMILL_MODELS_DIR=str(vllm.models_dir),
        )  # fmt: skip
        yield Training(stack, browser, url, folder / "runs" / RUN, environ)


@pytest.fixture(scope="module")
def page(training: Training) -> Iterator[Any]:
    """The tab that stays open from before the run to its end."""
    page = training.page()
    yield page
    page.context.close()


def step_of(page: Any) -> int:
    return int(fact(page, "progress").partition(" / ")[0].replace(",", ""))


def wait_for_step(page: Any, step: int) -> None:
    script = "(step) => parseInt(document.querySelector('.facts b').textContent.replace(',', '')) >= step"
    page.wait_for_function(script, arg=step, timeout=240_000)


def problems(training: Training) -> list[str]:
    """Returns what no page may report. Leaving a run ends its stream of events."""
    ended = [failed for failed in training.seen.failed if not ("ERR_ABORTED" in failed and "/events" in failed)]
    return training.seen.problems + ended


@pytest.mark.timeout(600)
def test_reward_rises_on_the_screen(training: Training, page: Any) -> None:
    page.goto(training.url)
    page.wait_for_selector("main .empty:has-text('No run is here yet')")
    training.stack.start("trainer", [PYTHON, "-m", "gristmill_trainer"], training.environ)
    training.start_env()
    # Nobody reloads the page: it finds the run, and the only run is shown.
    page.wait_for_url(f"{training.url}/view/{RUN}", timeout=120_000)
    settled(page)
    page.wait_for_selector(".connection.live")
    wait_for_step(page, 2)
    early, first = step_of(page), float(fact(page, "reward"))
    wait_for_step(page, 12)
    assert step_of(page) >= 12 > early
    assert fact(page, "progress").endswith(f"/ {STEPS}")
    shown = page.locator(".panel:first-child .plot")
    assert "Reward: mean" in shown.get_attribute("aria-label")
    # The page may be drawing the next step. The line ends higher than it begins: 0 is the top.
    ends = f"({LINE_ENDS})(document.querySelector('.panel:first-child .plot'))"
    rises = f"() => {{ const [left, right] = {ends}; return right < left; }}"
    page.wait_for_function(rises, timeout=120_000)
    assert float(fact(page, "reward")) > first
    assert page.locator(".services .dot.down").count() == 0
    assert problems(training) == []


@pytest.mark.timeout(300)
def test_killed_environment_shows_until_another_one_starts(training: Training, page: Any) -> None:
    page.wait_for_selector(".banner.calm")
    assert training.env is not None
    os.kill(training.env.process.pid, signal.SIGKILL)
    page.wait_for_selector(".services li:has(.dot.down):has-text('env')", timeout=30_000)
    page.wait_for_selector(".banner.trouble:has-text('environment_silent')", timeout=30_000)
    before = step_of(page)
    training.start_env()
    wait_for_step(page, before + 2)
    assert problems(training) == []


@pytest.mark.timeout(300)
def test_rollout_opens_from_the_list_and_from_its_link(training: Training, page: Any) -> None:
    tab = training.page()
    tab.set_default_timeout(90_000)  # the first question makes the table of rollouts
    tab.goto(f"{training.url}/view/{RUN}")
    settled(tab)
    tab.get_by_role("link", name="Rollouts").click()
    tab.wait_for_selector("tbody tr")
    tab.locator("select[name=outcome]").select_option("trained")
    tab.wait_for_url(re.compile("outcome=trained"))
    tab.wait_for_function("() => !document.querySelector('.list[aria-busy]')")
    tab.locator("tbody tr a:not(.second)").first.click()
    tab.wait_for_url(re.compile(rf"/view/{RUN}/group/g\d{{8}}#s\d"))
    settled(tab)
    chosen = tab.locator(".card.named")
    training.text = chosen.inner_text()
    training.link = tab.url.removeprefix(training.url)
    assert "What is" in tab.locator(".prompt").inner_text()
    assert tab.locator(".cards > *").count() == 8
    tab.context.close()
    fresh = training.page()
    fresh.goto(training.url + training.link)
    settled(fresh)
    assert fresh.locator(".card.named").inner_text() == training.text
    fresh.context.close()
    assert problems(training) == []


@pytest.mark.timeout(600)
def test_files_of_the_finished_run_show_the_same_page(training: Training, page: Any) -> None:
    page.wait_for_selector(".pill.state-finished", timeout=300_000)
    settled(page)
    assert fact(page, "progress") == f"{STEPS} / {STEPS}"
    reward = fact(page, "reward")
    page.context.close()
    assert problems(training) == []
    port = free_port()
    command = [PYTHON, "-m", "gristmill_cli", "view", str(training.folder), "--port", str(port)]
    viewer = training.stack.start("view", command, {"GRISTMILL_API_URL": "http://127.0.0.1:1"})
    url = f"http://127.0.0.1:{port}"
    training.stack.wait_until(viewer, lambda: answers(f"{url}/view"), timeout=240)
    tab = training.page()
    tab.set_default_timeout(90_000)
    tab.goto(f"{url}/view/{RUN}")
    settled(tab)
    assert (fact(tab, "progress"), fact(tab, "reward")) == (f"{STEPS} / {STEPS}", reward)
    assert tab.locator(".connection.still").is_visible()
    tab.goto(url + training.link)
    settled(tab)
    assert tab.locator(".card.named").inner_text() == training.text
    tab.context.close()
    assert problems(training) == []
