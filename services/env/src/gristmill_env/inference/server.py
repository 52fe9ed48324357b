"""One model server: which model it serves, and completions by one of two routes. Nothing here retries.

vLLM has a route for token ids, POST /inference/v1/generate: token ids in, token ids and log-probabilities out. Neither
Gristmill nor vLLM tokenizes text again. Every OpenAI-compatible server has POST /v1/chat/completions: messages in, text
out. Text cannot be used for training.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from gristmill import Manifest
from gristmill.model_servers import GENERATE, generation
from gristmill_env.errors import InferenceError
from gristmill_env.inference.http import RefusedError, ServerHttp, ServerTroubleError
from gristmill_env.inference.types import (
    ChatChoice,
    ChatMessage,
    Chatted,
    Choice,
    Completion,
    Generated,
    GenerationRequest,
    ModelCard,
    Models,
    ServedModel,
    WeightInfo,
)
from gristmill_env.settings.run import EnvConfig
from gristmill_env.settings.servers import ServerConfig

logger = logging.getLogger(__name__)

_CHECK_EVERY = 60.0
"""Seconds between two checks whether a server answers at all while it works on a request. Default of `timeout`."""
_QUICK = 30.0
"""Seconds that a request for the server's models or weight label, or for a parsed reply, may take."""
PARSE = "/v1/chat/completions/derender"
"""vLLM's route that parses sampled tokens into text, reasoning and tool calls."""

JsonObject = dict[str, Any]


class ModelServer:
    """Client of one server. Call `meet` before `generate`."""

    def __init__(self, config: ServerConfig, thinking: Thinking) -> None:
        self._http = ServerHttp(config.root_url, api_key=config.api_key, timeout=None)
        self.url = self._http.url
        self.ignores_n = config.n_kwarg_is_ignored
        self._config = config
        self._thinking = thinking
        self._model = config.model_name or ""
        self._dialect = Dialect.OTHER
        self._text_only = False

    async def meet(self, manifest: Manifest | None) -> ServedModel:
        """Finds out which model the server serves, and whether it returns token ids.

        `manifest`: the model service's manifest, which contains other names of the same model.

        Raises ServerTroubleError; InferenceError when the server serves another model than `model_name`.
        """
        card = self._choose(await self._cards(), manifest)
        self._text_only = await self._is_text_only()
        self._model, self._dialect = card.id, self._api_flavor(card)
        if self._dialect is Dialect.OPENAI and self._thinking.max_tokens is not None:
            logger.warning("%s knows no limit of reasoning tokens; max_reasoning_tokens is not sent there", self.url)
        return ServedModel(card.id, card.root, card.max_model_len, self._text_only)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Returns `request.count` completions; fewer from a text server that ignores `n`. Then sets `ignores_n`.

        Asks the server for its models every `timeout` seconds, and keeps waiting while the server answers. Raises
        ServerTroubleError, also if the server does not answer; InferenceError when the server refuses the request.
        """
        work = asyncio.create_task(self._generate(request))
        try:
            while not (await asyncio.wait([work], timeout=self._config.timeout or _CHECK_EVERY))[0]:
                if not await self.answers():
                    raise ServerTroubleError(self.url, "neither the request nor /v1/models is answered")
            return work.result()
        finally:
            work.cancel()

    async def _generate(self, request: GenerationRequest) -> list[Completion]:
        if not self._text_only:
            return await generate_tokens(self._http, self._model, request)
        url = f"{self._config.openai_url}/chat/completions"
        completions = await generate_text(self._http, url, self._model, request, self._dialect, self._thinking)
        if len(completions) < request.count and not self.ignores_n:
            logger.warning("the model server at %s ignores n; from now on it is asked for one at a time", self.url)
            self.ignores_n = True
        return completions

    async def parse(
        self, token_ids: Sequence[int], finish: str, before: Sequence[int], asked: JsonObject
    ) -> JsonObject:
        """Returns sampled tokens as a message of OpenAI's form, by the server's parsers of tool calls and reasoning.

        `finish`: the finish reason. `before`: the last tokens of the prompt. `asked`: the chat request, without the
        model. Raises ServerTroubleError; InferenceError.
        """
        choice = {"index": 0, "token_ids": list(token_ids), "finish_reason": finish}
        body = {
            "model": self._model,
            "generate_response": {"request_id": "parse", "choices": [choice]},
            "prompt_token_ids": list(before),
            "chat_request": {"model": self._model, **asked},
        }
        parsed = await self._http.ask("POST", PARSE, Chatted, json=body, timeout=_QUICK)
        message = parsed.choices[0].message
        kept = {"content": message.content or None, "tool_calls": message.tool_calls}
        kept["reasoning"] = message.reasoning or message.reasoning_content
        nothing = None if kept["tool_calls"] else ""
        return {"content": nothing} | {key: value for key, value in kept.items() if value}

    async def answers(self) -> bool:
        """Whether the server answers a cheap request. If so, a late completion does not mean that the server failed."""
        try:
            await self._cards()
        except (ServerTroubleError, InferenceError):
            return False
        return True

    async def weight_label(self) -> str:
        """Returns the current weight label; "default" if no weights were published to the server.

        Raises ServerTroubleError; InferenceError.
        """
        return (await self._http.ask("GET", "/weight_info", WeightInfo, timeout=_QUICK)).weight_version

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.close()

    async def _cards(self) -> list[ModelCard]:
        try:
            cards = (await self._http.ask("GET", f"{self._config.openai_url}/models", Models, timeout=_QUICK)).data
        except RefusedError as refusal:
            if refusal.status == 404 and self._config.server_type == "openai" and self._config.model_name:
                return [ModelCard(self._config.model_name)]  # not every such server lists its models
            raise
        if not cards:
            raise InferenceError("no_model", f"the model server at {self.url} serves no model", url=self.url)
        return cards

    async def _is_text_only(self) -> bool:
        wanted = self._config.server_type
        if wanted == "openai":
            return True
        if await takes_tokens(self._http):
            return False
        if wanted == "vllm":
            raise no_token_ids(self.url, f"has no {GENERATE}")
        return True

    def _api_flavor(self, card: ModelCard) -> Dialect:
        if urlsplit(self._config.root_url).hostname == "api.openai.com":
            return Dialect.OPENAI
        return Dialect.VLLM if card.owned_by == "vllm" else Dialect.OTHER

    def _choose(self, cards: list[ModelCard], manifest: Manifest | None) -> ModelCard:
        wanted = self._config.model_name
        for card in cards:
            names = {card.id, card.root}
            if manifest is not None and manifest.name == card.id:
                names |= {manifest.requested, manifest.weights_path}
            if wanted is not None and wanted in names:
                return card
        if wanted is not None:
            raise InferenceError(
                "model_not_served",
                f"the configuration names model '{wanted}', but the model server at {self.url} serves "
                f"'{cards[0].id}'{_and_others(cards)}; set MODEL={wanted} in .env and restart the model service, "
                "or remove model_name to train the served model",
                url=self.url,
                model=wanted,
                known=[card.id for card in cards],
            )
        # vLLM lists adapters after its model. Another server's list is a catalogue of models.
        if len(cards) > 1 and cards[0].owned_by != "vllm":
            raise InferenceError(
                "several_models",
                f"the model server at {self.url} serves '{cards[0].id}'{_and_others(cards)}; set model_name in "
                "server_configs to the one that is meant",
                url=self.url,
                known=[card.id for card in cards],
            )
        return cards[0]


def _and_others(cards: list[ModelCard]) -> str:
    return f" and {len(cards) - 1} more" if len(cards) > 1 else ""


_ENDED = frozenset({"stop", "length"})
"""Finish reasons of a whole completion. Other reasons mean that the server broke it off."""


async def takes_tokens(http: ServerHttp) -> bool:
    """Checks whether the server has the route. Raises ServerTroubleError."""
    try:
        # GET, because vLLM logs a traceback for each incomplete POST.
        await http.ask("GET", GENERATE, object, timeout=30)
    except RefusedError as refusal:
        return refusal.status == 405  # the path exists, for another method
    except InferenceError:
        pass
    return False


async def generate_tokens(http: ServerHttp, model: str, request: GenerationRequest) -> list[Completion]:
    """Returns `request.count` completions with token ids, and log-probabilities under the sampling distribution.

    Raises ServerTroubleError; InferenceError when the server refuses the request or returns no token ids.
    """
    body = generation(model, request.token_ids, _sampling(request))
    try:
        generated = await http.ask("POST", GENERATE, Generated, json=body)
    except RefusedError as refusal:
        if refusal.status == 404 and "does not exist" not in refusal.text:  # "does not exist" refers to the model
            raise no_token_ids(http.url, f"has no {GENERATE}") from refusal
        raise
    completions = [_token_completion(http.url, choice) for choice in generated.choices]
    if len(completions) != request.count:
        raise _wrong_count(http.url, len(completions), request.count)
    return completions


def no_token_ids(url: str, what: str) -> InferenceError:
    """Returns the error for a server that cannot be used for training. `what`: the reason."""
    return InferenceError(
        "no_token_ids",
        f"the model server at {url} {what}; training needs token ids: "
        "serve the model with vLLM and --enable-scale-out (process, evaluate and try do without)",
        url=url,
    )


def _sampling(request: GenerationRequest) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "n": request.count,
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "max_tokens": request.sampling.max_tokens,
        "logprobs": 0,
        # vLLM finds stop strings in the decoded text. Without stop strings vLLM need not decode.
        "detokenize": bool(request.stop),
    }
    if request.stop:
        sampling["stop"] = list(request.stop)  # the answer still includes its tokens
    if request.stop_token_ids:
        sampling["stop_token_ids"] = list(request.stop_token_ids)
    return sampling | dict(request.more) | dict(request.constraint)


def _token_completion(url: str, choice: Choice) -> Completion:
    if choice.finish_reason not in _ENDED:  # "abort": the server stops, or drops requests to load weights
        raise ServerTroubleError(GENERATE, f"a completion ended with '{choice.finish_reason}'")
    logprobs = choice.logprobs.content if choice.logprobs is not None else None
    if not choice.token_ids or logprobs is None:
        raise no_token_ids(url, "returns no token ids with log-probabilities")
    if [token.token_id for token in logprobs] != choice.token_ids:
        raise InferenceError(
            "logprobs_mismatch", f"the model server at {url} returned log-probabilities of other tokens", url=url
        )
    return Completion(
        choice.token_ids,
        [token.logprob for token in logprobs],
        choice.finish_reason,
        choice.weight_versions or [],
    )


_BROKEN_OFF = frozenset({None, "abort", "error"})


async def generate_text(
    http: ServerHttp, url: str, model: str, request: GenerationRequest, dialect: Dialect, thinking: Thinking
) -> list[Completion]:
    """Returns `request.count` completions as text; only one completion from a server that ignores `n`.

    `url`: the route's URL. vLLM is asked to keep a stop string in the text; other servers leave it out.

    Raises ServerTroubleError; InferenceError when the server refuses the request or does not support one of its
    fields.
    """
    body = {**_chat_body(model, request, dialect), **thinking.body(dialect)}
    if dialect is Dialect.VLLM:
        switches = {**body.get("chat_template_kwargs", {}), **request.template.get("chat_template_kwargs", {})}
        body |= {**request.template, **({"chat_template_kwargs": switches} if switches else {})}
    chatted = await http.ask("POST", url, Chatted, json=body)
    if len(chatted.choices) not in {1, request.count}:
        raise _wrong_count(http.url, len(chatted.choices), request.count)
    counted = chatted.usage.completion_tokens if chatted.usage is not None and len(chatted.choices) == 1 else None
    return [_text_completion(http.path(url), choice, counted) for choice in chatted.choices]


def _wrong_count(url: str, found: int, wanted: int) -> InferenceError:
    return InferenceError(
        "completion_count", f"the model server at {url} returned {found} of {wanted} completions",
        url=url, found=found, wanted=wanted,
    )  # fmt: skip


def _chat_body(model: str, request: GenerationRequest, dialect: Dialect) -> dict[str, Any]:
    limit = "max_completion_tokens" if dialect is Dialect.OPENAI else "max_tokens"
    body: dict[str, Any] = {
        "model": model,
        "messages": [dict(message) for message in request.messages],
        "temperature": request.sampling.temperature,
        limit: request.sampling.max_tokens,
    }
    # Optional fields that are not set are left out, because not every server knows all fields.
    if request.sampling.top_p != 1:
        body["top_p"] = request.sampling.top_p
    if request.count > 1:
        body["n"] = request.count
    if request.stop:
        body["stop"] = list(request.stop)
    body |= request.more
    if dialect is not Dialect.VLLM:
        _refuse_vllm_only(request)
        return body
    if request.prefill:
        body["messages"].append({"role": "assistant", "content": request.prefill})
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    if request.stop:
        body["include_stop_str_in_output"] = True
    if request.stop_token_ids:
        body["stop_token_ids"] = list(request.stop_token_ids)
    return body


_OF_OPENAI = frozenset({"presence_penalty", "frequency_penalty"})
"""Further sampling parameters that every OpenAI-compatible server knows."""


def _refuse_vllm_only(request: GenerationRequest) -> None:
    wanted = {
        "prefill": bool(request.prefill),
        "stop_token_ids": bool(request.stop_token_ids),
        **{name: name not in _OF_OPENAI for name in request.more},
        **dict.fromkeys(request.template, True),
    }
    if refused := [name for name, there in wanted.items() if there]:
        raise InferenceError(
            "needs_vllm",
            f"{' and '.join(refused)} cannot be asked of an OpenAI-compatible server that is not vLLM; "
            "leave it out, or serve the model with vLLM",
            settings=refused,
        )


def _text_completion(path: str, choice: ChatChoice, counted: int | None) -> Completion:
    if choice.finish_reason in _BROKEN_OFF:
        raise ServerTroubleError(path, f"a completion ended with '{choice.finish_reason}'")
    assert choice.finish_reason is not None
    return Completion([], [], choice.finish_reason, [], _text(choice.message, choice.finish_reason), counted)


def _text(message: ChatMessage, finish_reason: str) -> str:
    """Returns the text as the model wrote it, before a reasoning parser split it. Cut reasoning has no end tag."""
    thought, said = message.reasoning or message.reasoning_content, message.content or ""
    if not thought:
        return said
    opened = "<think>\n" + thought.strip("\n")
    return opened if finish_reason == "length" and not said else f"{opened}\n</think>\n\n{said}"


class Dialect(StrEnum):
    """The extensions of the chat API that a text server understands."""

    VLLM = "vllm"
    """vLLM: continued messages, stop tokens, options of the chat template."""
    OPENAI = "openai"
    """api.openai.com."""
    OTHER = "other"
    """Any other server. The only extension sent is OpenRouter's `reasoning`, and only if thinking is configured."""


@dataclass(frozen=True)
class Thinking:
    """thinking_mode, reasoning_effort and max_reasoning_tokens of a run."""

    enabled: bool | None = None
    """None uses the model's default."""
    effort: str | None = None
    max_tokens: int | None = None

    @classmethod
    def of(cls, config: EnvConfig) -> Thinking:
        """Reads the run's settings. As in Atropos, an effort or a limit enables thinking."""
        effort, limit = config.reasoning_effort, config.max_reasoning_tokens
        if effort is None and limit is None:
            return cls(config.thinking_mode)
        return cls(effort != "none", effort, limit)

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """Returns the fields to add to a request; none if `enabled` is None.

        OpenAI accepts only an effort. There, thinking without an effort is sent as "medium", and a limit or "off"
        cannot be expressed. OpenRouter's `reasoning` accepts an effort or a limit; if both are set, only the effort is
        sent.
        """
        if self.enabled is None:
            return {}
        if dialect is Dialect.OPENAI:
            effort = self.effort or ("medium" if self.enabled else None)
            return {} if effort is None else {"reasoning_effort": effort}
        if dialect is Dialect.VLLM:
            body: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": self.enabled, "thinking": self.enabled}}
            if self.effort is not None:
                body["reasoning_effort"] = self.effort
            if self.enabled and self.max_tokens is not None:
                body["thinking_token_budget"] = self.max_tokens
            return body
        reasoning: dict[str, Any] = {"enabled": self.enabled}
        if self.effort is not None:
            reasoning["effort"] = self.effort
        elif self.enabled and self.max_tokens is not None:
            reasoning["max_tokens"] = self.max_tokens
        return {"reasoning": reasoning}
