"""The model servers of a run, as one client. It balances outstanding tokens, and fails over to other servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from gristmill import Manifest
from gristmill_env.errors import InferenceError, PromptRefusedError
from gristmill_env.inference.balance import Lane
from gristmill_env.inference.bench import Bench, UnpublishedError
from gristmill_env.inference.budget import RetryBudget
from gristmill_env.inference.http import RefusedError, ServerTroubleError, SlowAnswerError
from gristmill_env.inference.meeting import Meeting, check_same
from gristmill_env.inference.request import Completion, GenerationRequest, ServedModel
from gristmill_env.inference.server import ModelServer
from gristmill_env.inference.thinking import Thinking
from gristmill_env.inference.tokens import no_token_ids
from gristmill_env.settings import ServerConfig

_AS_THE_MODEL_DOES = Thinking()


class ModelServers:
    """Clients of one or more servers of the same model."""

    def __init__(
        self, configs: Sequence[ServerConfig], *, patience: float, thinking: Thinking = _AS_THE_MODEL_DOES
    ) -> None:
        """`patience`: seconds for which all servers may fail during the run. `thinking`: sent to text servers."""
        self._lanes = [
            Lane(
                ModelServer(config, thinking), config.weight, config.num_max_requests_at_once,
                config.num_requests_for_eval,
            )
            for config in configs
        ]  # fmt: skip
        self._bench = Bench(self._lanes, self._check, patience)
        self._budget = RetryBudget()
        self._manifest: Manifest | None = None
        self._served: ServedModel | None = None
        self._is_published: Callable[[str], bool] | None = None

    @property
    def description(self) -> str:
        """The servers' addresses, for messages."""
        return ", ".join(lane.server.url for lane in self._lanes)

    async def connect(self, *, patience: float, manifest: Manifest | None = None) -> ServedModel:
        """Waits up to `patience` seconds for the servers, and returns the model that they serve.

        After the first answer, the other servers have a few more seconds. A late server joins when it answers.
        `manifest`: the model service's manifest, which contains other names of the same model.

        Raises InferenceError when no server answers, or when a server serves another model than `model_name` or than
        the other servers.
        """
        self._manifest = manifest
        meeting = Meeting(self._lanes, manifest, patience)
        met, late = await meeting.hold()
        if not met:
            for lane, trouble in late.items():
                lane.problem = trouble.told
            raise self._bench.gave_up(meeting.seconds)
        self._served = meeting.agree(met)
        for lane in met:
            self._bench.up(lane)
        for lane, trouble in late.items():
            self._bench.late(lane, trouble)
        return self._served

    def refuse_text_only(self) -> None:
        """Raises InferenceError when the servers return no token ids, which training needs."""
        if self._served is not None and self._served.text_only:
            raise no_token_ids(self.description, "gives text only")

    def trust_only(self, is_published: Callable[[str], bool]) -> None:
        """Accepts only completions of published weights from now on. `is_published`: whether a weight label is valid.

        If a server samples with other weights (for example after a restart), it gets no requests until its label is
        valid again.
        """
        self._is_published = is_published

    async def generate(self, request: GenerationRequest, *, evaluation: bool = False) -> list[Completion]:
        """Returns `request.count` completions of one prompt. `evaluation`: counts towards num_requests_for_eval.

        Raises InferenceError when all servers stay away, or a server refuses the request or returns no token ids.
        Raises RequestTimeoutError when the request took longer than its server's `timeout`, or failed for `patience`
        seconds while servers answered other requests. Raises PromptRefusedError when a text server refuses this prompt
        but accepts a short prompt.
        """
        try:
            return await self._complete(request, evaluation)
        except RefusedError as refusal:
            if self._served is not None and self._served.text_only and refusal.may_mean_the_prompt:
                await self._ask_briefly(request, evaluation)
                raise PromptRefusedError(refusal.code, str(refusal), **refusal.values) from refusal
            raise

    async def weight_label(self) -> str:
        """Returns the weight label of the first server; "default" if no weights were published to it.

        Raises ServerTroubleError when the server does not answer, InferenceError when it has no labels."""
        return await self._lanes[0].server.weight_label()

    async def close(self) -> None:
        """Closes all connections."""
        await self._bench.close()
        for lane in self._lanes:
            await lane.server.close()

    async def __aenter__(self) -> ModelServers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask_briefly(self, request: GenerationRequest, evaluation: bool) -> None:
        """Checks whether a refusal concerns the prompt. Raises InferenceError if a short prompt is refused as well."""
        try:
            await self._answer(request.with_short_prompt(), evaluation)
        except RefusedError as refusal:
            raise InferenceError(
                "every_prompt_refused",
                f"{refusal}; that was said of a short prompt ('Hi') too, so no row is to blame: look at the "
                "settings that go with every prompt (model_name, max_tokens, temperature, top_p, stop, thinking, "
                "system_prompt)",
                **refusal.values,
            ) from refusal

    async def _complete(self, request: GenerationRequest, evaluation: bool) -> list[Completion]:
        if request.count > 1 and any(lane.server.ignores_n for lane in self._lanes):
            return await self._one_by_one(request, request.count, evaluation)
        completions = await self._answer(request, evaluation)
        missing = request.count - len(completions)
        return completions + (await self._one_by_one(request, missing, evaluation) if missing else [])

    async def _one_by_one(self, request: GenerationRequest, count: int, evaluation: bool) -> list[Completion]:
        one = request.with_count(1)
        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(self._answer(one, evaluation)) for _ in range(count)]
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        return [completion for answer in answers for completion in answer.result()]

    async def _answer(self, request: GenerationRequest, evaluation: bool) -> list[Completion]:
        self._budget.request()
        failing_since: float | None = None
        while True:
            lane = await self._bench.free_lane(request.cost, evaluation=evaluation, failing_since=failing_since)
            turn = lane.turn
            try:
                try:
                    with lane.carrying(request.cost, evaluation=evaluation):
                        completions = await lane.server.generate(request)
                finally:
                    self._bench.changed()
            except ServerTroubleError as trouble:
                # If the server still answers, the server has not failed, and a retry would take as long again.
                if isinstance(trouble, SlowAnswerError) and await lane.server.answers():
                    raise self._bench.slow(lane) from trouble
                self._bench.trouble(lane, turn, trouble)
                failing_since = time.monotonic() if failing_since is None else failing_since
                self._bench.give_up(failing_since)
                await asyncio.sleep(self._budget.retry())
                continue
            self._bench.answered(lane, turn)
            if self._trusted(completions):
                return completions
            self._bench.unpublished(lane, turn)

    def _trusted(self, completions: list[Completion]) -> bool:
        known = self._is_published
        return known is None or all(c.labels and all(known(span.version) for span in c.labels) for c in completions)

    async def _check(self, lane: Lane) -> None:
        served = await lane.server.meet(self._manifest)
        if self._served is None:  # checks start only after `connect`
            raise InferenceError("not_connected", "the model servers were asked before they were connected to")
        check_same(self._served, self.description, served, lane.server.url)
        if self._is_published is not None and not self._is_published(await lane.server.weight_label()):
            raise UnpublishedError
