"""A small game in turns, as an example to copy: the model guesses a number, with a hint after each wrong guess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from gristmill_env.answers.extraction import final_answer, gold_answer
from gristmill_env.answers.numbers import read_number
from gristmill_env.data import Item, Message, user
from gristmill_env.environments.base import Environment, StepResult
from gristmill_env.environments.model import Reply
from gristmill_env.environments.registry import environment
from gristmill_env.errors import DatasetError


@environment("guess")
class Guess(Environment):
    """Asks a question with a number for an answer, in several tries, with the hints "Higher." and "Lower.".

    The rollout's reward falls linearly from 1 for a right first guess to 0 for no right guess.
    """

    def __init__(self, *, tries: Annotated[int, Field(ge=1, le=16)] = 3) -> None:
        self._tries = tries
        self._wrong = 0

    async def reset(self, item: Item) -> Sequence[Message]:
        """Raises DatasetError when the row's answer is not a number."""
        number = None if item.answer is None else read_number(gold_answer(item.answer))
        if number is None:
            raise DatasetError(
                "answer_not_a_number",
                f"the answer of row {item.index} is {item.answer!r:.60}; guess needs a number",
                row=item.index,
            )
        self._number = number.value
        return item.messages

    async def step(self, reply: Reply) -> StepResult:
        extracted = final_answer(reply.text, last_number=True)
        number = None if extracted is None else read_number(extracted)
        guess = None if number is None else number.value
        if guess == self._number:
            return StepResult.end(1.0 - self._wrong / self._tries)
        self._wrong += 1
        if self._wrong == self._tries:
            return StepResult.end(0.0)
        if guess is None:
            return StepResult((user("That is no number."),))
        return StepResult((user("Higher." if guess < self._number else "Lower."),))
