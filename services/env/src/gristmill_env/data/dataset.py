"""The data set of a run: rows with a prompt and, if rewards need it, an answer.

`PromptDataset` maps a permit's row number, which grows without limit, to a row (`RowOrder`), and makes the row's item:
the prompt, by a field or a template, and the answer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill.internal.settings import did_you_mean
from gristmill_env.data.messages import Message, message_problem, template_form, user
from gristmill_env.data.sources import load_rows
from gristmill_env.data.template import PromptTemplate
from gristmill_env.errors import DatasetError
from gristmill_env.settings.dataset import DatasetConfig
from gristmill_env.values import NotTextError, half_characters, text_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_SEARCHED = 100
"""Rows that are searched for a field."""
_EPOCHS = 64 + 2
"""Orders of epochs that are kept in memory: those for which a row can rest, and two."""
_MOST_AHEAD = 2**26
"""How far ahead of the newest permit the API keeps that a number is passed over (_difficulty.lua)."""


@dataclass(frozen=True)
class Item:
    """One row, with the fields that prompts and rewards use."""

    row: int
    """The permit's row number. With several sources it counts the rows of all."""
    index: int
    """Index into the data set."""
    prompt: str
    """The user's message; for a row that holds a conversation, its last message."""
    answer: str | None
    """The text that rewards compare with: `ground_truth_field` if set, else `answer_field`."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The whole row."""
    conversation: tuple[Message, ...] | None = None
    """The row's own messages, if `prompt_field` holds a list of them."""
    source: str | None = None
    """Name of the row's source; None if the run has no `sources`."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """Messages for the model to answer, without the run's system prompt. The last is never the assistant's."""
        return (user(self.prompt),) if self.conversation is None else self.conversation


class PromptDataset:
    """Returns the item for any row number."""

    def __init__(self, config: DatasetConfig, config_dir: Path | None, source: str | None = None) -> None:
        """Loads the data set. `config_dir`: the folder in which a relative dataset_path is searched first. `source`:
        name of the source of the run to which the rows belong.

        Raises DatasetError when the data set cannot be found or read, has no row, or lacks a field.
        """
        self._config = config
        self._source = source
        self.label, self._rows = load_rows(config, config_dir)
        if len(self._rows) == 0:
            raise DatasetError("no_rows", f"{self.label} has no rows; choose another split", label=self.label)
        self._order = RowOrder(len(self._rows), seed=config.seed, shuffle=config.shuffle_dataset)
        first = next(self._first_rows(), None)
        self.columns = list(self._row(0) if first is None else first)
        """Names of the rows' columns."""
        self._template = None
        if config.prompt_template is not None:
            self._template = PromptTemplate(config.prompt_template, self.columns)
        for key in ("prompt_field", "answer_field", "ground_truth_field"):
            path = getattr(config, key)
            if path is not None and not (key == "prompt_field" and self._template is not None):
                self._check_field(key, path)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def answer_column(self) -> str | None:
        """Field of a row with which rewards compare; None if rows have no answer."""
        return self._config.gold_field

    def item(self, row: int, number: int | None = None) -> Item:
        """Returns the item of the `row`-th row. `number`: the permit's, if it counts the rows of other sources too.

        Raises DatasetError: the prompt is not text, or the answer is missing.
        """
        return self._item(row if number is None else number, self.index(row))

    def index(self, row: int) -> int:
        """Returns the index into the data set of the `row`-th row."""
        return self._order.index(row)

    def turns(self, row: int, count: int) -> list[int]:
        """Returns the numbers of the next `count` rows with the data of the `row`-th row, one in each epoch."""
        return self._order.turns(row, count)

    def item_at(self, index: int) -> Item:
        """Returns the item at an index, in the data set's order. Raises DatasetError as `item` does."""
        return self._item(index, index)

    def _item(self, row: int, index: int) -> Item:
        columns = self._row(index)
        self._check_characters(columns, index)
        conversation = None
        if self._template is not None:
            prompt = self._template.render(columns, index, self.label)
        else:
            value = self._value(columns, index, self._config.prompt_field)
            if isinstance(value, Sequence) and not isinstance(value, str | bytes):
                conversation = self._messages(value, index)
                value = conversation[-1]["content"]
            prompt = self._text(value, index, self._config.prompt_field)
        gold = self._config.gold_field
        answer = None if gold is None else self._text(self._value(columns, index, gold), index, gold)
        return Item(row, index, prompt, answer, columns, conversation, self._source)

    def _check_field(self, key: str, path: str) -> None:
        """Raises DatasetError if none of the first rows has the field. (A single row without it is a bad row.)"""
        rows = self._first_rows()
        try:
            lookup(next(rows), path)
        except NoFieldError as error:
            for row in rows:
                with contextlib.suppress(NoFieldError):
                    lookup(row, path)
                    return
            at = "" if error.name == path else f" ('{error.name}' of it is missing)"
            raise DatasetError(
                "field_missing",
                f"{self.label} has no field '{path}' ({key}){at}; it has {', '.join(error.there)}."
                f"{did_you_mean(error.name, error.there)}",
                key=key,
                field=path,
                part=error.name,
                known=error.there,
            ) from error

    def _row(self, index: int) -> Mapping[str, Any]:
        """Raises DatasetError for a row with a value that Python cannot hold, such as a date after the year 9999."""
        try:
            return self._rows[index]
        except (DatasetError, OSError, MemoryError):
            raise
        except Exception as error:
            text = f"row {index} of {self.label} cannot be read: {type(error).__name__}: {error}"
            raise DatasetError("row_unreadable", text, row=index, label=self.label) from error

    def _first_rows(self) -> Iterator[Mapping[str, Any]]:
        """Yields the first rows that can be read."""
        for index in range(min(_SEARCHED, len(self._rows))):
            with contextlib.suppress(DatasetError):
                yield self._row(index)

    def _value(self, columns: Mapping[str, Any], index: int, path: str) -> Any:
        try:
            return lookup(columns, path)
        except NoFieldError as error:
            raise DatasetError(
                "field_missing",
                f"row {index} of {self.label} has no field '{path}'; it has {', '.join(error.there)}",
                row=index,
                field=path,
                part=error.name,
                known=error.there,
            ) from error

    def _text(self, value: Any, index: int, path: str) -> str:
        try:
            return text_of(value)
        except NotTextError as error:
            raise DatasetError(
                "not_text",
                f"field '{path}' of row {index} of {self.label} is {error}; it must be text",
                row=index,
                field=path,
            ) from error

    def _check_characters(self, columns: Mapping[str, Any], index: int) -> None:
        """Raises DatasetError if any text of the row holds half a character: rewards and saved groups read them all."""
        if (path := next(half_characters(columns), None)) is not None:
            raise DatasetError(
                "half_character",
                f"field '{path}' of row {index} of {self.label} holds half a character (half of a surrogate pair), "
                "which is not text; repair the row, or remove it",
                row=index,
                field=path,
            )

    def _messages(self, value: Sequence[Any], index: int) -> tuple[Message, ...]:
        path = self._config.prompt_field
        where = f"field '{path}' of row {index} of {self.label}"
        if not value:
            raise DatasetError("no_messages", f"{where} holds no message", row=index, field=path)
        for message in value:
            if (problem := message_problem(message)) is not None:
                raise DatasetError(
                    "not_a_message",
                    f"{where} is a list, but {message!r:.60} in it is not a message with role and content: {problem}",
                    row=index,
                    field=path,
                )
        if value[-1]["role"] == "assistant":
            raise DatasetError(
                "ends_with_assistant",
                f"{where} ends with the assistant's message; a prompt must end with the message to answer",
                row=index,
                field=path,
            )
        return tuple(map(template_form, value))


class RowOrder:
    """The order of the rows, epoch by epoch, computed from the seed alone.

    A permit's row number fixes the row, so replicas never take the same row twice. A restart continues at the same
    place, and no position is saved.
    """

    def __init__(self, length: int, *, seed: int, shuffle: bool) -> None:
        """`length`: rows of the data set, at least 1."""
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._permutation = lru_cache(maxsize=2)(self._permute)  # two: epochs overlap at their seam
        self._place = lru_cache(maxsize=_EPOCHS)(self._invert)
        self._placing = threading.Lock()

    def index(self, row: int) -> int:
        """Returns the index into the data set for the `row`-th requested row."""
        epoch, position = divmod(row, self._length)
        return int(self._permutation(epoch)[position]) if self._shuffle else position

    def turns(self, row: int, count: int) -> list[int]:
        """Returns the numbers of the next `count` requests for the data of the `row`-th: one in each later epoch.

        Returns none that is more than _MOST_AHEAD rows ahead, which the API would not keep: that bounds the memory for
        the orders of later epochs, 4 bytes a row. Threads may call it.
        """
        first = row // self._length + 1
        epochs = range(first, first + min(count, max(1, _MOST_AHEAD // self._length)))
        if not self._shuffle:
            return [epoch * self._length + row % self._length for epoch in epochs]
        with self._placing:
            index = self.index(row)
            return [epoch * self._length + int(self._place(epoch)[index]) for epoch in epochs]

    def _invert(self, epoch: int) -> npt.NDArray[np.int32]:
        """Returns the position of each index in an epoch."""
        import numpy as np

        places = np.empty(self._length, np.int32)
        places[self._permute(epoch)] = np.arange(self._length, dtype=np.int32)
        return places

    def _permute(self, epoch: int) -> npt.NDArray[np.int64]:
        import numpy as np

        return np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(self._length)


def lookup(row: Mapping[str, Any], path: str) -> Any:
    """Returns the value at `path`: `answer`, `metadata.answer_cot`, `choices.text.0`.

    A column with exactly that name overrides a path into another column.
    Raises NoFieldError for a missing part.
    """
    if path in row:
        return row[path]
    here: Any = row
    for part in path.split("."):
        if isinstance(here, Mapping):
            if part not in here:
                raise NoFieldError(part, list(here))
            here = here[part]
        elif isinstance(here, Sequence) and not isinstance(here, str):
            if not part.lstrip("-").isdigit() or not -len(here) <= int(part) < len(here):
                raise NoFieldError(part, [f"{len(here)} entries from 0"])
            here = here[int(part)]
        else:
            raise NoFieldError(part, [f"no fields but {here!r:.40}"])
    return here


class NoFieldError(Exception):
    """A path does not exist in the row."""

    def __init__(self, name: str, there: Sequence[str]) -> None:
        """`name`: the missing part of the path; `there`: the names that exist at that place."""
        super().__init__(name)
        self.name = name
        self.there = list(there)
