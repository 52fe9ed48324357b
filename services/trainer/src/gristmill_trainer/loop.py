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

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
import torch

from gristmill import ApiError, ErrorCode, GristmillError
from gristmill.metrics import METRICS_FILE, StepMetrics
from gristmill_trainer.checkpoint import BackgroundSave, Progress
from gristmill_trainer.data.types import Sample
from gristmill_trainer.disk import writing
from gristmill_trainer.errors import AbandonedError, WeightsError
from gristmill_trainer.export import RunFacts, export_model
from gristmill_trainer.hooks import StepEvent
from gristmill_trainer.metrics import StepResult, step_metrics
from gristmill_trainer.quarantine import SkipRecord
from gristmill_trainer.receipts import ANY_PROBES, Expectation, Probes, own_scores
from gristmill_trainer.settings import TrainerSettings
from gristmill_trainer.stop import StoppedError
from gristmill_trainer.training import MainRank, Training

_LOG = logging.getLogger(__name__)
# Seconds of one long-poll for groups; between polls the trainer checks the model server.
_POLL = 5.0


def train(training: Training) -> None:
    """Trains to `training_steps`, on every rank. Raises StoppedError on every rank if a stop is requested before."""
    with completing_checkpoint(training):
        take_steps(training)


def take_steps(training: Training) -> None:
    """Trains from `first_step` to `training_steps`, and finishes the run."""
    settings, learner, phases, on_main = training.settings, training.learner, training.phases, training.on_main
    step = training.first_step
    reward: float | None = None
    publish(training, step)

    while step < settings.training_steps:
        with phases("wait"), checkpoint_on_stop(training, step):
            on_main(wait_for_batch, step + 1, training.saving)
        with phases("pack"):
            samples = on_main(batch_samples)
        with phases("publish"):
            begin_receipts(training, samples, step)
        learning_rate = learner.learning_rate
        with phases("train"):
            try:
                result = optimizer_step(training, samples, step + 1)
            except AbandonedError as abandoned:
                leave_step(training, step, abandoned)
        step += 1
        on_main(record_outcome, step, result)
        # Metrics come before the checkpoint, so that every step in a checkpoint has metrics even after a kill.
        with checkpoint_on_stop(training, step):
            metrics = on_main(report, step, result, learning_rate, phases.take(), training.run_dir)
        reward = metrics.reward_mean
        check_weights(training, step)
        if on_main(is_checkpoint_due, step, settings):
            with phases("checkpoint"):
                begin_checkpoint(training, step)
        on_main(lambda main: main.skipped.raise_if_too_many())
        with phases("publish"), checkpoint_on_stop(training, step):
            publish(training, step, moved=learning_rate > 0 and result.moved)
        with checkpoint_on_stop(training, step):
            on_main(call_hook, metrics)

    finish(training, step, reward)


def wait_for_batch(main: MainRank, step: int, saving: BackgroundSave) -> None:
    """Waits without a time limit for the groups of `step`, and for the receipts of the weights that sampled them.

    Meanwhile acks the groups of a checkpoint that became durable, or raises the error of its thread.
    """
    main.watchdog.begin()
    main.batch = None
    while main.batch is None:
        main.stop.raise_if_requested()
        main.guard.progress()
        ack_durable(main, saving.poll())
        main.batch = main.batches.get(step, _POLL)
        if main.batch is None:
            torch.cuda.empty_cache()  # A model server on the same GPU may need the memory, for example to restart.
            # A restarted server serves its first weights again, while the environment waits for this trainer's weights.
            main.publisher.ensure()
            main.watchdog.check(str(main.version(step - 1)), publishing=main.publisher.publishing)
    main.publisher.settle()  # The receipts arrive while the environment samples, so this seldom waits.


def batch_samples(main: MainRank) -> list[Sample]:
    """Returns the samples of the current step's groups."""
    assert main.batch is not None
    return main.batch.prepared.samples


def optimizer_step(training: Training, samples: list[Sample], step: int) -> StepResult:
    """Takes one optimizer step. Raises AbandonedError if a stop is requested and too little time is left."""
    started = time.monotonic()
    slowest, saving = training.phases.slowest, training.saving

    def should_continue() -> bool:  # Called on rank 0 only.
        main = training.main
        assert main is not None
        main.guard.progress()
        # A checkpoint that is being written ends beside the step. The last checkpoint follows both.
        left = max(slowest.get("train", 0.0) - (time.monotonic() - started), saving.seconds_left, 0.0)
        return not main.stop.should_abandon(left + max(slowest.get("checkpoint", 0.0), saving.slowest))

    return training.learner.step(samples, step, should_continue)


def check_weights(training: Training, step: int) -> None:
    """Raises WeightsError on every rank if the weights after `step` steps give no numbers.

    The trainer then ends without a checkpoint or a publication of these weights. Its groups return to the queue, and
    the next trainer continues from the last checkpoint.
    """
    training.state.check_finite(step)
    probes = None if training.probing is None else training.probing.probes
    scores = own_scores(training.learner.policy, probes or ANY_PROBES)
    if not all(np.isfinite(one.flat()).all() for one in scores):
        raise WeightsError(
            "weights_give_nan",
            f"the weights after step {step} are finite and so large that their log-probabilities are not; they are "
            "neither published nor saved. Lower learning_rate or max_grad_norm, and start the trainer again: it "
            "continues from the last checkpoint",
            step=step,
        )


def leave_step(training: Training, step: int, abandoned: AbandonedError) -> NoReturn:
    """Abandons the step after `step`: saves finished steps, gives its groups back, and raises StoppedError."""
    if abandoned.untouched:
        checkpoint(training, step)
    else:
        training.on_main(finish_checkpoint, training.saving)
    training.on_main(give_back, step + 1)


def give_back(main: MainRank, step: int) -> NoReturn:
    """Returns the groups of `step` to the queue, and raises StoppedError."""
    main.session.give_back(step)
    raise StoppedError(
        "stopped",
        "stopped on request within a step; its groups are ready again, and the next start continues from the last "
        "checkpoint",
        given_back=step,
    )


def record_outcome(main: MainRank, step: int, result: StepResult) -> None:
    """Records the outcome of the step's groups. Quarantines the groups if nothing was trained or an update left out."""
    assert main.batch is not None
    main.session.trained(step)
    main.digests.trained(step, [group.group_id for group in main.batch.groups])
    problem = result.skipped or result.problem
    if problem is None:
        main.skipped.trained()
        return
    groups = main.batch.groups
    file = main.quarantine.write(
        groups,
        SkipRecord(
            step=step,
            version=str(main.version(step - 1)),
            problem=problem,
            loss=str(result.loss),
            grad_norm=str(result.grad_norm),
            group_ids=[group.group_id for group in groups],
        ),
    )
    main.skipped.skipped(file, problem)


def report(
    main: MainRank, step: int, result: StepResult, learning_rate: float, seconds: dict[str, float], run_dir: Path
) -> StepMetrics:
    """Sends the step's metrics to metrics.jsonl, the API, the display and the observers.

    If the API refuses a row, as for an invalid metric name, the trainer logs a warning and continues. The row is then
    only missing in the API.
    """
    assert main.batch is not None
    metrics: StepMetrics = step_metrics(
        main.version(step),
        main.batch.prepared.statistics,
        result,
        seconds,
        learning_rate=learning_rate,
        device=main.device,
        devices=main.devices,
        peak=main.peak_tflops,
    )
    if main.receipts is not None:
        metrics = msgspec.structs.replace(metrics, **main.receipts.take().metrics())
    values = metrics.values()
    with writing(run_dir / METRICS_FILE):
        main.metrics.append({"step": step, **values})
    try:
        main.session.report_metrics(step, values)
    except ApiError as error:
        if error.code != "bad_request":
            raise
        _LOG.warning("the API takes no metrics of step %d, which are in the run's folder: %s", step, error)
    if main.records is not None:
        main.records.add(main.version(step), main.batch.prepared, result)
    main.display.step(metrics)
    main.observers.step(metrics)
    return metrics


def is_checkpoint_due(main: MainRank, step: int, settings: TrainerSettings) -> bool:
    """Whether to write a checkpoint after `step`: it is the step's turn, or the training is about to end."""
    due = step % settings.checkpoint_interval == 0 or step == settings.training_steps
    return due or main.stop.requested or main.skipped.too_many


@contextmanager
def checkpoint_on_stop(training: Training, step: int) -> Iterator[None]:
    """Writes a checkpoint with all finished steps before an end between two steps, on every rank.

    Such an end is a stop request (StoppedError) or a suspended run (ApiError).
    """
    try:
        yield
    except StoppedError:
        checkpoint(training, step)
        raise
    except ApiError as error:
        # The API refuses acks of a suspended run. The trainer that resumes the run reports the covered groups.
        if error.code == ErrorCode.SUSPENDED:
            save(training, step)
        raise


@contextmanager
def completing_checkpoint(training: Training) -> Iterator[None]:
    """Lets the checkpoint in progress become durable before an error ends the training.

    After a GristmillError its groups get no ack, because the API may be unreachable or the run may have another
    trainer. The run's next trainer names them.
    """
    try:
        yield
    except BaseException as error:
        if training.main is not None and training.saving.pending:
            try:
                durable = training.saving.join()
                if not isinstance(error, GristmillError):
                    ack_durable(training.main, durable)
            except GristmillError as other:
                _LOG.error("after the error that ends the training, its last checkpoint failed too: %s", other)
        raise


def has_trained(main: MainRank) -> bool:
    """Whether groups were trained since the last ack."""
    return bool(main.session.covered)


def begin_checkpoint(training: Training, step: int) -> None:
    """Copies the state and lets a thread write it. First waits for the previous checkpoint.

    Returns when the checkpoint is durable and its groups have their ack: with several ranks, and if the training is
    about to end by a stop request or by too many skipped steps.
    """
    with checkpoint_on_stop(training, step):
        training.on_main(finish_checkpoint, training.saving)
    staged = None if training.on_main(is_ending) else training.state.staged()
    if staged is None:
        checkpoint(training, step)
        return
    main = training.main
    assert main is not None
    training.saving.begin(training.checkpoints, staged, progress(main, step), main.digests)


def is_ending(main: MainRank) -> bool:
    return main.stop.requested or main.skipped.too_many


def finish_checkpoint(main: MainRank, saving: BackgroundSave) -> None:
    """Waits for the checkpoint in progress, if there is one, and acks its groups."""
    ack_durable(main, saving.join())


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
    durable = training.on_main(lambda main: training.saving.join())
    if durable == step or not training.on_main(has_trained):
        return
    digests = None if training.main is None else training.main.digests
    training.checkpoints.save(training.state, training.on_main(progress, step), digests)


def progress(main: MainRank, step: int) -> Progress:
    """Returns the progress after `step` steps, for a checkpoint."""
    return Progress(
        step=step,
        version=main.version(step),
        last_batch=main.session.batch_id(step),
        covered=main.session.covered,
        skipped=main.skipped.files,
        origin=main.origin,
        creation=main.session.run.creation,
    )


def publish(training: Training, step: int, *, moved: bool = False) -> None:
    """Gathers the weights from every rank, and publishes them on rank 0. `moved`: the step changed the weights."""
    tensors = training.state.served_tensors()
    expect_scores(training, step, moved=moved)
    training.on_main(lambda main: main.publisher.publish(tensors, main.version(step)))


def begin_receipts(training: Training, samples: list[Sample], step: int) -> None:
    """Chooses the probes of a new run from its first batch, and asks for receipts of the served weights.

    `step`: steps done, so that the weights are still the published ones.
    """
    probing = training.probing
    if probing is None or probing.probes is not None:
        return
    probing.probes = Probes.choose(samples)
    if probing.probes is not None:
        expect_scores(training, step, moved=False)
        training.on_main(lambda main: main.publisher.wait())


def expect_scores(training: Training, step: int, *, moved: bool) -> None:
    """Computes the probes' scores for the version after `step` steps, now that the weights are of this version."""
    probes = None if training.probing is None else training.probing.probes
    if probes is None:
        return
    expectation = Expectation(own_scores(training.learner.policy, probes), moved)

    def expect(main: MainRank) -> None:
        assert main.receipts is not None
        main.receipts.expect(probes, main.version(step), expectation)

    training.on_main(expect)


def call_hook(main: MainRank, metrics: StepMetrics) -> None:
    """Calls the user's function, unless a stop is requested: the hook may take minutes of the grace period."""
    main.stop.raise_if_requested()
    if main.hook is not None:
        with main.guard.unwatched("on_step"):
            main.hook(StepEvent(main.session.run.run_id, metrics, tuple(server.url for server in main.servers)))
        main.stop.raise_if_requested()


def finish(training: Training, step: int, reward: float | None) -> None:
    """Waits for the last checkpoint and publication, exports the model and finishes the run."""
    training.on_main(finish_checkpoint, training.saving)
    training.on_main(lambda main: main.publisher.wait())
    facts = training.on_main(final_facts, step, reward)
    folder, tokenizer = training.run_dir / "model", training.learner.policy.source.tokenizer
    export_model(folder, training.state.save_whole, tokenizer, facts, training.dist)
    training.on_main(finish_run, step, folder)


def final_facts(main: MainRank, step: int, reward: float | None) -> RunFacts:
    found = None if main.receipts is None else main.receipts.proven()
    return replace(main.facts, policy_version=str(main.version(step)), final_reward=reward, receipts=found)


def finish_run(main: MainRank, step: int, model: Path) -> None:
    """Ends the run in the API, and pushes the folder `model` to the hub."""
    main.session.finish()
    if main.hub is not None:
        with main.guard.unwatched("push_to_hub"):
            main.hub.push(model)
    _LOG.info("run %s is finished after %d steps; its model: %s", main.session.run.run_id, step, model)
