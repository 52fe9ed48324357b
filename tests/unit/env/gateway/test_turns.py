"""Which stored turn a request continues, and which sequences a rollout is trained on."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.errors import raises

from gristmill_env.data import Message, assistant, system, user
from gristmill_env.errors import EpisodeError
from gristmill_env.gateway import Turn, Turns
from gristmill_env.gateway.dialects import template_message
from gristmill_env.gateway.turns import Stored
from gristmill_env.inference import Completion, LabelSpan

TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
OPENING = (system("Answer."), user("2 + 2?"))


def sampled(*ids: int, version: str = "1.0") -> Completion:
    return Completion(list(ids), [-0.5] * len(ids), "stop", [LabelSpan(version, 0, len(ids))])


def say(turns: Turns, messages: tuple[Message, ...], text: str, *ids: int, given: tuple[int, ...] = (1, 2)) -> Turn:
    """The model answers `messages` with `text`."""
    return turns.add(turns.place(messages), given, sampled(*ids), {"role": "assistant", "content": text})


def test_conversation_continues_the_stored_tokens() -> None:
    turns = Turns()
    first = say(turns, OPENING, "4", 10, 11, given=(1, 2, 3))
    place = turns.place((*OPENING, assistant("4"), user("Sure?")))
    assert (place.parent, place.more) == (first, (user("Sure?"),))
    second = turns.add(place, (5, 6), sampled(12), {"role": "assistant", "content": "Yes"})
    assert second.token_ids == [1, 2, 3, 10, 11, 5, 6, 12]
    assert second.messages == (*OPENING, assistant("4"), user("Sure?"), assistant("Yes"))
    (branch,) = turns.branches()
    assert branch.prompt.tolist() == [1, 2, 3]
    assert branch.token_ids.tolist() == [10, 11, 5, 6, 12]
    assert branch.mask.tolist() == [True, True, False, False, True]
    assert branch.logprobs.tolist() == [-0.5, -0.5, 0, 0, -0.5]
    assert [(span.start, span.end) for span in branch.labels] == [(0, 2), (4, 5)]


@pytest.mark.parametrize(
    "messages",
    [
        (system("Answer."), user("2 + 3?"), assistant("4"), user("Sure?")),  # another question
        (*OPENING, assistant("5"), user("Sure?")),  # the agent wrote the reply itself
        (user("2 + 2?"), assistant("4"), user("Sure?")),  # without the system message
        (*OPENING, user("Sure?")),  # without the reply
    ],
)
def test_history_that_matches_nothing_begins_another_conversation(messages: tuple[Message, ...]) -> None:
    turns = Turns()
    say(turns, OPENING, "4", 10)
    assert turns.place(messages).parent is None


@pytest.mark.parametrize(("role", "text"), [("user", "a\nb"), ("tool", "a\nb"), ("assistant", "ab")])
def test_parts_of_a_message_are_joined_as_by_vllm(role: str, text: str) -> None:
    parts = [{"type": "text", "text": part} for part in "ab"]
    assert template_message({"role": role, "content": parts})["content"] == text


def test_reasoning_decides_between_equal_replies() -> None:
    turns = Turns()
    answers = [{"role": "assistant", "content": "4", "reasoning": thought} for thought in ("one", "two")]
    first, second = (turns.add(turns.place(OPENING), (1,), sampled(10), answer) for answer in answers)
    echoes = [(*OPENING, template_message(one), user("Sure?")) for one in (*answers, assistant("4"))]
    more = [turns.add(turns.place(echo), (2,), sampled(11), assistant("Yes")) for echo in echoes]
    assert [turn.parent for turn in more] == [first, second, second]
    again = (*OPENING, template_message(answers[0]), user("Sure?"), assistant("Yes"), user("Why?"))
    assert turns.place(again).parent is more[0]


def test_other_tools_begin_another_conversation() -> None:
    turns = Turns()
    turns.add(turns.place(OPENING, [TOOL]), (1,), sampled(10), {"role": "assistant", "content": "4"})
    more = (*OPENING, assistant("4"), user("Sure?"))
    assert turns.place(more).parent is None
    assert turns.place(more, [TOOL]).parent is not None


def test_deepest_turn_is_continued_past_a_reply_that_the_agent_wrote() -> None:
    turns = Turns()
    first = say(turns, OPENING, "4", 10)
    place = turns.place((*OPENING, assistant("4"), user("Sure?"), assistant("An example."), user("Well?")))
    assert place.parent is first
    assert place.more == (user("Sure?"), assistant("An example."), user("Well?"))


def test_retry_is_a_sibling_and_shared_turns_are_trained_once() -> None:
    turns = Turns()
    say(turns, OPENING, "4", 10, given=(1, 2))
    more = (*OPENING, assistant("4"), user("Sure?"))
    say(turns, more, "Yes", 20, given=(5,))
    say(turns, more, "No", 21, given=(5,))
    first, second = turns.branches()
    assert first.token_ids.tolist() == [10, 5, 20]
    assert second.token_ids.tolist() == [10, 5, 21]
    assert first.mask.tolist() == [True, False, True]
    assert second.mask.tolist() == [False, False, True]
    assert second.logprobs.tolist() == [0, 0, -0.5]
    assert [(span.start, span.end) for span in second.labels] == [(2, 3)]


def test_shortened_history_is_another_root() -> None:
    turns = Turns()
    say(turns, OPENING, "4", 10)
    say(turns, (system("Answer."), user("Summary: 2 + 2 is 4. Go on.")), "Done", 11)
    assert [turn.parent for turn in turns] == [None, None]
    assert [branch.mask.tolist() for branch in turns.branches()] == [[True], [True]]


def test_turn_that_the_agent_did_not_receive_is_left_out() -> None:
    turns = Turns()
    first = say(turns, OPENING, "4", 10)
    lost = say(turns, (*OPENING, assistant("4"), user("Sure?")), "Yes", 20, given=(5,))
    assert [branch.turns for branch in turns.branches({lost.number})] == [[first]]
    assert [branch.turns for branch in turns.branches()] == [[first, lost]]


def test_every_trained_token_is_trained_once_in_a_tree_of_branches() -> None:
    turns = Turns()
    generator = np.random.default_rng(1)
    ids = iter(range(100, 10_000))
    for number in range(60):
        messages: tuple[Message, ...] = OPENING
        if number:
            parents = [turn for turn in turns if generator.random() < 0.5] or [next(iter(turns))]
            messages = (*parents[-1].messages, user(str(number)))
        say(turns, messages, f"reply {number}", *(next(ids) for _ in range(3)), given=(1,))
    branches = turns.branches()
    trained = [token for branch in branches for token in branch.token_ids[branch.mask].tolist()]
    assert sorted(trained) == list(range(100, 100 + 3 * 60))
    for branch in branches:
        assert [*branch.prompt, *branch.token_ids] == branch.turns[-1].token_ids


@pytest.mark.parametrize(
    "echo",
    [
        {"role": "assistant", "content": None, "refusal": None, "annotations": []},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": [], "audio": None},
    ],
)
def test_reply_is_recognized_in_the_form_of_other_clients(echo: dict[str, Any]) -> None:
    arguments = '{"query": "x", "least": 1.0, "of": [{"share": 2.0}]}'
    call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": arguments}}
    turns = Turns()
    turn = turns.add(
        turns.place(OPENING), (1,), sampled(10), {"role": "assistant", "content": None, "tool_calls": [call]}
    )
    written = '{ "query":"x", "least":1, "of":[{"share":2}]}'
    other = {"id": "call_1", "function": {"name": "search", "arguments": written}}
    sent = template_message({**echo, "tool_calls": [other]})
    assert turns.place((*OPENING, sent, user("more"))).parent is turn


@pytest.mark.parametrize(
    ("said", "arguments", "refused"),
    [
        (None, '{"text": "\\ud83d"}', False),
        (None, '{"a":' + "[" * 3000, False),
        (None, '{"a":' + "[" * 600 + "]" * 600 + "}", True),
        (None, '{"a": 18446744073709551616}', False),
        ("half \ud83d", "{}", True),
    ],
)
def test_call_that_no_template_reads_stays_text_or_fails_its_rollout(
    said: str | None, arguments: str, refused: bool
) -> None:
    turns = Turns()
    call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": arguments}}
    answer = {"role": "assistant", "content": said, "tool_calls": [call]}
    if refused:
        with raises(EpisodeError, "reply_not_parsed"):
            turns.add(turns.place(OPENING), (1,), sampled(10), answer)
        assert len(turns) == 0
    else:
        turn = turns.add(turns.place(OPENING), (1,), sampled(10), answer)
        assert turn.reply["tool_calls"][0]["function"]["arguments"] == arguments


def test_turns_are_read_from_a_file_as_they_were() -> None:
    turns = Turns()
    say(turns, OPENING, "4", 10, given=(1, 2))
    say(turns, (*OPENING, assistant("4"), user("Sure?")), "Yes", 20, given=(5,))
    again = Turns()
    for turn in turns:
        again.restore(msgspec.json.decode(msgspec.json.encode(turn.stored), type=Stored))
    assert [msgspec.to_builtins(turn.stored) for turn in again] == [msgspec.to_builtins(turn.stored) for turn in turns]
    assert again.place((*OPENING, assistant("4"), user("Sure?"), assistant("Yes"), user("!"))).parent is list(again)[1]
    for one, other in zip(turns.branches(), again.branches(), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.labels == other.labels
