"""The training loop.

Each step of reinforcement learning leases scored groups of completions from the trajectory API and takes an optimizer
step on the loss in objectives/. The trainer then publishes the new weights to the running model server. It acks the
groups once a durable checkpoint covers them. In one process, a thread writes the checkpoint beside the next steps.

A kill at any point loses no group, and the surviving weights contain no group twice. Groups without an ack return to
the queue. The next trainer of the run settles the groups that the last checkpoint covers.

Every rank runs this loop. The functions that take a `MainRank` run on rank 0 alone, through `Training.on_main`: they
call the API and the model server, and write the files.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from gristmill import ApiError, ErrorCode, GristmillError
from gristmill.internal.metrics import StepMetrics
from gristmill_trainer.checkpoint.contents import Progress
from gristmill_trainer.data.types import Sample
from gristmill_trainer.errors import AbandonedError, WeightsError
from gristmill_trainer.export import RunFacts, export_model
from gristmill_trainer.hooks import StepEvent
from gristmill_trainer.metrics import StepResult
from gristmill_trainer.out_of_memory import RankOutOfMemoryError
from gristmill_trainer.policy.model import no_visit
from gristmill_trainer.receipts.probes import ANY_PROBES, Probes, ProbeScores, own_scores
from gristmill_trainer.receipts.receipts import receipt_metrics
from gristmill_trainer.receipts.sums import PublishedSums
from gristmill_trainer.settings import TrainerSettings
from gristmill_trainer.stop import StoppedError
from gristmill_trainer.training import MainRank, Training

_LOG = logging.getLogger(__name__)
# Seconds of one long-poll for groups; between polls the trainer checks the model server.
_POLL = 5.0


def train(training: Training) -> None:
    """Trains to `training_steps` and finishes the run, on every rank.

    Raises StoppedError on every rank if a stop is requested before.
    """
    phases, done = training.phases, training.first_step
    publish(training, done)
    try:
        while done < training.settings.training_steps:
            samples = lease(training, done + 1)
            with phases("publish"):
                sleep(training)
            with phases("train"):
                result = training.learner.step(samples, done + 1, within_grace(training))
            done += 1
            metrics = record(training, done, result)
            scores = check_weights(training, done)
            checkpoint_if_due(training, done)
            with phases("publish"):
                publish(training, done, scores)
            training.on_main(after_step, metrics)
    except BaseException as error:
        try:
            end(training, done, error)
        finally:
            wake(training, error)
        raise
    finish(training, done)


def end(training: Training, done: int, error: BaseException) -> None:
    """Saves the finished steps, as far as the `error` that ends the loop allows. `done`: their number.

    - A stop request: writes a checkpoint. Within a step, also returns the groups of the step and raises StoppedError.
    - A suspended run: writes a checkpoint without an ack, which the API refuses. The trainer that resumes the run
      reports the covered groups.
    - A rank without memory: writes what did not fit, so that the next start has smaller micro-batches.
    - Any other error: completes the checkpoint in progress. After a GristmillError its groups get no ack, because the
      API may be unreachable or the run may have another trainer. The run's next trainer names them.
    """
    if isinstance(error, RankOutOfMemoryError):
        error.limits.write(training.run_dir, training.settings, training.dist.size)
    if isinstance(error, AbandonedError):
        if error.untouched:
            checkpoint(training, done)
        else:
            training.on_main(finish_checkpoint)
        training.on_main(give_back, done + 1)
    elif isinstance(error, StoppedError):
        checkpoint(training, done)
    elif isinstance(error, ApiError) and error.code == ErrorCode.SUSPENDED:
        save(training, done)
    elif training.main is not None and training.main.saving.pending:
        try:
            durable = training.main.saving.join()
            if not isinstance(error, GristmillError):
                ack_durable(training.main, durable)
        except GristmillError as other:
            _LOG.error("after the error that ends the training, its last checkpoint failed too: %s", other)


# --- The parts of a step ----------------------------------------------------------------------------------------------
def lease(training: Training, step: int) -> list[Sample]:
    """Returns the samples of `step` on every rank, once its groups and the receipts of the served weights are there."""
    has_batch = False
    while not has_batch:
        with training.phases("wait"):
            has_batch = training.on_main(wait_for_batch, training.settings, step)
        if not has_batch:
            checkpoint_if_due(training, step - 1)
    with training.phases("pack"):
        samples = training.on_main(lambda main: main.batches.leased.prepared.samples)
    with training.phases("publish"):
        begin_receipts(training, samples, step - 1)
    return samples


def wait_for_batch(main: MainRank, settings: TrainerSettings, step: int) -> bool:
    """Waits without a time limit for the groups of `step`, and for the receipts of the weights that sampled them.

    Meanwhile acks the groups of a checkpoint that became durable, or raises the error of its thread. Returns False if a
    checkpoint of the steps before is due first, because the store may be full of groups that only its ack frees.
    """
    batches, publisher = main.batches, main.publisher
    if batches.step != step:
        batches.watchdog.begin()
        batches.step, batches.current = step, None
    while batches.current is None:
        main.stop.raise_if_requested()
        main.guard.progress()
        ack_durable(main, main.saving.poll())
        batches.current = batches.source.get(step, _POLL)
        if batches.current is None:
            if main.saving.is_due(step - 1, settings.checkpoint_seconds):
                return False
            torch.cuda.empty_cache()  # A model server on the same GPU may need the memory, for example to restart.
            # A restarted server serves its first weights again, while the environment waits for this trainer's weights.
            publisher.ensure()
            batches.watchdog.check(str(main.session.version(step - 1)), publishing=publisher.publishing)
    publisher.settle()  # The receipts arrive while the environment samples, so this seldom waits.
    return True


def within_grace(training: Training) -> Callable[[], bool]:
    """Returns a function that returns False if a stop was requested and the step, which begins now, cannot end in time.

    The function is called on rank 0 only.
    """
    started = time.monotonic()
    slowest = training.phases.slowest

    def should_continue() -> bool:
        main = training.main
        assert main is not None
        saving = main.saving
        main.guard.progress()
        # A checkpoint that is being written ends beside the step. The last checkpoint follows both.
        left = max(slowest.get("train", 0.0) - (time.monotonic() - started), saving.seconds_left, 0.0)
        return not main.stop.should_abandon(left + max(slowest.get("checkpoint", 0.0), saving.slowest))

    return should_continue


def record(training: Training, step: int, result: StepResult) -> StepMetrics:
    """Records the outcome and the metrics of `step`.

    Call it before the checkpoint, so that every step in a checkpoint has metrics even after a kill.
    """
    seconds = training.phases.take()

    def on_main(main: MainRank) -> StepMetrics:
        main.ledger.trained(main.batches.leased, result)
        receipts = () if main.receipts is None else main.receipts.take()
        return main.reports.step(main.batches.leased, result, seconds, receipt_metrics(receipts))

    return training.on_main(on_main)


def check_weights(training: Training, step: int) -> list[ProbeScores]:
    """Returns the trainer's scores of the probes. Raises WeightsError on every rank if the weights after `step` steps
    give no numbers.

    The trainer then ends without a checkpoint or a publication of these weights. Its groups return to the queue, and
    the next trainer continues from the last checkpoint.
    """
    training.state.check_finite(step)
    scores = own_scores(training.learner.policy, training.probes or ANY_PROBES)
    if not all(np.isfinite(one.flat()).all() for one in scores):
        raise WeightsError(
            "weights_give_nan",
            f"the weights after step {step} are finite and so large that their log-probabilities are not; they are "
            "neither published nor saved. Begin a run from the last checkpoint (RUN_ID=..., --resume PATH) with a "
            "lower learning_rate or max_grad_norm",
            step=step,
        )
    return scores


def checkpoint_if_due(training: Training, step: int) -> None:
    """Copies the state and lets a thread write it, if it is the step's turn or the training is about to end.

    First waits for the previous checkpoint. Returns when the checkpoint is durable and its groups have their ack: with
    several ranks, and if the training is about to end. Raises TrainerError after too many skipped steps.
    """
    if training.on_main(is_checkpoint_due, training.settings, step):
        with training.phases("checkpoint"):
            training.on_main(finish_checkpoint)
            staged = None if training.on_main(lambda main: main.is_ending) else training.state.staged()
            if staged is None:
                checkpoint(training, step)
            else:
                main = training.main
                assert main is not None
                main.saving.begin(training.checkpoints, staged, main.ledger.progress(step), main.ledger.digests)
    training.on_main(lambda main: main.ledger.skipped.raise_if_too_many())


def is_checkpoint_due(main: MainRank, settings: TrainerSettings, step: int) -> bool:
    """Whether to write a checkpoint after `step`: it is the step's turn, or the training is about to end."""
    interval = settings.checkpoint_interval
    by_count = isinstance(interval, int) and step % interval == 0
    its_turn = by_count or main.saving.is_due(step, settings.checkpoint_seconds)
    return its_turn or step == settings.training_steps or main.is_ending


def sleep(training: Training) -> None:
    """Lets the model servers free their memory on the GPU until the next publication, if they can."""
    if training.servers_sleep:
        training.on_main(lambda main: main.publisher.sleep())


def wake(training: Training, error: BaseException) -> None:
    """Ends a sleep without a publication, when `error` ends the training within a step.

    The servers need the memory of the step, to which the frames of the error refer.
    """
    if not training.servers_sleep:
        return
    chain: BaseException | None = error
    cleared = set[int]()
    while chain is not None and id(chain) not in cleared:  # An error that is raised again may have itself as a cause.
        traceback.clear_frames(chain.__traceback__)
        cleared.add(id(chain))
        chain = chain.__cause__ or chain.__context__
    training.learner.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    with suppress(RuntimeError):  # After an error of CUDA, every call of CUDA fails.
        torch.cuda.empty_cache()
    if training.main is not None and (asleep := training.main.publisher.wake()):
        _LOG.warning("%s may sleep until another trainer publishes", ", ".join(asleep))


def publish(training: Training, step: int, scores: Sequence[ProbeScores] | None = None) -> None:
    """Gathers the weights from every rank, and publishes them on rank 0. `scores`: of the probes by these weights, if
    they are known."""
    tensors, sums = served_tensors(training)
    expect(training, step, sums, scores)
    if training.servers_sleep:
        torch.cuda.empty_cache()  # The servers need the memory of the step.
    training.on_main(lambda main: main.publisher.publish(tensors, main.session.version(step)))


def served_tensors(training: Training) -> tuple[dict[str, torch.Tensor], PublishedSums]:
    """Returns the tensors to publish and their sums for the receipts, on rank 0; nothing on other ranks."""
    sums = PublishedSums()
    if training.settings.publisher == "none":
        return {}, sums
    visit = no_visit if training.probes is None else sums.add
    on_device = training.settings.publishes_from_device
    return training.learner.policy.served_tensors(on_device=on_device, visit=visit), sums


def begin_receipts(training: Training, samples: list[Sample], step: int) -> None:
    """Chooses the probes of a new run from its first batch, and asks for receipts of the served weights.

    `step`: steps done, so that the weights are still the published ones.
    """
    if training.settings.publisher == "none" or training.probes is not None:
        return
    training.probes = Probes.choose(samples)
    if training.probes is not None:
        _, sums = served_tensors(training)
        expect(training, step, sums)
        training.on_main(lambda main: main.publisher.wait())


def expect(training: Training, step: int, sums: PublishedSums, scores: Sequence[ProbeScores] | None = None) -> None:
    """Computes what a server of the version after `step` steps answers, now that the weights are of this version.

    `sums`: of the published tensors, on rank 0. `scores`: as in `publish`.
    """
    probes = training.probes
    if probes is None:
        return
    wanted = own_scores(training.learner.policy, probes) if scores is None else list(scores)

    def receipts(main: MainRank) -> None:
        assert main.receipts is not None
        main.receipts.expect(probes, main.session.version(step), wanted, sums)

    training.on_main(receipts)


def after_step(main: MainRank, metrics: StepMetrics) -> None:
    """Calls the user's function, unless a stop is requested: the hook may take minutes of the grace period."""
    main.stop.raise_if_requested()
    if main.hook is not None:
        event = StepEvent(main.session.run.run_id, metrics, tuple(server.url for server in main.servers))
        with main.guard.unwatched("on_step"):
            main.hook(event)
        main.stop.raise_if_requested()


# --- Checkpoints and acks ---------------------------------------------------------------------------------------------
def finish_checkpoint(main: MainRank) -> None:
    """Waits for the checkpoint in progress, if there is one, and acks its groups."""
    ack_durable(main, main.saving.join())


def ack_durable(main: MainRank, step: int | None) -> None:
    """Acks the groups up to `step`, of a durable checkpoint. None: does nothing."""
    if step is not None:
        main.session.ack(step)


def checkpoint(training: Training, step: int) -> None:
    """Returns when the weights are on disk, and the groups that they were trained on have their ack."""
    save(training, step)
    training.on_main(lambda main: main.session.ack())


def save(training: Training, step: int) -> None:
    """Writes the weights to disk, with the ids of the groups trained since the last ack; not if there are none.

    First waits for the checkpoint in progress, whose groups have no ack yet.
    """
    progress, main = training.on_main(unsaved_progress, step), training.main
    if progress is not None:
        began = time.monotonic()
        training.checkpoints.save(training.state, progress, None if main is None else main.ledger.digests)
        if main is not None:
            main.saving.wrote(step, began)


def unsaved_progress(main: MainRank, step: int) -> Progress | None:
    """Returns the progress after `step`; None if no groups were trained since the last ack, or if a durable checkpoint
    of `step` names them."""
    main.saving.join()
    return main.ledger.progress(step) if main.saving.durable != step and main.session.covered else None


def give_back(main: MainRank, step: int) -> NoReturn:
    """Returns the groups of `step` to the queue, and raises StoppedError."""
    main.session.give_back(step)
    raise StoppedError(
        "stopped",
        "stopped on request within a step; its groups are ready again, and the next start continues from the last "
        "checkpoint",
        given_back=step,
    )


# --- The end of the run -----------------------------------------------------------------------------------------------
def finish(training: Training, step: int) -> None:
    """Waits for the last checkpoint and publication, exports the model and finishes the run."""
    training.on_main(finish_checkpoint)
    training.on_main(lambda main: main.publisher.wait())
    facts = training.on_main(final_facts, step)
    folder, tokenizer = training.run_dir / "model", training.learner.policy.source.tokenizer
    export_model(folder, training.learner.policy.save_whole, tokenizer, facts, training.dist)
    training.on_main(finish_run, step, folder)


def final_facts(main: MainRank, step: int) -> RunFacts:
    last = main.reports.last
    return replace(
        main.finish.facts,
        policy_version=str(main.session.version(step)),
        final_reward=None if last is None else last.reward_mean,
        receipts=None if main.receipts is None else main.receipts.proven(),
    )


def finish_run(main: MainRank, step: int, model: Path) -> None:
    """Pushes the folder `model` to the hub, and ends the run in the API. The run ends even if the push fails, because
    a new push needs no training.

    The push comes first: environment and launcher stop when the run has ended, and an upload may last longer than they
    wait for the trainer.
    """
    try:
        if main.finish.hub is not None:
            with main.guard.unwatched("push_to_hub"):
                main.finish.hub.push(model)
    finally:
        main.session.finish()
    _LOG.info("run %s is finished after %d steps; its model: %s", main.session.run.run_id, step, model)
