"""Questions about a run's first rows that `check`, `serve` and `doctor` ask alike.

Each answer is a sentence with a number.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gristmill_env.data import Item, PromptDataset
from gristmill_env.errors import CheckError, DatasetError, PromptError
from gristmill_env.rollouts.prompts import PromptBuilder

_ROWS = 1000
"""Rows that are read, in the run's order."""
_RENDERED = 20
"""Rows whose prompts are rendered to look for their messages."""


@dataclass(frozen=True)
class FirstRows:
    """The first rows of a run."""

    items: Sequence[Item]
    """The rows that can be used."""
    read: int
    problems: Sequence[str]
    """The reports of the other rows."""

    @classmethod
    def of(cls, dataset: PromptDataset) -> FirstRows:
        """Reads the rows."""
        items: list[Item] = []
        problems: list[str] = []
        for row in range(min(_ROWS, len(dataset))):
            try:
                items.append(dataset.item(row))
            except DatasetError as error:
                problems.append(error.report())
        return cls(items, len(items) + len(problems), problems)

    def unusable(self, refused: Sequence[str] = ()) -> CheckError | None:
        """Returns the error about the rows that cannot be used. `refused`: reports of an environment."""
        problems = [*self.problems, *refused]
        if not problems:
            return None
        text = f"{len(problems)} of {self.read} rows cannot be used; the first: {problems[0]}"
        return CheckError("rows_unusable", text, count=len(problems), of=self.read)


def first_warnings(prompts: PromptBuilder, dataset: PromptDataset, limit: int, max_tokens: int) -> Iterator[str]:
    """Yields the sentences that `serve` logs at its start. Does not raise: a row's own error drops the row later.

    `limit`: of prompt and completion together. `max_tokens`: of a completion.
    """
    rows = FirstRows.of(dataset)
    if (unusable := rows.unusable()) is not None:
        yield str(unusable)
    with contextlib.suppress(PromptError):
        yield from row_warnings(prompts, rows.items)
        if prompts.has_tokenizer:
            lengths = [len(prompts.build(item.messages).token_ids) for item in rows.items[:_RENDERED]]
            for warning in squeezed_prompts(lengths, limit, max_tokens):
                yield f"of the first {len(lengths)} rows, {warning}"


def row_warnings(prompts: PromptBuilder, items: Sequence[Item]) -> Iterator[str]:
    """Yields a sentence for each thing in the settings that the prompts of these rows do not show to the model.

    Raises PromptError when the chat template refuses a prompt.
    """
    if not items:
        return
    if empty := sum(not item.prompt.strip() for item in items):
        yield f"the prompt of {empty} of {len(items)} rows is empty; correct prompt_field, or remove the rows"
    yield from _messages_left_out(prompts, items)
    if not prompts.has_tokenizer:
        return
    for setting in prompts.unread_switches():
        yield f"{setting} is set, and the chat template does not read it: other values give the same prompts"
    if control := sorted(prompts.special_tokens, key=len, reverse=True):
        pattern = re.compile("|".join(map(re.escape, control)))
        in_rows = [set(pattern.findall("\0".join(str(m["content"]) for m in item.messages))) for item in items]
        names = Counter(name for tokens in in_rows for name in tokens)
        if names:
            listed = ", ".join(name for name, _ in names.most_common(5))
            yield (
                f"control tokens are in the text of {sum(map(bool, in_rows))} of {len(items)} rows ({listed}): the "
                "model reads them as ends of turns, not as text; remove them from the rows"
            )


def squeezed_prompts(lengths: Sequence[int], limit: int, max_tokens: int) -> Iterator[str]:
    """Yields a sentence if prompts, of these lengths in tokens, leave some room for a completion, but not enough."""
    if squeezed := sum(limit - max_tokens < length < limit for length in lengths):
        yield (
            f"{squeezed} prompts leave less than max_tokens ({max_tokens}) within {limit} tokens, so that their "
            "completions are cut earlier; raise max_token_length, or lower max_tokens"
        )


def _messages_left_out(prompts: PromptBuilder, items: Sequence[Item]) -> Iterator[str]:
    own = sum(item.messages[0]["role"] == "system" for item in items)
    if prompts.system_prompt and own:
        yield (
            f"system_prompt is not applied to {own} of {len(items)} rows, which have their own system message; remove "
            "one of the two"
        )
    if not prompts.has_tokenizer:
        return
    tried = items[:_RENDERED]
    lost: Counter[str] = Counter()
    for item in tried:
        prompt = prompts.build(item.messages)
        words = " ".join(prompt.text.split())
        lost.update({str(m["role"]) for m in prompt.messages if " ".join(str(m["content"]).split()) not in words})
    for role, remedy in (
        ("system", "write the instructions into prompt_template instead"), ("user", "use another chat_template"),
    ):  # fmt: skip
        if lost[role]:
            yield (
                f"the {role} message is missing in the prompts of {lost[role]} of {len(tried)} rows: the chat template "
                f"leaves it out, or changes it; {remedy}"
            )
