"""What the trainer calls in vLLM's worker to bring a new adapter: vLLM loads this class by `--worker-extension-cls`."""

from __future__ import annotations

from typing import Any

from gristmill_model import adapters

_FIRST = 1
"""vLLM's number for the adapter that it was started with."""


class AdapterWorker:
    """Becomes a base of vLLM's worker, which loads and forgets adapters."""

    add_lora: Any

    def load_adapter(self, path: str) -> bool:
        """Put the adapter in folder `path` in place of the one that is served, also for requests that stand still.

        Not by /v1/load_lora_adapter with `load_inplace`: vLLM would read the files anew for every batch of tokens.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest(lora_name=adapters.NAME, lora_int_id=_FIRST, lora_path=path, load_inplace=True)
        return bool(self.add_lora(request))
