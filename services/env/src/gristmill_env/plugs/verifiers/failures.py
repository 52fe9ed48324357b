"""Reports which functions of a rubric failed. verifiers itself scores a function that raises as 0.0."""

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
    """The failure of a rubric's function that raised or did not return a finite number."""

    error: Exception
    counts: bool
    """Whether the function's weight is not 0."""


Failures = dict[str, FunctionFailure]
"""The last failure of each function, by the function's name."""

_failures: ContextVar[Failures] = ContextVar("failures")


@contextmanager
def noted_failures() -> Iterator[Failures]:
    """Collects the failures of rubrics that run in this block, including rubrics in tasks that the block starts."""
    failures: Failures = {}
    token = _failures.set(failures)
    try:
        yield failures
    finally:
        _failures.reset(token)


def tell_failures(rubric: Any) -> None:
    """Wraps the functions of `rubric`, and of the rubrics in a vf.RubricGroup, so that they report their failures."""
    alone = not rubric.has_group_rewards
    rubric.funcs = [
        _told(function, counts=weight != 0, alone=alone)
        for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
    ]
    for inner in getattr(rubric, "rubrics", ()):
        tell_failures(inner)


def _told(function: Callable[..., Any], *, counts: bool, alone: bool) -> Callable[..., Any]:
    """Wraps `function`. `alone`: the function scores one completion and so returns one number, 0.0 if it fails."""

    @wraps(function)  # a rubric reads the signature
    async def told(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            if inspect.isawaitable(value):
                value = await value
            plain = value.tolist() if hasattr(value, "tolist") else value  # numpy and torch values
            for number in plain if isinstance(plain, list | tuple) and not alone else (plain,):
                if not math.isfinite(float(number)):
                    raise RewardError("value_invalid", f"a reward is a finite number, not {number!r}")
            return value
        except Exception as error:
            _failures.get()[function.__name__] = FunctionFailure(error, counts)
            if alone:
                return 0.0  # as verifiers does; a raised error would add a log line for each completion
            raise

    return told
