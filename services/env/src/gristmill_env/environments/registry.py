"""Environments by name: the ones that ship, entry points of other packages, and a user's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from gristmill.internal.plugins import is_plugin, load_plugin
from gristmill.internal.settings import did_you_mean
from gristmill_env.adapters import require
from gristmill_env.environments.base import DatasetEnvironment, Environment
from gristmill_env.environments.tools import Tools, is_tool_class, tool_environment
from gristmill_env.errors import EpisodeError
from gristmill_env.options import checked_options, options_of

E = TypeVar("E", bound=type[Environment])


class Source(NamedTuple):
    """Where a process finds an environment: the arguments of `create_environment`."""

    name: str
    params: dict[str, Any]
    folder: Path | None


@dataclass(frozen=True)
class EnvironmentFactory:
    """Creates the object of one more rollout."""

    kind: type[Environment]
    options: Mapping[str, Any] = field(default_factory=dict)
    source: Source | None = None
    """None for a class of this process, which no other process can load by its name."""

    def __call__(self) -> Environment:
        return self.kind(**self.options)

    @property
    def name(self) -> str:
        """The class' name, for messages."""
        return self.kind.__name__

    @property
    def ours(self) -> bool:
        """Whether the environment ships with this package, and therefore does not block."""
        return self.kind.__module__.startswith(f"{__package__}.") and not self.kind.runs_user_code

    @property
    def needs_process(self) -> bool:
        """Whether the environment runs in a process of its own."""
        return self.source is not None and not self.ours


ENTRY_POINTS = "gristmill.environments"
_REGISTRY: dict[str, type[Environment]] = {"dataset": DatasetEnvironment, "tools": Tools}


class Adapter(NamedTuple):
    """An environment of another project, whose module is imported only if a run names it."""

    plugin: str
    packages: tuple[str, ...]
    """What the module imports and this package does not install."""
    extra: str
    """The extra of gristmill-env that installs them; empty if there are none."""


ADAPTERS: Final = {
    "harbor": Adapter("gristmill_env.adapters.harbor:Harbor", (), ""),
    "openenv": Adapter("gristmill_env.adapters.openenv:OpenEnv", ("websockets",), "openenv"),
}


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
    kind, here = _find(name, folder)
    if is_tool_class(kind):
        kind = tool_environment(kind)
    elif not (isinstance(kind, type) and issubclass(kind, Environment)):
        wanted = f"{Environment.__module__.rpartition('.')[0]}.{Environment.__name__}"
        raise EpisodeError(
            "not_an_environment",
            f"environment '{name}' is {kind!r:.80}; it must be a class derived from {wanted}, or a class with reset(), "
            "whose other public methods are tools",
            name=name,
        )
    options = _options(name, kind, params or {})
    if issubclass(kind, Tools):
        options["folder"] = folder
        kind(**options).check()
    source = None if here else Source(name, dict(params or {}), folder)
    return EnvironmentFactory(kind, options, source)


def _find(name: str, folder: Path | None) -> tuple[Any, bool]:
    """Returns what `name` names, and whether it is a class of this process only. Raises EpisodeError, PluginError."""
    if name in _REGISTRY:
        kind = _REGISTRY[name]
        return kind, not kind.__module__.startswith(f"{__package__}.")
    if name in ADAPTERS:
        for package in ADAPTERS[name].packages:
            require(package, ADAPTERS[name].extra)
        return load_plugin(ADAPTERS[name].plugin, None), False
    if is_plugin(name):
        return load_plugin(name, folder), False
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in installed:
        return installed[name].load(), False
    names = sorted({*_REGISTRY, *ADAPTERS, *installed})
    raise EpisodeError(
        "unknown_environment",
        f"no environment '{name}' is registered; there are {', '.join(names)}.{did_you_mean(name, names)}",
        name=name,
        known=names,
    )


def _options(name: str, kind: type[Environment], params: Mapping[str, Any]) -> dict[str, Any]:
    initializer: Any = getattr(kind, "made_of", kind).__init__
    known = options_of(initializer, f"environment '{name}'", EpisodeError, name=name)
    return checked_options(params, known, f"environment '{name}'", EpisodeError, name=name)
