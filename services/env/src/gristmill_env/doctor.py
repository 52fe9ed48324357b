"""Checks for `gristmill doctor`: chat template, rewards and model server of a configuration, before and after a run.

Before a run, `before_run` loads the configuration as `serve` does. It scores a few constructed completions, and asks
the model server for short completions, if a server answers. After a run, `after_run` scores the archived completions
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gristmill import ConfigError, GristmillError, Manifest
from gristmill.archive.trained import TOKENIZER_FOLDER, TRAINED_FOLDER
from gristmill.folders import ROLLOUTS_FOLDER, RunFolder
from gristmill.internal import foreign
from gristmill.internal.check import Check, State
from gristmill.model_servers import GENERATE, ServerAddresses, generation
from gristmill_env.commands.check import score_gold
from gristmill_env.commands.replay import score_group
from gristmill_env.commands.source import open_groups
from gristmill_env.commands.trial import constructed
from gristmill_env.data import Item, assistant, user
from gristmill_env.errors import DatasetError, EpisodeError, InferenceError, PromptError, SavedError
from gristmill_env.inference import Thinking
from gristmill_env.inference.http import ServerHttp, ServerTroubleError
from gristmill_env.inference.server import ModelServer
from gristmill_env.inference.types import Generated
from gristmill_env.preflight import FirstRows, row_warnings
from gristmill_env.rollouts.prompts import Prompt, PromptBuilder, load_tokenizer
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved import SavedGroup
from gristmill_env.session import Task, load_tasks, of_source, prompt_builder, tokenizer_name
from gristmill_env.settings.run import differences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS = 20
"""Rows whose answers are scored before a run."""
_GROUPS = 50
"""Archived groups that are scored again, spread over the run."""
_SLOW_SHARE = 0.1
"""Share of `reward_wall_timeout` that scoring a group may take without a warning."""
_SAME = 1e-6
"""Largest difference of two scores that count as the same. The archive keeps rewards as float32."""
_LISTED = 5
_Parts = Mapping[str, float | None]
_SAMPLED, _TOKENS = 16, 24
"""Completions and tokens of the requests that look for the effect of the temperature."""
_COLD, _HOT = 0.01, 2.0
"""vLLM accepts temperatures up to 2."""


# --- Before a run ----------------------------------------------------------------------------------------------
def before_run(config: str, environ: Mapping[str, str]) -> Iterator[Check]:
    """Yields the checks of a configuration. `config`: its name or path."""
    try:
        run = RunSettings.read(["--config", config], environ, "gristmill doctor")
    except ConfigError as error:
        yield Check("settings", "failed", error.report())
        return
    yield _check_trainer_block(run)
    yield from (Check("settings", "warning", warning) for warning in run.warnings())
    yield from asyncio.run(_gathered(_before(run)))


def beyond_check(run: RunSettings) -> list[Check]:
    """Returns the checks of `before_run` that the command `check` does not make itself."""
    own = ("data and rewards", "data set", "prompts", "gold answers")
    return [check for check in asyncio.run(_gathered(_before(run))) if check.name not in own]


async def _gathered(checks: AsyncIterator[Check]) -> list[Check]:
    return [check async for check in checks]


def _check_trainer_block(run: RunSettings) -> Check:
    try:
        run.check_trainer()
    except ConfigError as error:
        return Check("settings", "failed", error.report())
    return Check("settings", "ok", f"{run.config_path}: run {run.run_id}, groups of {run.config.group_size}")


async def _before(run: RunSettings) -> AsyncIterator[Check]:
    prompt: Prompt | None = None
    async with contextlib.AsyncExitStack() as opened:
        try:
            tasks = [await opened.enter_async_context(task) for task in load_tasks(run)]
        except GristmillError as error:
            yield Check("data and rewards", "failed", error.report())
            return
        for task in tasks:
            rows = FirstRows.of(task.dataset)
            if (unusable := rows.unusable()) is not None:
                yield Check("data set", "failed", of_source(unusable, task.name).report())
            if not rows.items:
                return
            checks, first = await _check_task(task, rows.items)
            prompt = prompt or first
            for check in checks:
                yield check
    async for check in _check_servers(run, prompt):
        yield check


async def _check_task(task: Task, rows: Sequence[Item]) -> tuple[list[Check], Prompt | None]:
    """Checks chat template and rewards on the rows of a task. Also returns the prompt of the first row, if any."""
    run, items, checks = task.run, rows[:_ROWS], list[Check]()
    name = tokenizer_name(run.config, Manifest.find(run.deployment.models_dir))
    tokenizer, prompt = None, None
    if name is None:
        why = "no tokenizer is named: start the model service, or set tokenizer_name"
        checks.append(Check("chat template", "warning", f"not checked: {why}"))
    else:
        try:
            tokenizer = load_tokenizer(name)
            prompts = prompt_builder(run.config, tokenizer)
            opening = await task.environments.opening(items[0])
            messages, options = opening
            prompt = prompts.build(messages, options)
            checks += [Check("prompts", "warning", warning) for warning in row_warnings(prompts, rows)]
            several = task.environments.factory.kind.max_turns > 1
            checks.append(check_template(prompts, prompt, options, several_turns=several))
        except (PromptError, DatasetError, EpisodeError) as error:
            checks.append(Check("chat template", "failed", error.report()))
    checks += [await check_gold(task, items), await check_scores_twice(task, items, tokenizer)]
    if task.name is not None:
        checks = [msgspec.structs.replace(check, text=f"source '{task.name}': {check.text}") for check in checks]
    return checks, prompt


def check_template(
    prompts: PromptBuilder, prompt: Prompt, options: Mapping[str, Any] | None = None, *, several_turns: bool
) -> Check:
    """Checks that the prompt of a second turn begins with the prompt and the reply of the first turn.

    If it does not, the model sees another beginning in each turn, and a server computes the whole conversation again.
    `options`: values for the template, such as `tools`. `several_turns`: whether the run's environment has more than
    one turn. Then a lost prefix is a failed check.
    """
    if not prompt.token_ids:
        return Check("chat template", "warning", "not checked: the prompt has no tokens")
    plain = "It is 4."
    lost: State = "failed" if several_turns else "ok"
    if not _is_kept(prompts, prompt, options, plain):
        use = "use another template" if several_turns else "this run has one turn, so it trains correctly"
        text = f"the template changes earlier turns: the second prompt does not begin with the first turn; {use}"
        return Check("chat template", lost, text)
    if not _is_kept(prompts, prompt, options, f"<think>\nTwo and two.\n</think>\n\n{plain}"):
        text = "the template keeps answers and removes the thoughts of earlier turns"
        if not several_turns:
            return Check("chat template", "ok", f"{text}; this run has one turn")
        more = (
            "a rollout keeps its sampled thoughts, so a chat through the template has other prompts than the training"
        )
        return Check("chat template", "warning", f"{text}; {more}")
    return Check("chat template", "ok", "each turn's prompt begins with the whole conversation before it")


def _is_kept(prompts: PromptBuilder, first: Prompt, options: Mapping[str, Any] | None, reply: str) -> bool:
    said = assistant(first.begun + reply)
    second = prompts.build([*first.messages, said, user("And two more?")], options)
    return second.text.startswith(first.text + reply) and second.token_ids[: len(first.token_ids)] == first.token_ids


async def check_gold(task: Task, items: Sequence[Item]) -> Check:
    """Checks that the rewards that compare with an answer score the rows' own answers 1."""
    scores = await score_gold(task, items)
    if not scores.scores:
        return Check(
            "gold answers", "ok", f"not tried: no reward compares with an answer ({', '.join(scores.untried)})"
        )
    wrong = [(score, miss) for score in scores.scores for miss in [*score.wrong, *score.unscored]]
    if wrong:
        score, miss = wrong[0]
        bad = len(score.wrong) + len(score.unscored)
        text = f"{score.reward} scores {bad} of {score.rows} gold answers below 1; row {miss.index}: {miss.reason}"
        return Check("gold answers", "failed", f"{text}; `gristmill check` lists more of them")
    names = ", ".join(score.reward for score in scores.scores)
    return Check("gold answers", "ok", f"{names} score all {scores.scores[0].rows} gold answers 1")


async def check_scores_twice(task: Task, items: Sequence[Item], tokenizer: PreTrainedTokenizerBase | None) -> Check:
    """Checks that all rewards score in time, and give the same completion the same score a second time."""
    limit = task.scorer.execution.limits.wall
    slowest = 0.0
    changed: list[tuple[int, str, float | None, float | None]] = []
    for item, other in zip(items, [*items[1:], items[0]], strict=True):
        group = constructed(item, other, tokenizer)
        began = time.monotonic()
        first = await task.scorer.score(group)
        slowest = max(slowest, time.monotonic() - began)
        if (failed := next((score.error for score in first if score.error), None)) is not None:
            return Check("rewards", "failed", f"row {item.index}: {failed}")
        second = await task.scorer.score(group)
        for one, two in zip(first, second, strict=True):
            changed += [(item.index, *difference) for difference in _differences(one.parts, two.parts)]
    if changed:
        row, name, before, after = changed[0]
        text = f"{len(changed)} scores differ when they are computed again; row {row}: {name} gives {before} and then"
        more = "the model then learns from noise: seed what is random, or cache it by its input"
        return Check("rewards", "failed", f"{text} {after}; {more}")
    text = f"the same scores twice on {len(items)} rows; the slowest group took {slowest:.2g} s of at most {limit:g} s"
    if slowest > _SLOW_SHARE * limit:
        return Check("rewards", "warning", f"{text}: a slower machine may reach the limit; raise reward_wall_timeout")
    return Check("rewards", "ok", text)


def _differences(first: _Parts, second: _Parts) -> Iterator[tuple[str, float | None, float | None]]:
    """Yields (name, first value, second value) of each score that differs. None: the reward gives no score."""
    for name, one in first.items():
        two = second.get(name)
        if one is None or two is None:
            if one is not two:
                yield name, one, two
        elif abs(one - two) > _SAME * max(1.0, abs(one)):
            yield name, one, two


# --- The model server ------------------------------------------------------------------------------------------
async def _check_servers(run: RunSettings, prompt: Prompt | None) -> AsyncIterator[Check]:
    manifest = Manifest.find(run.deployment.models_dir)
    servers = run.config.server_configs
    addresses = [(config, await asyncio.to_thread(ServerAddresses(config.base_url).find)) for config in servers]
    for config, urls in addresses:
        if not urls:
            text = "not checked: the name has no address; start the model service"
            yield Check(f"model server {config.base_url}", "warning", text)
    for config in (config.model_copy(update={"base_url": url}) for config, urls in addresses for url in urls):
        server = ModelServer(config, Thinking.of(run.config))
        name = f"model server {server.url}"
        try:
            served = await server.meet(manifest)
        except InferenceError as error:
            yield Check(name, "failed", error.report())
            continue
        except ServerTroubleError as error:
            yield Check(name, "warning", f"not checked: it does not answer ({error}); start the model service")
            continue
        finally:
            await server.close()
        if served.text_only:
            text = "returns text without token ids, which cannot be trained on; serve the model with vLLM"
            yield Check(name, "failed", text)
        elif prompt is None or not prompt.token_ids:
            yield Check(name, "warning", "not checked: no tokenizer is known for a prompt")
        else:
            http = ServerHttp(config.root_url, api_key=config.api_key, timeout=config.timeout)
            try:
                yield await check_sampling(http, name, served.name, prompt.token_ids)
            except InferenceError as error:
                yield Check(name, "failed", error.report())
            except ServerTroubleError as error:
                yield Check(name, "failed", f"does not complete a short request: {error}")
            finally:
                await http.close()


async def check_sampling(http: ServerHttp, name: str, model: str, prompt: Sequence[int]) -> Check:
    """Checks that completions differ more at a high temperature than at a low one.

    The trainer's package checks the log-probabilities. Raises InferenceError, ServerTroubleError.
    """
    counts = []
    for temperature in (_COLD, _HOT):
        sampling = {"temperature": temperature, "max_tokens": _TOKENS, "n": _SAMPLED, "ignore_eos": True}
        body = generation(model, prompt, {"detokenize": False, **sampling})
        answer = await http.ask("POST", GENERATE, Generated, json=body)
        counts.append(len({tuple(choice.token_ids or ()) for choice in answer.choices}))
    cold, hot = counts
    if cold > _SAMPLED / 2 or hot <= cold:
        text = f"of {_SAMPLED} completions, {cold} differ at temperature {_COLD} and {hot} at {_HOT}"
        more = "remove settings that override the temperature of requests from the model server"
        return Check(name, "failed", f"{text}: it does not sample with the temperature of the request; {more}")
    return Check(name, "ok", f"serves {model}, and samples with the temperature of the request")


# --- After a run -----------------------------------------------------------------------------------------------
def after_run(run: RunFolder, config: str, environ: Mapping[str, str]) -> Iterator[Check]:
    """Yields the checks of a run's archived groups. `config`: name or path of the YAML that the run was started with.

    The archive has no answers, so the groups are completed from the configuration's data set.
    """
    name = "rewards again"
    folder = run.find(ROLLOUTS_FOLDER)
    if folder is None:
        yield Check(name, "warning", "not checked: the run has no archived groups")
        return
    try:
        settings = RunSettings.read(["--config", config], environ, "gristmill doctor")
    except ConfigError as error:
        text = f"not checked: the run's configuration is not here ({error.code}); name its YAML with --config"
        yield Check(name, "warning", text)
        return
    yield _check_unchanged(run, settings)
    tokenizer = _tokenizer_of(run)
    if tokenizer is not None:
        config_of_run = settings.config.model_copy(update={"tokenizer_name": str(tokenizer)})
        # The model service's manifest may be of another model than the run's.
        no_models = dataclasses.replace(settings.deployment, models_dir=settings.deployment.models_dir / "none")
        settings = dataclasses.replace(settings, config=config_of_run, deployment=no_models)
    try:
        yield asyncio.run(_check_scores_again(settings, folder.parent))
    except SavedError as error:
        yield Check(name, "failed" if error.code == "prompt_differs" else "warning", error.report())
    except GristmillError as error:
        yield Check(name, "warning", f"not checked: {error.report()}")


def _tokenizer_of(run: RunFolder) -> Path | None:
    """Returns the folder of the run's tokenizer, or None if no folder of the run has one with its chat template."""
    for folder in (run.find(f"{TRAINED_FOLDER}/{TOKENIZER_FOLDER}"), run.model()):
        if folder is not None and foreign.is_file(folder / "tokenizer.json"):
            settings = folder / "tokenizer_config.json"
            in_settings = foreign.is_file(settings) and b'"chat_template"' in foreign.read_file(settings)
            if in_settings or foreign.is_file(folder / "chat_template.jinja"):
                return folder
    return None


def _check_unchanged(run: RunFolder, settings: RunSettings) -> Check:
    """Compares the settings of the run's record with the configuration as it is now."""
    record = run.record()
    if record is None:
        return Check("configuration", "warning", "not compared: run.json is missing or not readable")
    recorded = settings.config.recorded(str(record.env.get("model")))
    changes = differences(record.env, recorded)
    if changes:
        listed = "; ".join(changes[:_LISTED])
        text = f"{settings.config_path} has changed since the run: {listed}"
        return Check("configuration", "warning", f"{text}. The checks below use it as it is now")
    return Check("configuration", "ok", f"{settings.config_path} has the settings of the run")


async def _check_scores_again(settings: RunSettings, folder: Path) -> Check:
    """Scores archived groups again and compares the scores with those that the run trained on."""
    tasks = {task.name: task for task in load_tasks(settings)}
    groups = await asyncio.to_thread(_spread, settings, folder)
    slowest, compared = 0.0, 0
    changed: list[tuple[int | None, str, float | None, float | None]] = []
    limit = settings.config.reward_wall_timeout
    async with contextlib.AsyncExitStack() as opened:
        for task in tasks.values():
            await opened.enter_async_context(task)
        for group in groups:
            if group.source not in tasks:
                continue
            task, began = tasks[group.source], time.monotonic()
            scores = await score_group(task.scorer, group, task.run.config.dataset.gold_field)
            slowest = max(slowest, time.monotonic() - began)
            for completion, score in zip(group.completions, scores, strict=True):
                compared += 1
                before = {**(completion.scores or {}), "the total": completion.total}
                after = {**score.parts, "the total": score.total}
                changed += [(group.row, *difference) for difference in _differences(before, after)]
    if changed:
        row, part, old, new = changed[0]
        text = f"{len(changed)} scores of {compared} completions differ from the run's; row {row}: {part} was"
        more = "the rewards, their code or the data have changed since, or the rewards are random"
        return Check("rewards again", "failed", f"{text} {old} and is {new}; {more}")
    text = f"{compared} archived completions have the same scores again; the slowest group took {slowest:.2g} s"
    return Check("rewards again", "ok", f"{text} of at most {limit:g} s")


def _spread(settings: RunSettings, folder: Path) -> list[SavedGroup]:
    """Returns at most `_GROUPS` groups, spread evenly over the archive. Raises SavedError, ArchiveError."""
    sampled: list[SavedGroup] = []
    every = 1
    for number, group in enumerate(open_groups(settings, folder)):
        if number % every == 0:
            sampled.append(group)
        if len(sampled) > _GROUPS:
            sampled, every = sampled[::2], every * 2
    return sampled
