"""Creation of a `Training` from the command line: settings, model, checkpoint and run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Literal

from httpx import URL

from gristmill import (
    ApiError,
    Deployment,
    ErrorCode,
    LeaseSession,
    Manifest,
    Protocol,
    RunRecord,
    SyncClient,
    TrajectoryGroup,
)
from gristmill.archive.trained import TRAINED_FOLDER
from gristmill.internal.lines import JsonlWriter
from gristmill.internal.metrics import METRICS_FILE
from gristmill.internal.prometheus import metrics_endpoint
from gristmill.internal.stall import StallGuard, StallLimits
from gristmill.model_servers import split_urls
from gristmill_trainer.batch_source import BatchSource, Prefetch
from gristmill_trainer.checkpoint.background import BackgroundSave
from gristmill_trainer.checkpoint.digests import DigestWriter, TrainerFacts
from gristmill_trainer.checkpoint.store import CheckpointStore, Resumption, find_resumption
from gristmill_trainer.data.checks import Limits, staleness_bound
from gristmill_trainer.data.samples import Prepared, to_samples
from gristmill_trainer.display import Display
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.export import Hub, RunFacts, public_command
from gristmill_trainer.hooks import load_function
from gristmill_trainer.learner_factory import LearnerPlan, build_learner
from gristmill_trainer.metrics import peak_of, step_metrics
from gristmill_trainer.observers import open_observers
from gristmill_trainer.out_of_memory import MemoryLimits
from gristmill_trainer.policy import ModelSource, Policy, check_publishable, find_model
from gristmill_trainer.publish.device_memory import DeviceMemoryTransport
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.publisher import FilesystemTransport, Publisher, claim_publishing
from gristmill_trainer.publish.sender import WeightSender
from gristmill_trainer.publish.servers import ServerList
from gristmill_trainer.quarantine import SkippedSteps
from gristmill_trainer.receipts.probes import Probes
from gristmill_trainer.receipts.receipts import Receipts
from gristmill_trainer.records import TrainedRecords
from gristmill_trainer.run import announce, noticing_replacement, open_atropos_run, raise_if_replaced, wait_for_run
from gristmill_trainer.settings import (
    TrainerSettings,
    dataset_name,
    longest_completion,
    read_flags,
    read_settings,
    reward_names,
    trainer_block,
)
from gristmill_trainer.stop import StopRequest, leave_to_rank_0, torchrun_grace
from gristmill_trainer.training import Batches, Finish, Ledger, MainRank, Phases, Reports, Training
from gristmill_trainer.watchdog import Wanted, Watchdog

_LOG = logging.getLogger(__name__)
STALL = StallLimits(floor=1800, frozen=7200, multiple=10)
"""Limits are long because a first step may compile for minutes, and a checkpoint's disk may be slow."""
# Seconds to retry an unresponsive API after an error ended the training.
_PATIENCE_AT_THE_END = 5.0


@contextmanager
def start(arguments: Sequence[str], environ: Mapping[str, str], dist: DistContext) -> Iterator[Training]:
    """Waits for a run and takes it, on rank 0; loads or resumes the model, on every rank. Closes everything at the end.

    Every rank calls it.
    """
    with dist.leaving_together(), ExitStack() as stack:
        if not dist.is_main:
            leave_to_rank_0()
        rank_0 = _MainStart(arguments, environ, dist.size, stack)
        dist.on_main(rank_0.connect)
        while True:
            plan = dist.on_main(rank_0.find_run)
            learner, state = build_learner(plan.learner, dist)
            resumption = plan.resumption
            if resumption.checkpoint is not None:
                plan.checkpoints.restore(resumption.checkpoint, state)
            policy = learner.policy
            if dist.on_main(partial(rank_0.take_run, plan, policy)):
                break
            del learner, state, policy  # A second model would not fit into the memory.
        yield Training(
            settings=plan.learner.settings,
            dist=dist,
            learner=learner,
            state=state,
            checkpoints=plan.checkpoints,
            phases=Phases(None if rank_0.main is None else rank_0.main.guard),
            first_step=plan.resumption.step,
            run_dir=plan.run_dir,
            main=rank_0.main,
            servers_sleep=plan.learner.source.sleeps(plan.learner.settings),
            probes=plan.probes,
        )


@dataclass(frozen=True)
class _Plan:
    """What rank 0 sends to every rank, once it has found the run."""

    learner: LearnerPlan
    resumption: Resumption
    checkpoints: CheckpointStore
    run_dir: Path
    probes: Probes | None
    """Of a resumed run that publishes weights."""

    @property
    def is_current(self) -> bool:
        """Whether the training still begins at this checkpoint. A step back would undo the acks of those after it."""
        resume = self.learner.settings.resume
        return find_resumption(self.checkpoints, resume, self.checkpoints.peek) == self.resumption


class _MainStart:
    """Rank 0's part of the start: `connect`, `find_run`, then `take_run` once every rank has the model.

    An environment may extend, suspend or replace the run while the model is loaded. Then `take_run` returns False, and
    the start begins again with `find_run`.

    Every rank creates it. The other ranks call none of its methods.
    """

    main: MainRank | None = None
    """Set by `take_run`."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], ranks: int, stack: ExitStack) -> None:
        """`ranks`: their number. `stack`: closes what the start opens."""
        self._arguments = arguments
        self._environ = environ
        self._ranks = ranks
        self._stack = stack

    def connect(self) -> None:
        """Handles stop signals, serves metrics, and connects to the API and the model servers."""
        self._flags = flags = read_flags(self._arguments)
        self._deployment = deployment = Deployment.read(self._environ)
        # Settings for addresses and folders are needed before the run is known.
        self._here = here = read_settings(deployment.config_dir, {}, flags, "command line")
        grace = here.stop_grace_seconds if self._ranks == 1 else torchrun_grace(self._environ)
        self._stop = stop = StopRequest(grace, torchrun=self._ranks > 1)
        self._stack.enter_context(stop.stop_on_timeout())  # Converts errors of the objects that close before it.
        with stop.stop_on_timeout():
            # Before the run is known, so that Prometheus sees a trainer that waits for a run.
            self._registry = self._stack.enter_context(
                metrics_endpoint(here.metrics_address or deployment.metrics_address, self._environ)
            )
            self._api_url = here.rollout_server_url or deployment.api_url or deployment.default_api_url
            client = SyncClient(self._api_url, token=deployment.api_token, patience=stop.patience)
            self._api = self._stack.enter_context(client)
            urls = split_urls(here.base_url or deployment.model_url or deployment.default_model_url)
            self._servers = ServerList(urls, stop.patience)

    def find_run(self) -> _Plan:
        """Waits for a run, and finds its settings, its model and the checkpoint to resume from."""
        here, deployment, stop, servers = self._here, self._deployment, self._stop, self._servers
        with stop.stop_on_timeout():
            if here.atropos_run is None:
                run = wait_for_run(self._api, deployment.stack, stop)
            else:
                longest = here.seq_len or int(servers.served().get("max_model_len") or 2048)
                run = open_atropos_run(self._api, here, longest)
            self._run = run
            settings = read_settings(deployment.config_dir, trainer_block(run), self._flags, f"run {run.run_id}")
            if self._ranks == 1:
                stop.grace = settings.stop_grace_seconds
            self._hook = None if settings.on_step is None else load_function(settings.on_step, "on_step")
            self._hub = Hub.read(settings.push_to_hub, self._environ)
            source = find_model(settings.model_name, Manifest.find(deployment.models_dir), servers.served())
            if settings.publisher != "none":
                check_publishable(settings.lora_rank, source)
            run_dir = deployment.runs_dir / run.run_id
            checkpoints = CheckpointStore(run_dir / "checkpoints", settings.checkpoints_kept, run.creation)
            resumption = find_resumption(checkpoints, settings.resume)
            if settings.lora_rank and resumption.checkpoint is not None:
                resumption.checkpoint.check_base(source.weights, source.sha256)
            self._skipped = SkippedSteps(settings.max_skipped_steps, resumption.skipped)
            self._skipped.raise_if_too_many()
            limits = MemoryLimits.read(run_dir, settings, self._ranks)
            if limits != MemoryLimits():
                _LOG.warning("an earlier start with these settings ran out of memory: %s now", limits)
        learner = LearnerPlan(source, resumption.weights, settings, longest_completion(run), limits)
        probes = None if settings.publisher == "none" or resumption.checkpoint is None else Probes.read(run_dir)
        return _Plan(learner, resumption, checkpoints, run_dir, probes)

    def take_run(self, plan: _Plan, policy: Policy) -> bool:
        """Takes the run, and opens everything that only rank 0 uses. Returns False if the run is not as planned."""
        settings, resumption = plan.learner.settings, plan.resumption
        session = LeaseSession(
            self._api,
            self._run.run_id,
            settings.record(),
            covered=resumption.covered,
            step=resumption.step,
            creation=self._run.creation,
        )
        with self._stop.stop_on_timeout():
            if not self._take_as_planned(session, plan):
                return False
        run, steps = session.run, settings.training_steps
        _LOG.info("took run %s: incarnation %d, step %d of %d", run.run_id, session.incarnation, resumption.step, steps)
        briefly = partial(SyncClient, self._api_url, token=self._deployment.api_token, patience=_PATIENCE_AT_THE_END)
        replacement = partial(noticing_replacement, briefly, run)
        self._stack.enter_context(replacement())  # Converts errors of the objects that close before it.
        with replacement(), self._stop.stop_on_timeout():
            self.main = self._open(plan, policy, session, replacement)
        return True

    def _open(
        self,
        plan: _Plan,
        policy: Policy,
        session: LeaseSession,
        replacement: Callable[[], AbstractContextManager[None]],
    ) -> MainRank:
        settings, source, resumption, run = plan.learner.settings, plan.learner.source, plan.resumption, session.run
        publishes = settings.publisher != "none"
        if publishes:
            self._servers.authorize(claim_publishing(self._deployment.weights_dir))
            raise_if_replaced(self._api, run)
        publisher, receipts = self._open_publisher(plan, policy, session)
        batches = self._open_batches(plan, policy, session)
        facts = TrainerFacts.of(plan.learner, policy.device, ranks=self._ranks, max_staleness=staleness_bound(run))
        digests = DigestWriter(plan.run_dir, facts, run.created_at, resumption.version)
        self._stack.callback(digests.close)
        reports = self._open_reports(plan, policy, session)
        guard = StallGuard("trainer", STALL)
        self._stack.callback(guard.close)
        unit: Literal["groups", "sequences"] = "sequences" if run.protocol is Protocol.ATROPOS else "groups"
        wanted = Wanted(run.groups_per_step or 0, unit, published=publishes)
        return MainRank(
            session=session,
            batches=Batches(batches, Watchdog(self._api, run.run_id, wanted, self._servers)),
            ledger=Ledger(session, digests, plan.run_dir / "aside", self._skipped, resumption.origin, source.sha256),
            saving=BackgroundSave(resumption.step),
            reports=reports,
            publisher=publisher,
            receipts=receipts,
            servers=self._servers,
            hook=self._hook,
            finish=Finish(_facts(run, settings, source, self._arguments), self._hub),
            stop=self._stop,
            guard=guard,
            noticing_replacement=replacement,
        )

    def _open_reports(self, plan: _Plan, policy: Policy, session: LeaseSession) -> Reports:
        settings, folder, first_step = plan.learner.settings, plan.run_dir, plan.resumption.step
        observers = open_observers(session.run.run_id, settings, folder, first_step, self._environ, self._registry)
        self._stack.callback(observers.close)
        records = None
        if settings.record_rollouts:
            records = TrainedRecords(folder / TRAINED_FOLDER, session.run, plan.learner.source.tokenizer)
            self._stack.callback(records.close)
        metrics = self._stack.enter_context(
            JsonlWriter(folder / METRICS_FILE, keep=lambda row: bool(row["step"] <= first_step))
        )
        peak = peak_of(policy.device, settings.peak_tflops)
        measure = partial(step_metrics, device=policy.device, devices=self._ranks, peak=peak)
        display = Display(settings.training_steps, first_step)
        self._stack.callback(display.close)
        return Reports(session, folder, metrics, display, observers, measure, records)

    def _open_publisher(self, plan: _Plan, policy: Policy, session: LeaseSession) -> tuple[Publisher, Receipts | None]:
        """Without publications, there are no receipts."""
        settings, source, stop, run_id = plan.learner.settings, plan.learner.source, self._stop, session.run.run_id
        ahead = settings.max_staleness > 0
        receipts: Receipts | None = None
        transport: FilesystemTransport | None = None
        if settings.publisher != "none":
            since = None if plan.resumption.checkpoint is None else plan.resumption.step
            receipts = Receipts(plan.run_dir, policy, plan.probes, since)
            self._stack.callback(receipts.close)
            servers = ModelServers(
                tuple(self._servers),
                look_up=self._servers.look_up if self._servers.may_change else None,
                background=ahead,
                closing=lambda: max(0.0, min(stop.seconds_left, stop.grace)),
                proof=receipts,
            )
            describe = policy.describe_adapters if policy.publishes_adapters else None
            folder, original = self._deployment.weights_dir / run_id, Path(source.weights)
            if settings.publishes_from_device and describe is None:  # Adapters are small, and are published as files.
                sender = None
                if settings.publisher == "nccl":
                    url = URL(next(iter(self._servers)).url)
                    sender = WeightSender((url.host, url.port or 80), policy.device)
                transport = DeviceMemoryTransport(
                    servers, folder, source.served_weights, original, device=policy.device, sender=sender
                )
            else:
                transport = FilesystemTransport(servers, folder, source.served_weights, describe, original)
        publisher = Publisher(transport, partial(announce, session), stop, background=ahead)
        self._stack.callback(publisher.close)
        return publisher, receipts

    def _open_batches(self, plan: _Plan, policy: Policy, session: LeaseSession) -> BatchSource:
        settings = plan.learner.settings

        def prepare(step: int, groups: list[TrajectoryGroup]) -> Prepared:
            limits = Limits(
                vocabulary=policy.vocabulary,
                seq_len=settings.seq_len or plan.learner.source.max_model_len,
                policy=session.version(step - 1),
                max_staleness=staleness_bound(session.run),
            )
            return to_samples(groups, limits, settings)

        batches = (
            Prefetch(session, prepare, plan.resumption.step + 1, settings.training_steps)
            if settings.max_staleness > 0
            else BatchSource(session, prepare)
        )
        self._stack.callback(batches.close)
        return batches

    def _take_as_planned(self, session: LeaseSession, plan: _Plan) -> bool:
        """Enters the session. Returns False, without a hold on the run, if another environment opened or changed it, or
        if another trainer wrote a checkpoint of it meanwhile."""
        planned = self._run
        if not plan.is_current:
            _LOG.info("run %s got another checkpoint while the model was loaded", planned.run_id)
            return False
        with ExitStack() as stack:
            try:
                stack.enter_context(session)
            except ApiError as error:
                # While the API deletes the replaced run, no run has this id.
                if error.code not in (ErrorCode.SUSPENDED, ErrorCode.OTHER_CREATION, ErrorCode.RUN_MISSING):
                    raise
                _LOG.info("run %s was replaced while the model was loaded: %s", planned.run_id, error)
                return False
            if planned.protocol is not Protocol.ATROPOS and session.run.env != planned.env:
                _LOG.info("run %s got other settings while the model was loaded", planned.run_id)
                return False
            # Until now, another trainer may have been writing one.
            plan.checkpoints.clean()
            if not plan.is_current:
                _LOG.info("run %s got another checkpoint while the model was loaded", planned.run_id)
                return False
            self._stack.enter_context(stack.pop_all())
            return True


def _facts(run: RunRecord, settings: TrainerSettings, source: ModelSource, arguments: Sequence[str]) -> RunFacts:
    return RunFacts(
        run_id=run.run_id,
        base_model=source.weights,
        dataset=dataset_name(run),
        rewards=reward_names(run),
        objective=settings.objective,
        steps=settings.training_steps,
        policy_version="",
        final_reward=None,
        command=public_command("python -m gristmill_trainer", arguments),
        versions={name: version_of(name) for name in ("gristmill-trainer", "torch", "transformers")},
    )
