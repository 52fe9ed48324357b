"""Merges a run's settings: the command line overrides GRISTMILL_*, then YAML, then the defaults."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from gristmill import ConfigError, Deployment
from gristmill.deployment import API_URL, MODEL_URL, RUN_ID
from gristmill.errors import UnknownKeyError
from gristmill.hyperparameters import Hyperparameters, check_run_block, completed_block
from gristmill.internal.assignments import assigned, by_place, parse_assignments
from gristmill.internal.config_files import find_config, load_yaml
from gristmill.internal.flags import parse_flag_sets
from gristmill.internal.settings import Settings, merge, parse
from gristmill.model_servers import split_urls
from gristmill_env.atropos import could_be_of_atropos, read_file, without_section
from gristmill_env.settings.run import TOP_LEVEL, EnvConfig
from gristmill_env.settings.task import AgentSpec
from gristmill_env.settings.warnings import warnings_of
from gristmill_env.slurm import discover

logger = logging.getLogger(__name__)

UNNAMED_RUN = "local"
"""Run id of a run that has neither a name nor a configuration file."""

_COMMAND_LINE = "command line"

Options = TypeVar("Options", bound=Settings)


class NoOptions(Settings):
    """The flags of a command without flags."""


@dataclass(frozen=True)
class RunSettings:
    """The settings of one environment process."""

    config: EnvConfig
    run_id: str
    config_path: Path | None
    deployment: Deployment
    source: str | None = None
    """The source or the evaluation that these settings are of; None for the run's settings."""

    def by_source(self) -> list[RunSettings]:
        """Returns the settings of each source, as if the run had only this one. A run without sources is the only."""
        return [replace(self, config=config, source=name) for name, config in self.config.by_source().items()]

    def by_evaluation(self) -> list[RunSettings]:
        """Returns the settings of each evaluation, as `EnvConfig.by_evaluation`."""
        return [replace(self, config=config, source=name) for name, config in self.config.by_evaluation().items()]

    @property
    def config_folder(self) -> Path | None:
        """The folder of the configuration's file."""
        return None if self.config_path is None else self.config_path.parent

    @property
    def run_folder(self) -> Path:
        """The folder of the run's files; relative paths of its settings start here."""
        return self.deployment.runs_dir / self.run_id

    @property
    def trainer_file(self) -> Path:
        """The trainer.yaml that completes the run's `trainer:` block. The file may be missing on this machine."""
        return self.deployment.config_dir / "trainer.yaml"

    @property
    def groups_file(self) -> Path | None:
        """The file that stores the submitted groups as text; None if none is configured."""
        path = self.config.data_path_to_save_groups
        return None if path is None else self.run_folder / path

    def check_step_size(self) -> None:
        """Checks that a training step takes whole groups, if the run sets its step size and trainer.yaml exists here.

        A run that sets no step size may leave it to the trainer's command line, which is unknown here. Raises
        ConfigError.
        """
        sets_step_size = not {"batch_size", "gradient_accumulation_steps"}.isdisjoint(self.config.trainer_block())
        if not sets_step_size or not self.trainer_file.is_file():
            return
        try:
            defaults = self.trainer_defaults()
        except ConfigError as error:  # trainer.yaml may need a variable that only the trainer has
            logger.warning("the step size is not compared with group_size: %s", error)
            return
        self.check_trainer(defaults)

    def warnings(self) -> list[str]:
        """Returns one sentence for each setting that is allowed, but probably a mistake. It begins with the key."""
        defaults: dict[str, Any] = {}
        with contextlib.suppress(ConfigError):  # trainer.yaml may need a variable that only the trainer has
            defaults = self.trainer_defaults()
        return warnings_of(self.config, {**defaults, **self.config.trainer_block()})

    def trainer_defaults(self) -> dict[str, Any]:
        """Returns the contents of `trainer_file`, if it exists on this machine. Raises ConfigError."""
        return load_yaml(self.trainer_file) if self.trainer_file.is_file() else {}

    def check_trainer(self, defaults: Mapping[str, Any] | None = None) -> None:
        """Checks the run's `trainer:` block, completed by `defaults`, which are `trainer_defaults` if they are None.

        Raises ConfigError if a value is wrong, or if a training step does not take whole groups.
        """
        defaults = self.trainer_defaults() if defaults is None else defaults
        where = f"trainer settings ({self.trainer_file}, trainer: block)"
        settings = completed_block(self.config.trainer_block(), defaults, where)
        settings.check_whole_groups(self.config.group_size, where)

    @classmethod
    def read(cls, arguments: Sequence[str], environ: Mapping[str, str], prog: str) -> RunSettings:
        """Reads the command line (without the command's name) and the environment's variables.

        Raises ConfigError for a missing configuration, unknown keys and flags, and wrong values.
        """
        return cls.read_with(NoOptions, arguments, environ, prog)[0]

    @classmethod
    def read_with(
        cls, options: type[Options], arguments: Sequence[str], environ: Mapping[str, str], prog: str, about: str = ""
    ) -> tuple[RunSettings, Options]:
        """Reads as `read` does, with the command's flags. `about`: text above the flags in --help."""
        deployment = Deployment.read(environ)
        name, words, flags = _take_shared(arguments)
        models: dict[str, type[Settings]] = {f"flags of {prog}": options, "settings of the run": EnvConfig}
        own, flagged = parse_flag_sets(flags, models, prog, about)
        assignments = parse_assignments(words, EnvConfig, [f"trainer.{key}" for key in Hyperparameters.model_fields])
        given = by_place([*flagged, *assignments])
        check_run_block(by_place(assignments).get("trainer", {}), 1, "--set trainer")  # the group size is checked below
        path = find_config(name, deployment.config_dir) if name is not None else None
        in_file = read_file(path, environ, given.get("config_format")) if path is not None else {}
        variables = _from_environment(deployment, in_file)
        values = assigned(merge(_overridden(in_file, given), variables), [*flagged, *assignments], EnvConfig)
        where = str(path) if path is not None else _COMMAND_LINE
        try:
            config = parse(EnvConfig, values, where, {_COMMAND_LINE: given, "GRISTMILL_* variables": variables})
            check_run_block(config.trainer_block(), config.group_size, f"{where}: trainer")
        except UnknownKeyError as error:
            if could_be_of_atropos(in_file):
                raise ConfigError(
                    "unknown_key", f"{error} A file of Atropos' loads with --config_format atropos.", **error.values
                ) from error
            raise
        config = config.with_templates(None if path is None else path.parent)
        if config.slurm:
            config = config.model_copy(update={"server_configs": discover(config.server_configs, environ)})
        run_id = config.run_id or (path.stem if path is not None else UNNAMED_RUN)
        if re.fullmatch(RUN_ID, run_id) is None:
            raise ConfigError(
                "run_id_invalid",
                f"{where}: the file's name is the run's id, but {run_id!r} cannot be one: an id has at most 64 "
                "letters, digits, dots, dashes and underscores, the first a letter or digit. Rename the file, "
                "or set run_id",
                run_id=run_id,
            )
        return cls(config, run_id, path, deployment), parse(options, by_place(own), _COMMAND_LINE)


def _overridden(in_file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the file's settings that the command line sets under their other name, because it overrides them."""
    block, given_block = in_file.get("trainer"), given.get("trainer") or {}
    # A top-level batch_size does not mean the same as trainer.batch_size.
    other = {here for here, there in TOP_LEVEL.items() if there in given_block and here != there}
    remaining = {key: value for key, value in in_file.items() if key not in other}
    if not isinstance(block, Mapping):
        return remaining
    replaced = {there for here, there in TOP_LEVEL.items() if here in given}
    return {**remaining, "trainer": {key: value for key, value in block.items() if key not in replaced}}


def _from_environment(deployment: Deployment, in_file: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if api_url := deployment.api_url or _unless_default(
        deployment.default_api_url, API_URL, "rollout_server_url", in_file
    ):
        values["rollout_server_url"] = api_url
    listed = in_file.get("server_configs")
    # GRISTMILL_MODEL_URL cannot select one server from a list.
    if not (isinstance(listed, list) and len(listed) > 1):
        # Each server of the list has the settings of the single server in the file.
        single = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], Mapping) else {}
        if model_url := deployment.model_url or _unless_default(
            deployment.default_model_url, MODEL_URL, "base_url", single
        ):
            values["server_configs"] = [{**single, "base_url": url} for url in split_urls(model_url)]
    if deployment.run_id:
        values["run_id"] = deployment.run_id
    if deployment.metrics_address:
        values["metrics_address"] = deployment.metrics_address
    if deployment.gateway_address:
        values |= _at_gateway(in_file, deployment.gateway_address)
        sources = in_file.get("sources")
        if isinstance(sources, list):
            here = [_at_gateway(one, deployment.gateway_address) if isinstance(one, Mapping) else {} for one in sources]
            if sum(map(bool, here)) > 1:
                # One address is not enough, so a source keeps its own.
                here = [{} if _has_address(one) else place for one, place in zip(sources, here, strict=True)]
            values["sources"] = [{**one, **place} if place else one for one, place in zip(sources, here, strict=True)]
    return values


def _unless_default(url: str, default: str, key: str, section: Mapping[str, Any]) -> str | None:
    """Returns the URL of an exported port; None if the port is the usual one, or if the file names an address."""
    return None if url == default or key in section else url


def _at_gateway(task: Mapping[str, Any], address: str) -> dict[str, Any]:
    """Returns the address of a run's or a source's external agents; nothing if it has none."""
    agent = AgentSpec.in_full(task.get("agent"))
    if not isinstance(agent, Mapping) or not agent.get("external"):
        return {}
    return {"agent": {**agent, "address": address}}


def _has_address(source: Any) -> bool:
    agent = source.get("agent") if isinstance(source, Mapping) else None
    return isinstance(agent, Mapping) and agent.get("address") is not None


_SHARED = {"--config": "a name or a path", "--set": "KEY=VALUE", "--model": "a model"}
"""Flags of every command that are not named after a setting, with the value that each needs."""


def _take_shared(arguments: Sequence[str]) -> tuple[str | None, list[str], list[str]]:
    """Returns the configuration's name or path, the words of `--set`, and the other arguments.

    `--model NAME` becomes `--model_name NAME`. A value may follow its flag after a blank or after `=`.
    """
    config: str | None = None
    assignments: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in _SHARED:
            rest.append(without_section(word))
            continue
        if not equals:
            following = next(words, None)
            if following is None:
                raise ConfigError("invalid_flag", f"command line: {flag} needs {_SHARED[flag]}")
            value = following
        if flag == "--config":
            config = value
        elif flag == "--set":
            assignments.append(value)
        else:
            rest += ["--model_name", value]
    return config, assignments, rest
