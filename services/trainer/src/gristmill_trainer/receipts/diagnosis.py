"""Names the cause of a failed receipt.

Each hypothesis names one certain fault, and the scores that a server with it would give, unless the answer alone shows
the fault. The first hypothesis whose scores agree with the server's to rounding is the cause. The trainer makes no copy
of the model for a diagnosis: the exact comparison (sums.py) finds wrong tensors.

Without a server to ask (`Case.ask`) and without a policy that computes in another dtype (`Case.in_dtype`), their
hypotheses are left out. A saved case can therefore be diagnosed as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np
import torch

from gristmill import PolicyVersion
from gristmill_trainer.receipts.probes import Probes, ProbeScores, distance

_HEAD: Final = "lm_head.weight"
_LEAST_CORRELATION: Final = 0.5
"""Of two differences with a common cause. By chance, about 80 scores reach it once in a million times."""


class Cause(StrEnum):
    """Why a server's scores differ from the trainer's. docs/reproduce.md lists the remedies."""

    VERSION_0 = "version_0_served"
    VERSION_BEFORE = "version_before_served"
    LABEL_WITHOUT_WEIGHTS = "label_without_weights"
    ADAPTER = "adapter_not_applied"
    TEMPERATURE = "temperature_not_applied"
    RAW = "raw_logprobs"
    TRUNCATION = "sampling_truncated"
    NOT_FINITE = "no_numbers"
    TOKENIZED_AGAIN = "text_tokenized_again"
    PREFIX_CACHE = "prefix_cache_stale"
    TIED_HEAD = "tied_head_stale"
    TENSORS = "tensors_missing"
    DTYPE = "dtype_differs"
    UNKNOWN = "unexplained"


_RESTART = "restart the model server; if the cause comes back, its publication does not work with this version of vLLM"
REMEDIES: Final = {
    Cause.VERSION_0: "look at the model server's log: it was restarted, or its publication fails without an error",
    Cause.VERSION_BEFORE: "look at the model server's log: it confirmed a publication that it did not carry out; check "
    "that GRISTMILL_WEIGHTS_DIR is the same volume for trainer and model server",
    Cause.LABEL_WITHOUT_WEIGHTS: "look for another program that sets the label (POST /update_weight_version), and "
    "check that GRISTMILL_WEIGHTS_DIR is the same volume for trainer and model server",
    Cause.ADAPTER: "start the model server by `python -m gristmill_model`, which sends requests for the model through "
    "the adapter, and look for 'load_adapter' in its log",
    Cause.TEMPERATURE: "remove settings that override the temperature of requests from the model server",
    Cause.RAW: "start the model server with --logprobs-mode processed_logprobs, as `python -m gristmill_model` does",
    Cause.TRUNCATION: "remove top_p, top_k and min_p from the model server's settings and its generation_config.json",
    Cause.NOT_FINITE: "the trainer's own log-probabilities are finite: start the model server with the dtype of its "
    "manifest, without quantization; if the cause comes back, report the version of vLLM",
    Cause.TOKENIZED_AGAIN: "remove the proxy or plug-in that converts tokens to text between trainer and model server",
    Cause.PREFIX_CACHE: "start the model server with --no-enable-prefix-caching, and report the version of vLLM",
    Cause.TIED_HEAD: "serve the model with a separate head, as `python -m gristmill_model` does",
    Cause.TENSORS: _RESTART,
    Cause.DTYPE: "start the model server with the dtype of its manifest, and without quantization",
    Cause.UNKNOWN: "look at the model server's log; train with --publisher none only if the difference is harmless",
}


@dataclass(frozen=True)
class Diagnosis:
    cause: Cause
    text: str
    """The server's behaviour, as a clause."""
    residual: float
    """Root mean square difference that is left under the cause, in nats."""

    @property
    def remedy(self) -> str:
        return REMEDIES[self.cause]


@dataclass(frozen=True, eq=False)
class Case:
    """A failed receipt, and everything that a diagnosis may use."""

    probes: Probes
    served: list[ProbeScores]
    own: list[ProbeScores]
    older: dict[str, list[ProbeScores]]
    """The trainer's scores of older versions by their label, the newest first: the version before, and the last version
    that this server proved."""
    bound: float
    """Nats. Hypotheses explain the gap if their scores differ from the server's by at most this."""
    version: str
    label: str = ""
    """The server's label of its weights."""
    stale: tuple[str, ...] = ()
    """Names of the server's tensors that are not as published, by an exact comparison."""
    stale_version: str = ""
    """The older version of which all compared tensors of the server are; empty if there is none."""
    served_dtype: str = ""
    """The dtype of the server's tensors, if it is not the published one."""
    adapters: bool = False
    """Whether adapters are published instead of whole weights."""
    tied: bool = False
    """Whether the trained model's head is its embedding table."""
    ask: Callable[..., list[ProbeScores]] | None = None
    """Asks the server for its scores, with other sampling parameters, as `served_scores` does."""
    in_dtype: Callable[[torch.dtype], list[ProbeScores]] | None = None
    """Returns the trainer's scores of the version, computed in a dtype."""
    raw: list[ProbeScores] | None = None
    """For an archived answer: the trainer's scores without the temperature. The archive has one score per position, so
    no other temperature and no truncation can be found in it."""


class _Found(NamedTuple):
    cause: Cause
    text: str
    scores: list[ProbeScores] | None = None
    """Scores of a server with this fault; None if the answer or an experiment shows the fault."""


def diagnose(case: Case) -> Diagnosis:
    """Returns the first cause that explains the case, else `unexplained` with the closest hypothesis in its text."""
    closest = Diagnosis(Cause.UNKNOWN, "", float("inf"))
    for hypotheses in (_tokens, _compared, _stored, _sampling, _experiments, _dtypes):
        judged = [_judged(one, case) for one in hypotheses(case)]
        best = min(judged, key=lambda one: one.residual, default=closest)
        if best.residual <= case.bound:
            return best
        closest = min(closest, best, key=lambda one: one.residual)
    gap = distance(case.served, case.own)
    text = f"no known cause explains the difference of {gap:.2g} nats"
    if closest.residual < 0.5 * gap:
        text += f" (closest is {closest.cause}, which leaves {closest.residual:.2g})"
    return Diagnosis(Cause.UNKNOWN, text, gap)


def _judged(found: _Found, case: Case) -> Diagnosis:
    residual = 0.0 if found.scores is None else distance(case.served, found.scores)
    return Diagnosis(found.cause, found.text, residual)


# --- Without any computation -------------------------------------------------------------------------------------
def _tokens(case: Case) -> Iterator[_Found]:
    """The server's log-probabilities are no numbers, or all of them are minus infinity, which vLLM sends for NaN.

    Or the server scored other tokens, as its answer shows.
    """
    if not any(np.isfinite(scores.flat()).any() for scores in case.served):
        yield _Found(Cause.NOT_FINITE, "its log-probabilities are NaN or infinite")
    if any(scores.tokens is not None for scores in case.served):
        yield _Found(Cause.TOKENIZED_AGAIN, "it converts the tokens of a request to text and back")


def _compared(case: Case) -> Iterator[_Found]:
    """Tensors of the server are not the published ones, exactly."""
    if case.stale_version:
        is_first = PolicyVersion.parse(case.stale_version).step == 0 and case.stale_version not in case.older
        yield _Found(Cause.VERSION_0 if is_first else _older_cause(case), _older_text(case, case.stale_version))
    elif case.stale:
        kinds = list(dict.fromkeys(map(_kind, case.stale)))
        head = kinds == [_HEAD] and case.tied
        text = "its tied head is" if head else f"its tensors {', '.join(kinds)} are"
        yield _Found(Cause.TIED_HEAD if head else Cause.TENSORS, f"{text} not those that were published")


def _kind(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _older_cause(case: Case) -> Cause:
    return Cause.LABEL_WITHOUT_WEIGHTS if case.label == case.version else Cause.VERSION_BEFORE


def _older_text(case: Case, version: str) -> str:
    return f"it has the weights of version {version} under the label {case.label or 'unknown'}"


def _stored(case: Case) -> Iterator[_Found]:
    """The server's scores are the trainer's scores of an older version."""
    step = PolicyVersion.parse(case.version).step
    first = (case.probes.first_scores() or None) if step > 0 else None
    if case.adapters and first is not None:
        # New adapters change nothing, so the base model's scores are those of version 0.
        yield _Found(Cause.ADAPTER, "it answers as the model without the adapter", first)
    for version, scores in case.older.items():
        yield _Found(_older_cause(case), _older_text(case, version), scores)
    if first is not None and not case.adapters:
        yield _Found(Cause.VERSION_0, "it has the weights with which it was started", first)


# --- The distribution that the server samples from ----------------------------------------------------------------
def _sampling(case: Case) -> Iterator[_Found]:
    """Another distribution at the sampled part, of the same weights: the prompt parts agree."""
    if case.raw is not None:
        yield _Found(Cause.RAW, "it ignores the temperature, at least in its log-probabilities", case.raw)
        return
    if not _prompts_agree(case):
        return
    fit = _temperature(case)
    if fit is not None:
        temperature, fitted = fit
        if abs(temperature - 1) < 1e-2 and _ignores_top_k(case):
            text = "it returns log-probabilities of the logits before it applies the temperature"
            yield _Found(Cause.RAW, text, fitted)
        else:
            text = f"it samples at temperature {temperature:.3g}, and requests ask for {case.probes.temperature:g}"
            yield _Found(Cause.TEMPERATURE, text, fitted)
    shifted = _truncated(case)
    if shifted is not None:
        yield _Found(Cause.TRUNCATION, "it cuts off unlikely tokens, although requests ask for all of them", shifted)


def _prompts_agree(case: Case) -> bool:
    served = [replace(one, sampled=np.zeros(0)) for one in case.served if len(one.prompt)]
    own = [replace(one, sampled=np.zeros(0)) for one in case.own if len(one.prompt)]
    return not served or distance(served, own) <= case.bound


def _temperature(case: Case) -> tuple[float, list[ProbeScores]] | None:
    """Returns the temperature that fits best, and the scores under it; None if a token has no finite score.

    A log-probability is z / T minus a constant of the position. Centred scores are therefore proportional to 1 / T.
    """
    served, own = ([one.sampled for one in scores] for scores in (case.served, case.own))
    if not all(np.isfinite(values).all() for values in served):
        return None
    left, right = (np.concatenate([values - values.mean() for values in scores]) for scores in (served, own))
    ratio = float(left @ right) / max(float(right @ right), 1e-30)
    spread = float(np.sqrt(np.mean(right**2)))
    if ratio <= 0 or abs(ratio - 1) * spread <= case.bound:
        return None
    fitted = [
        replace(one, sampled=mine.mean() + ratio * (other.sampled - other.sampled.mean()))
        for one, mine, other in zip(case.own, served, case.own, strict=True)
    ]
    return case.probes.temperature / ratio, fitted


def _ignores_top_k(case: Case) -> bool:
    """Whether log-probabilities are of the logits before processing: with top_k 1, processed ones are 0 or infinite."""
    if case.ask is None:
        return False
    answers = case.ask(case.probes, top_k=1)
    return all(np.isfinite(one.sampled).all() for one in answers)


def _truncated(case: Case) -> list[ProbeScores] | None:
    """Returns the own scores with the server's cut-off tokens, and the rest raised by the same constant per probe."""
    scores, cut = [], False
    for served, own in zip(case.served, case.own, strict=True):
        there = np.isfinite(served.sampled)
        rise = float(np.mean(served.sampled[there] - own.sampled[there])) if there.any() else 0.0
        if rise < -case.bound:
            return None
        cut |= not there.all() or rise > case.bound
        scores.append(replace(own, sampled=np.where(there, own.sampled + rise, served.sampled)))
    return scores if cut else None


# --- Experiments with the server ------------------------------------------------------------------------------------
def _experiments(case: Case) -> Iterator[_Found]:
    if case.ask is not None and _prompts_agree(case):
        salted = case.ask(case.probes, cache_salt=f"receipt-{case.version}")
        if distance(salted, case.own) <= case.bound:
            yield _Found(Cause.PREFIX_CACHE, "it continues from keys and values of older weights in its prefix cache")


# --- Dtypes ---------------------------------------------------------------------------------------------------
def _dtypes(case: Case) -> Iterator[_Found]:
    """The server has tensors of another dtype, or computes in one. Two programs in a short dtype do not agree exactly.

    Both round the weights alike, and the results of their arithmetic differently. A dtype therefore explains the gap if
    the gap has the size of the dtype's rounding in this process, and is correlated with it. With |a| = gap, |b| =
    rounding and |a - b| = left, the correlation is (|a|^2 + |b|^2 - |a - b|^2) / 2|a||b|. vLLM in bfloat16 and torch in
    bfloat16 gave 0.83; two faults without a common cause give about 0.
    """
    if case.served_dtype:
        yield _Found(Cause.DTYPE, f"its tensors are {case.served_dtype}")
    if case.in_dtype is None:
        return
    gap = distance(case.served, case.own)
    for dtype in (torch.bfloat16, torch.float16):
        scores = case.in_dtype(dtype)
        rounding, left = distance(scores, case.own), distance(scores, case.served)
        is_alike = 0.2 * rounding <= gap <= 5 * rounding
        if is_alike and gap**2 + rounding**2 - left**2 >= _LEAST_CORRELATION * 2 * gap * rounding:
            yield _Found(Cause.DTYPE, f"it computes in {str(dtype).removeprefix('torch.')}")
