"""Steps of a training that publishes to model servers, with the functions of the loop and without an API."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.unit.trainer.receipts.torch_server import TorchServer

from gristmill import PolicyVersion
from gristmill.internal.receipts import RECEIPTS_FILE, Receipt, read_receipts
from gristmill_trainer.data.types import Sample
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.learner_factory import LearnerPlan, build_learner
from gristmill_trainer.loop import begin_receipts, publish
from gristmill_trainer.policy import ModelSource
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.publisher import FilesystemTransport, Publisher
from gristmill_trainer.publish.servers import ModelServer
from gristmill_trainer.receipts.probes import Probes
from gristmill_trainer.receipts.receipts import Receipts
from gristmill_trainer.settings import TrainerSettings
from gristmill_trainer.stop import StopRequest
from gristmill_trainer.training import Training


class Run:
    """A training on random samples of the temperature 0.8."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        servers: Sequence[TorchServer],
        *,
        seed: int = 0,
        lora: str = "",
        receipts: bool = True,
        background: bool = False,
        dtype: str = "float32",
        learning_rate: float = 3e-3,
    ) -> None:
        """`lora`: "" (all weights are trained), "adapters" (published as adapters) or "merged". `dtype`: of servers."""
        rank = 4 if lora == "adapters" else 0
        source = ModelSource(str(model), str(model), None, 512, lora_rank=rank, served_dtype=dtype)
        settings = TrainerSettings(
            device="cpu",
            batch_size=8,
            learning_rate=learning_rate,
            seed=seed,
            lora_rank=4 if lora else 0,
            lora_alpha=8,
            publisher="filesystem" if receipts else "none",
        )
        self.rng = np.random.default_rng(seed)
        self.learner, state = build_learner(LearnerPlan(source, None, settings, None), DistContext())
        policy = self.learner.policy
        self.folder, self.receipts = folder, Receipts(folder, policy) if receipts else None
        self.servers = ModelServers(
            [ModelServer(server.url, "token", 30) for server in servers],
            background=background,
            proof=self.receipts,
        )
        describe = policy.describe_adapters if policy.publishes_adapters else None
        stop = StopRequest(50)
        self.announced: list[str] = []
        self.publisher = Publisher(
            FilesystemTransport(self.servers, folder / "weights", None, describe) if receipts else None,
            lambda version: self.announced.append(str(version)),
            stop,
            background=background,
        )
        main: Any = SimpleNamespace(
            publisher=self.publisher,
            receipts=self.receipts,
            session=SimpleNamespace(version=lambda step: PolicyVersion(1, step)),
            noticing_replacement=contextlib.nullcontext,
            stop=stop,
        )
        nothing: Any = None
        self.training = Training(settings, DistContext(), self.learner, state, nothing, nothing, 0, folder, main)

    def train(self, steps: int) -> None:
        publish(self.training, 0)
        for step in range(1, steps + 1):
            samples = self.samples()
            self.publisher.settle()
            begin_receipts(self.training, samples, step - 1)
            self.learner.step(samples, step)
            publish(self.training, step)
        self.publisher.wait()

    def resume(self, step: int) -> None:
        """Goes on as the trainer of another process, after `step` steps."""
        assert self.receipts is not None
        self.receipts.close()
        self.receipts = Receipts(self.folder, self.learner.policy, Probes.read(self.folder), step)
        main: Any = self.training.main
        main.receipts = self.servers._proof = self.receipts
        publish(self.training, step)
        self.publisher.wait()

    def close(self) -> None:
        self.servers.close()
        if self.receipts is not None:
            self.receipts.close()

    def rows(self) -> list[Receipt]:
        return read_receipts(self.folder / RECEIPTS_FILE)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.learner.policy.model.state_dict().items()}

    def samples(self) -> list[Sample]:
        found = []
        for number in range(8):
            prompt, completion = int(self.rng.integers(24, 40)), int(self.rng.integers(4, 12))
            trained = np.arange(prompt + completion) >= prompt
            found.append(
                Sample(
                    group_id=f"g{number // 2}",
                    tokens=self.rng.integers(0, 64, len(trained), dtype=np.int32),
                    trained=trained,
                    rollout_logprobs=np.where(trained, -4.2, 0).astype(np.float32),
                    advantages=np.where(trained, self.rng.normal(), 0).astype(np.float32),
                    temperature=0.8,
                )
            )
        return found
