"""The small rewards: for the length of a completion, its form, its text, and the reward of an environment."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from gristmill_env.answers.extraction import after_thinking, final_answer, gold_answer
from gristmill_env.answers.latex import TEXT, normalize_latex
from gristmill_env.rewards.outcomes import RewardResult
from gristmill_env.rewards.registry import reward

# Length, in tokens.


@reward("length")
def length(
    tokens: Sequence[int],
    *,
    target_tokens: Annotated[int, Field(gt=0)] = 128,
    min_reward: float = 0.0,
    max_reward: float = 1.0,
) -> float:
    """Rises in a straight line from `min_reward` for no token to `max_reward` at `target_tokens`, and stays there.

    Bounds given the wrong way round are swapped. To hold length down instead, see `soft_overlong` and
    `cosine_length`.
    """
    low, high = sorted((min_reward, max_reward))
    return low + (high - low) * min(1.0, len(tokens) / target_tokens)


_PAPERS_SHARE = 5


@reward("soft_overlong")
def soft_overlong(
    tokens: Sequence[int],
    *,
    max_tokens: Annotated[int, Field(gt=0)],
    cache_tokens: Annotated[int, Field(gt=0)] | None = None,
) -> float:
    """0 while there is room, then down in a straight line to -1 at `max_tokens`, and -1 beyond.

    With n tokens, L = max_tokens and c = cache_tokens: 0 for n <= L - c, (L - c - n) / c for
    L - c < n <= L, -1 for n > L. Equation 13 of Yu et al., "DAPO" (2025), arXiv:2503.14476.

    Options: `max_tokens`, which should be no more than dataset.max_tokens, else it is never reached;
    `cache_tokens`, the stretch before it in which the penalty grows, at most all of `max_tokens`. Unset,
    it is a fifth of `max_tokens`, as in the paper (4096 of 20480).
    """
    cache = min(cache_tokens or max(1, max_tokens // _PAPERS_SHARE), max_tokens)
    over = len(tokens) - (max_tokens - cache)
    return -min(over / cache, 1.0) if over > 0 else 0.0


@reward("cosine_length")
def cosine_length(
    tokens: Sequence[int],
    *,
    max_tokens: Annotated[int, Field(gt=0)],
    min_reward: float = 0.0,
    max_reward: float = 1.0,
) -> float:
    """Falls along half a cosine from `max_reward` for no token to `min_reward` at `max_tokens`, and stays there.

    min + (max - min) / 2 * (1 + cos(pi * min(n / L, 1))) with n tokens and L = max_tokens; bounds given
    the wrong way round are swapped. The curve is CosFn of Yeo et al., "Demystifying Long
    Chain-of-Thought Reasoning in LLMs" (2025), arXiv:2502.03373, which has other bounds for right answers
    than for wrong ones. This looks at length alone: by itself it teaches silence, so give it a small
    weight next to a reward for being right.
    """
    low, high = sorted((min_reward, max_reward))
    return low + (high - low) / 2 * (1 + math.cos(math.pi * min(len(tokens) / max_tokens, 1.0)))


# Form: tags and steps.


@reward("format")
def format_tags(
    completion: str,
    *,
    preferred_tags: Annotated[tuple[str, ...], Field(min_length=1)] = ("think", "answer"),
    require_all_tags: bool = False,
    case_sensitive: bool = False,
    strict: bool = False,
) -> float:
    """1 if the completion has a nonempty pair of the preferred tags (`<answer>25</answer>`), else 0.

    `require_all_tags` requires every pair of `preferred_tags` instead of one. `case_sensitive` does
    not accept `<Answer>` as `<answer>`. `strict` also requires exactly one think block, at the start
    of the completion, with text after the block.
    """
    text = completion if case_sensitive else completion.lower()
    tags = preferred_tags if case_sensitive else [tag.lower() for tag in preferred_tags]
    pairs = [_has_pair(text, tag) for tag in tags]
    shaped = all(pairs) if require_all_tags else any(pairs)
    return float(shaped and (not strict or _thinks_once_first(text)))


def _has_pair(text: str, tag: str) -> bool:
    for piece in text.split(f"</{tag}>")[:-1]:
        _, opened, inside = piece.rpartition(f"<{tag}>")
        if opened and inside.strip():
            return True
    return False


def _thinks_once_first(text: str) -> bool:
    if text.count("<think>") != 1 or text.count("</think>") != 1:
        return False
    return re.fullmatch(r"\s*<think>.*</think>\s*\S.*", text, re.DOTALL) is not None


@reward("tag_count")
def tag_count(
    completion: str, *, preferred_tags: Annotated[tuple[str, ...], Field(min_length=1)] = ("think", "answer")
) -> float:
    """Share of the opening and closing tags of `preferred_tags` that appear exactly once, 0 to 1.

    Partial credit towards the reward `format`. A repeated tag counts as little as a missing tag, so
    repetition earns nothing. The order of the tags does not count. The idea comes from open-r1
    (Hugging Face, 2025), which counts four tags at a quarter each.
    """
    tags = [text for tag in preferred_tags for text in (f"<{tag}>", f"</{tag}>")]
    return sum(completion.count(tag) == 1 for tag in tags) / len(tags)


_LIST = re.compile(r"[ \t>]*(?:[0-9]{1,3}[.)]|[-*•])[ \t]+(?=[^\s*-])")
_STEP = re.compile(
    r"[ \t>#*_]*(?:(?:[Ss]tep|STEP)[ \t]*[0-9]+\b"
    r"|(?:First(?:ly)?|Second(?:ly)?|Third(?:ly)?|Next|Then|After that|Afterwards|Finally|Lastly)(?=[,:*\s]))"
)
_STEP_DOT = re.compile(r"((?:[Ss]tep|STEP)[ \t]*[0-9]+)\.")
_SENTENCE_END = re.compile(r"(?<=[.!?])[ \t]+")


@reward("reasoning_steps")
def reasoning_steps(completion: str, *, min_steps: Annotated[int, Field(gt=0)] = 3) -> float:
    """min(1, markers / min_steps): how many steps the text marks, and 1 from `min_steps` on.

    A marker is a line that begins with a number ("1. ", "2) ") or a bullet ("- ", "* ", "• "), or a
    sentence that begins with "Step 1" or with First, Firstly, Second, Secondly, Third, Thirdly, Next,
    Then, After that, Afterwards, Finally or Lastly. Markdown before it ("**Step 1:**", "## Step 1")
    is allowed. One step is counted once, however it is marked: "1. First, ..." is one marker.
    """
    return min(1.0, sum(_markers(line) for line in completion.splitlines()) / min_steps)


def _markers(line: str) -> int:
    listed = _LIST.match(line)
    # "Step 1. First, add" is one step: the full stop after "1" does not end a sentence.
    text = _STEP_DOT.sub(r"\1:", line[listed.end() :] if listed else line)
    begun = [_STEP.match(sentence) is not None for sentence in _SENTENCE_END.split(text)]
    return 1 + sum(begun[1:]) if listed else sum(begun)


# Text.


@reward("repetition_penalty")
def repetition_penalty(
    completion: str,
    *,
    ngram_size: Annotated[int, Field(gt=0)] = 3,
    max_penalty: Annotated[float, Field(le=0)] = -1.0,
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.05,
) -> float:
    """(1 - unique / total) * `max_penalty` over the text's n-grams of words: 0 for none repeated.

    Words are what stands between spaces, without regard to case. A text of fewer than `ngram_size` words
    has no n-gram and no penalty: a short answer is never punished for being short. Nor is a share of
    repeated n-grams up to `threshold`, for some repetition is good style. Text without spaces (Chinese,
    Thai, formulas) counts by characters: in a word of more than 8 × `ngram_size` characters, every
    4 × `ngram_size` characters are an n-gram of a quarter of the weight. After the n-gram repetition
    penalty of Yeo et al. (2025), arXiv:2502.03373, appendix C.2, taken over the whole completion.
    """
    words = completion.lower().split()
    long = [word for word in words if len(word) > 2 * _CHARS_PER_WORD * ngram_size]
    of_words, different_words = _ngrams([tuple(words)], ngram_size)
    of_chars, different_chars = _ngrams(long, _CHARS_PER_WORD * ngram_size)
    total = of_words + of_chars / _CHARS_PER_WORD
    repeated = 1 - (different_words + different_chars / _CHARS_PER_WORD) / total if total else 0.0
    return repeated * max_penalty if repeated > threshold else 0.0


_CHARS_PER_WORD = 4


def _ngrams(texts: Sequence[tuple[str, ...]] | Sequence[str], size: int) -> tuple[int, int]:
    """Returns the number of n-grams within each of `texts`, and the number of different n-grams."""
    ngrams = [text[start : start + size] for text in texts for start in range(len(text) - size + 1)]
    return len(ngrams), len(set(ngrams))


def _extracted_text(
    completion: str,
    row: Mapping[str, Any],
    *,
    ignore_case: bool = True,
    ignore_punctuation: bool = False,
    whole_if_unmarked: bool = True,
) -> str | None:
    extracted = _said(completion, whole_if_unmarked)
    return None if extracted is None else _normal(extracted, ignore_case, ignore_punctuation) or None


@reward("exact_match", extract_answer=_extracted_text)
def exact_match(
    completion: str,
    answer: str,
    *,
    ignore_case: bool = True,
    ignore_punctuation: bool = False,
    whole_if_unmarked: bool = True,
) -> float | None:
    """1 when the completion's final answer reads as the row's: same words, single blanks, no punctuation at the end.

    None (no score) when the row's answer is empty. Options: `ignore_case`; `ignore_punctuation`
    leaves out all of it, not only at the end; `whole_if_unmarked` compares the whole completion,
    after its reasoning, when it marks no answer, else such a completion is 0.
    """
    gold = _normal(gold_answer(answer), ignore_case, ignore_punctuation)
    if not gold:
        return None
    extracted = _said(completion, whole_if_unmarked)
    return float(extracted is not None and _normal(extracted, ignore_case, ignore_punctuation) == gold)


def _said(completion: str, whole_if_unmarked: bool) -> str | None:
    extracted = final_answer(completion)
    return after_thinking(completion) if extracted is None and whole_if_unmarked else extracted


def _normal(text: str, ignore_case: bool, ignore_punctuation: bool) -> str:
    text = TEXT.sub(r"\1", normalize_latex(text))
    if ignore_punctuation:
        text = "".join(char for char in text if not unicodedata.category(char).startswith("P"))
    text = " ".join(text.split()).rstrip(".,;:!? ")
    return text.casefold() if ignore_case else text


# The environment's own reward.


@reward("episode")
def episode(episode_reward: float | None, episode_parts: Mapping[str, float]) -> float | RewardResult | None:
    """The reward of the run's `environment` for the rollout, summed over its turns; None if it returned no reward."""
    return RewardResult(episode_reward, episode_parts) if episode_parts else episode_reward
