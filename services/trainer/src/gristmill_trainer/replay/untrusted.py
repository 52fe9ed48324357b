"""What a record may decide. A run.json may come from another person or service, so it is data.

Settings of the environment are taken from an allowlist of plain values. A value that would import code, open a file,
download something or connect to an address needs `--trust`, or the user's own value by `--set`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from gristmill.group_checks import MAX_DEPTH, is_deeper
from gristmill_trainer.errors import TrainerError

_TEXTS: Final = frozenset({"system_prompt", "prompt_template", "prefill", "stop", "custom_thinking_prompt", "split"})
"""Settings whose text is shown to the model, or is a slice. The environment renders templates in a sandbox."""
_PLAIN: Final = _TEXTS | frozenset({
    "max_token_length", "ensure_scores_are_not_same", "thinking_mode", "reasoning_effort", "max_reasoning_tokens",
    "environment", "curriculum", "band", "window", "rest", "dataset", "type", "name", "params", "weight",
    "reward_functions", "dataset_config", "dataset_revision", "prompt_field", "answer_field", "ground_truth_field",
    "shuffle_dataset", "seed", "max_tokens", "min_tokens", "length_warmup_steps", "temperature", "top_p", "top_k",
    "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids",
})  # fmt: skip
_REWARD_OPTIONS: Final = frozenset({
    "rewards", "type", "name", "weight", "params",
    "extract", "last_number", "split_on_think_tag", "tolerance", "max_boxed_threshold",
    "target_tokens", "min_reward", "max_reward", "max_tokens", "cache_tokens",
    "preferred_tags", "require_all_tags", "case_sensitive", "strict",
    "min_steps", "ngram_size", "max_penalty", "threshold",
    "ignore_case", "ignore_punctuation", "whole_if_unmarked",
    "normalization", "format_weight", "accuracy_weight", "steps_bonus",
    "max_characters", "scale_factor", "letters", "first_index",
    "cases_field", "tests_field", "partial", "seconds", "memory_mb",
})  # fmt: skip
"""The options of the rewards that the environment ships, and that load nothing. A test compares them."""
_LOADS: Final = frozenset({
    "model", "models", "path", "paths", "file", "files", "url", "urls", "id", "ids", "module", "folder", "dir", "repo",
    "repository", "checkpoint", "adapter", "tokenizer", "host", "address", "server", "endpoint", "command", "code",
    "dataset", "package", "class", "function", "import", "script", "uri",
})  # fmt: skip
"""Words in the names of options with which an environment may load or fetch something."""
_EMPTY: Final[tuple[Any, ...]] = (None, "", {}, [])


class UntrustedError(TrainerError):
    """A record names code, files or addresses, and the user has not said that the record is trusted."""


def dollars_kept(value: Any) -> Any:
    """Returns the value with every dollar sign doubled, so that a configuration file expands no variable in it."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, Mapping):
        return {dollars_kept(name): dollars_kept(item) for name, item in value.items()}
    return [dollars_kept(item) for item in value] if isinstance(value, list) else value


def recorded_environment(
    env: Mapping[str, Any], own: Mapping[str, Any], config_dir: Path, *, trust: bool
) -> dict[str, Any]:
    """Returns the recorded settings of an environment, without those that `own` replaces.

    `own`: the user's settings, by name and nested as in a configuration file. `config_dir`: the user's own folder of
    configurations, whose data sets a record may name. Raises UntrustedError, unless `trust`.
    """
    if is_deeper(env, MAX_DEPTH):
        raise UntrustedError("untrusted_record", "the record of the run is nested too deep; no run has such settings")
    settings = _without(env, own)
    suspicious = [] if trust else list(_suspicious(settings, "", config_dir))
    if suspicious:
        raise UntrustedError(
            "untrusted_record",
            "the record of the run names "
            + "; ".join(suspicious)
            + ". If you trust whoever wrote the run, add --trust; else set your own value with --set NAME=VALUE",
            settings=suspicious,
        )
    return settings


def _without(recorded: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without(value, own[name]) if isinstance(value, Mapping) and isinstance(own.get(name), Mapping) else value
        for name, value in recorded.items()
        if name not in own or isinstance(own[name], Mapping)
    }


def _suspicious(value: Any, place: str, config_dir: Path) -> Iterator[str]:
    """Yields a text per setting that is more than a plain value. `place`: its name, with dots."""
    name = place.rpartition(".")[2]
    if isinstance(value, Mapping):
        for key, item in value.items():
            inner = f"{place}.{key}".lstrip(".")
            inside_params = "params" in place.split(".")
            if item in _EMPTY:
                continue
            if key == "sources" and not place and isinstance(item, Mapping):
                for source in item.values():  # each has the keys of a run
                    yield from _suspicious(source, "", config_dir)
            elif key == "dataset_path" and place == "dataset":
                if not _inside(str(item), config_dir):
                    yield f"{inner}: {item} (a file outside of {config_dir})"
            elif key == "dataset_name" and place == "dataset":
                yield f"{inner}: {item} (a download)"
            elif inside_params and _may_load(key, place):
                yield f"{inner}: {item} (code, a file or a download)"
            elif key not in _PLAIN and not inside_params:
                yield f"{inner}: {item} (not a setting that a record may have)"
            else:
                yield from _suspicious(item, inner, config_dir)
    elif isinstance(value, list):
        for item in value:
            yield from _suspicious(item, place, config_dir)
    elif isinstance(value, str) and name not in _TEXTS and any(sign in value for sign in "/\\:$"):
        yield f"{place}: {value} (code, a file or an address)"


def _may_load(option: str, place: str) -> bool:
    """Returns whether an option of a reward or of an environment may load something. `place`: of its params."""
    if place.startswith("environment."):
        return not _LOADS.isdisjoint(re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", option).lower()))
    return option not in _REWARD_OPTIONS


def _inside(path: str, folder: Path) -> bool:
    resolved = (folder / path).resolve()
    return resolved.exists() and resolved.is_relative_to(folder.resolve())
