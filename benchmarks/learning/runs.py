"""Whole trainings, one after another, on one real stack: Redis, API, vLLM, environment, trainer."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from benchmarks.services import Services
from tests.support.stack import ROOT

from gristmill.internal.lines import read_jsonl
from gristmill_cli.local.processes import LocalStackError, Service

_LAST_SECONDS = 60.0
"""Maximum seconds that environment or trainer may continue after the other has ended."""


@dataclass(frozen=True)
class Case:
    """A training: a shipped configuration, and settings that override it."""

    label: str
    """Name of the training in the table and the plot."""
    config: str
    """Name in configs/, or a path."""
    seed: int
    """Seed of the rows' order and of the trainer."""
    trainer: Mapping[str, Any]
    """Settings of the trainer, which override the configuration."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the run, which override the configuration."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return f"{Path(self.config).stem}-{self.label.replace(' ', '-')}-{self.seed}"

    def write(self, folder: Path) -> None:
        """Writes the configuration into `folder`."""
        source = Path(self.config) if self.config.endswith(".yaml") else ROOT / "configs" / f"{self.config}.yaml"
        settings = yaml.safe_load(source.read_text())
        dataset = settings["dataset"]
        if "sources" not in settings:
            dataset["dataset_path"] = str(source.parent / dataset["dataset_path"])
        if "agent" in settings:
            settings["agent"] = str(source.parent / settings["agent"])
        settings["dataset"] = {**dataset, "shuffle_dataset": True, "seed": self.seed}
        settings["steps_per_eval"] = 0  # The measured times contain no evaluation.
        settings["trainer"] = {**settings.get("trainer", {}), **self.trainer, "seed": self.seed}
        (folder / f"{self.name}.yaml").write_text(yaml.safe_dump({**settings, **self.more}))


@dataclass(frozen=True)
class Curve:
    """The results of a training."""

    label: str
    seed: int
    rewards: list[float]
    """Mean reward of each step's batch."""
    staleness: list[float]
    """Mean age of each step's groups, in steps."""
    tokens: list[int]
    """Tokens of each step."""
    seconds: float
    """From the start of environment and trainer to the end of both."""
    stepping: float
    """Part of `seconds` that all steps except the first took."""


def train(services: Services, case: Case) -> Curve:
    """Runs `case` to its end. Raises LocalStackError if a process fails. output.log contains the process' lines."""
    case.write(services.folder)
    began = time.monotonic()
    trainer = _start(services, "trainer", "gristmill_trainer")
    env = _start(services, "env", "gristmill_env", "serve", "--config", case.name)
    _wait(env, trainer)
    rows = read_jsonl(services.folder / "runs" / case.name / "metrics.jsonl")
    return Curve(
        case.label,
        case.seed,
        [row["reward_mean"] for row in rows],
        [row["staleness_mean"] for row in rows],
        [row["tokens"] for row in rows],
        time.monotonic() - began,
        sum(sum(row["seconds"].values()) for row in rows[1:]),
    )


def _start(services: Services, name: str, module: str, *arguments: str) -> Service:
    return services.processes.start(name, [sys.executable, "-m", module, *arguments], services.environ())


def _wait(*services: Service) -> None:
    """Waits until all services have ended without error."""
    deadline: float | None = None
    while any(service.exit_code is None for service in services):
        for service in services:
            if service.exit_code:
                raise LocalStackError(
                    "service_ended",
                    f"{service.name} ended with exit code {service.exit_code}",
                    service=service.name,
                    exit_code=service.exit_code,
                )
            if service.exit_code == 0 and deadline is None:
                deadline = time.monotonic() + _LAST_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            names = [service.name for service in services]
            raise LocalStackError("service_not_ended", f"one of {', '.join(names)} did not end", services=names)
        time.sleep(0.1)
