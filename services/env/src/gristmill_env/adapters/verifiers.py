"""verifiers 0.4: rows of a taskset, and an agent that plays its tasks by `run_episode` with the gateway as the model.

The configuration's `environment: {type: verifiers}` means `rows` and `run` of this module (`settings.run`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gristmill_env.adapters import require
from gristmill_env.agents.task import AgentTask, Endpoint
from gristmill_env.errors import EpisodeError

if TYPE_CHECKING:
    import verifiers.v1 as vf

Plugin = str | dict[str, Any]
"""The id of a plugin of verifiers, or its id and options: {id: ID, ...}."""
_IN_PROCESS = "gristmill_in_process"
_NO_KEY = "GRISTMILL_NO_KEY"
"""A variable that is not set: the gateway finds the rollout's key in the URL."""


def rows(*, taskset: Plugin, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yields the tasks of a taskset. `split`: the taskset's option of this name, if it has one.

    Raises EpisodeError if verifiers is not installed, and verifiers' error for an unknown taskset or option.
    """
    _verifiers()
    config = _plugin(taskset)
    loaders = sys.modules["verifiers.v1.utils.loaders"]
    kind = loaders.taskset_config_type(config["id"])
    if "split" in kind.model_fields:
        config.setdefault("split", split)
    tasks: vf.Taskset[Any, Any] = loaders.load_taskset(kind.model_validate(config))
    for task in tasks:
        yield {"prompt": task.data.prompt_text, "name": task.data.name, "task": task.data.model_dump(mode="json")}


async def run(
    task: AgentTask,
    endpoint: Endpoint,
    *,
    taskset: Plugin,
    harness: Plugin = _IN_PROCESS,
    runtime: Plugin = "subprocess",
    env: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Plays a row of `rows`. Returns the reward of its trace, with the task's rewards and metrics as parts.

    `harness`: the program that acts; by default a loop of replies and tool calls in this process. `runtime`: where the
    program runs. `env`: further options of the environment's config, such as {timeout: {episode: 600}}. Raises
    EpisodeError if the episode failed, and for an environment with several agents.
    """
    vf = _verifiers()
    played = {"harness": _plugin(harness), "runtime": {"type": runtime} if isinstance(runtime, str) else runtime}
    options = {"taskset": _plugin(taskset), **(env or {})}
    loaders = sys.modules["verifiers.v1.utils.loaders"]
    fields = loaders.env_config_type(options["taskset"]["id"], options.get("id", "")).model_fields
    roles = [name for name, field in fields.items() if isinstance(field.default, vf.AgentConfig)]
    config = vf.resolve_env_config({**options, **{role: {**played, **options.get(role, {})} for role in roles}})
    # An environment per rollout: the interception server of one keeps a client for each URL that it was ever given.
    environment = vf.load_environment(config)
    kind = type(environment.taskset).task_type()
    data = kind.data_type().model_validate(task.row["task"])
    # verifiers' own name for a client that passes requests on. The gateway answers with sampled tokens as ever.
    client = vf.EvalClientConfig(base_url=f"{endpoint.anthropic_url}/v1", api_key_var=_NO_KEY)
    context = vf.ModelContext(model=endpoint.model, client=client, sampling=vf.SamplingConfig())
    async with environment.serving():
        episode = await environment.run_episode(kind(data, environment.taskset.config.task), context)
    return _reward(episode, str(config.taskset.id))


def _reward(episode: vf.Episode[Any, Any, Any], taskset: str) -> dict[str, Any]:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        why = f"{errors[-1].type}: {errors[-1].message}" if errors else "no error is recorded"
        raise EpisodeError("verifiers_failed", f"the episode of {taskset} failed: {why}"[:1000], taskset=taskset)
    if len(episode.traces) != 1:
        raise EpisodeError(
            "verifiers_agents",
            f"the environment of {taskset} has played {len(episode.traces)} agents; an episode with one is supported",
            taskset=taskset, agents=len(episode.traces),
        )  # fmt: skip
    [trace] = episode.traces
    if missing := [name for name, reward in trace.rewards.items() if reward is None]:
        raise EpisodeError(
            "verifiers_failed", f"{taskset} has not scored the reward {missing[0]}", taskset=taskset, reward=missing[0]
        )
    parts = {name: reward.value for name, reward in trace.rewards.items()} | trace.metrics
    return {"reward": float(trace.reward), "parts": parts}


def _plugin(given: Plugin) -> dict[str, Any]:
    return {"id": given} if isinstance(given, str) else dict(given)


def _verifiers() -> Any:
    """Returns verifiers.v1, with the harness of this package. Raises EpisodeError if it is not installed."""
    require("verifiers", "verifiers")
    import verifiers.v1
    import verifiers.v1.utils.loaders

    from gristmill_env.adapters import verifiers_harness

    # verifiers imports a harness by its id, which names a module of its package.
    sys.modules.setdefault(f"verifiers.v1.harnesses.{_IN_PROCESS}", verifiers_harness)
    return verifiers.v1
