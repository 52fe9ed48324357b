"""The sample that a reward can read, and signature injection: the arguments of a reward are filled by their names.

A reward can ask for inputs of one completion: `completion`, `tokens`, `finish_reason`, and with several turns
`conversation` and `episode_reward`. A reward can also ask for inputs of the row: `answer`, `ground_truth`, `prompt`,
`messages`, `row`, or the name of any column. A plural (`completions`, `answers`, ..., the plural of a column) makes the
reward group-level: the reward is called once for all completions of a prompt. A group-level reward may ask for inputs
of the row in the singular, because they are the same for all completions. It may not ask for inputs of a completion in
the singular.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from operator import attrgetter
from typing import Any, Self

from gristmill.internal.settings import did_you_mean
from gristmill_env.data import Item, assistant
from gristmill_env.errors import RewardError
from gristmill_env.values import private

OF_COMPLETION = ("completion", "tokens", "finish_reason", "conversation", "episode_reward", "episode_parts")
OF_ROW = ("answer", "ground_truth", "prompt", "messages", "row")
"""`ground_truth` is an alias of `answer`."""
PLURALS = {
    "completions": "completion",
    "token_lists": "tokens",
    "finish_reasons": "finish_reason",
    "conversations": "conversation",
    "episode_rewards": "episode_reward",
    "episode_part_lists": "episode_parts",
    "answers": "answer",
    "ground_truths": "ground_truth",
    "prompts": "prompt",
    "message_lists": "messages",
    "rows": "row",
}

ANSWER = ("answer", "ground_truth")
"""Both names of the row's answer."""


@dataclass(frozen=True)
class Sample:
    """One completion to score, and the row that the completion answers."""

    completion: str
    """The completion's text without the tokens that end a turn. Includes the start of the answer that is part of the
    prompt: the prefill, and a `<think>` that the chat template opened."""
    answer: str | None = None
    """The reference answer: the row's `ground_truth_field` if set, else its `answer_field`; None if the run has
    neither."""
    prompt: str = ""
    """The row's `prompt_field`."""
    tokens: Sequence[int] | None = None
    """The sampled token ids; None if unknown. A reward that asks for unknown token ids fails."""
    finish_reason: str = "stop"
    """The reason why the completion ended: "stop", or "length" if the completion is truncated."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the row."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The prompt as chat messages ({role, content}), with the system message and without the completion."""
    conversation: Sequence[Mapping[str, Any]] = ()
    """All messages of the rollout, including the model's messages."""
    episode_reward: float | None = None
    """The reward that the run's `environment` returned for the rollout; None if it returned no reward."""
    episode_parts: Mapping[str, float] = field(default_factory=dict)
    """The named parts of that reward, if an agent returned them."""
    conversational: bool = False
    """Whether the row's prompt is a list of messages. Decides whether a TRL reward gets messages or text."""
    step: int | None = None
    """Number of optimizer steps of the sampling weights; None outside of training. For TRL rewards."""

    @classmethod
    def of(cls, item: Item, completion: str, **more: Any) -> Self:
        """Returns the sample of a completion of a row. `more`: other fields; by default, the prompt is the row's, and
        the completion is its only answer."""
        fields: dict[str, Any] = {
            "answer": item.answer,
            "prompt": item.prompt,
            "row": item.columns,
            "messages": item.messages,
            "conversational": item.conversation is not None,
        }
        fields |= more
        fields.setdefault("conversation", (*fields["messages"], assistant(completion)))
        return cls(completion, **fields)


@dataclass(frozen=True)
class RowSchema:
    """The inputs that all samples of a run have."""

    columns: Sequence[str] = ()
    """The data set's columns."""
    has_answer: bool = True
    """Whether rows have an answer."""


Getter = Callable[[Sample], Any]


@dataclass(frozen=True)
class Inputs:
    """The source of each argument of one reward."""

    singular: Mapping[str, Getter]
    plural: Mapping[str, Getter]
    """Arguments that get a list with one item per completion."""

    @property
    def group_level(self) -> bool:
        """Whether the reward is called once per group."""
        return bool(self.plural)

    def gather(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Returns the arguments of one call, for one sample or for all samples of a group. The call may change them.

        Raises RewardError if a row lacks a column, or if a singular argument differs within the group.
        """
        given = {name: getter(samples[0]) for name, getter in self.singular.items()}
        for name, getter in self.singular.items():
            for sample in samples[1:]:
                if (other := getter(sample)) is not given[name] and other != given[name]:
                    raise RewardError(
                        "input_differs", f"'{name}' is not the same for all completions; ask for its plural", input=name
                    )
        given |= {name: [getter(sample) for sample in samples] for name, getter in self.plural.items()}
        return {name: private(value) for name, value in given.items()}


def resolve(reward: str, arguments: Iterable[Parameter], schema: RowSchema) -> Inputs:
    """Finds a source for each argument. An argument without a source keeps its default.

    Raises RewardError if an argument has neither a source nor a default; the message suggests the nearest name. Also
    raises RewardError if the run has no answer, or if singular and plural are mixed.
    """
    singular: dict[str, Getter] = {}
    plural: dict[str, Getter] = {}
    for argument in arguments:
        name = argument.name
        field, getters = (PLURALS[name], plural) if name in PLURALS else (name, singular)
        if field in OF_COMPLETION or field in OF_ROW:
            if field not in ANSWER or schema.has_answer:
                getters[name] = _getter(field)
            elif argument.default is argument.empty:
                remedy = "set dataset.answer_field or dataset.ground_truth_field"
                raise RewardError(
                    "no_answer_field", f"reward '{reward}' compares with the row's answer; {remedy}", reward=reward
                )
        elif name in schema.columns:
            singular[name] = _column(name)
        elif (column := _singular(name, schema.columns)) is not None:
            plural[name] = _column(column)
        elif argument.default is argument.empty:
            raise RewardError(
                "unknown_input",
                _unknown(reward, name, schema),
                reward=reward,
                input=name,
                columns=list(schema.columns),
            )
    if plural and (mixed := [name for name in singular if name in OF_COMPLETION]):
        remedy = ", ".join(f"'{more}' for '{one}'" for more, one in PLURALS.items() if one in mixed)
        raise RewardError(
            "mixed_inputs",
            f"reward '{reward}' asks for {', '.join(map(repr, plural))}, so it is called once for all completions, "
            f"and for {', '.join(map(repr, mixed))} of one; write {remedy}, or no plural at all",
            reward=reward,
            plural=list(plural),
            singular=mixed,
        )
    return Inputs(singular, plural)


def _getter(field: str) -> Getter:
    return known_tokens if field == "tokens" else attrgetter("answer" if field in ANSWER else field)


def known_tokens(sample: Sample) -> Sequence[int]:
    """Returns the sample's token ids. Raises RewardError if they are unknown, because an empty list would mean a length
    of 0."""
    if sample.tokens is None:
        raise RewardError(
            "tokens_unknown",
            "it counts tokens, and the completion's tokens are not known; take a model server that gives token ids, "
            "not text only. (In score(), give one list per completion: score(completions, tokens=[[...], ...]))",
        )
    return sample.tokens


def _column(name: str) -> Getter:
    def get(sample: Sample) -> Any:
        try:
            return sample.row[name]
        except KeyError:
            raise RewardError(
                "column_missing",
                f"the row has no '{name}'; it has {', '.join(map(str, sample.row)) or 'nothing'}",
                column=name,
                columns=list(map(str, sample.row)),
            ) from None

    return get


def _singular(name: str, columns: Sequence[str]) -> str | None:
    """Returns the column whose plural is `name`, or None."""
    forms = [name[:-1]] if name.endswith("s") else []
    forms += [name[:-2]] if name.endswith("es") else []
    forms += [f"{name[:-3]}y"] if name.endswith("ies") else []
    return next((form for form in forms if form in columns), None)


def _unknown(reward: str, name: str, schema: RowSchema) -> str:
    columns = f"its row has {', '.join(schema.columns)}" if schema.columns else "its row has no columns"
    candidates = [*OF_COMPLETION, *OF_ROW, *PLURALS, *schema.columns]
    return (
        f"reward '{reward}' asks for '{name}'; a sample has {', '.join((*OF_COMPLETION, *OF_ROW))}, and {columns} "
        f"(an option of the reward comes after a *).{did_you_mean(name, candidates)}"
    )
