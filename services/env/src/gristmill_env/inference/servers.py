"""The model servers of a run, as one client. It balances outstanding tokens, and fails over to other servers."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from gristmill import Manifest
from gristmill_env.errors import InferenceError, PromptRefusedError
from gristmill_env.inference.failover import Bench, Lane, Pauses, RetryBudget, UnpublishedError
from gristmill_env.inference.http import RefusedError, ServerTroubleError, SlowAnswerError
from gristmill_env.inference.server import ModelServer, Thinking, no_token_ids
from gristmill_env.inference.types import Completion, GenerationRequest, ServedModel
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


_LONGEST_PAUSE = 0.5
"""Seconds. Short, because the run waits for the server's first answer and the server has no other requests yet."""
_GRACE = 10.0
"""Seconds that the other servers have after the first server's answer. Servers that run answer immediately."""


class Meeting:
    """Queries all servers until they answer."""

    def __init__(self, lanes: Sequence[Lane], manifest: Manifest | None, patience: float) -> None:
        """`patience`: seconds within which the first server must answer."""
        self._lanes = lanes
        self._manifest = manifest
        self._began = time.monotonic()
        self._until = self._began + patience
        self._met: dict[Lane, ServedModel] = {}
        self._late: dict[Lane, ServerTroubleError] = {}

    @property
    def seconds(self) -> float:
        """Seconds since the start of the meeting."""
        return time.monotonic() - self._began

    async def hold(self) -> tuple[dict[Lane, ServedModel], dict[Lane, ServerTroubleError]]:
        """Returns the model of each server that answered, and the error of each server that did not answer in time.

        Raises InferenceError when a server serves another model than its `model_name`.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for lane in self._lanes:
                    tasks.create_task(self._meet(lane))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        return {lane: self._met[lane] for lane in self._lanes if lane in self._met}, self._late

    def agree(self, met: Mapping[Lane, ServedModel]) -> ServedModel:
        """Returns the model that all servers serve, with the smallest `max_model_len`. Raises InferenceError if the
        servers differ."""
        (first, agreed), *others = met.items()
        for lane, served in others:
            check_same(agreed, first.server.url, dataclasses.replace(served, max_model_len=None), lane.server.url)
        lengths = [served.max_model_len for served in met.values() if served.max_model_len is not None]
        return dataclasses.replace(agreed, max_model_len=min(lengths, default=None))

    async def _meet(self, lane: Lane) -> None:
        pauses = Pauses(0.25, _LONGEST_PAUSE)
        while True:
            try:
                self._met[lane] = await lane.server.meet(self._manifest)
            except ServerTroubleError as trouble:
                left = self._until - time.monotonic()
                if left <= 0:
                    self._late[lane] = trouble
                    return
                await asyncio.sleep(min(max(pauses.next(), trouble.wait), left))
            else:
                self._until = min(self._until, time.monotonic() + _GRACE)
                return


def check_same(agreed: ServedModel, there: str, served: ServedModel, here: str) -> None:
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
