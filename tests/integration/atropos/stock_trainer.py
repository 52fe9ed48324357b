"""The API calls of Atropos' example trainer: register, then poll /batch until there is a batch."""

from __future__ import annotations

import time
from typing import Any

import httpx

_POLL_S = 0.1
_TRIES = 5
_TIMEOUT_S = 10.0


class StockTrainer:
    def __init__(self, url: str, batch_size: int, num_steps: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_S)
        self.batch_size = batch_size
        self.num_steps = num_steps

    def register(self) -> None:
        body = {
            "wandb_group": "group",
            "wandb_project": "project",
            "batch_size": self.batch_size,
            "max_token_len": 4096,
            "checkpoint_dir": "checkpoints",
            "save_checkpoint_interval": 5,
            "starting_step": 0,
            "num_steps": self.num_steps,
        }
        self._http.post("/register", json=body).raise_for_status()

    def draw(self, patience: float = 60.0) -> list[dict[str, Any]]:
        """Polls for the next batch."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            batch = self.ask()
            if batch is not None:
                assert sum(len(group["tokens"]) for group in batch) == self.batch_size
                assert all("overrides" in group for group in batch)
                return batch
            time.sleep(_POLL_S)
        raise AssertionError(f"no batch in {patience:.0f} s")

    def ask(self) -> list[dict[str, Any]] | None:
        for left in reversed(range(_TRIES)):
            try:
                answer = self._http.get("/batch").raise_for_status().json()
                break
            except httpx.TransportError:
                if not left:
                    raise
        assert answer.get("status") != "error", answer
        batch: list[dict[str, Any]] | None = answer["batch"]
        return batch

    def status(self) -> dict[str, int]:
        answer: dict[str, int] = self._http.get("/status").raise_for_status().json()
        return answer

    def close(self) -> None:
        self._http.close()
