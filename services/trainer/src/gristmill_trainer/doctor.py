"""Checks for `gristmill doctor`: room for model and checkpoints, and log-probabilities of trainer and server.

Before a run, `before_run` asks the model server for a receipt of its initial weights. After a run, `after_run` computes
the log-probabilities of archived completions again, with the weights that this machine still has: the checkpoints, and
the initial model. `receipts` has the bounds, and names the cause of a difference.
"""

from __future__ import annotations

import copy
import logging
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from gristmill import ConfigError, Deployment, GristmillError, Manifest, TrajectoryGroup, read_rollouts
from gristmill.errors import FileError
from gristmill.folders import ROLLOUTS_FOLDER, RunFolder
from gristmill.hyperparameters import check_run_block
from gristmill.internal import foreign
from gristmill.internal.check import Check, read_memory
from gristmill.internal.config_files import find_config, load_yaml
from gristmill.internal.receipts import RECEIPTS_FILE, ReceiptState, read_receipts
from gristmill.internal.redaction import redact_text
from gristmill.model_servers import split_urls
from gristmill_trainer.checkpoint.digests import DIGESTS_FILE, CheckpointRecord, read_digests
from gristmill_trainer.checkpoint.store import read_progress
from gristmill_trainer.data.micro_batches import collate
from gristmill_trainer.data.samples import sequences
from gristmill_trainer.data.types import Sample
from gristmill_trainer.errors import ModelError, PublishError, TrainerError
from gristmill_trainer.memory import MOMENTS, Memory, gigabytes
from gristmill_trainer.policy import ModelSource, Policy, check_publishable, find_model
from gristmill_trainer.policy.lora import ADAPTER_CONFIG, saved_lora
from gristmill_trainer.publish.publisher import shapes
from gristmill_trainer.publish.servers import ModelServer, ServerList
from gristmill_trainer.receipts.diagnosis import Case, Diagnosis, diagnose
from gristmill_trainer.receipts.probes import Probe, Probes, ProbeScores, distance, own_scores, scale, served_scores
from gristmill_trainer.receipts.receipts import first_bound, later_bound, rounding_of
from gristmill_trainer.settings import TrainerSettings, read_settings

_LOG = logging.getLogger(__name__)
_FLOAT32 = 4
_STRIDES = (5, 7, 11)
"""One probe each before a run: every 5th, 7th or 11th token of the vocabulary."""
_PROBE = 72
"""Tokens."""
_VISIBLE_TEMPERATURE = 0.5
"""At temperature 1, a server that ignores the temperature gives the same numbers."""
_GROUPS_PER_VERSION = 4
_MICRO_BATCH = 16
_NEUTRAL = {"top_k": None, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
"""Settings of sampling that change the distribution, with the values that do not."""


# --- Before a run ----------------------------------------------------------------------------------------------
def before_run(config: str, environ: Mapping[str, str]) -> Iterator[Check]:
    """Yields the checks of a configuration. `config`: its name or path."""
    deployment = Deployment.read(environ)
    try:
        values = load_yaml(find_config(config, deployment.config_dir), environ)
        block = values.get("trainer") or {}
        check_run_block(block, 1, f"{config}: trainer")  # The environment compares it with its group size.
        settings = read_settings(deployment.config_dir, block, {}, config)
    except ConfigError as error:
        yield Check("trainer settings", "failed", error.report())
        return
    dataset = values.get("dataset")
    given = dataset.get("temperature") if isinstance(dataset, Mapping) else None  # The environment checks the value.
    yield from check_settings(settings, float(given) if isinstance(given, int | float) else 1.0, deployment)


def check_settings(settings: TrainerSettings, temperature: float, deployment: Deployment) -> Iterator[Check]:
    """Yields the checks of a training with these settings. `temperature`: of the run's completions."""
    manifest = Manifest.find(deployment.models_dir)
    urls = split_urls(settings.base_url or deployment.model_url or deployment.default_model_url)
    servers = ServerList(urls, patience=0.0)
    served: dict[ModelServer, dict[str, Any]] = {}
    silent: list[Check] = []
    for server in servers:
        try:
            served[server] = server.first_model()
        except PublishError as error:
            text = (
                f"not checked: the model server at {redact_text(server.url)} does not answer; start the model service"
            )
            silent.append(
                Check("trainer and server", "failed" if error.code == "model_server_refused" else "warning", text)
            )
    try:
        source = _source(settings, manifest, next(iter(served.values()), None))
    except TrainerError as error:
        yield Check("model", "failed", error.report())
        return
    if source is None:
        yield Check("model", "warning", "not checked: no model server answers, and its model has no manifest")
        return
    yield from check_room(settings, source, deployment)
    yield from silent
    if served:
        yield from _check_servers(settings, source, served, temperature)


def _source(
    settings: TrainerSettings, manifest: Manifest | None, served: Mapping[str, Any] | None
) -> ModelSource | None:
    """Returns the model to train, from the model server or else from the manifest. Raises ModelError."""
    if served is None and manifest is not None:
        served = {"id": manifest.name, "max_model_len": manifest.max_model_len}
    if served is None:
        return None
    source = find_model(settings.model_name, manifest, dict(served))
    if settings.publisher != "none":
        check_publishable(settings.lora_rank, source)
    return source


def check_room(settings: TrainerSettings, source: ModelSource, deployment: Deployment) -> Iterator[Check]:
    """Yields the checks of memory (`Memory`) and of disk for checkpoints and weights."""
    folder = Path(source.weights)
    try:
        parameters = count_parameters(folder)
    except FileError as error:
        yield Check("memory of trainer", "failed", error.report())
        return
    if parameters is None or not (folder / "config.json").is_file():
        yield Check("memory of trainer", "warning", f"not checked: the files of {folder} are not on this machine")
        return
    cuda = settings.device != "cpu" and torch.cuda.is_available()
    memory = Memory.of(_config(folder), parameters, settings, cuda=cuda)
    if memory is None:
        text = f"unknown: {folder / 'config.json'} does not give the model's shape (docs/gpu.md has the parts)"
        yield Check("memory of trainer", "warning", text)
    else:
        yield _check_memory(memory, parameters, settings, source, cuda=cuda)
    whole = _FLOAT32 * parameters
    moments = MOMENTS * parameters
    adapters = 0 if memory is None else memory.checkpoint
    checkpoint = adapters if settings.lora_rank else whole + moments
    disk = (settings.checkpoints_kept + 1) * checkpoint + whole + 2 * whole
    folder = deployment.runs_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{settings.checkpoints_kept} checkpoints, the final model and published weights need {gigabytes(disk)}"
    more = "" if disk <= free else "; free some space, or lower checkpoints_kept"
    yield Check("disk of trainer", "ok" if disk <= free else "failed", f"{text}, of {gigabytes(free)} free{more}")


def _check_memory(
    memory: Memory, parameters: int, settings: TrainerSettings, source: ModelSource, *, cuda: bool
) -> Check:
    # A model server that runs on the same GPU has taken its share already.
    room = torch.cuda.mem_get_info()[0] if cuda else read_memory()
    tokens = settings.token_budget or settings.batch_size * (settings.seq_len or source.max_model_len)
    if cuda and room is not None and settings.token_budget is None:
        tokens = min(tokens, memory.planned(room))
    needed = memory.fixed + memory.per_token * tokens
    what = f"{parameters / 1e6:.1f}M parameters need {memory}: {gigabytes(needed)} for {tokens} tokens"
    if room is None:
        return Check("memory of trainer", "warning", f"{what}; the memory of this machine is unknown")
    text = f"{what}, of {gigabytes(room)}"
    if source.sleeps(settings) and memory.state + memory.published <= room:
        return Check("memory of trainer", "ok", f"{text} and what the model server frees during a step")
    if memory.tokens(room) == 0:
        remedy = "take a smaller model, lora_rank, or several GPUs with torchrun"
        return Check("memory of trainer", "failed", f"{text}; {remedy}")
    if needed > room:
        remedy = f"set token_budget: {memory.tokens(room)} or less, or gradient_checkpointing: true"
        return Check("memory of trainer", "warning", f"{text}; {remedy}")
    return Check("memory of trainer", "ok", text)


def _config(folder: Path) -> Any:
    """Returns the config of a model with the defaults of its architecture; None if transformers cannot read it."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  transformers raises errors of many kinds for the values in the file
        _LOG.warning("%s cannot be read: %s", folder / "config.json", error)
        return None


def count_parameters(folder: Path) -> int | None:
    """Returns the parameters in a folder's safetensors files, or None if the folder has no such files."""
    return sum(map(math.prod, shapes(folder).values())) or None


# --- Trainer and server ----------------------------------------------------------------------------------------
def _check_servers(
    settings: TrainerSettings, source: ModelSource, servers: Iterable[ModelServer], temperature: float
) -> Iterator[Check]:
    name = "trainer and server"
    try:
        policy = _load(source, settings)
    except TrainerError as error:
        yield Check(name, "failed", error.report())
        return
    probes = made_up_probes(policy.vocabulary, _VISIBLE_TEMPERATURE if temperature in (0, 1) else temperature)
    adapters = settings.lora_rank > 0 and source.lora_rank > 0
    for server in servers:
        where = redact_text(server.url)
        try:
            version = server.served_version()
            if version != "default":  # The version 1.0 of a fork is the checkpoint that the fork began from.
                text = f"not compared: {where} serves the weights {version} of an earlier training; restart it"
                yield Check(name, "warning", text)
            else:
                yield check_server(server, policy, probes, adapters=adapters)
        except PublishError as error:
            yield Check(name, "warning" if error.code == "probe_refused" else "failed", error.report())


def made_up_probes(vocabulary: int, temperature: float) -> Probes:
    """Returns probes of tokens that no tokenizer made. `temperature`: of their sampled parts."""
    samples = []
    for stride in _STRIDES:
        tokens = np.array([(stride * place + 3) % vocabulary for place in range(_PROBE)], np.int32)
        nothing = np.zeros(_PROBE, np.float32)
        samples.append(Sample(str(stride), tokens, np.arange(_PROBE) > 0, nothing, nothing, temperature))
    probes = Probes.choose(samples)
    assert probes is not None
    return probes


def check_server(server: ModelServer, policy: Policy, probes: Probes, *, adapters: bool) -> Check:
    """Compares a server of the initial weights with the policy, as the first receipt of a training does.

    `adapters`: whether the training publishes adapters. Raises PublishError.
    """
    name, where, source = "trainer and server", redact_text(server.url), policy.source
    own, served = own_scores(policy, probes), served_scores(server, probes)
    bound, difference = first_bound(rounding_of(policy), scale(own)), distance(served, own)
    if difference <= bound:
        text = f"log-probabilities of {where} agree with the trainer's to {difference:.1g}"
        return Check(name, "ok", f"{text} ({source.served_dtype}: at most {bound:.1g})")
    case = Case(
        probes=probes,
        served=served,
        own=own,
        older={},
        bound=bound,
        version="1.0",
        adapters=adapters,
        ask=partial(served_scores, server),
        in_dtype=partial(_scores_in, policy, probes),
    )
    return _failed(name, f"log-probabilities differ between {where} and {source.weights}", diagnose(case))


def _scores_in(policy: Policy, probes: Probes, dtype: torch.dtype) -> list[ProbeScores]:
    short = copy.deepcopy(policy)
    short.model.to(dtype)
    return own_scores(short, probes)


def _failed(name: str, text: str, found: Diagnosis) -> Check:
    text = f"{text}. The server: {found.text} [{found.cause}]. Remedy: {found.remedy}"
    return Check(name, "failed", text, code="receipt_failed")


def _load(source: ModelSource, settings: TrainerSettings, adapters: Path | None = None) -> Policy:
    """Loads a policy without a progress bar. `adapters`: folder of its adapters. Raises ModelError."""
    transformers_logging.disable_progress_bar()
    folder, lora = (None, None) if adapters is None else (str(adapters), saved_lora(adapters))
    return Policy(source, settings.device, folder, packing=settings.packing, lora=lora)


# --- After a run -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PublishedWeights:
    """Weights of a run that are on this machine."""

    label: str
    """The policy version, or "1.0" for the initial model."""
    source: ModelSource
    """The model, or the model that the adapters belong to."""
    adapters: Path | None = None
    """Folder of the checkpoint, if it contains only adapters."""


def after_run(run: RunFolder, config: str, environ: Mapping[str, str]) -> Iterator[Check]:
    """Yields the checks of a run's archived groups. `config`: not needed, because the run's files have the settings."""
    name = "weights again"
    folder = run.find(ROLLOUTS_FOLDER)
    if folder is None:
        yield Check(name, "warning", "not checked: the run has no archived groups")
        return
    try:
        if changed := _changed_distribution(run):
            yield Check(name, "warning", f"not checked: {changed} changed the log-probabilities of the completions")
            return
        weights, not_checked = _weights_of(run, Deployment.read(environ))
        yield from not_checked
        if not weights:
            yield Check(name, "warning", "not checked: neither a checkpoint nor the initial model is on this machine")
            return
        groups = _groups_of(folder, {one.label for one in weights})
        if not groups:
            text = (
                "not checked: no archived group was sampled by weights that are still here, from the whole "
                "distribution and with log-probabilities"
            )
            yield Check(name, "warning", text)
            return
        yield from check_weights(weights, groups, _proven_bound(run))
    except GristmillError as error:
        yield Check(name, "failed", error.report())


def _changed_distribution(run: RunFolder) -> str:
    """Returns the settings of sampling, except the temperature, that changed the distribution of groups."""
    record = run.record()
    env = {} if record is None else record.env
    sources = env.get("sources")
    # Each source has its complete settings. An environment of Atropos has none.
    parts = sources.values() if isinstance(sources, Mapping) and sources else (env,)
    datasets = [part.get("dataset") for part in parts if isinstance(part, Mapping)]
    return ", ".join(
        name
        for name, neutral in _NEUTRAL.items()
        if any(one.get(name, neutral) not in (neutral, None) for one in datasets if isinstance(one, Mapping))
    )


def _proven_bound(run: RunFolder) -> float | None:
    """Returns the largest bound of the run's receipts that did not fail; None without such a receipt."""
    path = run.own_file(RECEIPTS_FILE)
    receipts = [] if path is None else read_receipts(path)
    return max((one.bound for one in receipts if one.state is not ReceiptState.FAILED and one.bound > 0), default=None)


def _weights_of(run: RunFolder, deployment: Deployment) -> tuple[list[PublishedWeights], list[Check]]:
    """Returns the run's checkpoints, and the initial model if the manifest has it and the run began from it. Returns
    warnings of the checkpoints of adapters whose model is not on this machine. Raises GristmillError."""
    found, not_checked = [], []
    manifest, record = Manifest.find(deployment.models_dir), run.record()
    path = run.find(DIGESTS_FILE)
    digests = {} if path is None else {one.version: one for one in read_digests(path)}
    elsewhere = any(one.after is None and one.progress.origin for one in digests.values())
    if manifest is not None and record is not None and record.env.get("model") == manifest.name and not elsewhere:
        source = ModelSource(
            manifest.weights_path, manifest.tokenizer_path, None, manifest.max_model_len, 0, manifest.dtype
        )
        found.append(PublishedWeights(f"{record.incarnation and 1}.0", source))
    for folder in run.folders:
        for path in foreign.entries(folder / "checkpoints"):
            # step-000020-of-ID is a checkpoint of an earlier run, whose versions have the same labels.
            if not re.fullmatch(r"step-\d+", path.name) or not any(
                foreign.is_file(path / name) for name in ("config.json", ADAPTER_CONFIG)
            ):
                continue
            version, dtype = str(read_progress(path).version), "float32" if manifest is None else manifest.dtype
            if saved_lora(path) is None:
                found.append(PublishedWeights(version, replace(ModelSource.of(str(path)), served_dtype=dtype)))
            elif (base := _base_of(digests.get(version), deployment)) is not None:
                found.append(PublishedWeights(version, replace(base, served_dtype=dtype), path))
            else:
                text = "not checked: the model that its adapters belong to is not on this machine"
                not_checked.append(Check(f"weights {version}", "warning", text))
    return found, not_checked


def _base_of(record: CheckpointRecord | None, deployment: Deployment) -> ModelSource | None:
    """Returns the model of a checkpoint's adapters; None if it is not on this machine."""
    if record is None:
        return None
    try:
        # The name of a model in the hub's cache is used, and no path that the record names.
        model = record.trainer.model
        source = record.trainer.find_source(None, deployment.models_dir, trust=not Path(model).exists())
    except ModelError:
        return None
    if Path(source.weights).is_dir():
        return source
    try:
        return replace(source, weights=snapshot_download(source.weights, local_files_only=True))
    except (HFValidationError, OSError):  # LocalEntryNotFoundError is an OSError.
        return None


def _groups_of(folder: Path, labels: set[str]) -> dict[str, list[TrajectoryGroup]]:
    """Returns a few groups of each version in `labels`: groups whose tokens all came from those weights, with the
    log-probabilities of the whole distribution."""
    groups_by_label: dict[str, list[TrajectoryGroup]] = defaultdict(list)
    for group in read_rollouts(folder):
        versions = {span.version for spans in group.versions for span in spans}
        if (
            len(versions) == 1
            and group.logprobs_known
            and group.sampling.top_p == 1
            and (label := versions.pop()) in labels
            and len(groups_by_label[label]) < _GROUPS_PER_VERSION
        ):
            groups_by_label[label].append(group)
    return {label: groups for label, groups in groups_by_label.items() if groups}


def check_weights(
    weights: Sequence[PublishedWeights], groups: Mapping[str, Sequence[TrajectoryGroup]], proven: float | None
) -> Iterator[Check]:
    """Yields one check per version: whether its groups were sampled by the weights of that version.

    If they were not, the other weights of the run are tried, and the check names those that explain the groups.
    `proven`: the bound of the run's receipts, in nats; None if no receipt measured one.
    """
    samples = {label: [*chain.from_iterable(map(samples_of, found))] for label, found in groups.items()}
    scores: dict[str, dict[str, list[ProbeScores]]] = defaultdict(dict)
    raw, rounding, sizes = {}, {}, {}
    for one in weights:
        policy = _load(one.source, TrainerSettings(packing=False), one.adapters)
        for label, of_version in samples.items():
            scores[label][one.label] = scored_samples(policy, of_version)
            if label == one.label:
                raw[label] = scored_samples(policy, [replace(sample, temperature=1.0) for sample in of_version])
                rounding[label], sizes[label] = rounding_of(policy), scale(scores[label][label])
    for label, of_version in samples.items():
        unit, size = rounding[label], sizes[label]
        bound = first_bound(unit, size) if proven is None else later_bound(proven, unit, size)
        yield _check_version(label, of_version, scores[label], raw[label], bound)


def samples_of(group: TrajectoryGroup) -> list[Sample]:
    """Returns the sequences of an archived group that have sampled tokens, with the server's log-probabilities."""
    samples = sequences(group, np.zeros_like(group.logprobs), len(group.tokens), distill=False)
    return [sample for sample in samples if sample.trained_tokens]


def scored_samples(policy: Policy, samples: Sequence[Sample]) -> list[ProbeScores]:
    """Returns the policy's log-probabilities of the trained tokens, as scores of the sequences."""
    scores: list[ProbeScores] = []
    for start in range(0, len(samples), _MICRO_BATCH):
        part = samples[start : start + _MICRO_BATCH]
        micro = collate(part, range(len(part)), np.ones(len(part)), packing=policy.scorer.packing, device=policy.device)
        with torch.no_grad(), policy.compute():
            logprobs = policy.scorer(micro).logprobs.double().cpu().numpy()
        ends = np.cumsum([sample.trained_tokens for sample in part])
        scores += [ProbeScores(np.zeros(0), piece) for piece in np.split(logprobs, ends[:-1])]
    return scores


def _check_version(
    label: str,
    samples: Sequence[Sample],
    scores: Mapping[str, list[ProbeScores]],
    raw: list[ProbeScores],
    bound: float,
) -> Check:
    """`scores`: of `samples`, by each of the run's weights. `raw`: by their own weights at temperature 1."""
    name, own = f"weights {label}", scores[label]
    served = [ProbeScores(np.zeros(0), one.rollout_logprobs[one.trained].astype(np.float64)) for one in samples]
    difference = distance(served, own)
    if difference <= bound:
        text = f"they sampled the {len(samples)} compared completions of this version: they agree to {difference:.1g}"
        return Check(name, "ok", text)
    probes = tuple(
        Probe(tuple(sample.tokens.tolist()), tuple(sample.tokens[sample.trained].tolist()), prompt=False)
        for sample in samples
    )
    case = Case(
        probes=Probes(probes, samples[0].temperature),
        served=served,
        own=own,
        older={version: other for version, other in scores.items() if version != label},
        bound=bound,
        version=label,
        label=label,
        raw=raw,
    )
    text = f"the completions under this label differ by {difference:.2g} nats, and rounding explains {bound:.1g}"
    return _failed(name, text, diagnose(case))
