"""Probes: fixed token sequences whose log-probabilities the trainer and a model server both compute.

    probes = Probes.choose(samples)               the first groups of the run
    own = own_scores(policy, probes)              by the trainer's policy, on every rank
    served = served_scores(server, probes)        by the model server

The scores of a probe have two parts. The prompt part are the log-probabilities of its own tokens at temperature 1. The
sampled part are the log-probabilities of a few fixed tokens after the probe, under the distribution that the server
samples from. The sampled part therefore depends on the temperature, on truncation such as top-p, and on the server's
prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from gristmill.internal.disk import write_file
from gristmill.model_servers import GENERATE, generation
from gristmill_trainer.data.micro_batches import collate
from gristmill_trainer.data.types import Sample, Teacher
from gristmill_trainer.disk import writing
from gristmill_trainer.errors import PublishError
from gristmill_trainer.policy import Policy
from gristmill_trainer.policy.head import Scores
from gristmill_trainer.publish.servers import ModelServer

F64 = npt.NDArray[np.float64]
PROBES_FILE: Final = "probes.json"
_CACHED_TOKENS = 64
_PROMPT_TOKENS = 32
_IDS = 8
_PROMPT_PROBES = 2
_CLAMPED = -9999.0
"""vLLM's number for a log-probability of minus infinity, which JSON cannot hold."""
_NOT_A_NUMBER = "Out of range float values"
"""In the answer of a server whose log-probabilities are NaN or infinite."""
_TIMEOUT = 60.0


class Probe(msgspec.Struct, frozen=True):
    """One sequence that the server receives."""

    tokens: tuple[int, ...]
    ids: tuple[int, ...]
    """Tokens whose log-probabilities after `tokens` are the sampled part."""
    prompt: bool
    """Whether the server also scores `tokens`. vLLM reads no prefix cache for such a request."""


class Probes(msgspec.Struct, frozen=True):
    """The probes of a run, in probes.json of the run's folder, so that a resumed trainer uses the same."""

    probes: tuple[Probe, ...]
    temperature: float
    """The run's sampling temperature, for the sampled parts."""
    first: tuple[tuple[float, ...], ...] = ()
    """The trainer's scores of the run's first receipt, per probe: prompt part, then sampled part."""

    @classmethod
    def choose(cls, samples: Sequence[Sample]) -> Probes | None:
        """Returns probes from a step's samples: three sequences, of different groups if possible. None without samples.

        The first probe begins as its sequence does, so that the server may find it in its prefix cache. The others are
        the ends of their sequences, because prompts often begin alike.
        """
        if not samples:
            return None
        first_of_groups = {sample.group_id: sample for sample in reversed(samples)}
        others = [sample for sample in samples if first_of_groups[sample.group_id] is not sample]
        chosen = [*reversed(first_of_groups.values()), *others][: 1 + _PROMPT_PROBES]
        temperature = chosen[0].temperature if chosen[0].temperature > 0 else 1.0
        return cls(tuple(_probe(sample, prompt=place > 0) for place, sample in enumerate(chosen)), temperature)

    def each_time(self) -> Probes:
        """Returns the first probe, which shows whether the server computes with new weights.

        The first receipt of a server and a failed receipt ask for all probes.
        """
        return msgspec.structs.replace(self, probes=self.probes[:1])

    def first_scores(self) -> list[ProbeScores]:
        """Returns `first` as scores, or an empty list if there was no receipt yet."""
        return [
            ProbeScores(np.array(row[: -len(probe.ids)]), np.array(row[-len(probe.ids) :]))
            for probe, row in zip(self.probes, self.first, strict=False)
        ]

    @classmethod
    def read(cls, folder: Path) -> Probes | None:
        """Reads the probes of the run in `folder`; None if the run has none yet."""
        path = folder / PROBES_FILE
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.is_file() else None

    def write(self, folder: Path) -> None:
        """Writes probes.json. Raises TrainerError if the disk is full."""
        path = folder / PROBES_FILE
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            write_file(path, msgspec.json.encode(self))


ANY_PROBES: Final = Probes((Probe((0, 1, 0, 1), (0, 1), prompt=True),), temperature=1.0)
"""Of any vocabulary, for a check of the trainer's own weights."""


def _probe(sample: Sample, *, prompt: bool) -> Probe:
    tokens = [int(token) for token in sample.tokens]
    if prompt:
        before, after = tokens[:-1][-_PROMPT_TOKENS:], tokens[-1:]
    else:
        cut = min(_CACHED_TOKENS, len(tokens) - 1)
        before, after = tokens[:cut], tokens[cut:]
    return Probe(tuple(before), tuple(dict.fromkeys([*after, *reversed(before)]))[:_IDS], prompt)


@dataclass(frozen=True, eq=False)
class ProbeScores:
    """Log-probabilities of one probe, in nats. Minus infinity for a token that cannot be sampled."""

    prompt: F64
    """f64[L - 1]: of tokens[1:]; f64[0] for a probe without a prompt part."""
    sampled: F64
    """f64[K]: of the probe's ids."""
    tokens: tuple[int, ...] | None = None
    """Tokens that the server scored, if they are not the probe's."""

    def flat(self) -> F64:
        return np.concatenate([self.prompt, self.sampled])


def distance(left: Sequence[ProbeScores], right: Sequence[ProbeScores]) -> float:
    """Returns the root mean square of the differences. Infinity if the scores are of other tokens, or if only one of
    two scores is finite."""
    rows = [(one.flat(), other.flat()) for one, other in zip(left, right, strict=True)]
    if any(len(one) != len(other) for one, other in rows):
        return float("inf")
    if any(scores.tokens is not None for scores in (*left, *right)):
        return float("inf")
    gaps = np.concatenate([np.subtract(one, other, where=one != other, out=np.zeros(len(one))) for one, other in rows])
    return float(np.sqrt(np.mean(gaps**2))) if np.isfinite(gaps).all() else float("inf")


def scale(scores: Sequence[ProbeScores]) -> float:
    """Returns the root mean square of the finite log-probabilities, and at least 1."""
    values = np.concatenate([one.flat() for one in scores])
    values = values[np.isfinite(values)]
    return max(1.0, float(np.sqrt(np.mean(values**2)))) if len(values) else 1.0


def own_scores(policy: Policy, probes: Probes) -> list[ProbeScores]:
    """Returns the scores by the policy in training. Every rank calls it, because sharded weights need every rank.

    One forward pass without a gradient. It draws no random numbers and leaves the model in its mode, so training is bit
    for bit as without it.
    """
    samples = [_sample(probe) for probe in probes.probes]
    micro = collate(
        samples,
        range(len(samples)),
        np.ones(len(samples)),
        packing=policy.scorer.packing,
        device=policy.device,
    )
    ends = torch.tensor(np.cumsum([sample.trained_tokens for sample in samples]) - 1, device=policy.device)
    temperatures = micro.temperatures.clone()
    temperatures[ends] = probes.temperature
    micro = replace(micro, temperatures=temperatures)

    def scored() -> Scores:
        with torch.no_grad(), policy.compute():
            return policy.scorer(micro)  # type: ignore[no-any-return]

    try:
        scores = scored()
    except RuntimeError as error:
        if not policy.runs_eagerly_after(error):
            raise
        scores = scored()
    assert scores.student_logprobs is not None
    logprobs = scores.logprobs.double().cpu().numpy()
    sampled = scores.student_logprobs.double().cpu().numpy()
    found, start = [], 0
    for probe, sample in zip(probes.probes, samples, strict=True):
        end = start + sample.trained_tokens
        found.append(ProbeScores(logprobs[start : end - 1], sampled[end - 1, : len(probe.ids)]))
        start = end
    return found


def _sample(probe: Probe) -> Sample:
    """Returns the probe and one token after it, whose distribution is the sampled part's."""
    tokens = np.array([*probe.tokens, probe.ids[0]], np.int32)
    trained = np.full(len(tokens), probe.prompt)
    trained[0], trained[-1] = False, True
    ids = np.full((len(tokens), len(probe.ids)), -1, np.int32)
    ids[-1] = probe.ids
    return Sample.scored(tokens, trained, Teacher(ids, np.zeros(ids.shape, np.float32)))


def served_scores(
    server: ModelServer, probes: Probes, cache_salt: str | None = None, **sampling: Any
) -> list[ProbeScores]:
    """Returns the server's scores, by one request per probe, all at once. The requests name the model and use the route
    as those of environments do.

    `cache_salt`: a text that no other request has keeps the server from reading its prefix cache. `sampling`: more
    sampling parameters, for experiments. Raises PublishError; `probe_refused` if the server does not answer probes.
    """
    params = {"temperature": probes.temperature, **sampling}
    with _answering_probes(server), ThreadPoolExecutor(len(probes.probes)) as pool:
        model = str(server.first_model()["id"])
        return list(pool.map(lambda probe: _ask(server, model, probe, cache_salt, params), probes.probes))


def _ask(
    server: ModelServer, model: str, probe: Probe, cache_salt: str | None, sampling: dict[str, Any]
) -> ProbeScores:
    # vLLM cuts the list of tokens by one if it sampled another token, so the last id is sent twice.
    ids = [*probe.ids, probe.ids[-1]]
    params: dict[str, Any] = {"top_p": 1.0, "max_tokens": 1, "detokenize": False}
    params |= {"logprobs": len(ids), "logprob_token_ids": ids}
    if probe.prompt:
        params["prompt_logprobs"] = 0
    body = generation(model, probe.tokens, params | sampling)
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    try:
        answer = server.call("POST", GENERATE, timeout=_TIMEOUT, json=body)
    except PublishError as error:
        if _NOT_A_NUMBER not in str(error):
            raise
        # The server computed NaN, which its JSON cannot hold.
        return ProbeScores(np.full(len(probe.tokens) - 1 if probe.prompt else 0, np.nan), np.full(len(ids) - 1, np.nan))
    return _read(answer.json(), probe)


@contextmanager
def _answering_probes(server: ModelServer) -> Iterator[None]:
    """Raises `probe_refused` if the server refuses a probe, or answers it without log-probabilities."""
    try:
        yield
    except PublishError as error:
        if error.values.get("status") in (400, 404, 405, 422):
            raise PublishError("probe_refused", str(error), url=server.url) from error
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PublishError(
            "probe_refused",
            f"the model server at {server.url} answers POST {GENERATE} without the log-probabilities of a probe "
            f"({error!r}); use a vLLM of the version in requirements/",
            url=server.url,
        ) from error


def _read(answer: dict[str, Any], probe: Probe) -> ProbeScores:
    first = answer["choices"][0]["logprobs"]["content"][0]
    logprobs = {int(entry["token_id"]): float(entry["logprob"]) for entry in first["top_logprobs"]}
    sampled = np.array([logprobs[token] for token in probe.ids], np.float64)
    sampled[sampled <= _CLAMPED] = -np.inf
    if not probe.prompt:
        return ProbeScores(np.zeros(0), sampled)
    # The first token has no log-probability. With prompt_logprobs 0, each other entry has one token.
    rows = [next(iter(row.items())) for row in answer["prompt_logprobs"][1:]]
    tokens = (probe.tokens[0], *(int(token) for token, _ in rows))
    prompt = np.array([float(value["logprob"]) for _, value in rows], np.float64)
    prompt[prompt <= _CLAMPED] = -np.inf
    return ProbeScores(prompt, sampled, None if tokens == probe.tokens else tokens)
