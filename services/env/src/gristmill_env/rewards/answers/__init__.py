"""Reads and compares final answers. If exact comparison cannot decide, returns the pairs that algebra must decide."""

from gristmill_env.rewards.answers.answer import Answer, read_answer
from gristmill_env.rewards.answers.comparison import Decision, Pair, compare
from gristmill_env.rewards.answers.one_form import one_form

__all__ = ["Answer", "Decision", "Pair", "compare", "one_form", "read_answer"]
