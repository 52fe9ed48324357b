"""Measures how far wrong weights are from the trainer's in bfloat16, and whether a first receipt rejects them.

    python -m benchmarks wrong_weights .gristmill/models/tiny-*

Trainer and server are two programs on the CPU: the trainer's float32 policy computes under autocast, as on a GPU, and
the server is the model in bfloat16. `WRONG` has the changes that make the server's weights wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from benchmarks import script
from transformers import AutoModelForCausalLM

from gristmill_trainer.data.types import Sample
from gristmill_trainer.doctor import made_up_probes
from gristmill_trainer.policy import ModelSource, Policy
from gristmill_trainer.receipts.probes import Probe, Probes, ProbeScores, distance, own_scores, scale
from gristmill_trainer.receipts.receipts import first_bound

ROUNDING: Final = torch.finfo(torch.bfloat16).eps


def _layers(model: Any) -> list[Any]:
    return list(model.model.layers)


def _only(model: Any, layers: list[Any]) -> None:
    model.model.layers = torch.nn.ModuleList(layers)


def _swap(left: torch.Tensor, right: torch.Tensor) -> None:
    rows = min(len(left), len(right))
    kept = left[:rows].clone()
    left[:rows], right[:rows] = right[:rows], kept


def _random(model: Any) -> None:
    """The weights before any training."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.02)


def _without(place: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        layers = _layers(model)
        del layers[int(place * (len(layers) - 1))]
        _only(model, layers)

    return change


def _permuted(model: Any) -> None:
    order = torch.randperm(len(model.lm_head.weight), generator=torch.Generator().manual_seed(1))
    for weight in (model.lm_head.weight, model.get_input_embeddings().weight):
        weight.copy_(weight[order])


def _neighbours(model: Any) -> None:
    layers = _layers(model)
    middle = len(layers) // 2
    layers[middle - 1], layers[middle] = layers[middle], layers[middle - 1]
    _only(model, layers)


def _each(change: Callable[[Any], object]) -> Callable[[Any], None]:
    def changed(model: Any) -> None:
        for layer in _layers(model):
            change(layer)

    return changed


WRONG: Final[dict[str, Callable[[Any], object]]] = {
    "random, never trained weights": _random,
    "all logits equal": lambda model: model.lm_head.weight.zero_(),
    "layers in reverse order": lambda model: _only(model, _layers(model)[::-1]),
    "two layers in the middle exchanged": _neighbours,
    "every MLP zero": _each(lambda layer: layer.mlp.down_proj.weight.zero_()),
    "every attention zero": _each(lambda layer: layer.self_attn.o_proj.weight.zero_()),
    "logits three times as large": lambda model: model.lm_head.weight.mul_(3),
    "logits half as large": lambda model: model.lm_head.weight.mul_(0.5),
    "logits 20 % smaller": lambda model: model.lm_head.weight.mul_(0.8),
    "first layer missing": _without(0.0),
    "layer in the middle missing": _without(0.5),
    "last layer missing": _without(1.0),
    "one MLP zero": lambda model: _layers(model)[-1].mlp.down_proj.weight.zero_(),
    "one attention zero": lambda model: _layers(model)[0].self_attn.o_proj.weight.zero_(),
    "head's vocabulary shifted by one": lambda model: model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0)),
    "vocabulary permuted": _permuted,
    "embeddings twice as large": lambda model: model.get_input_embeddings().weight.mul_(2),
    "queries and keys exchanged": _each(lambda one: _swap(one.self_attn.q_proj.weight, one.self_attn.k_proj.weight)),
    "keys and values exchanged": _each(lambda one: _swap(one.self_attn.k_proj.weight, one.self_attn.v_proj.weight)),
    "gate and up exchanged": _each(lambda one: _swap(one.mlp.gate_proj.weight, one.mlp.up_proj.weight)),
    "positions half as far apart": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
}


class Difference(NamedTuple):
    weights: str
    nats: float
    bound: float

    @property
    def rejected(self) -> bool:
        return not self.nats <= self.bound


def autocast() -> AbstractContextManager[Any]:
    """Lets policies compute as on a GPU, with bfloat16 arithmetic on the CPU."""
    return patch.object(Policy, "compute", lambda self: torch.autocast("cpu", dtype=torch.bfloat16))


def served(folder: Path) -> Any:
    """Returns the model in bfloat16 with a separate head, as a server has it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.train(False)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def measure(folder: Path, probes: Callable[[Policy], Probes]) -> Iterator[Difference]:
    """Yields the difference of the right weights, then the differences of `WRONG`."""
    policy, right = Policy(ModelSource.of(str(folder)), "cpu"), served(folder)
    chosen = probes(policy)
    with autocast():
        own = own_scores(policy, chosen)
    bound = first_bound(ROUNDING, scale(own))
    for name, change in {"right": lambda model: None, **WRONG}.items():
        model = copy.deepcopy(right)
        with torch.no_grad():
            change(model)
            answers = [_scores(model, probe, chosen.temperature) for probe in chosen.probes]
        yield Difference(name, distance(answers, own), bound)


def _scores(model: Any, probe: Probe, temperature: float) -> ProbeScores:
    """Returns the scores as a server without faults computes them."""
    tokens = torch.tensor([probe.tokens])
    logits = model(input_ids=tokens, use_cache=False).logits[0].double()
    prompt = np.zeros(0)
    if probe.prompt:
        prompt = logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()
    return ProbeScores(prompt, (logits[-1] / temperature).log_softmax(-1)[list(probe.ids)].numpy())


def made_up(policy: Policy) -> Probes:
    """Returns the probes of `gristmill doctor --config`."""
    return made_up_probes(policy.vocabulary, 1.0)


def sampled(policy: Policy) -> Probes:
    """Returns probes of sequences that the model sampled, as in a run."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(3):
        tokens = [(7 * place + 5 * number + 1) % policy.vocabulary for place in range(8)]
        with torch.no_grad():
            while len(tokens) < 40:
                logits = policy.model(input_ids=torch.tensor([tokens])).logits[0, -1].float()
                tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        nothing = np.zeros(len(tokens), np.float32)
        trained = np.arange(len(tokens)) >= 8
        samples.append(Sample(str(number), np.array(tokens, np.int32), trained, nothing, nothing, 1.0))
    found = Probes.choose(samples)
    assert found is not None
    return found


def main() -> None:
    parser = script.parser("wrong_weights", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="models, as in .gristmill/models")
    options = parser.parse_args()
    text = ["# Wrong weights and the bound of a first receipt, in bfloat16", ""]
    for folder in [one for one in options.folders if not one.name.endswith("-untied")]:
        kinds = {"sampled probes": sampled, "the doctor's probes": made_up}
        columns = [list(measure(folder, probes)) for probes in kinds.values()]
        heads = [f"{kind}: nats, bound {column[0].bound:.2g}" for kind, column in zip(kinds, columns, strict=True)]
        text += [f"## {folder.name}", "", f"| server's weights | {' | '.join(heads)} |", "|---|---|---|"]
        for row in zip(*columns, strict=True):
            cells = [f"{one.nats:.2g}, {'rejected' if one.rejected else 'accepted'}" for one in row]
            text.append(f"| {row[0].weights} | {' | '.join(cells)} |")
        text.append("")
    script.publish("\n".join(text), options.results, "receipts-bounds")


if __name__ == "__main__":
    main()
