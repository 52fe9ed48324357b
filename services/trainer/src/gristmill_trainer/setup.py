"""From a command line to a `Training`: settings, model, checkpoint, the run taken."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from gristmill import Deployment, Manifest, ManifestError, Protocol, RunRecord, SyncClient
from gristmill.deployment import API_URL, MODEL_URL
from gristmill.metrics import METRICS_FILE, JsonlWriter
from gristmill.settings import load_yaml, merge, parse, parse_flags
from gristmill_trainer.checkpoint import CheckpointStore, SingleProcess, find_resumption
from gristmill_trainer.display import Display
from gristmill_trainer.leases import Leases
from gristmill_trainer.loop import Training
from gristmill_trainer.policy import ModelSource, Policy, find_model
from gristmill_trainer.publish import (
    FilesystemPublisher,
    ModelServer,
    NonePublisher,
    OneServer,
    SeveralServers,
    WeightPublisher,
)
from gristmill_trainer.publish.token import publish_token
from gristmill_trainer.settings import TrainerSettings
from gristmill_trainer.stop import StopRequest

_LOG = logging.getLogger(__name__)
TRAINER_CONFIG = "trainer.yaml"


@contextmanager
def prepare(arguments: Sequence[str], environ: dict[str, str]) -> Iterator[Training]:
    """Wait for a run, take it, load or resume the model. Everything opened is closed on leaving."""
    flags = parse_flags(
        arguments, TrainerSettings, "python -m gristmill_trainer", "GRPO on the groups of a trajectory API."
    )
    deployment = Deployment.read(environ)
    stop = StopRequest()
    # Settings that only say where things are do not wait for the run.
    here = _layered(deployment.config_dir, {}, flags, "command line")
    with ExitStack() as stack:
        api_url = here.rollout_server_url or deployment.api_url or API_URL
        api = stack.enter_context(SyncClient(api_url, token=deployment.api_token))
        run = _wait_for_run(api, deployment.stack, stop)
        settings = _layered(deployment.config_dir, run.env.get("trainer") or {}, flags, f"run {run.run_id}")
        urls = (here.base_url or deployment.model_url or MODEL_URL).split(",")
        token = publish_token(deployment.weights_dir)
        servers = [ModelServer(url.strip(), token) for url in urls]
        source = find_model(settings.model_name, _manifest(deployment.models_dir), servers[0].served())
        torch.manual_seed(settings.seed)
        run_dir = deployment.runs_dir / run.run_id
        checkpoints = CheckpointStore(run_dir / "checkpoints", settings.checkpoints_kept)
        resumption = find_resumption(checkpoints, settings.resume)
        policy = Policy(source, settings.device, None if resumption is None else str(resumption.checkpoint.path))
        optimizer = torch.optim.AdamW(
            policy.model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            weight_decay=settings.weight_decay,
        )
        if resumption is not None:
            checkpoints.restore(resumption.checkpoint, SingleProcess(policy, optimizer), own=resumption.own)
        first_step = 0 if resumption is None else resumption.step
        covered = [] if resumption is None else resumption.covered
        incarnation, run = api.take(run.run_id, settings.record(), covered, first_step)
        _LOG.info(
            "took run %s: incarnation %d, step %d of %d", run.run_id, incarnation, first_step, settings.training_steps
        )
        publisher = _publisher(settings, servers, deployment.weights_dir / run.run_id, source)
        stack.callback(publisher.close)
        leases = Leases(api, run.run_id, incarnation)
        stack.callback(leases.close)
        yield Training(
            settings=settings,
            run=run,
            api=api,
            policy=policy,
            optimizer=optimizer,
            publisher=publisher,
            checkpoints=checkpoints,
            leases=leases,
            metrics=stack.enter_context(
                JsonlWriter(run_dir / METRICS_FILE, keep=lambda row: bool(row["step"] <= first_step))
            ),
            display=stack.enter_context(Display(settings.training_steps, first_step)),
            stop=stop,
            incarnation=incarnation,
            first_step=first_step,
            origin=None if resumption is None else resumption.origin,
            final_model=run_dir / "model",
            seq_len=settings.seq_len or source.max_model_len,
        )


def _layered(config_dir: Path, block: dict[str, Any], flags: dict[str, Any], where: str) -> TrainerSettings:
    file = config_dir / TRAINER_CONFIG
    defaults = load_yaml(file) if file.is_file() else {}
    return parse(
        TrainerSettings, merge(merge(defaults, block), flags), f"trainer settings ({file}, trainer: block, {where})"
    )


def _wait_for_run(api: SyncClient, name: str, stop: StopRequest) -> RunRecord:
    told = False
    while True:
        run = api.open_run(wait=5.0, stack=name)
        if run is not None:
            return run
        stop.raise_if_requested()
        if not told:
            _LOG.info("waiting for a run; the environment brings it: python -m gristmill_env --config quickstart")
            told = True


def _manifest(models_dir: Path) -> Manifest | None:
    try:
        return Manifest.read(models_dir)
    except ManifestError as error:
        _LOG.info("%s", error)
        return None


def _publisher(
    settings: TrainerSettings, servers: Sequence[ModelServer], folder: Path, source: ModelSource
) -> WeightPublisher:
    if settings.publisher == "none":
        return NonePublisher()
    wait_for_all = settings.max_staleness == 0
    target = OneServer(servers[0]) if len(servers) == 1 else SeveralServers(servers, wait_for_all)
    return FilesystemPublisher(target, folder, source.served_weights)
