"""Single-turn environments of `verifiers`: their data set becomes rows, and their rubric a reward, `type: verifiers`.

dataset:
  dataset_name: verifiers:gsm8k       # the id for vf.load_environment
  dataset_args: {num_train_examples: 500}
  reward_functions: [verifiers]

Each completion goes through the environment's own rollout, with a model client that returns the completion. The
rubric's score_group then scores the resulting states. So totals and metrics equal the results of verifiers, except if a
function fails: here a failure is an error, never a 0. verifiers itself scores a function that raises as 0.0.

The package `verifiers` is an extra and slow to import. So this module is imported only if a configuration names it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

from pydantic import Field

from gristmill import ConfigError
from gristmill.errors import PluginError
from gristmill.settings import Settings, did_you_mean, parse
from gristmill_env.errors import DatasetError, RewardError
from gristmill_env.rewards.inputs import RowSchema, Sample, private
from gristmill_env.rewards.outcomes import RewardResult
from gristmill_env.rewards.reward import Reward
from gristmill_env.rewards.task import Task

_INSTALL = 'pip install "verifiers>=0.2,<0.4"'
_SPLITS = {"train": "build_dataset", "eval": "build_eval_dataset"}
_PROMPT = "prompt"
"""Column in the rows of every environment."""

_loaded: dict[str, Any] = {}
"""Environments by id and arguments, so that rows and rewards of a run use the same environment."""


def load_environment(environment_id: str, arguments: Mapping[str, Any]) -> Any:
    """Returns the vf.SingleTurnEnv from vf.load_environment; the same object for the same id and arguments.

    The environment's rubric reports the failures of its functions (`noted_failures`). Call this function on the main
    thread, because verifiers sets signal handlers. Raises PluginError if verifiers or the environment's package is not
    installed, or if its code fails. Also raises it if the environment needs more than one prompt and one reply.
    """
    key = json.dumps([environment_id, dict(arguments)], sort_keys=True, default=repr)
    if key not in _loaded:
        vf = _verifiers(environment_id)
        with _own_signals():
            environment = _load(vf, environment_id, arguments)
        _check(vf, environment_id, environment)
        tell_failures(environment.rubric)
        _loaded[key] = environment
    return _loaded[key]


def environment_rows(environment_id: str, arguments: Mapping[str, Any], split: str) -> Any:
    """Returns the environment's data set, a datasets.Dataset whose column `prompt` holds messages.

    `split`: train or eval. Raises PluginError like `load_environment`, DatasetError when the split does not exist or
    cannot be built.
    """
    label = f"verifiers environment '{environment_id}'"
    if split not in _SPLITS:
        raise DatasetError(
            "split_missing",
            f"{label} has no split '{split}'; it has train and eval.{did_you_mean(split, _SPLITS)}",
            split=split,
            known=list(_SPLITS),
        )
    environment = load_environment(environment_id, arguments)
    try:
        rows = getattr(environment, _SPLITS[split])()
    except Exception as error:  # the environment's code
        raise DatasetError(
            "environment_raised",
            f"{label}: its {split} data cannot be built: {type(error).__name__}: {error}",
            environment=environment_id,
            split=split,
            error=type(error).__name__,
        ) from error
    if rows is None:
        raise DatasetError(
            "split_missing",
            f"{label} has no {split} data; set split to {'eval' if split == 'train' else 'train'}",
            environment=environment_id,
            split=split,
        )
    return rows


def _verifiers(environment_id: str) -> Any:
    try:
        import verifiers
    except ImportError as error:
        raise PluginError(
            "package_missing",
            f"verifiers environment '{environment_id}' needs the package verifiers, which cannot be imported "
            f"({error}): {_INSTALL}",
            extra="verifiers",
        ) from error
    if not hasattr(verifiers, "SingleTurnEnv"):
        version = getattr(verifiers, "__version__", "as it is installed")
        raise PluginError(
            "extra_version",
            f"verifiers environment '{environment_id}' cannot be loaded: verifiers {version} has no SingleTurnEnv "
            f"(it went with 0.4): {_INSTALL}",
            extra="verifiers",
            version=version,
        )
    return verifiers


def _load(vf: Any, environment_id: str, arguments: Mapping[str, Any]) -> Any:
    try:
        return vf.load_environment(environment_id, **arguments)
    except Exception as error:  # the environment's code; verifiers wraps the code's error in another error
        cause = error.__cause__ or error
        raise PluginError(
            "environment_not_loaded",
            f"verifiers environment '{environment_id}' cannot be loaded: {type(cause).__name__}: {cause}; is its "
            "package installed (prime env install, pip), and do dataset_args fit its load_environment?",
            environment=environment_id,
            error=type(cause).__name__,
        ) from error


def _check(vf: Any, environment_id: str, environment: Any) -> None:
    reason = found = None
    if not isinstance(environment, vf.SingleTurnEnv):
        found = type(environment).__name__
        reason = f"is a {found}, no vf.SingleTurnEnv: its turns would not be played"
    elif environment.tool_defs:
        found = "tools"
        reason = "gives the model tools, and their calls are not executed"
    elif environment.message_type != "chat":
        found = environment.message_type
        reason = f"has message_type '{found}', and prompts here are chat messages"
    if reason is not None:
        raise PluginError(
            "environment_unsupported",
            f"verifiers environment '{environment_id}' {reason}; only one prompt and one reply can be run. Several "
            "turns are a class of your own: environment: {type: path/to/file.py:Class}",
            environment=environment_id,
            found=found,
        )


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restores the handlers of SIGINT and SIGTERM, because a new environment replaces them with handlers that exit
    immediately."""
    held = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in held.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


class RubricParams(Settings):
    """Which environment's rubric."""

    id: str
    """What vf.load_environment takes."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's load_environment."""


@dataclass(frozen=True)
class RubricReward(Reward):
    """The rubric of one environment. The unweighted values of its functions are the reward's parts."""

    environment: Any
    """The vf.SingleTurnEnv."""

    @property
    def asks_for(self) -> frozenset[str]:
        return frozenset({"completion", "finish_reason", "messages", "row"})

    def bind(self, schema: RowSchema, name: str) -> list[Task]:
        if _PROMPT not in schema.columns:
            raise RewardError(
                "unknown_input",
                f"reward '{self.name}' scores rows of its verifiers environment, with a column '{_PROMPT}'; the data "
                f"set has {', '.join(schema.columns) or 'no columns'}",
                reward=self.name,
                input=_PROMPT,
                columns=list(schema.columns),
            )
        # Score each completion alone if possible. Then a failure affects one completion, not its group.
        in_group = self.environment.rubric.has_group_rewards
        function = self._score if in_group else self._score_one
        return [Task(name, self, function, in_group, lambda samples: {"samples": samples})]

    async def _score_one(self, samples: Sequence[Sample]) -> RewardResult:
        (detailed,) = await self._score(samples)
        return detailed

    async def _score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        rubric = self.environment.rubric
        with noted_failures() as failures:
            states = await asyncio.gather(*(self._state(sample) for sample in samples))
            await rubric.score_group(states)
            for state in states:
                await rubric.cleanup(state)
        for function, failure in failures.items():
            if failure.counts:
                raise _named(function, failure.error) from failure.error
        failed = {function: failure.error for function, failure in failures.items()}
        return [RewardResult(state["reward"], {**state["metrics"], **failed}) for state in states]

    async def _state(self, sample: Sample) -> Any:
        """Returns the final state of the environment's rollout."""
        prompt = _messages(sample)
        client = _replay_client()(sample, prompt)
        state = await self.environment.rollout({**private(sample.row), _PROMPT: prompt}, client, "policy", {})
        if (error := state.get("error")) is not None:
            cause = error.__cause__ or error  # verifiers wraps the error in another error
            if isinstance(cause, RewardError):
                raise RewardError(cause.code, str(cause), **cause.values) from error
            raise _named("the environment's rollout", cause) from error
        return state


def rubric_reward(name: str, params: Mapping[str, Any]) -> RubricReward:
    """Returns the rubric of the environment that `params` describe (`RubricParams`).

    Raises RewardError for invalid params, PluginError for an environment that cannot be loaded.
    """
    try:
        wanted = parse(RubricParams, dict(params), f"params of reward '{name}'")
    except ConfigError as error:
        remedy = (
            "; if params is empty, the reward uses the environment of dataset.dataset_name: verifiers:<id>"
            if not params
            else ""
        )
        raise RewardError(error.code, f"{error}{remedy}", **error.values) from error
    return RubricReward(name, load_environment(wanted.id, wanted.args))


def _named(what: str, error: BaseException) -> RewardError:
    """Returns the RewardError for an `error` of the environment's code. `what`: the code's name, for the message."""
    if isinstance(error, RewardError):
        return RewardError(error.code, f"{what}: {error}", **error.values)
    kind = type(error).__name__
    return RewardError("reward_raised", f"{what}: {kind}: {error}", error=kind)


def _messages(sample: Sample) -> list[dict[str, Any]]:
    """Returns the model's prompt messages, or the row's prompt if the sample has no messages."""
    prompt = sample.messages or sample.row[_PROMPT]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


@cache
def _replay_client() -> type[Any]:
    """Returns the class of the model client. Its base class needs the extra, so this function defines the class."""
    import verifiers as vf
    from verifiers.types import Response, ResponseMessage, Usage

    class Replay(vf.Client):  # type: ignore[misc]  # Any to a type checker: it is an extra
        """Returns one sample's completion for every request with the sample's prompt."""

        def __init__(self, sample: Sample, prompt: Sequence[Mapping[str, Any]]) -> None:
            super().__init__(sample)
            self._sample = sample
            self._prompt = [(message["role"], message["content"]) for message in prompt]

        def setup_client(self, config: Any) -> Any:
            """Returns `config`; this client makes no connection."""
            return config

        async def to_native_tool(self, tool: Any) -> Any:
            """Raises RewardError, because the model did not get any tools."""
            raise RewardError(
                "tool_in_row",
                f"the row gives the model a tool, {tool.name}, whose calls are not executed",
                tool=tool.name,
            )

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            """Raises RewardError if the prompt differs from the sample's, that is, setup_state or get_prompt_messages
            changed it."""
            if [(message.role, message.content) for message in messages] != self._prompt:
                raise RewardError(
                    "prompt_changed",
                    "the environment's code changes the prompt, which the model was given as it is in the row",
                )
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            """Returns the sample."""
            return self._sample

        async def raise_from_native_response(self, response: Any) -> None:
            """Accepts every response."""

        async def from_native_response(self, response: Sample) -> Any:
            """Returns the completion as a verifiers Response. The number of prompt tokens is unknown, and set to 0."""
            cut = response.finish_reason == "length"
            spent = len(response.tokens or ())
            return Response(
                id="replay",
                created=0,
                model="policy",
                usage=Usage(prompt_tokens=0, reasoning_tokens=0, completion_tokens=spent, total_tokens=spent),
                message=ResponseMessage(
                    content=response.completion, finish_reason="length" if cut else "stop", is_truncated=cut
                ),
            )

        async def close(self) -> None:
            """Does nothing; this client has no connection."""

    return Replay


@dataclass(frozen=True)
class FunctionFailure:
    """The failure of a rubric's function that raised or did not return a finite number."""

    error: Exception
    counts: bool
    """Whether the function's weight is not 0."""


Failures = dict[str, FunctionFailure]
"""The last failure of each function, by the function's name."""

_failures: ContextVar[Failures] = ContextVar("failures")


@contextmanager
def noted_failures() -> Iterator[Failures]:
    """Collects the failures of rubrics that run in this block, including rubrics in tasks that the block starts."""
    failures: Failures = {}
    token = _failures.set(failures)
    try:
        yield failures
    finally:
        _failures.reset(token)


def tell_failures(rubric: Any) -> None:
    """Wraps the functions of `rubric`, and of the rubrics in a vf.RubricGroup, so that they report their failures."""
    alone = not rubric.has_group_rewards
    rubric.funcs = [
        _told(function, counts=weight != 0, alone=alone)
        for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
    ]
    for inner in getattr(rubric, "rubrics", ()):
        tell_failures(inner)


def _told(function: Callable[..., Any], *, counts: bool, alone: bool) -> Callable[..., Any]:
    """Wraps `function`. `alone`: the function scores one completion and so returns one number, 0.0 if it fails."""

    @wraps(function)  # a rubric reads the signature
    async def told(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            if inspect.isawaitable(value):
                value = await value
            plain = value.tolist() if hasattr(value, "tolist") else value  # numpy and torch values
            for number in plain if isinstance(plain, list | tuple) and not alone else (plain,):
                if not math.isfinite(float(number)):
                    raise RewardError("value_invalid", f"a reward is a finite number, not {number!r}")
            return value
        except Exception as error:
            _failures.get()[function.__name__] = FunctionFailure(error, counts)
            if alone:
                return 0.0  # as verifiers does; a raised error would add a log line for each completion
            raise

    return told
