"""Settings that are allowed and probably a mistake: keys without an effect, and limits that contradict each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gristmill_env.settings.dataset import default_of
from gristmill_env.settings.run import EnvConfig, EvalHandling, TimeoutAction

_WANDB = ("wandb_name", "num_rollouts_to_keep", "num_rollouts_per_group_for_logging", "min_items_sent_before_logging")

_COUNTING = ("length", "soft_overlong", "cosine_length")
"""Rewards that count the tokens of a completion."""


def warnings_of(config: EnvConfig, trainer: Mapping[str, Any]) -> list[str]:
    """Returns one sentence per setting, which begins with its key. `trainer`: the hyperparameters, as far as known."""
    warnings = [*_contradictions(config, trainer), *_written(_without_effect(config))]
    for source, part in config.by_source().items():
        of_rows = [*_of_sampling(part, trainer), *_written(_of_rows(part))]
        warnings += of_rows if source is None else [f"source '{source}': {warning}" for warning in of_rows]
    return warnings


def _written(useless: Iterable[tuple[str, str]]) -> Iterator[str]:
    return (f"{key} has no effect: {why}" for key, why in useless)


def _of_sampling(config: EnvConfig, trainer: Mapping[str, Any]) -> Iterator[str]:
    dataset, longest = config.dataset, config.max_token_length
    if dataset.top_p != 1:
        yield (
            f"top_p is {dataset.top_p:g}: tokens outside the nucleus are never sampled, which biases the "
            "trainer's importance ratio; 1.0 does not"
        )
    for key in dataset.more_sampling:
        yield (
            f"{key} is {getattr(dataset, key):g}: tokens are drawn from another distribution than the trainer's, which "
            f"biases its importance ratio; {default_of(key) or 'leaving it out'} does not"
        )
    if dataset.max_tokens > longest:
        yield (
            f"max_tokens is {dataset.max_tokens}, above max_token_length, {longest}, which "
            "limits prompt and completion together; lower max_tokens or raise max_token_length"
        )
    steps = trainer.get("training_steps")
    if isinstance(steps, int) and dataset.length_warmup_steps > steps:
        yield f"length_warmup_steps is {dataset.length_warmup_steps}, above trainer.training_steps, {steps}; lower it"
    if config.environment.type == "dataset" and config.agent is None:
        for reward in dataset.rewards():
            for key in ("target_tokens", "max_tokens"):
                wanted = reward.params.get(key)
                if isinstance(wanted, int) and reward.type in _COUNTING and wanted > dataset.max_tokens:
                    yield f"{key} of reward {reward.type} is {wanted}, above max_tokens, {dataset.max_tokens}; lower it"
    buffer = trainer.get("overlong_buffer")
    if isinstance(buffer, int) and buffer >= dataset.max_tokens:
        yield f"trainer.overlong_buffer is {buffer}, not below max_tokens, {dataset.max_tokens}: every completion loses"


def _contradictions(config: EnvConfig, trainer: Mapping[str, Any]) -> Iterator[str]:
    longest = config.max_token_length
    limits = {"worker_timeout": config.worker_timeout, "group_timeout": config.group_timeout or 0}
    if config.rollout_timeout_action is TimeoutAction.LEAVE_OUT:
        limits["rollout_timeout"] = config.rollout_timeout or 0
    for key, seconds in limits.items():
        if seconds > 0:
            yield (
                f"{key} is {seconds:g} s: a completion that takes longer is left out, so that the model learns from "
                "short completions more often; without the limit it does not"
            )
    if config.group_size == 1:
        yield "group_size is 1: the advantage is the reward itself, and ensure_scores_are_not_same has no effect"
    warmup, steps = trainer.get("warmup_steps"), trainer.get("training_steps")
    if isinstance(warmup, int) and isinstance(steps, int) and warmup > steps:
        yield f"trainer.warmup_steps is {warmup}, above trainer.training_steps, {steps}; lower it"
    for key, loss in (("seq_len", "trains only its beginning"), ("token_budget", "drops it")):
        limit = trainer.get(key)
        if isinstance(limit, int) and limit < longest:
            yield (
                f"trainer.{key} is {limit}, and max_token_length {longest}: the trainer {loss} if a sequence is longer "
                f"than {limit} tokens; set both to one number"
            )
    if config.reward_timeout > config.reward_wall_timeout:
        yield (
            f"reward_timeout is {config.reward_timeout:g}, above reward_wall_timeout, {config.reward_wall_timeout:g}, "
            "which ends a call first"
        )
    if config.thinking_mode is False and config.reasoning_effort not in (None, "none"):
        yield f"thinking_mode is false, and reasoning_effort ({config.reasoning_effort}) switches thinking on; keep one"


def _without_effect(config: EnvConfig) -> Iterator[tuple[str, str]]:
    """Yields the keys that a user has set although another setting makes them useless, and the reason."""
    given = config.model_fields_set
    evaluates = bool(config.by_evaluation())
    if "steps_per_eval" in given and config.steps_per_eval > 0 and not evaluates:
        yield (
            "steps_per_eval",
            "no evaluation set is named (eval_split, eval_dataset_name, eval_dataset_path, evaluations)",
        )
    for key in ("eval_handling", "eval_limit_ratio", "max_eval_workers")[: 2 if evaluates else 3]:
        if key in given and (not evaluates or config.steps_per_eval <= 0):
            yield key, "serve does not evaluate: an evaluation set or a positive steps_per_eval is missing"
        elif key == "eval_limit_ratio" and key in given and config.eval_handling is not EvalHandling.LIMIT_TRAIN:
            yield key, "eval_handling is not LIMIT_TRAIN"
    if "max_num_workers_per_node" in given and config.max_num_workers > 0:
        yield "max_num_workers_per_node", "max_num_workers is not -1"
    if not config.use_wandb:
        for key in _WANDB:
            if key in given:
                yield key, "use_wandb is not set"
    if "rollout_timeout_action" in given and config.rollout_timeout is None and config.agent is None:
        yield "rollout_timeout_action", "rollout_timeout is not set"
    if "reward_processes" in given and not any(
        spec.process for part in config.by_source().values() for spec in part.dataset.rewards()
    ):
        yield "reward_processes", "no reward has process: true"
    if config.agent is not None:
        if config.rollout_timeout is not None:
            yield "rollout_timeout", "agent.timeout limits the rollouts of an agent"
        if config.dataset.prefill:
            yield "dataset.prefill", "an agent writes its messages itself"
    if config.environment.type == "dataset" and "step_timeout" in config.environment.model_fields_set:
        yield "environment.step_timeout", "the environment is dataset, whose methods do not wait"


def _of_rows(config: EnvConfig) -> Iterator[tuple[str, str]]:
    dataset, given = config.dataset, config.dataset.model_fields_set
    if dataset.min_tokens and not dataset.length_warmup_steps:
        yield "min_tokens", "it is the start of a warm-up; set length_warmup_steps"
    if dataset.length_warmup_steps and dataset.min_tokens == dataset.max_tokens:
        yield "length_warmup_steps", "min_tokens is max_tokens"
    if "prompt_field" in given and dataset.prompt_template is not None:
        yield "prompt_field", "prompt_template replaces it"
    if dataset.answer_field is not None and dataset.ground_truth_field not in (None, dataset.answer_field):
        yield "answer_field", "ground_truth_field replaces it"
    if dataset.rows_params and dataset.rows is None:
        yield "rows_params", "rows is not set"
    if dataset.dataset_config is not None and dataset.rows is not None:
        yield "dataset_config", "rows in Python have no configurations"
    if "seed" in given and not dataset.shuffle_dataset:
        yield "seed", "shuffle_dataset is false"
    for prefix in ("", "eval_"):
        name, path = (getattr(dataset, f"{prefix}dataset_{part}") for part in ("name", "path"))
        part, revision = (getattr(dataset, f"{prefix}dataset_{part}") for part in ("config", "revision"))
        if part is not None and Path(path or name or "").suffix:
            yield f"{prefix}dataset_config", "a single file has no configurations"
        if prefix and name is None:
            for key, value in (("config", part), ("revision", revision)):
                if value is not None and path is None:
                    yield f"eval_dataset_{key}", "eval_dataset_name is not set"
