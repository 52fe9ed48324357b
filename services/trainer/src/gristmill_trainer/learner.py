"""Optimizer steps on samples. The learner does not depend on any server.

    learner = Learner(policy, optimizer, settings)
    result = learner.step(samples, step=1)

A step trains on one batch: `num_epochs` passes, each in `minibatches` updates. The old policy of the ratio is the
policy before the first update. All sums are over all micro-batches and ranks. Packing, gradient accumulation and the
number of processes therefore change a result only by rounding.

So an update that runs out of memory is repeated with half the tokens per micro-batch, and has the same result.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch
from msgspec.structs import replace
from torch.distributed.tensor import DTensor

from gristmill import Hyperparameters
from gristmill_trainer.data.micro_batches import F64, MicroPlan, collate, divide, dummy, split
from gristmill_trainer.data.prefixes import Tree
from gristmill_trainer.data.types import F32, MicroBatch, Sample, rollouts_of
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.errors import AbandonedError, OutOfMemoryError
from gristmill_trainer.hooks import load_function
from gristmill_trainer.metrics import ModelFlops, StepResult, TokenStats
from gristmill_trainer.objectives import Objective, TrainedTokens, token_weights
from gristmill_trainer.objectives.losses import of_user
from gristmill_trainer.optimizer import learning_rate
from gristmill_trainer.out_of_memory import MemoryLimits, RankOutOfMemoryError, is_out_of_memory
from gristmill_trainer.policy import Policy
from gristmill_trainer.settings import TrainerSettings

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_Limit = Literal["too_long", "too_long_to_score"]


@dataclass(frozen=True)
class _Update:
    loss: float
    grad_norm: float
    token_stats: TokenStats
    order: tuple[int, ...]
    """Index, among the step's samples, of each sequence in `token_stats`."""
    flops: int
    """0 if the model's are unknown."""


class Learner:
    """The policy and its optimizer. With several ranks, each calls the same methods with the same arguments."""

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        settings: TrainerSettings,
        *,
        max_completion_length: int | None = None,
        budget: Callable[[], int | None] | None = None,
        limits: MemoryLimits | None = None,
        copied_key: float = 0.0,
        reference: Policy | None = None,
        dist: DistContext | None = None,
    ) -> None:
        """`max_completion_length`: the divisor of dr_grpo, unless the settings have one. `budget`: returns
        the most tokens of a micro-batch, unless the settings have a token_budget; called once, at the first batch,
        because a model server on the same GPU may sleep by then. A longer sequence is one micro-batch. `limits`: of
        earlier starts with several ranks. `copied_key`: the share of a token's memory that a copied key of a shared
        prefix takes. `reference`: scores samples without reference log-probabilities for the KL penalty. LoRA does not
        need it: the reference is then the policy without its adapters."""
        self.policy = policy
        self.optimizer = optimizer
        own = settings.policy_loss
        self.objective = Objective.of(settings, of_user(load_function(own, "policy_loss"), own) if own else None)
        self._settings = settings
        self._max_completion_length = settings.max_completion_length or max_completion_length
        self._reference = reference
        self._dist = dist or DistContext()
        self.sharing = policy.scorer.sharing and (reference is None or reference.scorer.sharing)
        """Whether a prefix that samples of a group share is computed once."""
        self._copied_key = copied_key
        self._limits = limits or MemoryLimits()
        self._find_budget = self._own_budget = budget if settings.token_budget is None else None
        self._budget = min(filter(None, (settings.token_budget, self._limits.token_budget)), default=None)
        """Most tokens of a micro-batch; halved after an update that ran out of memory."""
        self._halved = 0
        """How often the budget was halved in the current step."""
        self._flops = ModelFlops.of(policy.model)

    def step(
        self, samples: Sequence[Sample], step: int, should_continue: Callable[[], bool] = lambda: True
    ) -> StepResult:
        """Trains on `samples`, the whole batch of optimizer step `step`, on every rank.

        An update with a non-finite loss or gradient is left out and does not change the policy. An update without a
        trained token is left out too, because AdamW's momentum would change the policy.
        Rank 0 calls `should_continue` before each micro-batch. If it returns False, every rank raises AbandonedError.
        """
        settings = self._settings
        self._halved = 0
        seed_all(settings.seed, step)
        self._learning_rate = learning_rate(settings, step)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate
        try:
            samples = self._with_reference(samples, should_continue)
            if settings.updates_per_step > 1:
                samples = self._with_old_logprobs(samples, should_continue)
        except OutOfMemoryError as error:
            return self._nothing(str(error))
        rollouts = rollouts_of(samples)
        groups = [samples[first].group_id for first in np.unique(rollouts, return_index=True)[1]]
        updates: list[_Update] = []
        left_out: list[_Update] = []
        too_large = 0
        problem = None
        if not any(sample.trained_tokens for sample in samples):
            return self._nothing("nothing is left of its groups to train on")
        for epoch in range(settings.num_epochs):
            for part in split(groups, settings.minibatches, seed=settings.seed, step=step, epoch=epoch):
                part = tuple(np.flatnonzero(np.isin(rollouts, part)).tolist())
                members = [samples[number] for number in part]
                if not any(sample.trained_tokens for sample in members):
                    continue
                try:
                    accumulate = partial(self._update, members, should_continue, untouched=not updates)
                    update = self._in_memory(members, accumulate)
                except OutOfMemoryError as error:
                    problem = str(error)
                    too_large += 1
                    _LOG.error("step %d: %s; this update is left out", step, problem)
                    continue
                update = dataclasses.replace(update, order=tuple(part[place] for place in update.order))
                found = _not_finite(update)
                if found is None:
                    self._take_step()
                else:
                    problem = found
                    _LOG.error("step %d: %s; this update is left out", step, problem)
                (updates if found is None else left_out).append(update)
                self.optimizer.zero_grad(set_to_none=True)
        if not updates and not left_out:
            assert problem is not None
            return self._nothing(problem, left_out=too_large)
        reported = updates or left_out
        computed = [samples[place] for update in (*updates, *left_out) for place in update.order]
        return StepResult(
            loss=float(np.mean([update.loss for update in reported])),
            grad_norm=float(np.mean([update.grad_norm for update in reported])),
            token_stats=TokenStats.join([update.token_stats for update in reported]),
            tokens=sum(map(len, computed)),
            trained_tokens=sum(sample.trained_tokens for sample in computed),
            flops=None if self._flops is None else sum(update.flops for update in (*updates, *left_out)),
            skipped=None if updates else problem,
            left_out=len(left_out) + too_large,
            problem=problem,
            halved=self._halved,
            learning_rate=self._learning_rate,
            order=tuple(place for update in reported for place in update.order),
        )

    def _take_step(self) -> None:
        """Changes the policy. Raises OutOfMemoryError, which ends the training: a part of the weights may have changed.

        The first step allocates the optimizer's moments.
        """
        try:
            self.optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
            raise OutOfMemoryError(
                "optimizer_out_of_memory",
                f"the optimizer's step does not fit in the memory of {self.policy.device} ({reason}); set "
                "lora_rank, lower token_budget, or use more GPUs",
            ) from error

    def logprobs(
        self,
        samples: Sequence[Sample],
        policy: Policy | None = None,
        should_continue: Callable[[], bool] = lambda: True,
    ) -> list[F32]:
        """Returns float32[L] per sample: log-probabilities of its trained tokens, 0 for other tokens. No gradient.

        `policy`: default is the policy in training. `should_continue`: as in `step`.
        """
        scored = policy or self.policy
        return self._in_memory(samples, lambda: self._scored(samples, scored, should_continue), "too_long_to_score")

    def _scored(self, samples: Sequence[Sample], scored: Policy, should_continue: Callable[[], bool]) -> list[F32]:
        found: dict[int, F32] = {}
        with torch.no_grad(), scored.compute():
            for micro in self._micro_batches(samples, np.zeros(len(samples))):
                self._check_abort(should_continue, untouched=True)
                scores = scored.scorer(micro)
                flat = scores.logprobs.float().cpu().numpy()
                for number in micro.index:
                    values = np.zeros(len(samples[number]), np.float32)
                    own, flat = np.split(flat, [samples[number].trained_tokens])
                    values[samples[number].trained] = own
                    found[number] = values
        everywhere = {number: values for share in self._dist.gather(found) for number, values in share.items()}
        return [everywhere[number] for number in range(len(samples))]

    def _nothing(self, reason: str, left_out: int = 0) -> StepResult:
        return StepResult(skipped=reason, left_out=left_out, halved=self._halved, learning_rate=self._learning_rate)

    def _in_memory(self, samples: Sequence[Sample], call: Callable[[], _T], limit: _Limit = "too_long") -> _T:
        """Returns the result of `call`, which computes micro-batches of `samples`. `limit`: the one that it observes.

        Halves the tokens per micro-batch and repeats the call while the memory runs out. Repeats the call without
        torch.compile if that fails. Raises OutOfMemoryError if the longest sequence alone does not fit. With several
        ranks, raises RankOutOfMemoryError in place of a repetition.
        """
        longest = max((self._tokens(samples, unit) for unit in self._units(samples)), default=0)
        too_long = getattr(self._limits, limit)
        if too_long is not None and longest >= too_long:
            raise self._does_not_fit(longest, longest, "in an earlier start of this training")
        while True:
            try:
                return call()
            except (RuntimeError, MemoryError) as error:
                if self.policy.runs_eagerly_after(error):
                    self._find_budget = self._own_budget  # which counted on compiled layers
                    self.optimizer.zero_grad(set_to_none=True)
                    continue
                if not is_out_of_memory(error):
                    self._dist.raise_if_lost(error)
                    raise
                reason = str(error).partition("\n")[0]
            # Only here, behind the handler, nothing refers to the tensors of the failed micro-batch any more.
            self.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()
            self._halve_budget(samples, longest, limit, reason)

    def _halve_budget(self, samples: Sequence[Sample], longest: int, limit: _Limit, reason: str) -> None:
        """`longest`: tokens of the longest of the samples that are computed alone."""
        tokens = max(self._tokens(samples, micro or ()) for share in self._plan(samples) for micro in share)
        # With shared prefixes, parts of a group may cost a little more together than apart. So a budget of the longest
        # sequence may have a larger micro-batch, and is not halved again.
        fits = min(tokens, self._budget or tokens) > longest
        half = max(tokens // 2, longest)
        if self._dist.size > 1:
            limits = replace(self._limits, token_budget=half) if fits else replace(self._limits, **{limit: longest})
            raise RankOutOfMemoryError(
                f"a micro-batch of {tokens} tokens, whose longest sequence has {longest}, does not fit in the memory of"
                f" {self.policy.device} ({reason}). Start all ranks again, unless that happens by itself. They continue"
                f" from the last checkpoint, and {limits}",
                limits,
            )
        if not fits:
            raise self._does_not_fit(tokens, longest, reason)
        self._budget = half
        self._halved += 1
        _LOG.warning(
            "a micro-batch of %d tokens does not fit in memory (%s); the update is repeated with token_budget: %d, and "
            "has the same result. To save the time, write token_budget: %d into the trainer's settings",
            tokens,
            reason,
            self._budget,
            self._budget,
        )

    def _does_not_fit(self, tokens: int, longest: int, reason: str) -> OutOfMemoryError:
        return OutOfMemoryError(
            "out_of_memory",
            f"a micro-batch of {tokens} tokens, whose longest sequence has {longest}, does not fit in the memory of"
            f" {self.policy.device} ({reason}); lower token_budget or max_token_length, or set "
            "gradient_checkpointing: true or lora_rank",
            tokens=tokens,
            longest=longest,
        )

    def _update(self, samples: Sequence[Sample], should_continue: Callable[[], bool], *, untouched: bool) -> _Update:
        """Accumulates and clips the gradient of one update."""
        weights = sample_weights(samples, self._settings, self._max_completion_length)
        entropy_weight = 1.0 / max(sum(sample.trained_tokens for sample in samples), 1)
        losses, rows = [], []
        order: list[int] = []
        flops = 0
        for micro in self._micro_batches(samples, weights):
            self._check_abort(should_continue, untouched=untouched)
            with self.policy.compute():
                scores = self.policy.scorer(
                    micro, entropy="gradient" if self.objective.wants_entropy_gradient else "value"
                )
            if not micro.index or not len(micro.targets):
                # A micro-batch without a trained token adds nothing to the loss or entropy, and a user's loss may need
                # a token. It only takes part in the collectives, as a dummy does.
                (0.0 * scores.logprobs.sum()).backward()
                order += micro.index
                continue
            assert scores.entropy is not None
            old = scores.logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
            # Tokens without recorded rollout log-probabilities use the old policy's.
            rollout = torch.where(micro.rollout_logprobs.isnan(), old, micro.rollout_logprobs)
            tokens = TrainedTokens(
                logprobs=scores.logprobs,
                old_logprobs=old,
                rollout_logprobs=rollout,
                advantages=micro.advantages,
                weights=micro.weights,
                sequence=micro.sequence,
                sequences=micro.sequences,
                entropy=scores.entropy,
                entropy_weight=entropy_weight,
                ref_logprobs=micro.ref_logprobs,
                teacher_logprobs=micro.teacher_logprobs,
                student_logprobs=scores.student_logprobs,
            )
            loss, ratios = self.objective.loss(tokens)
            # FSDP averages gradients over the ranks, but the losses of the ranks must be summed.
            (loss * self._dist.size).backward()  # type: ignore[no-untyped-call]
            # Values stay on the device until the end of the update, so the GPU can start the next micro-batch.
            order += micro.index
            if self._flops is not None:
                flops += self._flops.step(micro.tokens, micro.layout.squares, len(micro.targets))
            losses.append(loss.detach())
            rows.append(TokenStats.rows(tokens, ratios))
        grad_norm = self._clip_gradient()
        loss_sum = sum(loss.item() for loss in losses)
        shares = self._dist.gather((loss_sum, TokenStats.of(rows), order, flops))
        return _Update(
            loss=sum(share[0] for share in shares),
            grad_norm=grad_norm,
            token_stats=TokenStats.join([share[1] for share in shares]),
            order=tuple(place for share in shares for place in share[2]),
            flops=sum(share[3] for share in shares),
        )

    def _clip_gradient(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.policy.trained_parameters(), self._settings.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _micro_batches(self, samples: Sequence[Sample], weights: np.ndarray) -> Iterator[MicroBatch]:
        """Yields this rank's micro-batches, each built on demand while a GPU still computes the previous one.

        All ranks have equally many, because FSDP's collectives need every rank.
        """
        packing, device = self._settings.packing, self.policy.device
        for index in self._plan(samples)[self._dist.rank]:
            if index is None:
                yield dummy(device, packing=packing)
            else:
                yield collate(samples, index, weights, packing=packing, sharing=self.sharing, device=device)

    def _plan(self, samples: Sequence[Sample]) -> list[list[MicroPlan | None]]:
        units = self._units(samples)
        lengths = [self._tokens(samples, unit) for unit in units]
        batch_size = max(self._settings.batch_size * len(units) // max(len(samples), 1), 1)
        if self._find_budget is not None:
            found, self._find_budget = self._find_budget(), None
            self._budget = min(filter(None, (found, self._budget)), default=None)
        budget = self._budget
        if budget is not None and budget != self._settings.token_budget:
            budget = max([budget, *lengths])  # It was computed, or halved in a step of shorter sequences.
        return divide(
            samples,
            units,
            partial(self._tokens, samples),
            budget=budget,
            batch_size=batch_size,
            ranks=self._dist.size,
            sharing=self.sharing,
        )

    def _tokens(self, samples: Sequence[Sample], numbers: Sequence[int]) -> int:
        """Returns the tokens that a micro-batch of the samples computes, and those that its copied keys count as."""
        whole = sum(len(samples[number]) for number in numbers)
        if not self.sharing or len(numbers) < 2:
            return whole
        tree = Tree.of([samples[number] for number in numbers])
        return min(tree.tokens + int(self._copied_key * tree.copied), whole)

    def _units(self, samples: Sequence[Sample]) -> list[tuple[int, ...]]:
        """Returns the indices of the samples that must be in one micro-batch: each sample alone, or each rollout."""
        rollouts = rollouts_of(samples).tolist() if self._settings.joins_branches else list(range(len(samples)))
        units: dict[int, list[int]] = {}
        for number, rollout in enumerate(rollouts):
            units.setdefault(rollout, []).append(number)
        return [tuple(unit) for unit in units.values()]

    def _check_abort(self, should_continue: Callable[[], bool], *, untouched: bool) -> None:
        if not self._dist.on_main(should_continue):
            self.optimizer.zero_grad(set_to_none=True)
            raise AbandonedError("step_abandoned", "the step was given up", untouched=untouched)

    def _with_old_logprobs(self, samples: Sequence[Sample], should_continue: Callable[[], bool]) -> list[Sample]:
        logprobs = self.logprobs(samples, should_continue=should_continue)
        return [dataclasses.replace(one, old_logprobs=old) for one, old in zip(samples, logprobs, strict=True)]

    def _with_reference(self, samples: Sequence[Sample], should_continue: Callable[[], bool]) -> Sequence[Sample]:
        if not self.objective.wants_reference or all(sample.ref_logprobs is not None for sample in samples):
            return samples
        with nullcontext() if self._reference is not None else self.policy.without_adapters():
            logprobs = self.logprobs(samples, self._reference, should_continue)
        return [
            one if one.ref_logprobs is not None else dataclasses.replace(one, ref_logprobs=ref)
            for one, ref in zip(samples, logprobs, strict=True)
        ]


def seed_all(seed: int, step: int = 0) -> None:
    """Seeds Python's, numpy's and torch's generators for a step, or for the model's creation, alike on every rank.

    So the random numbers of a step, which only a user's loss draws, are the same after a resume.
    """
    number = int(np.random.SeedSequence((seed % (1 << 64), step)).generate_state(1)[0]) if step else seed
    random.seed(number)
    np.random.seed(number % (1 << 32))
    torch.manual_seed(number)


def sample_weights(samples: Sequence[Sample], settings: Hyperparameters, max_completion_length: int | None) -> F64:
    """Returns float64[len(samples)]: the weight of each trained token of a sample in the loss of the update.

    `samples`: the whole update, before it is split into micro-batches. The branches of a rollout count as one sequence.
    """
    rollouts = rollouts_of(samples)
    trained = np.bincount(rollouts, [sample.trained_tokens for sample in samples]).astype(np.int64)
    return token_weights(settings.objective, trained, settings.batch_size, max_completion_length)[rollouts]


def _not_finite(update: _Update) -> str | None:
    for name, value in (("loss", update.loss), ("gradient norm", update.grad_norm)):
        if not math.isfinite(value):
            return f"the {name} is {value}"
    return None
