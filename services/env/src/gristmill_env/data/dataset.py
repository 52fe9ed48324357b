"""The data set of a run: rows with a prompt and, where rewards want one, an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.settings.nearest import did_you_mean
from gristmill_env.data.rows import RowOrder
from gristmill_env.data.sources import load_rows
from gristmill_env.errors import DatasetError
from gristmill_env.settings import DatasetConfig


@dataclass(frozen=True)
class Item:
    """One row, as far as prompts and rewards care."""

    row: int
    """The permit's row number."""
    index: int
    """Index into the data set."""
    prompt: str
    answer: str | None
    columns: Mapping[str, Any]
    """The whole row."""


class PromptDataset:
    """Gives the item of any row number."""

    def __init__(self, config: DatasetConfig, config_dir: Path | None) -> None:
        """Load the data set. `config_dir`: folder that a relative dataset_path is looked for in first.

        Raises DatasetError: it cannot be found or read, has no row, or lacks a field.
        """
        self._config = config
        self.label, self._rows = load_rows(config, config_dir)
        if len(self._rows) == 0:
            raise DatasetError(f"{self.label} has no rows; choose another split")
        self._order = RowOrder(len(self._rows), seed=config.seed, shuffle=config.shuffle_dataset)
        self.columns = columns = list(self._rows[0])
        for key, field in (("prompt_field", config.prompt_field), ("answer_field", config.answer_field)):
            if field is not None and field not in columns:
                raise DatasetError(
                    f"{self.label} has no field '{field}' ({key}); it has {', '.join(columns)}."
                    f"{did_you_mean(field, columns)}"
                )

    def __len__(self) -> int:
        return len(self._rows)

    def item(self, row: int) -> Item:
        """The item of the `row`-th permit. Raises DatasetError when its prompt is no text or its answer is missing."""
        index = self._order.index(row)
        columns = self._rows[index]
        answer = self._config.answer_field
        return Item(
            row=row,
            index=index,
            prompt=self._text(columns, index, self._config.prompt_field),
            answer=None if answer is None else self._text(columns, index, answer),
            columns=columns,
        )

    def _text(self, columns: Mapping[str, Any], index: int, field: str) -> str:
        value = columns.get(field)
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        raise DatasetError(f"field '{field}' of row {index} of {self.label} is {value!r:.60}; text is wanted")
