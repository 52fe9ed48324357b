"""The interface of a task in turns: the environment sends messages and the model replies, until the task is done.

One object plays one rollout. Each rollout of a group has its own object, so rollouts share no state::

    class Guess(Environment):
        def __init__(self, *, tries: int = 3) -> None: ...           # options: `environment: {params: {tries: 5}}`
        def reset(self, item: Item) -> Sequence[Message]: ...         # the messages for the model to answer first
        def step(self, reply: Reply) -> StepResult: ...               # the next messages, or the end

The runner calls reset, then generates a reply and calls step in turn. A rollout ends with a StepResult that is `done`,
a truncated reply, no tokens left, or `max_turns`. Then the runner calls close. A plain method runs on a thread, and may
block for `step_timeout` seconds. An `async def` method runs on an event loop that all rollouts share, but no other
part of the service.
"""

from __future__ import annotations

import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import TypeAdapter, ValidationError

from gristmill.plugins import is_plugin, load_plugin
from gristmill.redaction import redact
from gristmill.settings import did_you_mean
from gristmill_env.data import Item, Message
from gristmill_env.errors import EpisodeError


@dataclass(frozen=True)
class Reply:
    """The model's reply in one turn."""

    text: str
    """The reply without the tokens that end a turn; with the prefill, and with a `<think>` that the template opened."""
    finish_reason: str
    """ "stop", or "length" for a truncated reply."""
    tokens: int | None
    """Tokens sampled; None if a text server does not report the number."""


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to a reply."""

    messages: tuple[Message, ...] = ()
    """Messages added to the conversation for the model to answer. The loss mask excludes them from training."""
    done: bool = False
    """Whether the rollout is over."""
    reward: float | None = None
    """Added to the rollout's reward, which the reward `episode` puts into the total."""
    trained: bool = True
    """False excludes the last reply from the loss."""

    @classmethod
    def end(cls, reward: float | None = None, *, trained: bool = True) -> StepResult:
        """Returns the last turn."""
        return cls(done=True, reward=reward, trained=trained)


Turn = StepResult
"""The earlier name of `StepResult`."""


class Environment(ABC):
    """One rollout of an item. Its options are the keyword-only arguments of `__init__`."""

    max_turns: ClassVar[int] = 16
    """Maximum number of replies in a rollout."""

    @abstractmethod
    def reset(self, item: Item) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Begins a rollout. Returns at least one message for the model to answer, without the run's system prompt.

        A group compares its rollouts, so all of them need the same task: derive any randomness from `item.row` alone.
        """

    @abstractmethod
    def step(self, reply: Reply) -> StepResult | Awaitable[StepResult]:
        """Continues after a reply."""

    def close(self) -> Awaitable[None] | None:
        """Releases the rollout's resources: a sandbox, a connection. Called once, however the rollout ends.

        After an error, a time-out or a cancellation, close has 5 seconds. A step that did not end may still run on
        another thread.
        """
        return None


class DatasetEnvironment(Environment):
    """A row's prompt and one reply: the environment of a run without an `environment:` section."""

    max_turns: ClassVar[int] = 1

    async def reset(self, item: Item) -> Sequence[Message]:
        """Returns the row's messages."""
        return item.messages

    async def step(self, reply: Reply) -> StepResult:
        """Ends the rollout."""
        return StepResult.end()


E = TypeVar("E", bound=type[Environment])


@dataclass(frozen=True)
class EnvironmentFactory:
    """Creates the object of one more rollout."""

    kind: type[Environment]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Environment:
        return self.kind(**self.options)

    @property
    def name(self) -> str:
        """The class' name, for messages."""
        return self.kind.__name__

    @property
    def ours(self) -> bool:
        """Whether the environment ships with this package, and therefore does not block."""
        return self.kind.__module__.startswith(f"{__package__}.")


ENTRY_POINTS = "gristmill.environments"
_REGISTRY: dict[str, type[Environment]] = {"dataset": DatasetEnvironment}


def environment(name: str) -> Callable[[E], E]:
    """Registers the decorated class as the environment `name`. Raises EpisodeError when the name is taken."""

    def register(kind: E) -> E:
        if name in _REGISTRY:
            raise EpisodeError(
                "environment_registered_twice",
                f"environment '{name}' is registered twice: {_REGISTRY[name]} and {kind}; rename one",
                name=name,
            )
        _REGISTRY[name] = kind
        return kind

    return register


def create_environment(
    name: str, params: Mapping[str, Any] | None = None, folder: Path | None = None
) -> EnvironmentFactory:
    """Returns a factory of rollouts of the environment `name` with its options set.

    `name`: a registered name, an entry point of the group `gristmill.environments`, or code (`plugins`), relative to
    `folder`. Raises EpisodeError for an unknown name and for unknown options; PluginError.
    """
    kind = _find(name, folder)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        wanted = f"{Environment.__module__.rpartition('.')[0]}.{Environment.__name__}"
        raise EpisodeError(
            "not_an_environment",
            f"environment '{name}' is {kind!r:.80}; it must be a class derived from {wanted}",
            name=name,
        )
    options = _options(name, kind, params or {})
    return EnvironmentFactory(kind, options)


def _find(name: str, folder: Path | None) -> Any:
    if name in _REGISTRY:
        return _REGISTRY[name]
    if is_plugin(name):
        return load_plugin(name, folder)
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in installed:
        return installed[name].load()
    known = sorted({*_REGISTRY, *installed})
    raise EpisodeError(
        "unknown_environment",
        f"no environment '{name}' is registered; there are {', '.join(known)}.{did_you_mean(name, known)}",
        name=name,
        known=known,
    )


def _options(name: str, kind: type[Environment], params: Mapping[str, Any]) -> dict[str, Any]:
    initializer: Any = kind.__init__
    hints = typing.get_type_hints(initializer, include_extras=True)
    known = [
        argument.name
        for argument in inspect.signature(initializer).parameters.values()
        if argument.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    options = {}
    for key, value in params.items():
        if key not in known:
            raise EpisodeError(
                "unknown_parameter",
                f"environment '{name}' has no parameter '{key}'; it has {', '.join(known) or 'none'}."
                f"{did_you_mean(key, known)}",
                name=name,
                parameter=key,
                known=known,
            )
        try:
            options[key] = TypeAdapter(hints.get(key, Any)).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise EpisodeError(
                "parameter_invalid",
                f"parameter '{key}' of environment '{name}': {reason} (found {redact(value, key)!r})",
                name=name,
                parameter=key,
            ) from error
    return options
