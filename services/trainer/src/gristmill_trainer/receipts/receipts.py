"""Judges each server's answers to the probes, and writes receipts.jsonl.

`difference` is the root mean square, over all scores of all probes, of the server's log-probability minus the
trainer's. The first receipt of a server measures the difference d0 of two programs that compute with the same weights.
With the rounding unit eps of the coarser of the two dtypes, and s the root mean square of the log-probabilities (at
least 1):

    first receipt:     ok if  d0 <= 1024 eps s
    bound              = max(4 d0, 8 eps s, 64 eps32 s) rounding of other values is up to a few times larger
    later receipts:    ok if  difference <= bound
    no first bound exceeds max(s, 4) / 32, 4 units of bfloat16, and no later bound twice as much, because later receipts
    ask for fewer scores, which scatter more

eps32 is the rounding unit of float32, in which both programs add up. A sum of many terms loses many of these units, and
a low d0 of the first weights does not bound the rounding of trained weights, whose logits are larger.

A step is proven to be on the server in one of two ways. The answer differs from the trainer's scores of the version
before by more than the bound: it is then no answer of that version. Or the server's tensors are compared with the
published ones exactly (sums.py), and one that the step changed is equal. After a change that neither shows, the receipt
is `unproven`, although the answers agree. A tensor that is not as published fails the receipt. The first receipt of a
server shows which of its tensors can be compared, as a server may transform some. A tensor of an older version is none
of these, and a resumed training knows from receipts.jsonl how many there are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from gristmill import PolicyVersion
from gristmill.internal.lines import JsonlWriter
from gristmill.internal.logs import line
from gristmill.internal.receipts import RECEIPTS_FILE, Proven, Receipt, ReceiptState, proven, read_receipts
from gristmill_trainer.disk import writing
from gristmill_trainer.errors import PublishError
from gristmill_trainer.policy import Policy
from gristmill_trainer.policy.model import tied_head
from gristmill_trainer.publish.servers import ModelServer
from gristmill_trainer.receipts.diagnosis import Case, Cause, Diagnosis, diagnose
from gristmill_trainer.receipts.probes import Probes, ProbeScores, distance, scale, served_scores
from gristmill_trainer.receipts.sums import Comparison, Sums, compare, served_sums

_LOG = logging.getLogger(__name__)
_FIRST_UNITS: Final = 1024
"""Rounding units by which a first receipt may differ. float32: 1.2e-4 s. Kernels differ by 10 to 100 units."""
_LARGEST_FIRST: Final = 1 / 32
"""Share of the size of the log-probabilities that no first bound exceeds, in any dtype: 4 rounding units of bfloat16.
Right weights of SmolLM2 differ by 1.7 units over three probes, and the closest of 21 wrong models by 6."""
_LARGEST_LATER: Final = 1 / 16
"""The same for later receipts. Of 60 single probes of SmolLM2, the right weights differ by up to 2.6 units."""
_LEAST_SIZE: Final = 4.0
"""Least size for the cap, in nats. The logit of a likely token rounds too, although its log-probability is near 0."""
_FLOOR_UNITS: Final = 8
_FLOOR_UNITS_FLOAT32: Final = 64
_TIMES_FIRST: Final = 4
_KEPT: Final = 4
"""Versions whose scores are kept: a server in the background may be a version or two behind."""


@dataclass(frozen=True)
class Expectation:
    """The trainer's scores for one version."""

    scores: list[ProbeScores]
    sums: Sums
    """Of the published tensors."""
    moved: bool
    """Whether a published tensor is not that of the version before."""


@dataclass(frozen=True)
class Answered:
    """The last receipt of a server that did not fail."""

    version: PolicyVersion
    served: list[ProbeScores]
    own: list[ProbeScores]
    """The trainer's, of all probes."""


@dataclass
class _Server:
    """What the receipts of one server have shown."""

    measured: float | None = None
    """`_TIMES_FIRST` times the difference of the first receipt, in nats; None before the first receipt."""
    answered: Answered | None = None
    refused: bool = False
    """Whether the log says that the server answers no probes."""
    comparable: frozenset[str] | None = None
    """Names of the tensors that the server holds as they are published; None before its first receipt."""
    compared: int = 0
    """Number of those tensors in the last receipt before this process; 0 if there is none."""


class Receipts:
    """The receipts of one training, on rank 0. The threads that publish to the servers call it.

    It implements `publish.pool.Proof`.
    """

    def __init__(
        self,
        folder: Path,
        policy: Policy,
        probes: Probes | None = None,
        first_step: int | None = None,
    ) -> None:
        """`folder`: the run's. `policy`: in training. `probes`: of a resumed run. `first_step`: receipts of later
        steps, which a resumed training repeats, are removed; None removes all, for a training that begins."""
        self._folder, self._rounding = folder, rounding_of(policy)
        self._adapters, self._tied = policy.publishes_adapters, tied_head(policy.model) is not None
        self._file = JsonlWriter(
            folder / RECEIPTS_FILE, keep=lambda row: first_step is not None and bool(row["step"] <= first_step)
        )
        self._written = read_receipts(folder / RECEIPTS_FILE)
        self._taken = len(self._written)
        """Receipts in earlier rows of metrics."""
        self._servers: dict[str, _Server] = defaultdict(_Server)
        for one in self._written:
            if one.state is not ReceiptState.FAILED and one.bound > 0:
                known = self._servers[one.server]
                known.measured = min(one.bound, known.measured or one.bound)
                known.compared = one.compared
        self._probes = probes
        self._expected: dict[PolicyVersion, Expectation] = {}
        self._first: tuple[PolicyVersion, Expectation] | None = None
        """Of the first version that this process published."""
        self._lock = threading.Lock()

    def expect(self, probes: Probes, version: PolicyVersion, scores: list[ProbeScores], sums: Sums) -> None:
        """Sets the trainer's scores for `version`, and the sums of its published tensors. Call it before the
        publication.

        The first call of a run writes the probes and its scores to the run's folder.
        """
        with self._lock:
            if self._probes is None:
                first = tuple(tuple(one.flat().tolist()) for one in scores)
                self._probes = msgspec.structs.replace(probes, first=first)
                self._probes.write(self._folder)
            before = self._expected.get(PolicyVersion(version.incarnation, version.step - 1))
            moved = before is not None and before.sums != sums
            self._expected[version] = Expectation(scores, sums, moved)
            self._first = self._first or (version, self._expected[version])
            for old in sorted(self._expected)[:-_KEPT]:
                del self._expected[old]

    def expects(self, version: PolicyVersion) -> bool:
        """Whether the trainer's scores for `version` are known, so that a server can be asked for a receipt."""
        with self._lock:
            return version in self._expected

    def check(self, server: ModelServer, version: PolicyVersion, attempt: int) -> PublishError | None:
        """Asks the server for its receipt. If the receipt fails, leaves the server out and returns its error.

        `attempt`: 1, or 2 after the version was published again. Raises PublishError if the server does not answer, or
        if the trainer's scores for the version are not kept any more.
        """
        with self._lock:
            expectation, probes = self._expected.get(version), self._probes
            before = self._expected.get(PolicyVersion(version.incarnation, version.step - 1))
            known = self._servers[server.url]
            last, measured, comparable = known.answered, known.measured, known.comparable
        if expectation is None:
            raise PublishError(
                "receipt_outdated",
                f"{server.url} took so long that newer versions than {version} are published; it gets the newest one",
                url=server.url,
                version=str(version),
            )
        assert probes is not None
        started = time.monotonic()
        try:
            served = served_scores(server, probes if measured is None else probes.each_time())
        except PublishError as error:
            if error.code != "probe_refused":
                raise
            self._unanswered(server, version, attempt, measured or 0.0, error)
            return None
        sums = [] if comparable == frozenset() else served_sums(server)
        compared = compare(sums, expectation.sums)
        if comparable is None:
            comparable = compared.equal | self._old_tensors(sums, compared, known.compared, version)
        equal, stale = compared.equal & comparable, compared.other & comparable
        seconds = time.monotonic() - started
        own = expectation.scores[: len(served)]
        difference = distance(served, own)
        size = scale(own)
        allowed = first_bound(self._rounding, size)
        if measured is not None:
            allowed = later_bound(measured, self._rounding, size)
        elif difference <= allowed:
            measured = _TIMES_FIRST * difference
        bound = None if measured is None else later_bound(measured, self._rounding, size)
        older = None if before is None else before.scores[: len(own)]
        fails = bool(stale) or not difference <= allowed or bound is None
        seen = older is not None and bound is not None and distance(served, older) > bound
        exact = before is not None and _shown(equal, expectation.sums, before.sums)
        state = ReceiptState.OK if seen or exact or not expectation.moved else ReceiptState.UNPROVEN
        receipt = Receipt(
            step=version.step,
            version=str(version),
            server=server.url,
            state=ReceiptState.FAILED if fails else state,
            compared=len(equal) + len(stale),
            difference=_finite(difference),
            bound=allowed if bound is None else bound,
            change=None if last is None else _finite(_change(served, last.served)),
            wanted_change=None if older is None else distance(own, older),
            seconds=seconds,
            attempt=attempt,
        )
        if receipt.state is ReceiptState.FAILED:
            case = Case(
                probes=probes,
                served=served if len(served) == len(probes.probes) else served_scores(server, probes),
                own=expectation.scores,
                older=_older(version, before, last),
                bound=receipt.bound,
                version=str(version),
                stale=tuple(sorted(stale)),
                stale_version=self._version_of(sums, comparable, version) if stale else "",
                served_dtype=compared.dtype,
                adapters=self._adapters,
                tied=self._tied,
                label=server.served_version(),
                ask=partial(served_scores, server),
            )
            server.leave_out()
            return self._explain(case, receipt)
        with self._lock:
            known.answered = Answered(version, served, expectation.scores)
            known.measured, known.comparable = measured, comparable
        self._write(receipt)
        return None

    def _explain(self, case: Case, receipt: Receipt) -> PublishError:
        """Diagnoses a failed receipt, writes it, and returns its error."""
        try:
            diagnosis = diagnose(case)
        except PublishError:
            raise
        except Exception as error:  # noqa: BLE001  An error of the diagnosis must not end the training.
            _LOG.exception("the diagnosis of the failed receipt of %s failed", receipt.server)
            problem = f"the diagnosis failed: {type(error).__name__}: {error}"
            diagnosis = Diagnosis(Cause.UNKNOWN, problem, receipt.difference or float("inf"))
        detail = f"{diagnosis.text}; {diagnosis.remedy}"
        receipt = msgspec.structs.replace(receipt, cause=diagnosis.cause, detail=detail)
        self._write(receipt)
        _LOG.error(
            line(
                "receipt",
                state="failed",
                version=receipt.version,
                server=receipt.server,
                cause=diagnosis.cause,
                difference=None if receipt.difference is None else f"{receipt.difference:.2g}",
                bound=f"{receipt.bound:.2g}",
                detail=detail,
            )
        )
        return PublishError(
            "receipt_failed",
            f"the model server at {receipt.server} does not serve version {receipt.version}, which was published to it:"
            f" {diagnosis.text} [{diagnosis.cause}]. Remedy: {diagnosis.remedy}",
            url=receipt.server,
            version=receipt.version,
            cause=diagnosis.cause,
            difference=receipt.difference,
            bound=receipt.bound,
        )

    def take(self) -> list[Receipt]:
        with self._lock:
            new, self._taken = self._written[self._taken :], len(self._written)
        return new

    def proven(self) -> Proven:
        """Counts the run's publications with receipts, and the proven publications among them."""
        with self._lock:
            return proven(self._written)

    def close(self) -> None:
        self._file.close()

    def _old_tensors(
        self, sums: Sequence[Sums], compared: Comparison, before: int, version: PolicyVersion
    ) -> frozenset[str]:
        """Returns the tensors that differ at a server's first receipt in this process because they are of another
        version. The server transforms the others. `before`: how many tensors were comparable in an earlier process.

        With fewer comparable tensors than before, each one that differs may be old.
        """
        if len(compared.equal) < before and not compared.dtype:
            return compared.other
        with self._lock:
            known = [*self._expected.items(), *([self._first] if self._first else [])]
        of_older = (compare(sums, one.sums).equal for older, one in known if older < version)
        return compared.other & frozenset[str]().union(*of_older)

    def _version_of(self, sums: Sequence[Sums], names: frozenset[str], version: PolicyVersion) -> str:
        """Returns the older version of which all these tensors of a server are; empty if no known version has them."""
        with self._lock:
            known = [*sorted(self._expected.items(), reverse=True), *([self._first] if self._first else [])]
        for older, expectation in known:
            if older < version and compare(sums, expectation.sums).equal >= names:
                return str(older)
        return ""

    def _unanswered(
        self, server: ModelServer, version: PolicyVersion, attempt: int, bound: float, error: PublishError
    ) -> None:
        with self._lock:
            state = self._servers[server.url]
            is_first, state.refused = not state.refused, True
        if is_first:
            _LOG.warning("no receipts of the model server at %s: %s", server.url, error)
        self._write(
            Receipt(
                step=version.step,
                version=str(version),
                server=server.url,
                state=ReceiptState.UNPROVEN,
                difference=None,
                bound=bound,
                attempt=attempt,
                detail=str(error),
            )
        )

    def _write(self, receipt: Receipt) -> None:
        with self._lock:
            with writing(self._folder / RECEIPTS_FILE):
                self._file.append(receipt)
            self._written.append(receipt)


def receipt_metrics(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Returns the fields of StepMetrics about the receipts of a step: the largest difference, the smallest change."""
    if not receipts:
        return {}
    return {
        "receipts": dict(Counter(str(one.state) for one in receipts)),
        "receipt_difference": max((one.difference for one in receipts if one.difference is not None), default=None),
        "receipt_change": min((one.change for one in receipts if one.change is not None), default=None),
        "receipt_seconds": max(one.seconds for one in receipts),
    }


def first_bound(rounding: float, size: float) -> float:
    """Returns the largest difference, in nats, of the first comparison of trainer and server.

    `rounding`: `rounding_of` the policy. `size`: `scale` of the trainer's scores.
    """
    return min(_FIRST_UNITS * rounding * size, _LARGEST_FIRST * max(size, _LEAST_SIZE))


def later_bound(measured: float, rounding: float, size: float) -> float:
    """Returns the largest difference, in nats, of a comparison after one that gave the bound `measured`.

    `rounding`, `size`: as in `first_bound`.
    """
    floor = max(_FLOOR_UNITS * rounding, _FLOOR_UNITS_FLOAT32 * torch.finfo(torch.float32).eps) * size
    return min(max(measured, floor), _LARGEST_LATER * max(size, _LEAST_SIZE))


def rounding_of(policy: Policy) -> float:
    """Returns the rounding unit (torch.finfo.eps) of the coarser of the server's and the trainer's dtypes."""
    return max(torch.finfo(dtype).eps for dtype in (policy.arithmetic, policy.served_dtype))


def _shown(equal: frozenset[str], now: Sums, before: Sums) -> bool:
    """Whether tensors that are `equal` to the published ones show the step: one changed, or no published tensor did."""
    return any(now[name] != before.get(name) for name in equal) or (bool(equal) and now == before)


def _older(version: PolicyVersion, before: Expectation | None, last: Answered | None) -> dict[str, list[ProbeScores]]:
    """Returns the scores of the version before, and of the last version that the server proved."""
    older = {}
    if before is not None:
        older[str(PolicyVersion(version.incarnation, version.step - 1))] = before.scores
    if last is not None and last.version != version:
        older.setdefault(str(last.version), last.own)
    return older


def _change(now: list[ProbeScores], before: list[ProbeScores]) -> float:
    """Returns the distance of the probes that both receipts have."""
    common = min(len(now), len(before))
    return distance(now[:common], before[:common])


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
