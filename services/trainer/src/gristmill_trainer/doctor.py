"""Checks for `gristmill doctor`: room for model and checkpoints, and log-probabilities of trainer and server.

Before a run, `before_run` asks the model server for completions of a fixed prompt, and computes their log-probabilities
with the trainer's policy. After a run, `after_run` does the same with archived completions and with the weights that
this machine still has: the checkpoints, and the initial model.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers.utils import logging as transformers_logging

from gristmill import ConfigError, Deployment, GristmillError, Manifest, ManifestError, TrajectoryGroup, read_rollouts
from gristmill.deployment import MODEL_URL
from gristmill.redaction import redact_text
from gristmill.settings import find_config, load_yaml
from gristmill.view.check import Check, State
from gristmill.view.doctor import read_memory
from gristmill.view.folders import ROLLOUTS_FOLDER, RunFolder
from gristmill_trainer.checkpoint.store import read_progress
from gristmill_trainer.data.micro_batches import collate
from gristmill_trainer.data.types import Sample
from gristmill_trainer.errors import PublishError, TrainerError
from gristmill_trainer.policy import ModelSource, Policy, check_publishable, find_model
from gristmill_trainer.publish import ModelServer
from gristmill_trainer.settings import TrainerSettings, read_settings

_FLOAT32 = 4
_MOMENTS = {"adamw": 8, "adamw_8bit": 2}
"""Bytes of the optimizer's two moments per trained parameter."""
_PROMPT = 8
_COMPLETIONS, _TOKENS = 4, 16
"""The completions of one request before a run."""
_GROUPS_PER_VERSION = 4
_MICRO_BATCH = 16
_EPSILONS = 8
"""The mean difference of log-probabilities may be this many times the rounding of the server's dtype."""
_LEAST_BOUND = 1e-3
"""Nats, as in the check of the policy's scores at the trainer's start. Kernels differ by about 1e-5 in float32."""


# --- Before a run ----------------------------------------------------------------------------------------------
def before_run(config: str, environ: Mapping[str, str]) -> Iterator[Check]:
    """Yields the checks of a configuration. `config`: its name or path. Raises ConfigError if it cannot be read."""
    deployment = Deployment.read(environ)
    values = load_yaml(find_config(config, deployment.config_dir), environ)
    try:
        settings = read_settings(deployment.config_dir, values.get("trainer") or {}, {}, config)
    except ConfigError as error:
        yield Check("trainer settings", "failed", error.report())
        return
    manifest = _manifest(deployment.models_dir)
    urls = [url.strip() for url in (settings.base_url or deployment.model_url or MODEL_URL).split(",")]
    servers = [ModelServer(url, patience=0.0) for url in urls]
    served: dict[ModelServer, dict[str, Any]] = {}
    silent: list[Check] = []
    for server in servers:
        try:
            served[server] = server.served()
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
        yield Check("model", "warning", "not checked: no model server answers, and there is no manifest of its model")
        return
    yield from check_room(settings, source, deployment)
    yield from silent
    if served:
        temperature = float((values.get("dataset") or {}).get("temperature", 1.0))
        yield from _check_servers(settings, source, served, temperature)


def _manifest(models_dir: Path) -> Manifest | None:
    try:
        return Manifest.read(models_dir)
    except ManifestError:
        return None


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
    """Yields the checks of memory and disk for weights, gradients, optimizer and checkpoints.

    Parameters, gradients and moments are float32. The sizes are lower bounds: activations come in addition.
    """
    parameters = count_parameters(Path(source.weights))
    if parameters is None:
        yield Check(
            "memory of trainer", "warning", f"not checked: the files of {source.weights} are not on this machine"
        )
        return
    adapters = settings.lora_rank > 0
    # Adapters of usual ranks have about a hundredth of the model's parameters.
    trained = parameters // 100 if adapters else parameters
    moments = _MOMENTS[settings.optimizer] * trained
    needed = _FLOAT32 * (parameters + trained) + moments
    cuda = settings.device != "cpu" and torch.cuda.is_available()
    there = torch.cuda.get_device_properties(0).total_memory if cuda else read_memory()
    what = f"{parameters / 1e6:.1f}M parameters need {_gigabytes(needed)} for weights, gradients and optimizer"
    if there is None:
        yield Check("memory of trainer", "warning", f"{what}; the memory of this machine is unknown")
    else:
        state: State = "failed" if needed > there else "warning" if needed > there / 2 else "ok"
        remedy = {
            "failed": "; take a smaller model, lora_rank, or several GPUs with torchrun",
            "warning": ", and activations come in addition; set gradient_checkpointing if the memory runs out",
            "ok": "",
        }
        yield Check("memory of trainer", state, f"{what}, of {_gigabytes(there)}{remedy[state]}")
    whole = _FLOAT32 * parameters
    checkpoint = (_FLOAT32 * trained if adapters else whole) + moments
    disk = (settings.checkpoints_kept + 1) * checkpoint + whole + 2 * whole
    folder = deployment.runs_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{settings.checkpoints_kept} checkpoints, the final model and published weights need {_gigabytes(disk)}"
    more = "" if disk <= free else "; free some space, or lower checkpoints_kept"
    yield Check("disk of trainer", "ok" if disk <= free else "failed", f"{text}, of {_gigabytes(free)} free{more}")


def count_parameters(folder: Path) -> int | None:
    """Returns the parameters in a folder's safetensors files, or None if the folder has no such files."""
    found = 0
    for path in folder.glob("*.safetensors") if folder.is_dir() else []:
        with safe_open(path, framework="pt") as tensors:
            found += sum(int(np.prod(tensors.get_slice(name).get_shape())) for name in tensors.keys())  # noqa: SIM118
    return found or None


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2g} GB" if size < 1e10 else f"{size / 1e9:.0f} GB"


# --- Trainer and server ----------------------------------------------------------------------------------------
def bound_of(dtype: str) -> float:
    """Returns the largest mean difference, in nats, that the rounding of the server's dtype explains.

    `dtype`: torch's name of the dtype that the server computes in. The bound is 8 times its machine epsilon: a
    log-probability is a sum over the vocabulary of values that are rounded once per layer.
    """
    kind = getattr(torch, dtype, torch.float32)
    return max(_LEAST_BOUND, _EPSILONS * float(torch.finfo(kind).eps))


@dataclass(frozen=True)
class Gap:
    """The difference between the server's log-probabilities and those of one policy."""

    mean: float
    """Mean of the absolute differences, in nats."""
    raw: float
    """The same if the policy computes without the temperature."""


def gap(policy: Policy, samples: Sequence[Sample]) -> Gap:
    """Compares the server's log-probabilities with the policy's. `samples`: at least one, with a trained token."""
    means = []
    for temperature in (None, 1.0):
        scored = [one if temperature is None else replace(one, temperature=temperature) for one in samples]
        differences = []
        for start in range(0, len(scored), _MICRO_BATCH):
            part = scored[start : start + _MICRO_BATCH]
            weights = np.ones(len(part))
            micro = collate(part, range(len(part)), weights, packing=policy.scorer.packing, device=policy.device)
            with torch.no_grad(), policy.compute():
                found = policy.scorer(micro).logprobs
            differences.append((found.float() - micro.rollout_logprobs).abs())
        means.append(float(torch.cat(differences).mean()))
    return Gap(*means)


def _check_servers(
    settings: TrainerSettings,
    source: ModelSource,
    served: Mapping[ModelServer, Mapping[str, Any]],
    temperature: float,
) -> Iterator[Check]:
    name = "trainer and server"
    try:
        policy = _load(source, settings)
    except TrainerError as error:
        yield Check(name, "failed", error.report())
        return
    bound = bound_of(source.served_dtype)
    for server, card in served.items():
        where = redact_text(server.url)
        try:
            version = server.served_version()
            if version != "default" and not version.endswith(".0"):
                text = f"not compared: {where} serves the weights {version} of an earlier training; restart it"
                yield Check(name, "warning", text)
                continue
            # Two temperatures, because raw log-probabilities are right at temperature 1.
            gaps = [
                gap(policy, _ask(server, str(card["id"]), policy.vocabulary, value))
                for value in (temperature, temperature / 2)
            ]
        except PublishError as error:
            yield Check(name, "failed", error.report())
            continue
        largest = max(one.mean for one in gaps)
        if largest <= bound:
            text = f"log-probabilities of {where} agree with the trainer's to {largest:.1g}"
            yield Check(name, "ok", f"{text} ({source.served_dtype}: at most {bound:.1g})")
        elif max(one.raw for one in gaps) <= bound:
            text = f"{where} returns raw log-probabilities, without the temperature"
            yield Check(name, "failed", f"{text}; start it with --logprobs-mode processed_logprobs")
        else:
            text = f"log-probabilities of {where} differ from the trainer's by {largest:.2g} on average"
            more = f"{source.served_dtype} rounding explains {bound:.1g}. The server has other weights than"
            yield Check(name, "failed", f"{text}; {more} {source.weights}, or samples with top-k, top-p or penalties")


def _load(source: ModelSource, settings: TrainerSettings) -> Policy:
    """Loads a policy without a progress bar. Raises ModelError."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return Policy(source, settings.device, packing=settings.packing)


def _ask(server: ModelServer, model: str, vocabulary: int, temperature: float) -> list[Sample]:
    """Returns completions of a fixed prompt, with the server's log-probabilities. Raises PublishError."""
    prompt = [(7 * place + 3) % vocabulary for place in range(_PROMPT)]
    sampling = {
        "n": _COMPLETIONS, "max_tokens": _TOKENS, "temperature": temperature, "logprobs": 0, "ignore_eos": True,
        "detokenize": False, "seed": 0,
    }  # fmt: skip
    body = {"model": model, "token_ids": prompt, "sampling_params": sampling}
    choices = server.ask("POST", "/inference/v1/generate", "choices", json=body)
    return [
        _sample(prompt, choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]], temperature)
        for choice in choices
    ]


def _sample(prompt: Sequence[int], completion: Sequence[int], logprobs: Sequence[float], temperature: float) -> Sample:
    tokens = np.array([*prompt, *completion], np.int32)
    known = np.zeros(len(tokens), np.float32)
    known[len(prompt) :] = logprobs
    return Sample("", tokens, np.arange(len(tokens)) >= len(prompt), known, np.zeros_like(known), temperature)


# --- After a run -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Weights:
    """Weights of a run that are on this machine."""

    label: str
    """The policy version, or "1.0" for the initial model."""
    source: ModelSource


def after_run(run: RunFolder, config: str, environ: Mapping[str, str]) -> Iterator[Check]:
    """Yields the checks of a run's archived groups. `config`: not needed, because the run's files have the settings."""
    name = "weights again"
    folder = run.find(ROLLOUTS_FOLDER)
    if folder is None:
        yield Check(name, "warning", "not checked: the run has no archived groups")
        return
    weights = _weights_of(run, Deployment.read(environ))
    if not weights:
        yield Check(name, "warning", "not checked: neither a checkpoint nor the initial model is on this machine")
        return
    try:
        groups = _groups_of(folder, {one.label for one in weights})
        if not groups:
            yield Check(name, "warning", "not checked: no archived group was sampled by weights that are still here")
            return
        yield from check_weights(weights, groups)
    except GristmillError as error:
        yield Check(name, "failed", error.report())


def _weights_of(run: RunFolder, deployment: Deployment) -> list[_Weights]:
    """Returns the run's checkpoints of whole models, and its initial model if the manifest has it."""
    found = []
    manifest, record = _manifest(deployment.models_dir), run.record()
    if manifest is not None and record is not None and record.env.get("model") == manifest.name:
        source = ModelSource(
            manifest.weights_path, manifest.tokenizer_path, None, manifest.max_model_len, 0, manifest.dtype
        )
        found.append(_Weights(f"{record.incarnation and 1}.0", source))
    for folder in run.folders:
        for path in sorted((folder / "checkpoints").glob("step-*")):
            if (path / "config.json").is_file() and not (path / "adapter_config.json").exists():
                dtype = "float32" if manifest is None else manifest.dtype
                source = replace(ModelSource.of(str(path)), served_dtype=dtype)
                found.append(_Weights(str(read_progress(path).version), source))
    return found


def _groups_of(folder: Path, labels: set[str]) -> dict[str, list[TrajectoryGroup]]:
    """Returns a few groups of each version in `labels`: groups whose tokens all came from those weights."""
    found: dict[str, list[TrajectoryGroup]] = defaultdict(list)
    for group in read_rollouts(folder):
        versions = {span.version for spans in group.versions for span in spans}
        if len(versions) == 1 and (label := versions.pop()) in labels and len(found[label]) < _GROUPS_PER_VERSION:
            found[label].append(group)
    return {label: groups for label, groups in found.items() if groups}


def check_weights(weights: Sequence[_Weights], groups: Mapping[str, Sequence[TrajectoryGroup]]) -> Iterator[Check]:
    """Yields one check per version: whether its groups were sampled by the weights of that version.

    If they were not, the other weights of the run are tried, and the check names those that explain the groups.
    """
    gaps: dict[str, dict[str, Gap]] = defaultdict(dict)
    for one in weights:
        policy = _load(one.source, TrainerSettings(packing=False))
        for label, of_version in groups.items():
            samples = [sample for group in of_version for sample in _samples_of(group)]
            gaps[label][one.label] = gap(policy, samples)
    dtypes = {one.label: one.source.served_dtype for one in weights}
    for label in groups:
        yield _check_version(label, gaps[label], bound_of(dtypes[label]), len(groups[label]))


def _samples_of(group: TrajectoryGroup) -> Iterator[Sample]:
    """Yields the sequences of an archived group, with the server's log-probabilities."""
    nothing = np.zeros_like(group.logprobs)
    start = 0
    for end in np.cumsum(group.lengths).tolist():
        piece = slice(start, start := end)
        trained = group.mask[piece].copy()
        trained[0] = False  # No token predicts the first token.
        if trained.any():
            known = np.where(trained, group.logprobs[piece], np.float32(0))
            yield Sample("", group.tokens[piece], trained, known, nothing[piece], group.sampling.temperature)


def _check_version(label: str, gaps: Mapping[str, Gap], bound: float, groups: int) -> Check:
    name, own = f"weights {label}", gaps[label]
    if own.mean <= bound:
        return Check(
            name, "ok", f"they sampled the {groups} compared groups of this version: they agree to {own.mean:.1g}"
        )
    if own.raw <= bound:
        text = "the server returned raw log-probabilities, without the temperature"
        return Check(name, "failed", f"{text}; start it with --logprobs-mode processed_logprobs")
    other = min(gaps, key=lambda key: gaps[key].mean)
    if gaps[other].mean <= bound:
        text = (
            f"the groups that say {label} were sampled by the weights {other}: a publication did not reach the server"
        )
        return Check(name, "failed", text)
    text = (
        f"log-probabilities of {groups} groups differ by {own.mean:.2g} on average, and rounding explains {bound:.1g}"
    )
    return Check(name, "failed", f"{text}: neither these weights nor others of this run explain the groups")
