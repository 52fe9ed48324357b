#!/usr/bin/env python3
"""Writes the generated tables in docs/ from their sources.

The sources are the models that check settings, the rewards, the tables of Atropos' keys, of the fixes of its protocol
and of troubles, .env.example, and the packages' errors.

    python scripts/configuration_docs.py            write them
    python scripts/configuration_docs.py --check    fail when a table is not current (a unit test does the same)

A table stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`. The text around it is written by hand. In
docs/metrics.md, the names of labels and the definitions are generated, and in docs/reproduce.md the remedies.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import itertools
import re
import sys
import types
import typing
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from error_codes import table_rows
from gristmill.hyperparameters import TRAINER_ONLY, Hyperparameters
from gristmill.internal.flags import flag_names
from gristmill.internal.metrics import Kind
from gristmill.internal.prometheus import Exported
from gristmill.internal.settings import inner_model
from gristmill.internal.trouble import CODES
from gristmill_api import metrics as api_metrics
from gristmill_api.settings import Limits
from gristmill_env import prometheus as env_metrics
from gristmill_env.atropos.keys import KEYS, OPTIONS, REWARDS, Key, Part, Verdict
from gristmill_env.options import REQUIRED
from gristmill_env.progress import REASONS
from gristmill_env.rewards.registry import find, reward_names
from gristmill_env.settings.run import EnvConfig
from gristmill_trainer.memory import Memory, gigabytes
from gristmill_trainer.prometheus import OF_STEPS, OTHERS
from gristmill_trainer.settings import TrainerSettings

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FILES = (
    "configuration.md",
    "errors.md",
    "from-atropos.md",
    "gpu.md",
    "metrics.md",
    "operations.md",
    "reproduce.md",
    "rewards.md",
    "troubleshooting.md",
)

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_CAUSE = re.compile(r"^(?P<row>\| `(?P<cause>\w+)` \|[^|\n]*\|)[^|\n]*\|$", re.MULTILINE)
_METRIC = re.compile(
    r"^\| (?P<field>`\w+` \| )?`(?P<name>gristmill_\w+)(?:\{[^`]*\})?` \|(?:\\\||[^|\n])*\|", re.MULTILINE
)
_TABLE = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


def main() -> int:
    """Writes the tables, or checks them. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the generated tables of docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a table is not current")
    check = parser.parse_args().check
    stale = stale_files()
    for path, text in stale.items():
        if check:
            print(f"docs/{path.name} is not current: run python scripts/configuration_docs.py", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote docs/{path.name}")
    return 1 if check and stale else 0


def stale_files(folder: Path = DOCS) -> dict[Path, str]:
    """Returns the files with outdated tables and their new text. Raises KeyError for an unknown table."""
    texts = {path: path.read_text(encoding="utf-8") for path in (folder / name for name in FILES)}
    fresh = {}
    for path, text in texts.items():
        fresh[path] = _CAUSE.sub(_remedied, _METRIC.sub(_defined, _TABLE.sub(_filled, text)))
    return {path: fresh[path] for path in texts if fresh[path] != texts[path]}


def _defined(match: re.Match[str]) -> str:
    """Returns the row of a metric with its definition. Its healthy range and its remedy are written by hand."""
    row = _metrics().get(match["name"])
    if row is None:
        return match[0]
    labels = ",".join(label for label in row.labels if label != "run")
    named = f"`{match['name']}{{{labels}}}`" if labels else f"`{match['name']}`"
    return f"| {match['field'] or ''}{named} | {_cell(_linked(row.meaning))} |"


def _remedied(match: re.Match[str]) -> str:
    """Returns the row of a failed receipt's cause with its remedy. The column about the server is written by hand."""
    from gristmill_trainer.receipts.diagnosis import REMEDIES  # imports torch

    cause = next((cause for cause in REMEDIES if cause == match["cause"]), None)
    return match[0] if cause is None else f"{match['row']} {_cell(REMEDIES[cause])} |"


@cache
def _metrics() -> dict[str, Exported]:
    """Returns the metrics of the services by their names in Prometheus."""
    rows = [*env_metrics.METRICS.values(), *api_metrics.METRICS.values(), *OF_STEPS, *OTHERS]
    return {row.name + ("_total" if row.kind is Kind.COUNTER else ""): row for row in rows}


def _filled(match: re.Match[str]) -> str:
    return f"{match[1]}\n{_made(match['name'])}\n{match[3]}"


@cache
def _made(name: str) -> str:
    return TABLES[name]()


def _settings(model: type[BaseModel], command: str, only: Container[str] | None = None) -> str:
    """Returns a table for the top level and one per section below it. `only`: the fields to list, or None for all."""
    flags = flag_names(model)
    parts = []
    for place, section in _sections(model, ""):
        if place:
            parts.append(f"### `{place}`\n\n{_cell(_about(section))}\n")
        prefix = place.replace("[]", "").rstrip(":")
        rows = [
            [
                f"`{name}`",
                _type(info.annotation) + _bounds(info),
                _default(info),
                f"`{flags[here]}`" if (here := f"{prefix}.{name}".lstrip(".")) in flags else "",
                info.description or "",
            ]
            for name, info in section.model_fields.items()
            if only is None or name in only
        ]
        parts.append(_table(["key", "type", "default", f"flag of {command}", "meaning"], rows))
    return "\n".join(parts)


def _api_limits() -> str:
    rows = [
        [f"`API_{name.upper()}`", _type(info.annotation) + _bounds(info), _default(info), info.description or ""]
        for name, info in Limits.model_fields.items()
    ]
    return _table(["variable", "type", "default", "meaning"], rows)


def _sections(
    model: type[BaseModel], place: str, seen: set[type[BaseModel]] | None = None
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yields (place, model) for the model and its inner models: "", "dataset:", "dataset.reward_functions[]:".

    A model that is in several places is listed at the first place: `sources[]:` has the same sections as the run.
    """
    seen = set() if seen is None else seen
    if model in seen:
        return
    seen.add(model)
    yield place, model
    for name, info in model.model_fields.items():
        section = inner_model(info.annotation)
        if section is not None:
            many = "[]" if typing.get_origin(info.annotation) is list else ""
            yield from _sections(section, f"{place.rstrip(':')}.{name}{many}:".lstrip("."), seen)


def _about(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").split("\n\n")[0]


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(kind) for kind in arguments if kind is not type(None))
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "section"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    return "str" if annotation is SecretStr else str(getattr(annotation, "__name__", annotation))


def _bounds(info: FieldInfo) -> str:
    found = [
        f"{sign} {value:g}"
        for rule in info.metadata
        for name, sign in _BOUNDS.items()
        if (value := getattr(rule, name, None)) is not None
    ]
    return ", " + ", ".join(found) if found else ""


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value is None:
        return ""
    if isinstance(value, BaseModel) or (isinstance(value, list) and value and isinstance(value[0], BaseModel)):
        return "below"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _atropos_keys() -> str:
    titles = {
        Part.FILE: "Of the file itself",
        Part.BASE: "Of every environment (top level or `env:`)",
        Part.DATASET: "Of the dataset environment (`dataset:`, `env:` or top level)",
        Part.SERVER: "Of a server (`server_configs:` or `openai:`)",
    }
    head = ["key", "in our files", "verdict", "Atropos' default", "remarks"]
    parts = [
        f"### {title}\n\n" + _table(head, [_atropos_row(key) for key in KEYS if key.part is part])
        for part, title in titles.items()
    ]
    return "\n".join(parts)


def _atropos_row(key: Key) -> list[str]:
    verdict = str(key.verdict)
    if key.quiet and key.verdict is not Verdict.HONOURED:
        verdict += " (except for " + ", ".join(dict.fromkeys(f"`{_yaml(value)}`" for value in key.quiet)) + ")"
    default = "" if key.default is None else f"`{_yaml(key.default)}`"
    return [f"`{key.name}`", f"`{key.here}`" if key.here else "", verdict, default, key.text]


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _atropos_rewards() -> str:
    names = [[f"`{reward.name}`", f"`{reward.here}`" if reward.here else "refused", reward.text] for reward in REWARDS]
    options = [[f"`{option.reward}`", f"`{option.name}`", option.text] for option in OPTIONS]
    return (
        _table(["reward", "here", "remarks"], names)
        + "\nOptions are passed to the reward unchanged, except for these, which have no effect, with a warning:\n\n"
        + _table(["reward", "option", "because"], options)
    )


def _atropos_fixes() -> str:
    """Returns a table of the differences from Atropos' server, which a test shows with a conversation for each."""
    fixes = yaml.safe_load((ROOT / "tests" / "integration" / "atropos" / "fixes.yaml").read_text(encoding="utf-8"))
    rows = [[fix["id"].replace("-", " "), fix["theirs"], fix["ours"], fix["safe"]] for fix in fixes]
    return _table(["case", "atroposlib 0.4.0", "here", "why it hurts no client"], rows)


def _rewards() -> str:
    """Returns the rewards that ship, with their options and the first lines of their docstrings."""
    found = [find(name) for name in reward_names()]
    rows = []
    for definition in (one for one in found if one.target.__module__.startswith("gristmill_env.")):
        options = (
            f"`{name}`" if option.default is REQUIRED else f"`{name}: {_yaml(option.default)}`"
            for name, option in definition.options.items()
        )
        rule = (inspect.getdoc(definition.target) or "").partition("\n")[0]
        rows.append([f"`{definition.name}`", ", ".join(options) or "none", rule])
    return _table(["name", "options", "rule"], rows)


def _variables() -> str:
    """Returns one table per section of .env.example. A variable's comment is its meaning."""
    sections: list[tuple[str, list[list[str]]]] = []
    comment: list[str] = []
    for line in (ROOT / ".env.example").read_text(encoding="utf-8").splitlines():
        if title := re.match(r"# --- (.*?) -+$", line):
            sections.append((title[1], []))
            comment = []
        elif variable := re.match(r"(?:# )?([A-Z][A-Z0-9_]*)=(.*)$", line):
            name, default = variable[1], variable[2]
            shown = "" if line.startswith("#") or not default else f"`{default}`"
            sections[-1][1].append([f"`{name}`", shown, " ".join(comment)])
            comment = []
        elif line.startswith("# "):
            comment.append(line.removeprefix("# "))
    return "\n".join(f"**{title}**\n\n" + _table(["variable", "default", "meaning"], rows) for title, rows in sections)


def _remedies(head: str, rows: Mapping[Any, tuple[str, str]]) -> str:
    return _table([head, "cause", "remedy"], [[f"`{code}`", *map(_linked, texts)] for code, texts in rows.items()])


def _linked(text: str) -> str:
    """Returns the text with links to the pages and sections that it names."""

    def link(match: re.Match[str]) -> str:
        title = match[2] or match[1]
        anchor = "#" + re.sub(r"[^\w -]", "", match[2]).lower().replace(" ", "-") if match[2] else ""
        return f"[{title}]({match[1]}{anchor})"

    return re.sub(r"docs/([\w-]+\.md)(?:, '([^']+)')?", link, text)


_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
# Qwen2.5: parameters, and the shape in the model's config.json.
_MODELS: Mapping[str, tuple[float, dict[str, int]]] = {
    name: (parameters, dict(zip(_SHAPE, shape, strict=True)))
    for name, parameters, *shape in (
        ("0.5B", 0.494e9, 896, 4864, 24, 14, 2, 151936),
        ("1.5B", 1.544e9, 1536, 8960, 28, 12, 2, 151936),
        ("3B", 3.086e9, 2048, 11008, 36, 16, 2, 151936),
        ("7B", 7.616e9, 3584, 18944, 28, 28, 4, 152064),
        ("14B", 14.77e9, 5120, 13824, 48, 40, 8, 152064),
    )
}
_CARDS = (24, 48, 80)
_USABLE, _LEAST_TOKENS, _MOST_TOKENS, _KV_BYTES = 0.92, 8192, 65536, 2e9


def _memory() -> str:
    head = [
        "model",
        "all weights",
        "per token",
        "per token, recomputed",
        "LoRA, rank 16",
        "per token",
        "per token, recomputed",
        "vLLM's weights",
    ]
    rows = []
    for name, (parameters, config) in _MODELS.items():
        row = [f"Qwen2.5-{name}"]
        for lora in (0, 16):
            plain, recomputed = (_need(config, parameters, lora, recompute) for recompute in (False, True))
            row += [gigabytes(plain.fixed), f"{plain.per_token / 1e6:.2f} MB", f"{recomputed.per_token / 1e6:.2f} MB"]
        rows.append([*row, gigabytes(2 * parameters)])
    return _table(head, rows)


def _cards() -> str:
    head = ["model", *(f"one {card} GB card" for card in _CARDS), "two 80 GB cards"]
    return _table(
        head,
        [
            [
                name,
                *(_fitting(config, parameters, card, (0.45, 0.3)) for card in _CARDS),
                _fitting(config, parameters, 80, (0.0,)),
            ]
            for name, (parameters, config) in _MODELS.items()
        ],
    )


def _fitting(config: Mapping[str, int], parameters: float, card: int, shares: tuple[float, ...]) -> str:
    """Returns the settings with the most trained weights that fit. `shares`: of the trainer's card, for vLLM."""
    for lora, recompute, share in itertools.product((0, 16), (False, True), shares):
        tokens = _need(config, parameters, lora, recompute).tokens((1 - share) * card * 1e9 * _USABLE)
        if tokens >= _LEAST_TOKENS and (not share or 2 * parameters + _KV_BYTES < share * card * 1e9):
            words = (
                ["`MODEL_GPU=0`, `TRAINER_GPU=1`"]
                if not share
                else []
                if share == shares[0]
                else [f"`GPU_MEMORY_UTILIZATION={share}`"]
            )
            words.append("`lora_rank: 16`, `LORA_RANK=16`" if lora else "all weights")
            words += ["`gradient_checkpointing: true`"] if recompute else []
            return ", ".join([*words, f"`token_budget: {min(2 ** (tokens.bit_length() - 1), _MOST_TOKENS)}`"])
    return "does not fit"


def _need(config: Mapping[str, int], parameters: float, lora: int, recompute: bool) -> Memory:
    settings = TrainerSettings(lora_rank=lora, gradient_checkpointing=recompute)
    memory = Memory.of(config, int(parameters), settings, cuda=True)
    assert memory is not None
    return memory


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(_cell(cell) for cell in line) + " |\n" for line in lines)


def _cell(text: str) -> str:
    """Returns the text as one line. Outside of `code` it contains neither a column's border nor an HTML tag."""
    words = " ".join(text.split()).replace("|", "\\|")
    return "".join(
        part if number % 2 else part.replace("<", "&lt;").replace("*", "\\*")
        for number, part in enumerate(re.split(r"(`[^`]*`)", words))
    )


TABLES: Mapping[str, Callable[[], str]] = {
    "run": lambda: _settings(EnvConfig, "gristmill_env"),
    "hyperparameters": lambda: _settings(Hyperparameters, "gristmill_trainer"),
    "trainer": lambda: _settings(TrainerSettings, "gristmill_trainer", TRAINER_ONLY),
    "api": _api_limits,
    "memory": _memory,
    "cards": _cards,
    "variables": _variables,
    "atropos-keys": _atropos_keys,
    "atropos-rewards": _atropos_rewards,
    "atropos-fixes": _atropos_fixes,
    "troubles": lambda: _remedies("code", CODES),
    "drop-reasons": lambda: _remedies("reason", REASONS),
    "rewards": _rewards,
    "errors": lambda: _table(["package", "code", "error", "message"], table_rows()),
}

if __name__ == "__main__":
    sys.exit(main())
