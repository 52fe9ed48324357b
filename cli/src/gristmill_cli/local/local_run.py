"""One run of the launcher: the facts for the live view and the summary, and the commands that may follow the run."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
from rich.text import Text

from gristmill import ApiError, ErrorCode, GristmillError, PolicyVersion, RunState, SyncClient
from gristmill.archive.run_file import RUN_FILE, read_run_file
from gristmill.folders import REPORT_FILE, RunFolder
from gristmill.group import Tokenizer
from gristmill.internal.lines import read_jsonl
from gristmill.internal.logs import escaped
from gristmill.internal.metrics import METRICS_FILE
from gristmill_cli.local.options import PROGRAM, command, serve_command
from gristmill_cli.local.processes import STARTED, WENT_WELL, LocalStack
from gristmill_cli.terminal import Command, summary
from gristmill_view.facts import ApiReader, Facts, Service, read_files
from gristmill_view.overview import current_rows, overview
from gristmill_view.phases import Meaning
from gristmill_view.samples import Sample, read_samples, read_tokenizer

ORDER: Final = ("redis", "api", "model", "trainer", "env")
_SAMPLES_AT_END = 3
_LONGEST_QUESTION = 300
"""Characters of a prompt in a command line."""
_REPORT_SECONDS = 30.0
"""Longest wait for the report of the run, which the API writes."""
_CONTEXT_LINES = 12
"""Lines of a failed service's log that are shown before its error."""


class LocalRun:
    """The run of this launcher, as the view and the summary read it."""

    def __init__(self, run_id: str, training_steps: int, folder: Path, models_dir: Path, model_url: str) -> None:
        """`folder`: of the run. `models_dir`: the folder of the model service's manifest."""
        self.run_id = run_id
        self._steps = training_steps
        self._folder = folder
        self._models_dir = models_dir
        self._model_url = model_url
        self._stack: LocalStack | None = None
        self._client: SyncClient | None = None
        self._reader: ApiReader | None = None
        self._tokenizer: Tokenizer | None = None
        self._phases: dict[str, str] = {}
        self._stepped = False
        self._closing = False
        self._reading = threading.Lock()
        self._facts = Facts(run=run_id, state=RunState.OPEN, steps=training_steps)
        self._began = time.monotonic()
        self._started_at = time.time()
        self._waits_for_report = False

    def attach(self, stack: LocalStack) -> None:
        """Shows the services of `stack` from now on."""
        self._stack = stack

    def connect(self, client: SyncClient) -> None:
        """Reads the run from the API from now on. `client`: with a short patience."""
        self._client = client
        self._reader = ApiReader(client, self.run_id, model_urls=[self._model_url])

    def heard(self, service: str, found: Meaning) -> None:
        """Notes the phase that a line of a service names."""
        if found.phase:
            self._phases[service] = found.phase
        self._stepped = self._stepped or bool(found.step)

    def close(self) -> None:
        """The services stop: the view keeps what it has."""
        self._closing = True

    def facts(self) -> Facts:
        """Returns what is known now: the API's answer if there is one, else only the services."""
        with self._reading:
            if self._reader is not None and not self._closing:
                try:
                    self._facts = self._reader.read()
                except ApiError as error:
                    if error.code != ErrorCode.RUN_MISSING:
                        raise
        services = self._services(self._facts.services)
        steps = self._facts.steps or self._steps
        return replace(self._facts, services=services, phase=self._phase(), steps=steps)

    def samples(self, limit: int) -> list[Sample]:
        """Returns the newest completions as text; none before the first group, and none without a tokenizer."""
        if self._client is None or self._closing:
            return []
        if self._tokenizer is None:
            self._tokenizer = read_tokenizer(self._files().tokenizer(self._models_dir))
        if self._tokenizer is None:
            return []
        try:
            return read_samples(self._client, self.run_id, self._tokenizer, limit)
        except ApiError as error:
            if error.code != ErrorCode.RUN_MISSING:
                raise
            return []

    def question(self) -> str:
        """Returns a short prompt of the run's data, or a greeting if no group is known as text."""
        prompts: list[str] = []
        with suppress(GristmillError):  # the run is finished, whether or not the API still answers
            prompts = [sample.prompt for sample in self.samples(_SAMPLES_AT_END) if sample.prompt]
        return min(prompts, key=len, default="Hello")[:_LONGEST_QUESTION]

    def wait_for_report(self, seconds: float = _REPORT_SECONDS) -> None:
        """Waits until the API has written the report of the run. Without an archive the API writes none."""
        self._waits_for_report = True
        deadline = time.monotonic() + seconds
        while self._report() is None and (self._folder / RUN_FILE).exists() and time.monotonic() < deadline:
            if self._stack is not None:
                self._stack.raise_if_stopped()
            time.sleep(0.1)
        self._waits_for_report = False

    def _report(self) -> Path | None:
        """Returns the report of this start, or None. An extended run may have an earlier one."""
        path = self._folder / REPORT_FILE
        return path if path.exists() and path.stat().st_mtime >= self._started_at else None

    def end(self, commands: list[Command]) -> list[Text]:
        """Returns the lines of the summary. Reads the API for the last time, so call it before the services stop."""
        try:
            facts, samples = self.facts().with_files(self._files()), self.samples(_SAMPLES_AT_END)
        except GristmillError:  # the run is finished, whether or not the API still answers
            facts, samples = read_files(self.run_id, [self._folder.parent]), []
        found = overview(facts)
        metrics = self._folder / METRICS_FILE
        rows = read_jsonl(metrics) if metrics.exists() else current_rows(facts)
        places = {"model": self._folder / "model", "report": self._report(), "logs": self._folder / "logs"}
        seconds = time.monotonic() - self._began
        encoding = (sys.stdout.encoding or "").lower()
        return list(
            summary(
                found, rows, samples, seconds=seconds, commands=commands, plain=encoding not in ("utf-8", "utf8"),
                places={label: str(path) for label, path in places.items() if path is not None},
            )
        )  # fmt: skip

    def _files(self) -> RunFolder:
        return RunFolder(self.run_id, (self._folder.parent,))

    def _phase(self) -> str:
        if self._closing:
            return "stopping the services"
        if self._waits_for_report:
            return "writing the report"
        env = self._phases.get("env", "")
        if env.startswith("evaluates"):
            return env
        if self._stepped:
            return ""
        started = [service.name for service in self._stack.services] if self._stack is not None else []
        if not started:
            return "starting"
        working = ["trainer", "env"] if "trainer" in started else started[-1:]
        for name in working:
            if phase := self._phases.get(name):
                return f"{name}: {phase}"
        return f"{working[0]}: starts"

    def _services(self, reported: Sequence[Service]) -> list[Service]:
        by_name: Mapping[str, Service] = {service.name.partition(" ")[0]: service for service in reported}
        running = {} if self._stack is None else {service.name: service for service in self._stack.services}
        services = []
        for name in ORDER:
            process, other = running.get(name), by_name.get(name)
            if process is None:
                services.append(
                    other if other is not None and not self._closing else Service(name=name, state="unknown")
                )
                continue
            code = process.exit_code
            if code is not None:
                state, detail = ("done", "") if code == 0 else ("down", process.last_error or process.last_line)
            elif other is not None and other.state in ("up", "waiting"):
                state, detail = other.state, other.detail or ("" if self._stepped else self._phases.get(name, ""))
            else:
                state = "up" if process.ready else "waiting"
                detail = "" if process.ready else self._phases.get(name, "starts")
            version = other.version if other is not None else None
            services.append(Service(name=name, state=state, version=version, detail=detail))
        return services


class _Progress(msgspec.Struct):
    """The trainer's state in a checkpoint."""

    version: PolicyVersion
    creation: str | None = None


def saved_step(folder: Path) -> int | None:
    """Returns the step from which the run in `folder` continues: the one of its newest checkpoint."""
    record = folder / RUN_FILE
    creation = read_run_file(record).creation if record.exists() else None
    states = [
        msgspec.json.decode(path.read_bytes(), type=_Progress)
        for path in folder.glob("checkpoints/step-*/trainer_state.json")
    ]
    newest = max((state.version for state in states if creation in (None, state.creation)), default=None)
    return None if newest is None else newest.step


def show_context(log: Path | None) -> None:
    """Shows the last lines that a failed service logged since its start. The calm views did not show these lines.

    Leaves out the lines about work that went well. A busy service writes many of them, and they hide the others.
    """
    if log is None or not log.exists():
        return
    _, started, written = log.read_text(encoding="utf-8", errors="replace").rpartition(STARTED)
    if started:
        _, _, written = written.partition("\n")
    lines = [text for text in written.splitlines() if not WENT_WELL.match(text)][-_CONTEXT_LINES:]
    for line in lines:
        print(f"  {escaped(line)}", flush=True)


def next_commands(
    options: argparse.Namespace, root: Path, folder: Path, *, steps: int, question: str, stays: bool = False
) -> list[Command]:
    """Returns the commands that a user probably needs after a run.

    `options`: of this start. `root`: the clone. `folder`: of the run. `question`: a prompt of the run's data.
    `stays`: the model server of the run continues to run.
    """
    model, port = folder / "model", options.model_port
    chat = {"model": str(model), "messages": [{"role": "user", "content": question}]}
    ask = (
        f"curl http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(chat))}"
    )
    program = [PROGRAM, *([] if folder.parent == root / "runs" else ["--runs", str(folder.parent)])]
    evaluate = [*program, "evaluate", options.config, "--model", str(model)]
    evaluate += [] if folder.name == Path(options.config).stem else ["--run_id", folder.name]
    evaluate += [] if port == 9001 else ["--base_url", f"http://127.0.0.1:{port}"]
    evaluate += [word for assignment in options.set for word in ("--set", assignment)]
    return [
        Command("serve it", [serve_command(options, model, stays=stays)]),
        Command("chat with it", [ask]),
        Command("evaluate it", [shlex.join(evaluate)]),
        Command("train longer", [command(options, training_steps=2 * steps)]),
        Command("see it", [shlex.join([*program, "view", folder.name])]),
    ]
