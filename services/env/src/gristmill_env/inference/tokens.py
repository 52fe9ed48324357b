"""vLLM's POST /inference/v1/generate: token ids in, token ids and log-probabilities out.

Neither Gristmill nor vLLM tokenizes text again.
"""

from __future__ import annotations

from typing import Any

from gristmill_env.errors import InferenceError
from gristmill_env.inference.http import RefusedError, ServerHttp, ServerTroubleError
from gristmill_env.inference.request import Completion, GenerationRequest
from gristmill_env.inference.wire import Choice, Generated

GENERATE = "/inference/v1/generate"
_ENDED = frozenset({"stop", "length"})


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
    body = {"model": model, "token_ids": list(request.token_ids), "sampling_params": _sampling(request)}
    try:
        generated = await http.ask("POST", GENERATE, Generated, json=body)
    except RefusedError as refusal:
        if refusal.status == 404 and "does not exist" not in refusal.text:  # "does not exist" refers to the model
            raise no_token_ids(http.url, f"has no {GENERATE}") from refusal
        raise
    completions = [_completion(http.url, choice) for choice in generated.choices]
    if len(completions) != request.count:
        raise InferenceError(
            "completion_count",
            f"the model server at {http.url} returned {len(completions)} of {request.count} completions",
            url=http.url,
            found=len(completions),
            wanted=request.count,
        )
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
    return sampling


def _completion(url: str, choice: Choice) -> Completion:
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
