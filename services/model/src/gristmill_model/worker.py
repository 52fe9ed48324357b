"""The methods that Gristmill adds to vLLM's worker, by `--worker-extension-cls`. POST /collective_rpc calls them.

None of them raises an error. With several workers, vLLM 0.32 would leave the answers of the other workers unread, and
take them for answers to the next call.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from gristmill_model.device_memory import UnusableError, weights_of
from gristmill_model.lora import ADAPTER_NUMBER, NAME
from gristmill_model.publication import FAILED

_LOG = logging.getLogger(__name__)
_PART: Final = {"cpu": 1 << 14, "cuda": 1 << 22}
"""Elements at a time. A part on a CPU fits in its cache, and is too small for torch to share among threads."""
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32}


Answer = list[Any]
"""Empty; or HTTP status, code and message of a refusal (`UnusableError`) or of an error (`FAILED`)."""


def _answering(method: Callable[..., None]) -> Callable[..., Answer]:
    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Answer:
        try:
            method(*arguments, **named)
        except UnusableError as refusal:
            return list(refusal.args)
        except Exception as error:  # noqa: BLE001  It is logged, and the caller gets it as an answer.
            _LOG.exception("%s failed", method.__name__)
            return [500, FAILED, f"{method.__name__}: {error or type(error).__name__}"]
        return []

    return call


class Worker:
    """A base class of vLLM's worker at run time."""

    add_lora: Any
    device: torch.device
    model_runner: Any
    reload_weights: Any
    sleep: Any
    wake_up: Any

    def weight_sums(self) -> dict[str, list[Any]]:
        """Returns dtype and `weight_sum` of each tensor of the model by vLLM's name.

        Tensors without elements are left out: on a CPU, vLLM packs the weights of linear layers for its kernels, and
        leaves an empty tensor in their place. The dictionary is empty if the worker has no memory for the sums.
        """
        named = self.model_runner.get_model().named_parameters()
        try:
            return {
                name: [str(tensor.dtype).removeprefix("torch."), weight_sum(tensor)]
                for name, tensor in named
                if tensor.numel() and tensor.element_size() in _INTEGERS
            }
        except RuntimeError:
            _LOG.exception("weight_sums failed")
            return {}

    @_answering
    def fall_asleep(self, level: int) -> None:
        """Frees the memory of vLLM's pool. `level`: 1 keeps the weights in main memory, 2 drops them."""
        self.sleep(level)

    @_answering
    def wake(self, tags: list[str] | None = None) -> None:
        """Wakes memory of vLLM's pool. A repetition does nothing. `tags`: None for all of it."""
        self.wake_up(tags)

    @_answering
    def load_adapter(self, path: str) -> None:
        """Replaces the served adapter by the adapter in folder `path`, also for paused requests.

        /v1/load_lora_adapter with `load_inplace` is not an option, because vLLM would then read the files again for
        every batch of tokens.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest(lora_name=NAME, lora_int_id=ADAPTER_NUMBER, lora_path=path, load_inplace=True)
        if not self.add_lora(request):
            raise ValueError(f"vLLM did not add the adapter in {path}")

    @_answering
    def load_files(self, path: str) -> None:
        """Replaces the weights by those in the files of folder `path`."""
        with self._whole_load():
            self.reload_weights(weights_path=path)

    @_answering
    def load_device_memory(self, path: str) -> None:
        """Replaces the weights by those in the trainer's device memory, which folder `path` describes."""
        with weights_of(Path(path), self.device) as tensors, self._whole_load():
            self.reload_weights(weights_iterator=tensors)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    @contextmanager
    def _whole_load(self) -> Iterator[None]:
        """If a load fails, drops the tensors that vLLM has kept for the layers that are not complete.

        vLLM collects the tensors of a layer before it copies them. The next load would continue with them, and leave
        tensors of that layer without values.
        """
        try:
            yield
        except BaseException:
            from vllm.model_executor.model_loader.reload import layerwise

            for layer in self.model_runner.get_model().modules():
                info = layerwise.get_layerwise_info(layer)
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(layer, info)
                info.reset()
            layerwise.LOADING_LAYERS.clear()
            raise


def weight_sum(tensor: torch.Tensor) -> int:
    """Returns the sum of 31 x^2 + x over the elements, modulo 2^64 and signed, with x the bits of an element as an
    integer.

    It is additive: a tensor that vLLM joined from parts has the sum of their sums, and padding by zeros adds nothing.
    The trainer has the same function (gristmill_trainer.receipts.sums).
    """
    flat = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    size = _PART.get(flat.device.type, _PART["cuda"])
    for start in range(0, len(flat), size):
        part = flat[start : start + size].long()
        total += (31 * part * part + part).sum()
    return int(total)
