"""`check`: shows what a configuration will do, before a run costs anything. Needs no model and no API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from gristmill import ConfigError, GristmillError, Manifest
from gristmill.internal.check import Check
from gristmill_env.agents.runners import FunctionAgent
from gristmill_env.answers.extraction import gold_answer
from gristmill_env.commands.trial import Trial, try_rewards
from gristmill_env.console import Steps, plain, say
from gristmill_env.data import assistant
from gristmill_env.data.dataset import Item
from gristmill_env.errors import CheckError, DatasetError, EpisodeError, PromptError
from gristmill_env.evaluation.plan import (
    count_training_rows,
    evaluation_tasks,
    number_of_prompts,
    seen_in_training,
)
from gristmill_env.preflight import FirstRows, row_warnings, squeezed_prompts
from gristmill_env.rewards import Sample, Scorer, WeightedReward
from gristmill_env.rewards.scorer import FULL
from gristmill_env.rollouts.prompts import Prompt, load_tokenizer
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved.summary import quantile
from gristmill_env.session import Task, load_tasks, of_source, prompt_builder, tokenizer_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 3
_RESETS = 20
"""Rows for which `check` resets a user's environment; each reset may start a sandbox."""
_GOLD = 200
_UNSCORED_SHARE = 0.1
"""Share of the tried rows. If a reward cannot read more answers than this, `check` reports a mistake."""
_TRIED = "only a reward that asks for answer or ground_truth, and needs no tokens and no episode, can be"
_NOT_THERE = frozenset({"tokens", "episode_reward", "episode_parts"})
"""Inputs that cannot be constructed for an answer that a model did not generate."""
_FORMS: tuple[Callable[[str], str], ...] = (
    lambda answer: answer,
    lambda answer: f"\\boxed{{{gold_answer(answer)}}}",
    lambda answer: f"#### {gold_answer(answer)}",
    lambda answer: f"<answer>{gold_answer(answer)}</answer>",
    lambda answer: f"Answer: {gold_answer(answer)}",
    gold_answer,
)
"""Ways in which models are asked to state an answer. A reward passes with any one of them.

The format rewards check which way the run's prompt asks for; this check does not test format rewards."""


@dataclass
class _Findings:
    """The problems, reported at the end, and the rows of the present source."""

    problems: list[GristmillError] = field(default_factory=list)
    rows: FirstRows = field(default_factory=lambda: FirstRows([], 0, []))
    refused: list[str] = field(default_factory=list)
    """Reports of the rows that the source's environment refuses."""
    warnings: int = 0

    def warn(self, console: Console, text: str) -> None:
        """Shows a warning, and counts it."""
        self.warnings += 1
        say(console, f"warning: {text}")


async def check(run: RunSettings, console: Console, more: Iterable[Check] = ()) -> None:
    """Shows rows, prompts, prompt lengths, the rewards' scores for the rows' own answers, and `more` checks.

    Raises CheckError when something is wrong, and any GristmillError that prevents loading.
    """
    tasks, findings = load_tasks(run), _Findings()
    say(console, f"{run.config_path or 'no configuration file'}: run {run.run_id}")
    for task in tasks:
        say(console, f"{_of(task)}{task.dataset.label}: {len(task.dataset)} rows")
    for warning in run.warnings():
        findings.warn(console, warning)
    try:
        run.check_trainer()
    except ConfigError as error:
        findings.problems.append(error)
    trials = []
    for task in tasks:
        if task.name is not None:
            say(console, f"\nsource {task.name}", style="bold")
        async with task:
            trials.append(await _check(task, console, findings))
    await _check_evaluations(run, tasks, console, findings)
    for one in await asyncio.to_thread(list, more):
        style = {"ok": "", "warning": "yellow", "failed": "red"}[one.state]
        say(console, f"{one.state:<8}{one.name:<17} {one.text}", style=style)
        if one.state == "failed":
            findings.problems.append(CheckError("check_failed", f"{one.name}: {one.text}", check=one.name))
        findings.warnings += one.state == "warning"
    if findings.problems:
        for problem in findings.problems:
            say(console, f"wrong: {problem.report()}", style="red")
        raise CheckError(
            "check_failed",
            f"check found {len(findings.problems)} mistake{'s' if len(findings.problems) > 1 else ''}, see above",
            problems=[problem.code for problem in findings.problems],
        )
    silent = [name for trial, task in zip(trials, tasks, strict=True) for name in _silent(trial, task)]
    if silent:
        say(console, f"nothing is wrong as far as was tried; no value came from {', '.join(silent)}")
    elif findings.warnings:
        say(
            console,
            f"nothing is wrong, with {findings.warnings} warning{'s' if findings.warnings > 1 else ''}, see above",
        )
    else:
        say(console, "all is well")


def _of(task: Task) -> str:
    return "" if task.name is None else f"source '{task.name}': "


def _silent(trial: Trial, task: Task) -> Sequence[str]:
    return trial.silent or ([] if trial.ran else task.scorer.names)


async def _check(task: Task, console: Console, found: _Findings) -> Trial:
    """Checks a source of the run, or the whole run."""
    run, dataset, before = task.run, task.dataset, len(found.problems)
    rewards = ", ".join(f"{w.weight:g} × {w.reward.name}" for w in task.scorer.rewards)
    found.rows, found.refused = FirstRows.of(dataset), []
    say(console, f"columns: {', '.join(dataset.columns)}")
    say(console, f"rewards: {rewards}")
    await _check_agent(run, console, found)
    tokenizer = await _show_prompts(run, task, console, found)
    if (unusable := found.rows.unusable(found.refused)) is not None:
        found.problems.append(unusable)
    _show_gold(console, await score_gold(task, found.rows.items[:_GOLD]), found)
    trial = await try_rewards(task, found.rows.items, tokenizer)
    _show_trial(console, trial, found)
    found.problems[before:] = [of_source(problem, task.name) for problem in found.problems[before:]]
    return trial


async def _check_agent(run: RunSettings, console: Console, found: _Findings) -> None:
    """Loads the run's agent, if it is a function, in a process as `serve` does."""
    agent = run.config.agent
    if agent is None or agent.function is None:
        return
    try:
        async with FunctionAgent(agent.function, run.config_folder, agent.params):
            say(console, f"agent: {agent.function}")
    except EpisodeError as error:
        found.problems.append(error)


async def _check_evaluations(run: RunSettings, tasks: Sequence[Task], console: Console, found: _Findings) -> None:
    """Loads the evaluation sets, if there are any, and warns if their rows are training rows. Raises as `Task.load`."""
    for task in evaluation_tasks(run) if run.config.by_evaluation() else ():
        async with task:
            dataset, of = task.dataset, "" if task.name is None else f" {task.name}"
            prompts = number_of_prompts(task.run.config.dataset, len(dataset))
            say(console, f"evaluation{of}: {dataset.label}: {prompts} of {len(dataset)} rows")
            training = [one.dataset for one in tasks if one.name == task.name] or [one.dataset for one in tasks]
            if seen := count_training_rows(dataset, prompts, *training):
                found.warn(console, seen_in_training(seen, prompts))


async def _show_prompts(
    run: RunSettings, task: Task, console: Console, found: _Findings
) -> PreTrainedTokenizerBase | None:
    """Shows the first prompts and the lengths of all prompts; without a tokenizer, shows the messages.

    Returns the tokenizer.
    """
    manifest = Manifest.find(run.deployment.models_dir)
    name = tokenizer_name(run.config, manifest)
    tokenizer = None
    why = "no tokenizer is named: set --tokenizer_name, or point GRISTMILL_MODELS_DIR at the model service's folder"
    if name is not None:
        try:
            tokenizer = load_tokenizer(name)
        except PromptError as error:
            why = error.report()
    try:
        prompts = prompt_builder(run.config, tokenizer)
    except PromptError as error:
        found.problems.append(error)
        return tokenizer
    lengths: list[int] = []
    for number, item in enumerate(found.rows.items):
        if number == (_SHOWN if tokenizer is None else _RESETS if not task.environments.factory.ours else None):
            break
        try:
            prompt = prompts.build(*await task.environments.opening(item))
        except DatasetError as error:  # the run's environment cannot begin with this row
            found.refused.append(error.report())
            continue
        except (PromptError, EpisodeError) as error:
            found.problems.append(error)
            return tokenizer
        lengths.append(len(prompt.token_ids))
        if number < _SHOWN:
            _show_prompt(console, item, prompt)
    try:
        for warning in row_warnings(prompts, found.rows.items):
            found.warn(console, warning)
    except PromptError as error:  # of a template that refuses the rows' own messages, but not the environment's
        found.warn(console, str(error))
    if tokenizer is None:
        say(console, f"no token counts: {why}")
        return None
    limit = run.config.max_token_length
    if manifest is not None and name == manifest.tokenizer_path:
        limit = min(limit, manifest.max_model_len)
    say(console, f"tokenizer: {name}")
    wanted = run.config.server.model_name
    held = () if manifest is None else (manifest.name, manifest.requested, manifest.weights_path)
    if manifest is not None and name == manifest.tokenizer_path and wanted not in (None, *held):
        text = f"the tokenizer is of {manifest.name}, which the model service holds, not of {wanted}; lengths differ"
        found.warn(console, f"{text}. Start that model, or set --tokenizer_name")
    if lengths:
        _show_lengths(run, console, lengths, limit, found)
    return tokenizer


def _show_prompt(console: Console, item: Item, prompt: Prompt) -> None:
    if prompt.token_ids:
        title, text = f"{len(prompt.token_ids)} tokens, as the model will see it", prompt.text
    else:
        messages = [*prompt.messages, *([assistant(prompt.prefill)] if prompt.prefill else [])]
        title, text = "as messages", "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    console.print(Panel(plain(text), title=f"row {item.index}, {title}", title_align="left"))


def _show_lengths(run: RunSettings, console: Console, lengths: list[int], limit: int, found: _Findings) -> None:
    marks = ", ".join(f"{share:.0%} ≤ {quantile(lengths, share)}" for share in (0.5, 0.9, 0.99))
    say(console, f"prompt tokens over {len(lengths)} rows: {min(lengths)} to {max(lengths)} ({marks})")
    too_long = sum(length > limit - 1 for length in lengths)
    if too_long:
        say(console, f"{too_long} prompts leave no room for a completion within {limit} tokens and will be skipped")
    if too_long == len(lengths):
        text = f"every prompt is longer than max_token_length {limit} allows"
        found.problems.append(CheckError("all_prompts_too_long", text, limit=limit))
    for warning in squeezed_prompts(lengths, limit, run.config.dataset.max_tokens):
        found.warn(console, warning)


def _show_gold(console: Console, gold: GoldCheck, found: _Findings) -> None:
    scores = gold.scores
    if not scores:
        say(console, "no reward was tried on the rows' own answers")
    if gold.untried:
        names = ", ".join(gold.untried)
        say(console, f"not tried on the rows' own answers: {names} ({_TRIED})")
    if not scores:
        return
    table = Table("reward", "rows", "own answer scores 1", "less", "no score")
    for score in scores:
        share = f"{score.full} ({score.full / score.rows:.1%})" if score.rows else "0"
        table.add_row(plain(score.reward), str(score.rows), share, str(len(score.wrong)), str(len(score.unscored)))
    console.print(table)
    for score in scores:
        for miss in [*score.wrong, *score.unscored][:_SHOWN]:
            answer = " ".join(miss.answer.split())
            shortened = answer if len(answer) <= 80 else f"…{answer[-80:]}"
            say(console, f"{score.reward}, row {miss.index}: {miss.reason} (answer {shortened!r})")
        if score.wrong:
            text = f"{score.reward} does not know {len(score.wrong)} of {score.rows} rows' own answers"
            values = {"reward": score.reward, "count": len(score.wrong), "of": score.rows}
            found.problems.append(CheckError("answers_not_known", text, **values))
        elif len(score.unscored) > _UNSCORED_SHARE * score.rows:
            text = f"{score.reward} cannot read the answers of {len(score.unscored)} of {score.rows} rows"
            values = {"reward": score.reward, "count": len(score.unscored), "of": score.rows}
            found.problems.append(CheckError("answers_not_read", text, **values))


def _show_trial(console: Console, trial: Trial, found: _Findings) -> None:
    say(console, f"called on constructed completions of {trial.rows} rows: {', '.join(trial.ran) or 'no reward'}")
    for name, rows in trial.failed.items():
        for index, error in list(rows.items())[:_SHOWN]:
            say(console, f"{name}, row {index}: {error}")
        text = f"{name} fails on {len(rows)} of {trial.rows} rows; the first: row {min(rows)}: {rows[min(rows)]}"
        values = {"reward": name, "count": len(rows), "of": trial.rows, "row": min(rows)}
        found.problems.append(CheckError("reward_fails", text, **values))


@dataclass(frozen=True)
class Miss:
    """A row whose own answer scores less than 1."""

    index: int
    answer: str
    reason: str


@dataclass
class GoldScore:
    """One reward's results for the rows' own answers."""

    reward: str
    """The reward's full name; "r1/accuracy" for a part of a composed reward."""
    full: int = 0
    """Rows that score 1 or more."""
    unscored: list[Miss] = field(default_factory=list)
    """Rows for which the reward gives no score, because it cannot read their answer."""
    wrong: list[Miss] = field(default_factory=list)
    """Rows that score less than 1, or on which the reward fails."""

    @property
    def rows(self) -> int:
        """Rows that were tried."""
        return self.full + len(self.unscored) + len(self.wrong)


@dataclass(frozen=True)
class GoldCheck:
    """The results of a run's rewards for the rows' own answers."""

    scores: Sequence[GoldScore]
    """Scores of the rewards that were tried."""
    untried: Sequence[str]
    """Rewards that were not tried, because they ask for no answer or for more than a text. For a TRL function or
    an environment's rubric, only its code shows whether it compares."""


async def score_gold(task: Task, items: Sequence[Item]) -> GoldCheck:
    """Scores each row's own answer as if a model had given it, to check that the rewards recognise a right answer.

    Tries each reward that compares with an answer, over all `items` that have one. A reward compares too if it asks for
    the column of the answer by the column's own name.

    Tries the parts of a composed reward instead, because its sum also depends on the shape of the text and on weights.
    """
    leaves = {name: leaf for weighted in task.scorer.rewards for name, leaf in weighted.reward.leaves().items()}
    column = {task.dataset.answer_column, f"{task.dataset.answer_column}s"}
    comparing = {name: leaf for name, leaf in leaves.items() if leaf.compares or leaf.asks_for & column}
    judges = {name: leaf for name, leaf in comparing.items() if leaf.asks_for.isdisjoint(_NOT_THERE)}
    untried = [name for name in leaves if name not in judges]
    if not judges or not items:
        return GoldCheck([], untried)
    scores = []
    with Steps("answers", len(judges) * len(items)) as steps:
        for name, reward in judges.items():
            score = GoldScore(name)
            async with Scorer([WeightedReward(reward, 1.0)], has_answer=True, columns=list(items[0].columns)) as scorer:
                for item in items:
                    await _try_forms(scorer, item, score)
                    steps.add()
            scores.append(score)
    return GoldCheck(scores, untried)


async def _try_forms(scorer: Scorer, item: Item, score: GoldScore) -> None:
    if item.answer is None:
        return
    best: float | None = None
    for form in _FORMS:
        (said,) = await scorer.score([Sample.of(item, form(item.answer))])
        if said.error is not None:
            score.wrong.append(Miss(item.index, item.answer, said.error))
            return
        if said.total is not None:
            best = said.total if best is None else max(best, said.total)
            if best >= FULL:
                score.full += 1
                return
    if best is None:
        score.unscored.append(Miss(item.index, item.answer, "no score: the reward cannot read this answer"))
    else:
        score.wrong.append(Miss(item.index, item.answer, f"scores {best:.3g} at best"))
