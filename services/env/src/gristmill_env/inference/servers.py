"""The model servers of a run, as one client. It balances outstanding tokens, and fails over to other servers."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from gristmill import Manifest
from gristmill.internal.backoff import Backoff
from gristmill.internal.redaction import redact_text
from gristmill.model_servers import LOOK_UP_EVERY, ServerAddresses
from gristmill_env.errors import EpisodeError, InferenceError, PromptRefusedError
from gristmill_env.gather import gather
from gristmill_env.inference.failover import Endpoint, EndpointState, Failover, RetryBudget, UnpublishedError
from gristmill_env.inference.http import RefusedError, ServerTroubleError
from gristmill_env.inference.server import ModelServer, Thinking, no_token_ids
from gristmill_env.inference.types import Completion, GenerationRequest, ServedModel
from gristmill_env.settings.servers import ServerConfig

T = TypeVar("T")
_AS_THE_MODEL_DOES = Thinking()
_LONGEST_PAUSE = 0.5
"""Seconds. Short, because the run waits for the server's first answer and the server has no other requests yet."""
_GRACE = 10.0
"""Seconds that the other servers have after the first server's answer. Servers that run answer immediately."""


class ModelServers:
    """Clients of one or more servers of the same model."""

    def __init__(
        self, configs: Sequence[ServerConfig], *, patience: float, thinking: Thinking = _AS_THE_MODEL_DOES
    ) -> None:
        """`patience`: seconds for which all servers may fail during the run. `thinking`: sent to text servers."""
        self._thinking = thinking
        self._listed = [(config, ServerAddresses(config.base_url)) for config in configs]
        fixed = [config for config, addresses in self._listed if not addresses.by_name]
        self._endpoints = [_endpoint(config, thinking) for config in fixed]
        self._by_name: dict[str, Endpoint] = {}
        """The servers whose addresses were looked up, by their URLs."""
        self._named: frozenset[str] = frozenset()
        """The URLs of the last look-up."""
        self._looking: asyncio.Task[None] | None = None
        self._failover = Failover(self._endpoints, self._check, patience)
        self._budget = RetryBudget()
        self._manifest: Manifest | None = None
        self._served: ServedModel | None = None
        self._is_published: Callable[[str], bool] | None = None

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """The servers with their states and loads, in the order of the settings."""
        return self._endpoints

    @property
    def description(self) -> str:
        """The servers' addresses, for messages."""
        return ", ".join(redact_text(config.root_url) for config, _ in self._listed)

    async def connect(self, *, patience: float, manifest: Manifest | None = None) -> ServedModel:
        """Waits up to `patience` seconds for the servers, and returns the model that they serve.

        After the first answer, the other servers have a few more seconds. A late server joins when it answers.
        `manifest`: the model service's manifest, which contains other names of the same model.

        Raises InferenceError when no server answers, or when a server serves another model than `model_name` or than
        the other servers.
        """
        self._manifest = manifest
        began = time.monotonic()
        patience -= await self._find(patience)
        met, late = await _wait_for_servers(self._endpoints, manifest, patience)
        if not met:
            for endpoint, trouble in late.items():
                endpoint.problem = trouble.told
            raise self._failover.gave_up(time.monotonic() - began)
        self._served = _agreed(met)
        for endpoint in met:
            self._failover.up(endpoint)
        for endpoint, trouble in late.items():
            self._failover.late(endpoint, trouble)
        if any(addresses.by_name for _, addresses in self._listed):
            self._looking = asyncio.create_task(self._look_again())
        return self._served

    def refuse_text_only(self) -> None:
        """Raises InferenceError when the servers return no token ids, which training needs."""
        if self._served is not None and self._served.text_only:
            raise no_token_ids(self.description, "gives text only")

    def trust_only(self, is_published: Callable[[str], bool] | None) -> None:
        """Accepts only completions of published weights from now on; of all weights for None.

        `is_published`: whether a weight label is valid.

        If a server samples with other weights (for example after a restart), it gets no requests until its label is
        valid again.
        """
        self._is_published = is_published

    async def generate(self, request: GenerationRequest, *, evaluation: bool = False) -> list[Completion]:
        """Returns `request.count` completions of one prompt. `evaluation`: counts towards num_requests_for_eval.

        Raises InferenceError when all servers stay away, or a server refuses the request or returns no token ids.
        Raises RequestTimeoutError when the request failed for `patience` seconds while servers answered other requests.
        Raises PromptRefusedError when a server refuses this prompt but accepts a short prompt.
        """
        try:
            return await self._complete(request, evaluation)
        except RefusedError as refusal:
            if refusal.may_mean_the_prompt:
                await self._ask_briefly(request, evaluation)
                raise PromptRefusedError(refusal.code, str(refusal), **refusal.values) from refusal
            raise

    async def parse(
        self, token_ids: Sequence[int], finish: str, before: Sequence[int], asked: dict[str, Any], server: str | None
    ) -> dict[str, Any]:
        """Returns sampled tokens as a message (`ModelServer.parse`). `server`: URL of the server that is asked first.

        Raises InferenceError and RequestTimeoutError as `generate` does, and EpisodeError for a reply that the server
        cannot parse.
        """
        try:
            parsed = self._ask(lambda one: one.parse(token_ids, finish, before, asked), earlier=server)
            return (await parsed)[0]
        except RefusedError as refusal:
            if refusal.may_mean_the_prompt:
                raise EpisodeError("reply_not_parsed", str(refusal), **refusal.values) from refusal
            raise

    async def weight_label(self) -> str:
        """Returns the weight label of the first server that is up; "default" if no weights were published to it.

        Raises ServerTroubleError when the server does not answer, InferenceError when it has no labels."""
        up = [endpoint for endpoint in self._endpoints if endpoint.state is EndpointState.UP]
        return await (up or self._endpoints)[0].server.weight_label()

    async def close(self) -> None:
        """Closes all connections."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._failover.close()
        for endpoint in self._endpoints:
            await endpoint.server.close()

    async def __aenter__(self) -> ModelServers:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _find(self, patience: float) -> float:
        """Adds the servers of all names. If no server is known, repeats the look-ups for at most `patience` seconds.

        Returns the seconds it took. Raises InferenceError if no name has an address.
        """
        began = time.monotonic()
        while True:
            for config in await self._look_up():
                self._by_name[config.base_url] = endpoint = _endpoint(config, self._thinking)
                self._endpoints.append(endpoint)
            spent = time.monotonic() - began
            if self._endpoints:
                return spent
            if spent >= patience:
                raise InferenceError(
                    "no_model_server",
                    f"{self.description} had no address for {spent:.0f} s; is the model service running?",
                    urls=[config.base_url for config, _ in self._listed],
                    seconds=spent,
                )
            await asyncio.sleep(_LONGEST_PAUSE)

    async def _look_up(self) -> list[ServerConfig]:
        """Returns a configuration for each server that the names have now and that is not known yet."""
        configs: dict[str, ServerConfig] = {}
        for config, addresses in self._listed:
            if addresses.by_name:
                for url in await asyncio.to_thread(addresses.find):
                    configs.setdefault(url, config.model_copy(update={"base_url": url}))
        self._named = frozenset(configs)
        return [config for url, config in configs.items() if url not in self._by_name]

    async def _look_again(self) -> None:
        """Adds the servers that join, and removes servers that have left their name and do not answer."""
        while True:
            await asyncio.sleep(LOOK_UP_EVERY)
            for config in await self._look_up():
                self._by_name[config.base_url] = endpoint = _endpoint(config, self._thinking)
                self._failover.join(endpoint)
            for url, endpoint in list(self._by_name.items()):
                away = endpoint.state is EndpointState.AWAY
                if url not in self._named and away and not endpoint.requests and len(self._endpoints) > 1:
                    del self._by_name[url]
                    await self._failover.leave(endpoint)

    async def _ask_briefly(self, request: GenerationRequest, evaluation: bool) -> None:
        """Checks whether a refusal concerns the prompt. Raises InferenceError if a short prompt is refused as well."""
        try:
            await self._answer(request.with_short_prompt(), evaluation)
        except RefusedError as refusal:
            raise InferenceError(
                "every_prompt_refused",
                f"{refusal}; the server refuses a short prompt too, so no row is to blame: look at the "
                "settings that go with every prompt (model_name, max_tokens, temperature, top_p, stop, thinking, "
                "system_prompt)",
                **refusal.values,
            ) from refusal

    async def _complete(self, request: GenerationRequest, evaluation: bool) -> list[Completion]:
        if request.count > 1 and any(endpoint.server.ignores_n for endpoint in self._endpoints):
            return await self._one_by_one(request, request.count, evaluation)
        completions = await self._answer(request, evaluation)
        missing = request.count - len(completions)
        return completions + (await self._one_by_one(request, missing, evaluation) if missing else [])

    async def _one_by_one(self, request: GenerationRequest, count: int, evaluation: bool) -> list[Completion]:
        one = request.with_count(1)
        answers = await gather(self._answer(one, evaluation) for _ in range(count))
        return [completion for answer in answers for completion in answer]

    async def _answer(self, request: GenerationRequest, evaluation: bool) -> list[Completion]:
        while True:
            completions, endpoint, turn = await self._ask(
                lambda server: server.generate(request), request.cost, evaluation=evaluation, earlier=request.earlier
            )
            if self._is_published is not None and any(one.token_ids and not one.labels for one in completions):
                raise InferenceError(
                    "weight_label_missing",
                    f"the model server at {endpoint.server.url} returns tokens without a weight label; serve the model "
                    "with `python -m gristmill_model`, or set publisher: none if no trainer publishes to it",
                    url=endpoint.server.url,
                )
            if self._trusted(completions):
                endpoint.had_weights = self._is_published is not None
                return [dataclasses.replace(completion, server=endpoint.server.url) for completion in completions]
            self._failover.unpublished(endpoint, turn)

    async def _ask(
        self,
        ask: Callable[[ModelServer], Awaitable[T]],
        cost: int = 0,
        *,
        evaluation: bool = False,
        earlier: str | None = None,
    ) -> tuple[T, Endpoint, int]:
        """Returns the answer of a server, the server and its turn. Waits for a server up to `patience`.

        `cost`: tokens; 0 for a request that samples nothing.
        """
        self._budget.request()
        failing_since: float | None = None
        while True:
            if self._looking is not None and self._looking.done():
                self._looking.result()  # raises the error that ended the look-ups
            endpoint = await self._failover.free_endpoint(
                cost, evaluation=evaluation, failing_since=failing_since, earlier=earlier
            )
            turn = endpoint.turn
            try:
                try:
                    with endpoint.carrying(cost, evaluation=evaluation):
                        answer = await ask(endpoint.server)
                finally:
                    self._failover.changed()
            except ServerTroubleError as trouble:
                self._failover.trouble(endpoint, turn, trouble)
                failing_since = time.monotonic() if failing_since is None else failing_since
                self._failover.give_up(failing_since)
                await asyncio.sleep(self._budget.retry())
                continue
            self._failover.answered(endpoint, turn)
            return answer, endpoint, turn

    def _trusted(self, completions: list[Completion]) -> bool:
        known = self._is_published
        return known is None or all(c.labels and all(known(span.version) for span in c.labels) for c in completions)

    async def _check(self, endpoint: Endpoint) -> None:
        served = await endpoint.server.meet(self._manifest)
        if self._served is None:  # checks start only after `connect`
            raise InferenceError("not_connected", "the model servers were asked before they were connected to")
        _check_same(self._served, self.description, served, endpoint.server.url)
        if self._is_published is not None and not self._is_published(await endpoint.server.weight_label()):
            raise UnpublishedError


def _endpoint(config: ServerConfig, thinking: Thinking) -> Endpoint:
    most, evaluations = config.num_max_requests_at_once, config.num_requests_for_eval
    return Endpoint(ModelServer(config, thinking), config.weight, most, evaluations)


async def _wait_for_servers(
    endpoints: Sequence[Endpoint], manifest: Manifest | None, patience: float
) -> tuple[dict[Endpoint, ServedModel], dict[Endpoint, ServerTroubleError]]:
    """Returns the model of each server that answered, and the error of each server that did not answer in time.

    `patience`: seconds within which the first server must answer. Raises InferenceError when a server serves another
    model than its `model_name`.
    """
    until = time.monotonic() + patience
    met: dict[Endpoint, ServedModel] = {}
    late: dict[Endpoint, ServerTroubleError] = {}

    async def meet(endpoint: Endpoint) -> None:
        nonlocal until
        backoff = Backoff(0.25, _LONGEST_PAUSE)
        while True:
            try:
                met[endpoint] = await endpoint.server.meet(manifest)
            except ServerTroubleError as trouble:
                seconds_left = until - time.monotonic()
                if seconds_left <= 0:
                    late[endpoint] = trouble
                    return
                await asyncio.sleep(min(max(backoff.next(), trouble.wait), seconds_left))
            else:
                until = min(until, time.monotonic() + _GRACE)
                return

    await gather(meet(endpoint) for endpoint in endpoints)
    return {endpoint: met[endpoint] for endpoint in endpoints if endpoint in met}, late


def _agreed(met: Mapping[Endpoint, ServedModel]) -> ServedModel:
    """Returns the model that all servers serve, with the smallest `max_model_len`. Raises InferenceError if the
    servers differ."""
    (first, agreed), *others = met.items()
    for endpoint, served in others:
        _check_same(agreed, first.server.url, dataclasses.replace(served, max_model_len=None), endpoint.server.url)
    lengths = [served.max_model_len for served in met.values() if served.max_model_len is not None]
    return dataclasses.replace(agreed, max_model_len=min(lengths, default=None))


def _check_same(agreed: ServedModel, there: str, served: ServedModel, here: str) -> None:
    """Checks that `served` can replace `agreed`. Raises InferenceError that names both servers."""
    if served.name != agreed.name and (served.root is None or served.root != agreed.root):
        raise InferenceError(
            "models_differ",
            f"the model servers serve different models: '{agreed.name}' at {there}, '{served.name}' at {here}; "
            "all of server_configs must serve the same",
            models=[agreed.name, served.name],
            urls=[there, here],
        )
    if served.text_only != agreed.text_only:
        plain, ids = (here, there) if served.text_only else (there, here)
        raise InferenceError(
            "server_kinds_differ",
            f"the model server at {plain} gives text only, the one at {ids} token ids; "
            "server_configs must be of one kind",
            text_only=plain,
            token_ids=ids,
        )
    wanted, found = agreed.max_model_len, served.max_model_len
    if wanted is not None and found is not None and found < wanted:
        raise InferenceError(
            "context_too_short",
            f"the model server at {here} takes {found} tokens, less than the {wanted} at {there}; "
            "start it with the same --max-model-len",
            url=here,
            found=found,
            wanted=wanted,
        )
