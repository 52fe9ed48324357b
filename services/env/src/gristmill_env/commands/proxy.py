"""`proxy`: serves the routes of Atropos' managed_server_proxy at a separate gateway.

An environment of Atropos with ATROPOS_PROXY_URL opens a session for each rollout, gives the session's URL to its
program, and reads the tokens at the end:

    POST   /sessions/create                   opens a session: {"uuid"}
    POST   /UUID/v1/chat/completions          as OpenAI's, not streamed; with `n` and `temperature`
    POST   /UUID/v1/chat/completions/render   the same messages as a prompt, without a reply
    GET    /UUID/nodes                        the sequences to train on
    DELETE /UUID                              ends the session
    GET    /health
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gristmill import SamplingParams
from gristmill.internal.prometheus import parse_address
from gristmill_env.commands import ProxyOptions
from gristmill_env.gateway import PORT, Branch, Policy, RequestError, Session, Sessions, serving
from gristmill_env.gateway.dialects import DIALECTS
from gristmill_env.gateway.dialects.base import invalid, read_count
from gristmill_env.gateway.server import read_body, read_request, repetition, unless_gone
from gristmill_env.gateway.sessions import Prepared
from gristmill_env.gather import gather
from gristmill_env.inference import ModelServers, Thinking
from gristmill_env.run_settings import RunSettings
from gristmill_env.session import AT_A_TERMINAL, for_agents, meet_model

_CHAT: Final = DIALECTS["/v1/chat/completions"]
_MOST_SESSIONS: Final = 4096
"""A further session ends the one whose last request was the earliest: a killed environment deletes none."""
_MOST_REPLIES: Final = 10_000
_PROMPT_LOGPROB: Final = 1.0
"""Atropos' values of tokens that are not trained on, in `logprobs` and `masked_tokens`."""
_PROMPT_MASK: Final = -100


async def proxy(run: RunSettings, options: ProxyOptions, environ: Mapping[str, str]) -> None:
    """Serves the model until the command is stopped. Raises InferenceError, PromptError, EnvError."""
    config = run.config
    servers = ModelServers(config.server_configs, patience=config.patience, thinking=Thinking.of(config))
    async with servers:
        model = await meet_model(run, servers, config.startup_patience or AT_A_TERMINAL)
        servers.refuse_text_only()
        listen = options.listen or run.deployment.gateway_address or f"127.0.0.1:{PORT}"
        async with serving_managed(model.policy(for_agents(config)), parse_address(listen), environ):
            await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def serving_managed(policy: Policy, address: tuple[str, int], environ: Mapping[str, str]) -> AsyncIterator[str]:
    """Serves the proxy inside the block, whose value is the proxy's URL. `address`: host and port, 0 for a free one."""
    managed = ManagedProxy(policy)
    async with serving(managed.sessions, policy.name, address, environ, managed.routes()) as gateway:
        yield gateway.url
        await managed.close()


class ManagedProxy:
    """The sessions of the environments."""

    def __init__(self, policy: Policy, most: int = _MOST_SESSIONS) -> None:
        self.sessions = Sessions(most)
        self._policy, self._most = policy, most
        self._open: dict[str, Session] = {}
        """By the time of the last request, the earliest first."""

    def routes(self) -> list[Route]:
        """Returns the routes that the gateway does not have."""
        answers: list[tuple[str, str, Callable[[Request], Awaitable[dict[str, Any]]]]] = [
            ("GET", "/health", self._health),
            ("POST", "/sessions/create", self._create),
            ("POST", "/{key}/v1/chat/completions", self._chat),
            ("POST", "/{key}/v1/chat/completions/render", self._render),
            ("GET", "/{key}/nodes", self._nodes),
            ("DELETE", "/{key}", self._delete),
        ]
        return [Route(path, _answering(answer), methods=[method]) for method, path, answer in answers]

    async def close(self) -> None:
        """Ends all sessions."""
        await gather(self._end(session) for session in [*self._open.values()])

    async def _health(self, request: Request) -> dict[str, Any]:
        return {"status": "ok", "model": self._policy.name, "sessions": len(self._open)}

    async def _create(self, request: Request) -> dict[str, Any]:
        sampling = SamplingParams(temperature=1.0, max_tokens=self._policy.max_length)
        session = Session(self._policy, sampling, most_turns=_MOST_REPLIES)
        if len(self._open) == self._most:
            await self._end(next(iter(self._open.values())))
        self.sessions.add(session)
        self._open[session.key] = session
        # The proxy chooses among its servers for each request, so a session belongs to none.
        return {
            "uuid": session.key, "model_name": self._policy.name, "tool_parser": "the model server's",
            "base_url": None, "created_at": time.time(),
        }  # fmt: skip

    async def _chat(self, request: Request) -> dict[str, Any]:
        session = self._find(request)
        prepared, count = await _prepared(session, request)
        how = repetition(request)
        coming = [session.reply(prepared, **how, choice=choice) for choice in range(count)]
        # Environments take the choices and their nodes in the same order.
        replies = sorted(await unless_gone(gather(coming), request), key=lambda reply: reply.number)
        answers = [_CHAT.answer(reply) for reply in replies]
        choices = [answer["choices"][0] | {"index": index} for index, answer in enumerate(answers)]
        prompt, sampled = replies[0].prompt_tokens, sum(reply.completion_tokens for reply in replies)
        usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        return {**answers[0], "choices": choices, "usage": usage}

    async def _render(self, request: Request) -> dict[str, Any]:
        prepared, _ = await _prepared(self._find(request), request)
        ids = prepared.token_ids
        text = self._policy.prompts.decode(ids, special=True)
        return {"prompt_text": text, "token_ids": ids, "num_tokens": len(ids)}

    async def _nodes(self, request: Request) -> dict[str, Any]:
        """Returns the sequences in the order of their first own replies: a further turn leaves a node in its place."""
        used: set[int] = set()
        nodes: list[tuple[int, dict[str, Any]]] = []
        for branch in self._find(request).branches():
            own = [turn.number for turn in branch.turns if turn.number not in used]
            nodes.append((own[0], self._node(branch)))
            used.update(own)
        return {"nodes": [node for _, node in sorted(nodes, key=lambda node: node[0])]}

    async def _delete(self, request: Request) -> dict[str, Any]:
        session = self._find(request)
        await self._end(session)
        return {"status": "deleted", "uuid": session.key}

    def _node(self, branch: Branch) -> dict[str, Any]:
        """Returns a sequence as Atropos' SequenceNode."""
        prompt, ids = branch.prompt.tolist(), branch.token_ids.tolist()
        trained = branch.mask.tolist()
        masked = [token if own else _PROMPT_MASK for token, own in zip(ids, trained, strict=True)]
        logprobs = [
            value if own else _PROMPT_LOGPROB for value, own in zip(branch.logprobs.tolist(), trained, strict=True)
        ]
        return {
            "full_text": self._policy.prompts.decode([*prompt, *ids], special=True),
            "tokens": [*prompt, *ids],
            "masked_tokens": [_PROMPT_MASK] * len(prompt) + masked,
            "logprobs": [_PROMPT_LOGPROB] * len(prompt) + logprobs,
            "metadata": {"finish_reason": branch.turns[-1].stored.finish_reason},
        }

    def _find(self, request: Request) -> Session:
        key = request.path_params["key"]
        if (session := self._open.pop(key, None)) is None:
            raise RequestError(404, "unknown_session", "no open session has this UUID")
        self._open[key] = session
        return session

    async def _end(self, session: Session) -> None:
        self._open.pop(session.key, None)
        self.sessions.remove(session)
        await session.close()


async def _prepared(session: Session, request: Request) -> tuple[Prepared, int]:
    """Returns the request of a chat completion and the number of replies. Raises RequestError."""
    body = await read_body(request)
    count, temperature = read_count(body, "n") or 1, body.get("temperature")
    asked = read_request(_CHAT, {**body, "n": None})
    if asked.stream:
        raise RequestError(400, "stream", f"stream at /s/{session.key}/v1, or leave 'stream' out", "stream")
    prepared = session.prepare(asked)
    if temperature is None:
        return prepared, count
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature <= 2:
        raise invalid("'temperature' must be a number from 0 to 2", "temperature")
    sampling = msgspec.structs.replace(prepared.sampling, temperature=float(temperature))
    return dataclasses.replace(prepared, sampling=sampling), count


def _answering(answer: Callable[[Request], Awaitable[dict[str, Any]]]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return JSONResponse(await answer(request))
        except RequestError as error:
            return JSONResponse(_CHAT.error(error), error.status)
        except ClientDisconnect:
            return Response(status_code=499)

    return endpoint
