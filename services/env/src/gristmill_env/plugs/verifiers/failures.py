"""Tells which functions of a rubric failed. verifiers itself scores a function that raises as 0.0, and goes on."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

from gristmill_env.errors import RewardError


@dataclass(frozen=True)
class FunctionFailure:
    """A function of a rubric that raised, or gave what is no finite number."""

    error: Exception
    counts: bool
    """Its weight is not 0."""


Failures = dict[str, FunctionFailure]
"""By the function's name; the last failure of each."""

_failures: ContextVar[Failures] = ContextVar("failures")


@contextmanager
def noted_failures() -> Iterator[Failures]:
    """Failures of the rubrics that are run in this block, also in tasks that it starts."""
    failures: Failures = {}
    token = _failures.set(failures)
    try:
        yield failures
    finally:
        _failures.reset(token)


def tell_failures(rubric: Any) -> None:
    """Have the functions of `rubric`, and of those in it where it is a vf.RubricGroup, tell their failures."""
    alone = not rubric.has_group_rewards
    rubric.funcs = [
        _told(function, counts=weight != 0, alone=alone)
        for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
    ]
    for inner in getattr(rubric, "rubrics", ()):
        tell_failures(inner)


def _told(function: Callable[..., Any], *, counts: bool, alone: bool) -> Callable[..., Any]:
    """`alone`: it is called with one completion, so that one number stands for what it failed to give."""

    @wraps(function)  # a rubric reads the signature
    async def told(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            if inspect.isawaitable(value):
                value = await value
            plain = value.tolist() if hasattr(value, "tolist") else value  # of numpy and torch
            for number in plain if isinstance(plain, list | tuple) and not alone else (plain,):
                if not math.isfinite(float(number)):
                    raise RewardError("value_invalid", f"a reward is a finite number, not {number!r}")
            return value
        except Exception as error:
            _failures.get()[function.__name__] = FunctionFailure(error, counts)
            if alone:
                return 0.0  # what verifiers makes of it; raised, it would be a line in the log for each completion
            raise

    return told
