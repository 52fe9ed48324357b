"""Reads the groups for `replay`, `sft` and `dpo`, and adds the data that the run's configuration can provide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec

from gristmill import Manifest
from gristmill_env.data import Item, PromptDataset
from gristmill_env.errors import PromptError, SavedError
from gristmill_env.rollouts.prompts import PromptBuilder, load_tokenizer
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved import SavedGroup, read_groups
from gristmill_env.saved.group import json_columns
from gristmill_env.session import prompt_builder, tokenizer_name


def open_groups(run: RunSettings, source: Path) -> Iterator[SavedGroup]:
    """Yields the groups of `source` that have completions. Decodes groups that hold only tokens.

    If the run's data set is configured, its rows add messages and answers.
    Raises SavedError, PromptError, DatasetError, ArchiveError.
    """

    parts = {part.source: part for part in run.by_source()}
    schedule = run.config.schedule()

    @cache
    def prompts(of: str | None) -> PromptBuilder:
        name = tokenizer_name(run.config, Manifest.find(run.deployment.models_dir))
        if name is None:
            raise PromptError(
                "no_tokenizer",
                f"{source} holds token ids and no text: name the model's tokenizer with --tokenizer_name, or point "
                "GRISTMILL_MODELS_DIR at the model service's folder",
                source=source,
            )
        return prompt_builder(parts[of].config, load_tokenizer(name))

    @cache
    def dataset(of: str | None) -> PromptDataset | None:
        config = parts[of].config.dataset
        return PromptDataset(config, run.config_folder, of) if config.has_rows else None

    def decode(token_ids: Sequence[int], special: bool) -> str:
        return prompts(next(iter(parts))).decode(token_ids, special=special)

    for group in read_groups(source, decode):
        if not group.completions:
            continue
        name = group.source
        if group.columns or group.row is None or name not in parts or (rows := dataset(name)) is None:
            yield group
        else:
            row = group.row if schedule is None else schedule.at(group.row)[1]
            config, item = parts[name].config, rows.item(row, group.row)
            writer = "an agent" if config.agent is not None else f"environment '{config.environment.type}'"
            from_row = config.agent is None and config.environment.type == "dataset"
            yield _completed(group, item, rows.label, prompts(name), None if from_row else writer)


def require_turns(group: SavedGroup, source: Path) -> None:
    """Raises SavedError if the texts of the group hold the environment's turns, because messages were not saved."""
    if not group.turns_known:
        place = "a group" if group.row is None else f"the group of row {group.row}"
        raise SavedError(
            "turns_unknown",
            f"{place} of {source} has several turns and no messages, so its text holds the environment's words too; "
            "set include_messages: true in the run's configuration and train again, or save groups with process",
            path=source,
            row=group.row,
        )


def count_lines(source: Path) -> int | None:
    """Returns the number of lines of a file with one group per line; None if counting takes as long as reading."""
    if not source.is_file():
        return None
    with source.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def _completed(group: SavedGroup, item: Item, label: str, prompts: PromptBuilder, writer: str | None) -> SavedGroup:
    """Returns the group with the values of its row. `label`: of the data set. `writer`: of the prompts, if they are not
    those of the rows."""
    prompt = prompts.build(item.messages)
    if list(prompt.token_ids) != group.prompt_token_ids and writer is not None:
        raise SavedError(
            "prompt_from_environment",
            f"the group of row {group.row} has another prompt than that row of {label}, because {writer} writes the "
            "prompts: leave --config out",
            row=group.row,
            writer=writer,
        )
    if list(prompt.token_ids) != group.prompt_token_ids:
        raise SavedError(
            "prompt_differs",
            f"the group of row {group.row} has another prompt than that row of {label}: its run had other "
            "settings (seed, shuffle_dataset, split, system_prompt) or another tokenizer",
            row=group.row,
        )
    columns, left_out = json_columns(item.columns)
    messages, completions = group.messages, group.completions
    # With several turns, tokens alone do not show each message's author, so such a group stays text.
    if messages is None and all(completion.mask is None for completion in completions):
        messages = [dict(message) for message in prompt.messages]
        completions = [msgspec.structs.replace(c, text=prompt.begun + c.text) for c in completions]
    return msgspec.structs.replace(
        group,
        index=item.index,
        prompt=item.prompt,
        messages=messages,
        completions=completions,
        conversational=item.conversation is not None,
        answer=item.answer,
        columns=columns,
        columns_left_out=left_out,
    )
