"""Runs a TRL reward function unchanged: `type: trl:package.module:function`, or `trl:file.py:function`.

TRL calls the function once for several completions, with keyword arguments: `prompts`, `completions`, `completion_ids`,
every column of the data set as a list, `trainer_state`, `log_extra`, `log_metric`. The function returns a list whose
items are numbers or None, and may be async. In a conversational data set the row's prompt is a list of messages. Then a
prompt is that list, and a completion is `[{"role": "assistant", "content": text}]`, or all turns after the prompt if
there are several. Otherwise both are text, and the completion is the last reply.
Source: https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.internal.settings import did_you_mean
from gristmill_env.errors import RewardError
from gristmill_env.options import refuse_unknown
from gristmill_env.rewards.inputs import RowSchema, Sample, known_tokens
from gristmill_env.rewards.reward import BoundReward, CallableReward
from gristmill_env.values import message_of, private

_IDS = "completion_ids"
_COMPLETIONS = frozenset({"prompts", "completions", _IDS})
_TRAINER = frozenset({"trainer_state", "log_extra", "log_metric"})
_NOT_COLUMNS = frozenset({"prompt", "completion", _IDS})
"""Columns that TRL does not pass to the function."""
_HINT = (
    " (completions are text or message lists, as the rows' prompts are; if it needs the other, set "
    "params: {conversational: true} or false)"
)


@dataclass(frozen=True)
class TrainerState:
    """The known part of TRL's trainer state."""

    step: int | None

    @property
    def global_step(self) -> int:
        """Number of optimizer steps so far. Raises RewardError outside of training."""
        if self.step is None:
            raise RewardError("no_trainer_state", "trainer_state.global_step is asked for, but nothing is trained here")
        return self.step


@dataclass(frozen=True)
class TrlReward(CallableReward):
    """A TRL reward function and the arguments that a configuration sets."""

    named: Mapping[str, inspect.Parameter]
    """The function's arguments that can be passed by name."""
    open_ended: bool
    """Whether the function takes **kwargs, and so all columns."""
    params: Mapping[str, Any]
    conversational: bool | None
    """Whether prompts and completions are messages. None: as in the row's prompt."""

    @property
    def asks_for(self) -> frozenset[str]:
        # The function gets all arguments, and which ones it reads is unknown.
        return frozenset({"completion", "prompt", *(["tokens"] if self._counts_tokens else [])})

    @property
    def reads_tokens(self) -> bool:
        return self.open_ended or _IDS in self.named

    @property
    def _counts_tokens(self) -> bool:
        return _IDS in self.named and self.named[_IDS].default is inspect.Parameter.empty

    def bind(self, schema: RowSchema, name: str) -> BoundReward:
        given = {*_COMPLETIONS, *_TRAINER, *schema.columns, *self.params} - (_NOT_COLUMNS - _COMPLETIONS)
        for argument in self.named.values():
            if argument.default is argument.empty and argument.name not in given:
                has = ", ".join(schema.columns) or "no columns"
                raise RewardError(
                    "unknown_input",
                    f"TRL reward '{self.name}' wants '{argument.name}', a column; the data set has {has}."
                    f"{did_you_mean(argument.name, sorted(given))}",
                    reward=self.name,
                    input=argument.name,
                    columns=list(schema.columns),
                )
        return BoundReward(name, self, self.function, self._arguments, group_level=True, hint=_HINT)

    def _arguments(self, samples: Sequence[Sample]) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            column: [private(sample.row[column]) for sample in samples]
            for column in samples[0].row
            if column not in _NOT_COLUMNS
        }
        conversational = samples[0].conversational if self.conversational is None else self.conversational
        arguments |= {
            "prompts": [_prompt(sample, conversational) for sample in samples],
            "completions": [_completion(sample, conversational) for sample in samples],
            "trainer_state": TrainerState(samples[0].step),
            "log_extra": _not_logged,
            "log_metric": _not_logged,
            **self.params,
        }
        # Unknown token ids are left out, so that the function uses its default. A function without a default fails.
        if self._counts_tokens or all(sample.tokens is not None for sample in samples):
            arguments[_IDS] = [list(known_tokens(sample)) for sample in samples]
        return arguments if self.open_ended else {key: arguments[key] for key in self.named if key in arguments}


def trl_reward(name: str, target: Callable[..., Any], params: Mapping[str, Any]) -> TrlReward:
    """Makes a reward from a TRL reward function or from its factory (a class, `get_soft_overlong_punishment`).

    `params`: `conversational`, and arguments of the function or of the factory.
    Raises RewardError for params that do not exist.
    """
    params = dict(params)
    conversational = params.pop("conversational", None)
    if conversational is not None and not isinstance(conversational, bool):
        raise RewardError(
            "parameter_invalid",
            f"parameter 'conversational' of TRL reward '{name}' is {conversational!r}; true or false?",
            reward=name,
            parameter="conversational",
            problem="bool_type",
        )
    if inspect.isclass(target) or not _takes_completions(target):
        _check(name, target, params)
        try:
            target = target(**params)
        except Exception as error:  # the user's code
            kind = type(error).__name__
            reason = f"TRL reward '{name}' cannot be made with these params: {kind}: {message_of(error)}"
            raise RewardError("reward_not_made", reason, reward=name, error=kind) from error
        params = {}
        if not callable(target) or not _takes_completions(target):
            raise RewardError(
                "not_a_trl_reward",
                f"'{name}' takes neither completions nor prompts: it is not a TRL reward function",
                reward=name,
            )
    _check(name, target, params)
    parameters = inspect.signature(target).parameters.values()
    return TrlReward(
        name,
        target,
        {parameter.name: parameter for parameter in parameters if _by_name(parameter)},
        any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
        params,
        conversational,
    )


def _takes_completions(target: Callable[..., Any]) -> bool:
    parameters = inspect.signature(target).parameters.values()
    return any(p.name in _COMPLETIONS or p.kind is p.VAR_KEYWORD for p in parameters)


def _check(name: str, target: Callable[..., Any], params: Mapping[str, Any]) -> None:
    has = [p.name for p in inspect.signature(target).parameters.values() if _by_name(p)]
    options = ["conversational", *(option for option in has if option not in _COMPLETIONS | _TRAINER)]
    refuse_unknown(params, options, f"TRL reward '{name}'", RewardError, reward=name)


def _by_name(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _prompt(sample: Sample, conversational: bool) -> Any:
    return [dict(message) for message in sample.messages] if conversational else sample.prompt


def _completion(sample: Sample, conversational: bool) -> Any:
    if not conversational:
        return sample.completion
    turns = sample.conversation[len(sample.messages) :]
    if len(turns) > 1:
        return [dict(message) for message in turns]
    return [{"role": "assistant", "content": sample.completion}]


def _not_logged(name: str, values: object) -> None:
    """Ignores values for TRL's table of completions and TRL's metrics, which Gristmill does not support."""
