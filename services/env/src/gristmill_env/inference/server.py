"""Completions from vLLM: token ids in, token ids and log-probabilities out. Text is never tokenized again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import httpx
import msgspec

from gristmill import Manifest, SamplingParams
from gristmill_env.errors import InferenceError
from gristmill_env.inference.patience import PatientHttp, TryAgainError
from gristmill_env.inference.wire import Choice, Generated, LabelSpan, ModelCard, Models, WeightInfo
from gristmill_env.settings import ServerConfig

T = TypeVar("T")

_ENDED = frozenset({"stop", "length"})


@dataclass(frozen=True)
class Completion:
    """One completion, as sampled."""

    token_ids: list[int]
    """At least one; the token that ends the turn included."""
    logprobs: list[float]
    """One a token: log-probability under the distribution it was drawn from."""
    finish_reason: str
    """ "stop", or "length" when it was cut."""
    labels: list[LabelSpan]
    """Which of the server's weight labels sampled which tokens. "default" until weights were published to it."""


@dataclass(frozen=True)
class ServedModel:
    """What the server says it serves."""

    name: str
    root: str | None
    """Folder or hub id it was loaded from."""
    max_model_len: int | None


class ModelServer:
    """Client of one vLLM server."""

    def __init__(self, config: ServerConfig, *, patience: float) -> None:
        """`patience`: seconds the server may be away in mid-run."""
        self.url = config.root_url
        self._wanted = config.model_name
        self._model: str | None = None
        headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self._http = PatientHttp(self.url, headers=headers, timeout=config.timeout, patience=patience)

    async def connect(self, *, patience: float, manifest: Manifest | None = None) -> ServedModel:
        """Wait up to `patience` seconds for the server, and see what it serves.

        `manifest`: what the model service wrote; it knows other names of the same model.

        Raises InferenceError when it does not answer, or serves another model than `model_name`.
        """
        cards = (await self._http.ask("GET", "/v1/models", self._read_models, patience=patience)).data
        if not cards:
            raise InferenceError(f"the model server at {self.url} serves no model")
        card = self._choose(cards, manifest)
        self._model = card.id
        return ServedModel(card.id, card.root, card.max_model_len)

    async def generate(self, prompt: Sequence[int], sampling: SamplingParams, count: int) -> list[Completion]:
        """`count` completions of one prompt.

        Raises InferenceError when the server stays away, refuses the request, or returns no token ids.
        """
        sampling_params = {
            "n": count,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "logprobs": 0,
            "detokenize": False,
        }
        request = {"model": self._model, "token_ids": list(prompt), "sampling_params": sampling_params}
        completions = await self._http.ask("POST", "/inference/v1/generate", self._read_completions, json=request)
        if len(completions) != count:
            raise InferenceError(f"the model server at {self.url} returned {len(completions)} of {count} completions")
        return completions

    async def weight_label(self) -> str:
        """The server's present weight label; "default" when no weights were published to it."""
        return (await self._http.ask("GET", "/weight_info", self._read_label)).weight_version

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def __aenter__(self) -> ModelServer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def _choose(self, cards: list[ModelCard], manifest: Manifest | None) -> ModelCard:
        wanted = self._wanted
        for card in cards:
            names = {card.id, card.root}
            if manifest is not None and manifest.name == card.id:
                names |= {manifest.requested, manifest.weights_path}
            if wanted is None or wanted in names:
                return card
        raise InferenceError(
            f"the configuration wants model '{wanted}', but the model server at {self.url} serves '{cards[0].id}'; "
            f"set MODEL={wanted} in .env and restart the model service, or leave model_name out to use what is served"
        )

    def _read_models(self, answer: httpx.Response) -> Models:
        return self._decode(answer, Models)

    def _read_label(self, answer: httpx.Response) -> WeightInfo:
        return self._decode(answer, WeightInfo)

    def _read_completions(self, answer: httpx.Response) -> list[Completion]:
        return [self._completion(choice) for choice in self._decode(answer, Generated).choices]

    def _completion(self, choice: Choice) -> Completion:
        if choice.finish_reason not in _ENDED:  # "abort": the server is stopping, or drops requests to load weights
            raise TryAgainError(f"a completion ended with '{choice.finish_reason}'")
        logprobs = choice.logprobs.content if choice.logprobs is not None else None
        if not choice.token_ids or logprobs is None:
            raise self._no_token_ids("returns no token ids with log-probabilities")
        if [token.token_id for token in logprobs] != choice.token_ids:
            raise InferenceError(f"the model server at {self.url} returned log-probabilities of other tokens")
        return Completion(
            choice.token_ids,
            [token.logprob for token in logprobs],
            choice.finish_reason,
            choice.weight_versions or [],
        )

    def _decode(self, answer: httpx.Response, kind: type[T]) -> T:
        path = answer.request.url.path
        if answer.status_code == 404 and path.startswith("/inference/") and "does not exist" not in answer.text:
            raise self._no_token_ids(f"has no {path}")
        if answer.status_code in (401, 403):
            raise InferenceError(f"the model server at {self.url} refuses {path}: set api_key in server_configs")
        if not answer.is_success:
            raise InferenceError(
                f"the model server at {self.url} refused {path}: HTTP {answer.status_code}: {answer.text[:300]}"
            )
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            raise InferenceError(f"the server at {self.url} does not answer {path} as vLLM does: {error}") from error

    def _no_token_ids(self, what: str) -> InferenceError:
        return InferenceError(
            f"the model server at {self.url} {what}; training needs token ids: "
            "serve the model with vLLM and --enable-scale-out"
        )
