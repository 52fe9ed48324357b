"""The model card: base model, dataset, rewards and progress of the training."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from gristmill.redaction import redact_arguments, redact_text

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run for the model card. All fields become public with the model."""

    run_id: str
    base_model: str
    """The user's name of the model; the card contains only the last part of a folder's path."""
    dataset: str
    rewards: list[str]
    objective: str
    steps: int
    policy_version: str
    final_reward: float | None
    """Mean reward of the last step's groups; None if this process trained no step."""
    command: str
    """Command line from `told_command`."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the packages, by name."""


def told_command(program: str, arguments: Sequence[str]) -> str:
    """Returns a command line without secrets, addresses and this machine's paths."""
    told = [program]
    for argument in redact_arguments(arguments):
        flag, equals, value = argument.partition("=")
        named = flag.startswith("--") and equals
        told.append(f"{flag}={shlex.quote(_public(value))}" if named else shlex.quote(_public(argument)))
    return " ".join(told)


def model_card(facts: RunFacts) -> str:
    """Returns the README.md, with the metadata that hubs read."""
    base = _public(facts.base_model)
    head = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [gristmill, reinforcement-learning]"]
    if _HUB_ID.fullmatch(base):
        head.insert(0, f"base_model: {base}")
    reward = "not known" if facts.final_reward is None else f"{facts.final_reward:.4f}"
    rows: Mapping[str, str] = {
        "Base model": base,
        "Dataset": _public(facts.dataset),
        "Rewards": ", ".join(facts.rewards) or "none",
        "Objective": facts.objective,
        "Optimizer steps": str(facts.steps),
        "Mean reward of the last step": reward,
        "Policy version": facts.policy_version,
        "Versions": ", ".join(f"{name} {version}" for name, version in sorted(facts.versions.items())),
    }
    table = "\n".join(f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows.items())
    front = "\n".join(head)
    return (
        f"---\n{front}\n---\n\n# {facts.run_id}\n\n"
        f"{base}, trained further by reinforcement learning with Gristmill.\n\n"
        f"| | |\n|---|---|\n{table}\n\n```sh\n{facts.command}\n```\n"
    )


def _public(text: str) -> str:
    """Returns the text without secrets and addresses; a path becomes its last part."""
    text = redact_text(text)
    if _URL.search(text):
        return _URL.sub("URL", text)
    if text.startswith(("/", "~", "./", "../")) or "\\" in text:
        return PurePath(text).name
    return text
