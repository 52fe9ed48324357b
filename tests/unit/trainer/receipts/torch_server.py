"""A model server with torch that answers the trainer's calls as vLLM does, and has one of several faults on request.

No real server has these faults on request. `test_receipts.py` in integration/loop asks a real vLLM.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file
from tests.support.http_server import Answer, HttpServer, Request
from transformers import AutoModelForCausalLM, AutoTokenizer

from gristmill_model.worker import Worker

FAULTS = (
    "stale_version",
    "swallowed_update",
    "missing_kind",
    "stale_head",
    "no_adapter",
    "temperature",
    "raw_logprobs",
    "top_p",
    "tokenizes_again",
    "stale_prefix_cache",
    "label_only",
    "bfloat16",
    "no_numbers",
)
NAME = "owner/name"
MISSING = r"mlp\.down_proj"
BLOCK = 16
"""Tokens of a block of the prefix cache."""


class TorchServer(HttpServer):
    """Serves the model in `folder`. `fault` acts from the version of step `since` on, `times` publications long, or
    from the start if `since` is 0."""

    def __init__(
        self,
        folder: Path,
        fault: str | None = None,
        since: int = 2,
        times: int = 1000,
        change: Callable[[Any], object] | None = None,
        sums: torch.dtype | None = None,
    ) -> None:
        """`change`: computes in bfloat16 from the start, and makes the weights wrong by this function as the fault.
        `sums`: answers the request for the sums of tensors in this dtype; None: it does not know the request."""
        self._sums = sums
        self.fault, self.since, self.times, self._change = fault, since, times, change
        self.label = "default"
        self.labels: list[str] = []
        self.loads: list[str] = []
        self.asked: list[dict[str, Any]] = []
        """Bodies of the requests for tokens."""
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.train(False)
        head = self._model.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        self._first = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._cache: dict[tuple[int, ...], Any] = {}
        self._lock = threading.Lock()
        self._faulty = since == 0
        super().__init__(self._answer)

    def _answer(self, request: Request) -> Answer:
        body = request.json
        path = urlsplit(request.path).path
        status = 200
        with self._lock:
            if path == "/gristmill/publish":
                self._publish(Path(body["path"]), body["version"])
                answer: dict[str, Any] = {"weight_version": body["version"]}
            elif path == "/update_weight_version":
                self.label = body["new_version"]
                self.labels.append(self.label)
                answer = {}
            elif path == "/collective_rpc" and self._sums is not None:
                assert body == {"method": "weight_sums"}
                answer = {"results": [self.weight_sums()]}
            elif path == "/v1/models":
                answer = {"data": [{"id": NAME}]}
            elif path == "/inference/v1/generate":
                self.asked.append(body)
                if self._is("no_numbers"):
                    status, answer = 400, {"error": {"message": "Out of range float values are not JSON compliant"}}
                else:
                    answer = self._generate(body)
            else:
                answer = {"weight_version": self.label, "is_paused": False}
        return Answer(status, answer)

    def weight_sums(self) -> dict[str, list[Any]]:
        """Returns what vLLM's worker does: it joins query, key and value, and gate and up."""
        joined: dict[str, list[torch.Tensor]] = {}
        for name, tensor in self._model.state_dict().items():
            name = re.sub(r"\.[qkv]_proj", ".qkv_proj", re.sub(r"(gate|up)_proj", "gate_up_proj", name))
            joined.setdefault(name, []).append(tensor.to(torch.bfloat16 if self._is("bfloat16") else self._sums))
        whole = {name: torch.nn.Parameter(torch.cat(parts)) for name, parts in joined.items()}
        model = SimpleNamespace(named_parameters=whole.items)
        worker = Worker()
        worker.model_runner = SimpleNamespace(get_model=lambda: model)
        return worker.weight_sums()

    def _is(self, fault: str) -> bool:
        return self._faulty and self.fault == fault

    def _publish(self, path: Path, version: str) -> None:
        self.loads.append(version)
        self._faulty = int(version.partition(".")[2]) >= self.since and self.times > 0
        self.times -= self._faulty
        if self._is("swallowed_update"):
            if self.label == "unproven":
                self.label = f"1.{self.since - 1}"
            return
        self.label = version
        if self._is("label_only"):
            return
        state = self._model.state_dict()
        new = dict(self._first) if self._is("stale_version") else self._read(path)
        if self._is("missing_kind"):
            new = {name: state[name] if re.search(MISSING, name) else value for name, value in new.items()}
        if self._is("stale_head"):
            new["lm_head.weight"] = state["lm_head.weight"]
        self._model.load_state_dict({name: value.clone() for name, value in new.items()})
        if not self._is("stale_prefix_cache"):
            self._cache.clear()

    def _read(self, path: Path) -> dict[str, torch.Tensor]:
        adapters = path / "adapter_model.safetensors"
        if not adapters.exists():
            return load_file(path / "model.safetensors")
        if self._is("no_adapter"):
            return dict(self._first)
        config = json.loads((path / "adapter_config.json").read_text())
        found, tensors = dict(self._first), load_file(adapters)
        for name, left in tensors.items():
            if ".lora_B." in name:
                plain = name.removeprefix("base_model.model.").replace(".lora_B", "")
                product = left @ tensors[name.replace("lora_B", "lora_A")]
                found[plain] = found[plain] + config["lora_alpha"] / config["r"] * product
        return found

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        params, tokens = body["sampling_params"], body["token_ids"]
        if self._is("tokenizes_again"):
            tokens = self._tokenizer.encode(self._tokenizer.decode(tokens), add_special_tokens=False)
        whole = "prompt_logprobs" in params
        with torch.no_grad():
            logits = self._logits(tokens, reads_cache=not whole and "cache_salt" not in body)
        answer: dict[str, Any] = {"choices": [{"logprobs": {"content": [self._sample(logits[-1], params)]}}]}
        if whole:
            rows = logits[:-1].log_softmax(-1)
            answer["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": float(row[token])}} for row, token in zip(rows, tokens[1:], strict=True)
            ]
        return answer

    def _logits(self, tokens: list[int], *, reads_cache: bool) -> torch.Tensor:
        """Returns float32[T, V] of the last T tokens, which are not in the prefix cache."""
        if self._is("bfloat16") or self._change is not None:
            short: Any = copy.deepcopy(self._model).bfloat16()
            if self._change is not None and self._faulty:
                with torch.no_grad():
                    self._change(short)
            rounded: torch.Tensor = short(input_ids=torch.tensor([tokens])).logits[0].float()
            return rounded
        blocks = tuple(tokens[: (len(tokens) - 1) // BLOCK * BLOCK])
        if not reads_cache or not blocks:
            whole: torch.Tensor = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
            return whole
        if blocks not in self._cache:
            made = self._model(input_ids=torch.tensor([blocks]), use_cache=True).past_key_values
            self._cache[blocks] = made
        past = copy.deepcopy(self._cache[blocks])
        rest = torch.tensor([tokens[len(blocks) :]])
        tail: torch.Tensor = self._model(input_ids=rest, past_key_values=past, use_cache=True).logits[0]
        return tail

    def _sample(self, logits: torch.Tensor, params: dict[str, Any]) -> dict[str, Any]:
        temperature = 1.0 if self._is("temperature") else params["temperature"]
        processed = logits / temperature
        if "top_k" in params:
            kept = processed.topk(params["top_k"]).indices
            processed = torch.full_like(processed, -torch.inf).scatter(0, kept, processed[kept])
        if self._is("top_p"):
            chances, order = processed.softmax(-1).sort(descending=True)
            processed = processed.clone()
            processed[order[chances.cumsum(0) - chances > 0.8]] = -torch.inf
        logprobs = (logits if self._is("raw_logprobs") else processed).log_softmax(-1)
        entries = [
            {"token_id": token, "logprob": max(float(logprobs[token]), -9999.0)}
            for token in dict.fromkeys(params["logprob_token_ids"])
        ]
        return {"token_id": entries[0]["token_id"], "logprob": entries[0]["logprob"], "top_logprobs": entries}
