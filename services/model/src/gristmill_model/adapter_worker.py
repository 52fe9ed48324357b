"""The extension of vLLM's worker that loads a published adapter. vLLM loads this class by `--worker-extension-cls`."""

from __future__ import annotations

from typing import Any

from gristmill_model import adapters

_FIRST = 1
"""vLLM's number for the adapter that it was started with."""


class AdapterWorker:
    """A base class of vLLM's worker at run time. The worker loads and unloads adapters."""

    add_lora: Any

    def load_adapter(self, path: str) -> bool:
        """Replaces the served adapter by the adapter in folder `path`, also for paused requests.

        /v1/load_lora_adapter with `load_inplace` is not an option, because vLLM would then read the files again for
        every batch of tokens.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest(lora_name=adapters.NAME, lora_int_id=_FIRST, lora_path=path, load_inplace=True)
        return bool(self.add_lora(request))
