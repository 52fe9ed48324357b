"""One model server, its model and its routes. Methods do not retry."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from gristmill import Manifest
from gristmill_env.errors import InferenceError
from gristmill_env.inference.chat import generate_text
from gristmill_env.inference.http import RefusedError, ServerHttp, ServerTroubleError
from gristmill_env.inference.request import Completion, GenerationRequest, ServedModel
from gristmill_env.inference.thinking import Dialect, Thinking
from gristmill_env.inference.tokens import GENERATE, generate_tokens, no_token_ids, takes_tokens
from gristmill_env.inference.wire import ModelCard, Models, WeightInfo
from gristmill_env.settings import ServerConfig

logger = logging.getLogger(__name__)

_QUICK = 30.0
"""Seconds that a request for the server's models or weight label may take."""


class ModelServer:
    """Client of one server. Call `meet` before `generate`."""

    def __init__(self, config: ServerConfig, thinking: Thinking) -> None:
        self._http = ServerHttp(config.root_url, api_key=config.api_key, timeout=config.timeout)
        self.url = self._http.url
        self.timeout = config.timeout
        """Seconds that one request may take."""
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
        self._model, self._dialect = card.id, self._tongue(card)
        if self._dialect is Dialect.OPENAI and self._thinking.max_tokens is not None:
            logger.warning("%s knows no limit of reasoning tokens; max_reasoning_tokens is not sent there", self.url)
        return ServedModel(card.id, card.root, card.max_model_len, self._text_only)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Returns `request.count` completions; fewer from a text server that ignores `n`. Then sets `ignores_n`.

        Raises SlowAnswerError after `timeout`; ServerTroubleError; InferenceError when the server refuses the request.
        """
        if not self._text_only:
            return await generate_tokens(self._http, self._model, request)
        url = f"{self._config.openai_url}/chat/completions"
        completions = await generate_text(self._http, url, self._model, request, self._dialect, self._thinking)
        if len(completions) < request.count and not self.ignores_n:
            logger.warning("the model server at %s ignores n; from now on it is asked for one at a time", self.url)
            self.ignores_n = True
        return completions

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

    def _tongue(self, card: ModelCard) -> Dialect:
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
                f"the configuration wants model '{wanted}', but the model server at {self.url} serves "
                f"'{cards[0].id}'{_and_others(cards)}; set MODEL={wanted} in .env and restart the model service, "
                "or leave model_name out to use what is served",
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
