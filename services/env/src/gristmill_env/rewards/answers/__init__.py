"""Final answers read and compared: exactly where that decides, and else the pairs that algebra has to decide."""

from gristmill_env.rewards.answers.answer import Answer, read_answer
from gristmill_env.rewards.answers.comparison import Decision, Pair, compare
from gristmill_env.rewards.answers.one_form import one_form

__all__ = ["Answer", "Decision", "Pair", "compare", "one_form", "read_answer"]
