"""POST /gristmill/publish: one request makes the server pause, load new weights and resume.

    {"path": "/weights/RUN/1.20", "version": "1.20"}   a folder with whole weights, a LoRA adapter, or the description
                                                       of weights in the trainer's device memory
 -> {"weight_version": "1.20"}

POST /gristmill/reset does the same with the weights that the server was started with. A server that stays between runs
then has no weights of an earlier run:

    (no body) -> {"weight_version": "default"}

POST /gristmill/sleep lets vLLM sleep until the next of these requests, so that a trainer on the same GPU can use its
memory meanwhile. Requests for completions wait. At level 1, vLLM keeps its weights in main memory. At level 2, it drops
them:

    {"level": 2} -> {"weight_version": "1.20"}

The trainer sends one request and the server does the rest, so a trainer that is killed meanwhile does not leave the
server paused. Publications run one after another, in the order of their arrival. The server checks each request when
its turn comes: it refuses a request of a trainer that was replaced while the request waited.

While weights are loaded, the server's label is `INVALID`, which is not a policy version. Environments reject samples
with this label. If loading fails, vLLM has no usable weights, and its engine would crash on the next token. The server
then loads the previous weights again and serves them under their own label. The trainer's device memory does not keep
previous weights, so the server then loads those that it was started with.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gristmill.internal.device_memory import FILE as DEVICE_MEMORY
from gristmill_model.asgi import App, Receive, Refusal, Scope, Send, read_body, send_json, with_body

PATH: Final = "/gristmill/publish"
RESET_PATH: Final = "/gristmill/reset"
SLEEP_PATH: Final = "/gristmill/sleep"
FAILED: Final = "publish_failed"
"""Code of weights that could not be loaded."""
PATHS: Final = frozenset({PATH, RESET_PATH, SLEEP_PATH})
FIRST_WEIGHTS: Final = "GRISTMILL_FIRST_WEIGHTS"
"""Variable that holds the folder with which vLLM was started: a model's or an adapter's folder."""
FIRST: Final = "default"
"""vLLM's label for the weights that it was started with."""
INVALID: Final = "invalid"
"""Label of weights that may be only partly loaded."""

_ADAPTER: Final = "adapter_config.json"
_LOG = logging.getLogger(f"vllm.{__name__}")  # vLLM shows the lines of its own loggers only.


class _CallError(Exception):
    """One of vLLM's endpoints failed."""


class _RefusedError(Exception):
    """The weights cannot be loaded, and the server still has those before. `args`: of the Refusal."""


class Publications:
    """Loads published weights into the vLLM whose ASGI application is `app`."""

    def __init__(self, app: App, first_weights: Path) -> None:
        """`first_weights`: the folder with which vLLM was started, a model's or an adapter's folder."""
        self._app = app
        self._first = self._served = (first_weights, FIRST)
        """Folder and version of the newest weights that are in files, for a load that fails."""
        self._asleep = False
        """Whether memory of vLLM may sleep. It is then paused, and computing would crash its engine."""
        self._turn = asyncio.Lock()
        self._took: list[str] = []
        """Calls of vLLM for the present request, and their seconds."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send, refusal: Callable[[], Refusal | None]) -> None:
        """Serves one request. `refusal`: returns why the sender may not publish at this moment, or None."""
        # Read the whole body first, because a sender that stops within its request must not hold up the others.
        body = await read_body(receive)
        async with self._turn:
            self._took.clear()
            version = refusal() or await self._serve(scope, body)
            if not isinstance(version, Refusal):
                _LOG.info("POST %s, version %s: %s", scope["path"], version, ", ".join(self._took))
        if isinstance(version, Refusal):
            await version.send(send)
        else:
            await send_json(send, 200, {"weight_version": version})

    async def _serve(self, scope: Scope, body: bytes) -> str | Refusal:
        """Returns the version that is served afterwards."""
        try:
            if scope["path"] == SLEEP_PATH:
                return await self._sleep(scope, body)
            asked = self._first if scope["path"] == RESET_PATH else _read(body)
            if isinstance(asked, Refusal):
                return asked
            await self._load(scope, *asked)
        except _RefusedError as error:
            return Refusal(*error.args)
        except _CallError as error:
            return Refusal(500, FAILED, f"POST {scope['path']} {body.decode(errors='replace')}: {error}")
        return asked[1]

    async def _sleep(self, scope: Scope, body: bytes) -> str | Refusal:
        """Running requests are computed again after the next load."""
        try:
            level = int(json.loads(body)["level"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            return Refusal(422, "bad_request", f"POST {SLEEP_PATH} takes a level ({error!r})")
        if level not in (1, 2):
            return Refusal(422, "bad_request", f"POST {SLEEP_PATH} takes level 1 or 2, not {level}")
        if not self._asleep:
            await self._call(scope, "/pause", query="mode=keep")
            self._asleep = True  # also if a worker fails, which may leave a part asleep
            await self._on_workers(scope, "fall_asleep", level=level)
        return await self._label(scope)

    async def _load(self, scope: Scope, path: Path, version: str) -> None:
        """Swaps the weights while generation is paused. Running requests continue afterwards."""
        await self._call(scope, "/pause", query="mode=keep")
        if self._asleep:
            await self._on_workers(scope, "wake", tags=["weights"])
        # If one of these calls fails, the server stays paused until the next load.
        label = await self._label(scope)
        await self._call(scope, "/update_weight_version", {"new_version": INVALID})
        try:
            await self._swap(scope, path, version)
            self._served = self._first if (path / DEVICE_MEMORY).is_file() else (path, version)
        except _RefusedError:
            if self._asleep:  # The weights before may be gone.
                await self._swap(scope, *self._served)
            else:
                await self._call(scope, "/update_weight_version", {"new_version": label})
            raise
        except _CallError as error:
            _LOG.error("publishing version %s: %s; going back to version %s", version, error, self._served[1])
            await self._swap(scope, *self._served)
            raise
        finally:
            if self._asleep:
                await self._on_workers(scope, "wake")
                self._asleep = False
            await self._call(scope, "/resume")

    async def _label(self, scope: Scope) -> str:
        return str((await self._call(scope, "/weight_info", method="GET")).get("weight_version", INVALID))

    async def _swap(self, scope: Scope, path: Path, version: str) -> None:
        if (path / _ADAPTER).is_file():
            load = "load_adapter"
        elif (path / DEVICE_MEMORY).is_file():
            load = "load_device_memory"
        else:
            load = "load_files"
        await self._on_workers(scope, load, path=str(path))
        # Also resets the blocks of paused requests, which vLLM then computes again with the new weights.
        reset = await self._call(scope, "/reset_prefix_cache", query="reset_running_requests=true")
        if not reset.get("success"):
            raise _CallError("the prefix cache, which is of the old weights, was kept")
        await self._call(scope, "/update_weight_version", {"new_version": version})

    async def _on_workers(self, scope: Scope, method: str, **arguments: object) -> None:
        """Calls a method of `gristmill_model.worker`. Raises _RefusedError if all workers refuse, and have changed
        nothing; else _CallError if one did not do it."""
        call = {"method": method, "kwargs": arguments}
        results = (await self._call(scope, "/collective_rpc", call))["results"]
        problems = [one for one in results if one]
        if not problems:
            return
        status, code, message = problems[0]
        if len(problems) == len(results) and all(one[1] != FAILED for one in problems):
            raise _RefusedError(status, code, message)
        raise _CallError(f"{len(problems)} of {len(results)} workers failed, the first by {code}: {message}")

    async def _call(
        self, outer: Scope, path: str, body: Any = None, query: str = "", method: str = "POST"
    ) -> dict[str, Any]:
        """Calls one of vLLM's endpoints behind the gate. Raises _CallError."""
        headers = [(b"content-type", b"application/json")]
        scope = {
            **outer,
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": headers,
        }
        content = b"" if body is None else json.dumps(body).encode()
        inner, receive = with_body(scope, _nothing_more, content)
        status, answered, started = 0, bytearray(), time.monotonic()

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            answered.extend(message.get("body", b""))

        try:
            await self._app(inner, receive, send)
        except Exception as error:  # an endpoint raises whatever error its engine raised
            raise _CallError(f"{path} failed: {error}") from error
        self._took.append(f"{(body or {}).get('method', path)} {time.monotonic() - started:.3f} s")
        text = bytes(answered).decode(errors="replace")
        if status != 200:
            raise _CallError(f"{path} was answered with {status}: {text[:300]}")
        try:
            answer = json.loads(text or "{}")
        except ValueError as error:
            raise _CallError(f"{path} was answered with {text[:300]}") from error
        return answer if isinstance(answer, dict) else {}


def _read(body: bytes) -> tuple[Path, str] | Refusal:
    """Returns the folder and the version that a request names."""
    try:
        request = json.loads(body)
        path, version = Path(request["path"]), str(request["version"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        return Refusal(422, "bad_request", f"POST {PATH} takes a path and a version ({error!r})")
    if not path.is_dir():
        # 503 makes the trainer retry, because a new folder may appear late on a network file system.
        return Refusal(
            503,
            "weights_missing",
            f"the model server sees no folder {path}; trainer and model server must see the same GRISTMILL_WEIGHTS_DIR "
            "under the same path",
        )
    return path, version


async def _nothing_more() -> dict[str, Any]:
    """Waits for ever. After the body, `receive` could only report that the client is gone, and this client stays."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # never done
