"""`gristmill status` and `gristmill tail`: one run, from the API if it has the run, else from the run's files."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.text import Text

from gristmill.errors import ApiError, ApiUnreachable, ConfigError, ErrorCode, GristmillError
from gristmill.folders import RunFolder, list_runs
from gristmill.group import Tokenizer
from gristmill.model_servers import split_urls
from gristmill.run import Example, RunState
from gristmill.sync_client import SyncClient
from gristmill_cli import doctor
from gristmill_cli.terminal import LiveView, Screen, figure, redraws, summary
from gristmill_view.facts import ApiReader, Facts, find_run, read_files
from gristmill_view.overview import Overview, current_rows, overview, to_json
from gristmill_view.pack import SUFFIX, named_run
from gristmill_view.samples import Sample, one_line, read_samples, read_tokenizer, samples_of

_TIMEOUT = 5.0
"""Seconds of one call. A view must not wait for minutes."""
_EVENTS_WAIT = 0.3
"""Seconds in which the events of the run arrive, before the status is shown once."""
_SAMPLES = 3
_EXAMPLES = 8
"""Most groups that one call of `examples` returns."""
_TAIL_PATIENCE = 60.0
"""Seconds for which the API may be away while `tail` or `status --watch` follows it."""


@dataclass(frozen=True)
class Place:
    """Where runs are: an API and folders."""

    api: str
    token: str | None
    roots: tuple[Path, ...]
    models_dir: Path
    model_url: str
    model_named: bool
    """Whether the user named the model server. Otherwise it counts only if it answers."""

    def client(self, patience: float | Callable[[], float] = 0.0) -> SyncClient:
        return SyncClient(self.api, patience=patience, timeout=_TIMEOUT, token=self.token)


# --- status ----------------------------------------------------------------------------------------------------
class RunView:
    """Reads one run for `status`: from the API if it has the run, else from the files."""

    def __init__(self, place: Place, run_id: str | None, *, follow: bool = True) -> None:
        """`run_id`: or the folder or the pack of a run, whose files are then read.

        Raises GristmillError `no_run` if neither the API nor a folder has a run, and RunMissingError for a run that
        neither of them has.
        """
        self.patience = 0.0
        """Seconds for which the API may be away."""
        self._reader: ApiReader | None = None
        self._place, self._problem = place, ""
        if run_id is None or not is_path(run_id):
            self._client = place.client(lambda: self.patience)
            self.run_id = self._find(run_id, follow)
        if run_id is not None and not self.live:
            named = named_run(run_id, place.roots)
            self._place, self.run_id = replace(place, roots=named.roots), named.run_id
        self._tokenizer = read_tokenizer(RunFolder(self.run_id, self._place.roots).tokenizer(place.models_dir))

    def _find(self, run_id: str | None, follow: bool) -> str:
        try:
            run = run_id or find_run(self._client)
            if run is not None:
                self._client.get_run(run)
                urls = split_urls(self._place.model_url)
                if not self._place.model_named:  # the default, where another program may answer
                    urls = [url for url in urls if doctor.port_use(urlsplit(url).port or 0) == "ours"]
                self._reader = ApiReader(self._client, run, model_urls=urls, follow=follow)
                return run
            self._problem = f"the API at {self._place.api} has no run"
        except ApiUnreachable:
            self._problem = f"no API answers at {self._place.api}"
        except ApiError as error:
            if error.code != "run_missing":
                raise
            self._problem = f"the API at {self._place.api} has no run {run_id!r}"
        if run_id is not None:
            return run_id
        newest = next(iter(list_runs(self._place.roots)), None)
        if newest is None:
            places = ", ".join(map(str, self._place.roots))
            raise GristmillError(
                "no_run",
                f"{self._problem}, and no folder of a run is in {places}; name them with --api and --runs",
                api=self._place.api,
                roots=places,
            )
        return newest.run_id

    @property
    def live(self) -> bool:
        return self._reader is not None

    @property
    def source(self) -> str:
        """Where the facts are from, as words for a person."""
        return (
            f"API: {self._place.api}" if self.live else ": ".join(filter(None, ("from the run's files", self._problem)))
        )

    def facts(self) -> Facts:
        """Raises GristmillError if the run cannot be read."""
        if self._reader is None:
            return read_files(self.run_id, self._place.roots)
        return self._reader.read().with_files(RunFolder(self.run_id, self._place.roots))

    def screen(self) -> Screen:
        facts = self.facts()
        samples = self.samples(1) if facts.status is not None and facts.status.accepted else []
        return Screen(
            overview(facts), current_rows(facts), next(iter(samples), None), tuple(facts.warnings[-3:]), self.source
        )

    def samples(self, limit: int) -> list[Sample]:
        """Returns the newest completions; none without a live API."""
        return read_samples(self._client, self.run_id, self._tokenizer, limit) if self.live else []


def status(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Shows what a run does now."""
    run = RunView(place, options.run, follow=not options.json)
    if options.watch and not options.json:
        return _watch(run, console)
    if run.live and not options.json:
        time.sleep(_EVENTS_WAIT)
    if options.json:
        while True:
            found = overview(run.facts())
            print(json.dumps(to_json(found)), flush=True)
            if not options.watch or found.state == RunState.FINISHED:
                return 0
            run.patience = _TAIL_PATIENCE
            time.sleep(1.0)
    screen = run.screen()
    if screen.overview.state == RunState.FINISHED:
        _say_end(run, console)
    else:
        console.print(screen)
    return 0


def _watch(run: RunView, console: Console) -> int:
    """Shows the run until it is finished."""
    if redraws(console):
        with LiveView(console, run.screen) as view:
            view.refresh()
            while view.shown is None or view.shown.overview.state != RunState.FINISHED:
                time.sleep(0.2)
    else:
        run.patience = _TAIL_PATIENCE
        last = -1
        while True:
            summary = overview(run.facts())
            if summary.step != last:
                last = summary.step
                console.print(Text(step_line(summary)), soft_wrap=True)
            if summary.state == RunState.FINISHED:
                break
            time.sleep(1.0)
    _say_end(run, console)
    return 0


def step_line(found: Overview) -> str:
    """Returns a run's progress on one line."""
    total = "" if found.steps is None else f"/{found.steps}"
    speed = "" if found.tokens_per_second is None else f"  {found.tokens_per_second:.0f} tokens/s"
    return f"{found.run}  step {found.step}{total}  reward {figure(found.reward)}{speed}"


def _say_end(run: RunView, console: Console) -> None:
    facts = run.facts()
    found = overview(facts)
    places = {"files": str(facts.folders[0])} if facts.folders else {}
    samples = run.samples(_SAMPLES) if run.live else []
    if not run.live:
        console.print(Text(run.source, style="dim"), soft_wrap=True)
    for line in summary(found, current_rows(facts), samples, places=places):
        console.print(line, soft_wrap=True)


def is_path(run: str) -> bool:
    """Whether the name of a run cannot be an id: it is the path of a folder or a pack, or it is empty."""
    return not run or os.sep in run or run.endswith(SUFFIX)


# --- tail ------------------------------------------------------------------------------------------------------
def tail(options: argparse.Namespace, place: Place, console: Console) -> int:
    """Prints completions as the environments submit them, until the run is finished."""
    if options.run is not None and is_path(options.run):
        raise ConfigError("invalid_flag", f"`tail` follows a run at the API: name its id, not {options.run}")
    run_id = options.run or find_run(place.client())
    client = place.client(_TAIL_PATIENCE)
    if run_id is None:
        raise GristmillError("no_run", f"the API at {place.api} has no run", api=place.api)
    tokenizer = read_tokenizer(RunFolder(run_id, place.roots).tokenizer(place.models_dir))
    if tokenizer is None:
        console.print("no tokenizer found (--runs, GRISTMILL_MODELS_DIR): token ids are shown", style="dim")
    started_ms = time.time() * 1000
    examples = client.examples(run_id, min(options.last, _EXAMPLES)) if options.last > 0 else []
    for example in reversed(examples):
        _say_group(console, samples_of(example, tokenizer), options.completions)
    if client.get_run(run_id).state == RunState.FINISHED:
        return 0
    newest = examples[0].group_id if examples else None
    begun = False
    # From the oldest event on, because a group may come between the call above and a stream of new events only.
    for event in client.events(run_id, after="0-0"):
        is_new = int(event.id.partition("-")[0]) >= started_ms
        if event.kind == "finish" and is_new:
            return 0
        if event.kind != "submit":
            continue
        group_id = event.fields["group"]
        if begun or (is_new and group_id != newest):
            begun = True
            _say_submitted(client, run_id, group_id, tokenizer, console, options.completions)
        begun = begun or group_id == newest
    return 0


def _say_submitted(
    client: SyncClient, run_id: str, group_id: str, tokenizer: Tokenizer | None, console: Console, most: int
) -> None:
    example: Example | None
    try:
        example = client.read_example(run_id, group_id)
    except ApiError as error:
        if error.code != ErrorCode.GROUP_MISSING:
            raise
        # It was trained and archived since. The newest groups stay examples.
        example = next((other for other in client.examples(run_id, _EXAMPLES) if other.group_id == group_id), None)
    if example is None:
        return
    _say_group(console, samples_of(example, tokenizer), most)


def _say_group(console: Console, samples: Sequence[Sample], most: int) -> None:
    if not samples:
        return
    first = samples[0]
    mean = sum(sample.reward for sample in samples) / len(samples)
    version = f"  version {first.version}" if first.version else ""
    console.print(Text.assemble((first.group_id, "bold"), f"{version}  mean reward {mean:.3f}"), soft_wrap=True)
    if first.prompt:
        console.print(Text(f"  {one_line(first.prompt, 400)}", style="dim"), soft_wrap=True)
    for sample in samples[: most or None]:
        console.print(Text(f"  {sample.reward:6.2f}  {one_line(sample.completion)}"), soft_wrap=True)
