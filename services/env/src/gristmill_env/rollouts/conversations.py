"""The conversations of one rollout of an environment, as the tokens that were sent and sampled.

An environment asks for a reply to messages after an earlier reply (`environments.model`). The prompt is the stored
tokens up to that reply and the tokens of the new messages, so that nothing that was sampled is tokenized again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill import SamplingParams
from gristmill_env.data import Message, assistant, template_form
from gristmill_env.environments.model import LeaveOut, Noted, Over, Reply, Say, ToolCall
from gristmill_env.errors import EnvError, InferenceError, PromptTooLongError
from gristmill_env.gateway import Branch, Policy, Turns
from gristmill_env.gateway.turns import Place
from gristmill_env.inference import Completion
from gristmill_env.rollouts.groups import Rollout, joined
from gristmill_env.rollouts.prompts import Prompt, PromptBuilder
from gristmill_env.values import whole


class GroupPrompts:
    """Builds the first prompts of one group. Equal openings, the rule in a group, are rendered and tokenized once."""

    def __init__(self, builder: PromptBuilder) -> None:
        self._builder = builder
        self._built: list[tuple[Sequence[Message], Mapping[str, Any], Prompt]] = []

    def build(self, opening: Sequence[Message], options: Mapping[str, Any] | None = None) -> Prompt:
        """Returns the prompt of an opening. `options`: more values for the chat template.

        Raises PromptError when the template refuses it.
        """
        more = options or {}
        for known, by, prompt in self._built:
            if known == opening and by == more:
                return prompt
        prompt = self._builder.build(opening, more)
        if len(self._built) < _KEPT:
            self._built.append((opening, more, prompt))
        return prompt


_KEPT = 64
"""Most openings of a group that are kept: an environment may begin many conversations in a rollout."""


class Conversations:
    """The conversations of one rollout."""

    def __init__(
        self, policy: Policy, prompts: GroupPrompts, sampling: SamplingParams, *, evaluation: bool = False
    ) -> None:
        self.turns = Turns()
        self._policy, self._prompts, self._sampling, self._evaluation = policy, prompts, sampling, evaluation
        self._asked: dict[int, Prompt] = {}
        """The prompts of the roots."""
        self._texts: dict[int, str] = {}
        """The whole texts of the replies."""
        self._completions: dict[int, Completion] = {}
        self._untrained: set[int] = set()
        self._reward: float | None = None
        self._ended = False

    async def answer(self, asked: Say | LeaveOut) -> Reply | Over | Noted:
        """Answers an environment. Raises InferenceError, PromptError, PromptTooLongError and PromptRefusedError."""
        if isinstance(asked, LeaveOut):
            self._untrained.add(asked.turn)
            return Noted()
        self._refuse_ended()
        self._reward = asked.reward
        policy = self._policy
        if asked.tools and (policy.tools is False or not policy.prompts.has_tokenizer):
            raise InferenceError(
                "no_tool_parser",
                "the environment has tools, and the model server parses no tool calls: set MODEL_TOOL_PARSER",
            )
        options: dict[str, Any] = {"tools": asked.tools} if asked.tools else {}
        more = [template_form(message) for message in asked.messages]
        parent = None if asked.parent is None else self.turns[asked.parent]
        if parent is None:
            prompt = self._prompts.build(more, options)
            place, given, ids = Place(None, prompt.messages, b""), prompt.token_ids, prompt.token_ids
        else:
            *said, reply = parent.messages
            between = policy.prompts.continuation_tokens(said, more, parent.last_token, options, reply)
            given, place = between.token_ids, Place(parent, tuple(more), b"")
            if between.whole:
                place, ids, text = place.rendered_again(), given, policy.prompts.decode(given, special=True)
            else:
                ids, text = (*parent.token_ids, *given), ""
            prompt = Prompt(text, ids, (*parent.messages, *more), tuple(asked.tools), begun=between.begun)
        if len(ids) >= policy.max_length and len(self.turns) > 0:
            return Over("length")
        earlier = None if parent is None else self._completions[parent.number].server
        (completion,) = await sample(policy, prompt, self._sampling, evaluation=self._evaluation, earlier=earlier)
        return await self._add(place, given, prompt, completion, asked)

    def end(self) -> None:
        """Takes no more replies: `play` has returned, and did not wait for them."""
        self._ended = True

    def rollout(
        self, reward: float | None, over: Mapping[int, str], finish_reason: str | None = None
    ) -> Rollout | None:
        """Returns the rollout so far; None before its first reply.

        `over`: the finish reasons of conversations by their last replies; by default, those of the replies.
        `finish_reason`: overrides that of the last branch.
        """

        def part(branch: Branch) -> Rollout:
            root, last = branch.turns[0].number, branch.turns[-1].number
            made = Rollout.of(branch, self._asked[root], self._texts[last], reward)
            reason = over.get(last, made.finish_reason)
            return dataclasses.replace(made, finish_reason=reason, sampled=self._sampled(branch))

        rollout = joined(self.turns.branches(untrained=self._untrained), len(self.turns), part)
        if rollout is None:
            return None
        rendered = self.turns.counts().get("rendered")
        rollout = dataclasses.replace(rollout, counts={"rendered": rendered} if rendered else {})
        return rollout if finish_reason is None else dataclasses.replace(rollout, finish_reason=finish_reason)

    def rollout_so_far(self, finish_reason: str) -> Rollout | None:
        """Returns the unfinished rollout up to its last reply, with the reward so far; None before its first reply."""
        return self.rollout(self._reward, {}, finish_reason)

    def _refuse_ended(self) -> None:
        if self._ended:
            raise EnvError("rollout_ended", "the environment's play has returned, and the rollout has ended")

    async def _add(
        self, place: Place, given: Sequence[int], prompt: Prompt, completion: Completion, asked: Say
    ) -> Reply:
        text = prompt.begun + text_of(completion, self._policy.prompts)
        answer: dict[str, Any] = {"role": "assistant", "content": text}
        if asked.parse and completion.text is None and (asked.tools or self._policy.reasoning):
            answer = await self._policy.parsed(completion, prompt.token_ids, asked.tools)
        self._refuse_ended()
        turn = self.turns.add(place, given, completion, answer)
        self._texts[turn.number], self._completions[turn.number] = text, completion
        if turn.parent is None:
            self._asked[turn.number] = prompt
        return Reply(
            turn=turn.number,
            text=text,
            answer=answer.get("content") or "",
            reasoning=answer.get("reasoning") or "",
            tool_calls=tuple(map(_call, answer.get("tool_calls") or (), turn.reply.get("tool_calls") or ())),
            finish_reason=completion.finish_reason,
            tokens=completion.length,
        )

    def _sampled(self, branch: Branch) -> int | None:
        """Returns the number of sampled tokens; None if a text server does not report it."""
        lengths = [self._completions[turn.number].length for turn in branch.turns]
        if None in lengths:
            return None
        return branch.sampled or sum(length or 0 for length in lengths)


async def sample(
    policy: Policy,
    prompt: Prompt,
    sampling: SamplingParams,
    *,
    evaluation: bool,
    count: int = 1,
    earlier: str | None = None,
) -> list[Completion]:
    """Returns `count` replies to a prompt. `earlier`: URL of the server that sampled the conversation so far.

    Raises InferenceError, PromptTooLongError and PromptRefusedError.
    """
    if len(prompt.token_ids) >= policy.max_length:
        raise PromptTooLongError(
            "prompt_too_long",
            f"the prompt has {len(prompt.token_ids)} tokens; prompt and completion may have {policy.max_length}",
            tokens=len(prompt.token_ids),
            limit=policy.max_length,
        )
    request = policy.request(
        prompt.token_ids,
        sampling,
        messages=prompt.messages,
        prefill=prompt.prefill,
        count=count,
        template=policy.prompts.server_options,
        earlier=earlier,
    )
    return await policy.servers.generate(request, evaluation=evaluation)


def single_reply(prompt: Prompt, completion: Completion, prompts: PromptBuilder) -> Rollout:
    """Returns the rollout of one reply."""
    text = prompt.begun + text_of(completion, prompts)
    return Rollout(
        prompt=prompt,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        mask=[True] * len(completion.token_ids),
        labels=list(completion.labels),
        text=text,
        messages=(*prompt.messages, assistant(text)),
        finish_reason=completion.finish_reason,
        replies=1,
        sampled=completion.length,
    )


def text_of(completion: Completion, prompts: PromptBuilder) -> str:
    """Returns the text of a completion without the tokens that end a turn."""
    return prompts.decode(completion.token_ids) if completion.text is None else whole(completion.text)


def _call(written: Mapping[str, Any], read: Mapping[str, Any]) -> ToolCall:
    """Returns a tool call. `written`: as the model wrote it. `read`: with its arguments as an object."""
    arguments = read["function"]["arguments"]
    return ToolCall(
        str(read.get("id") or ""),
        read["function"]["name"],
        arguments if isinstance(arguments, dict) else None,
        str(written["function"].get("arguments") or ""),
    )
