"""A small model with a tokenizer that joins pairs of letters, and servers of it."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.trainer.receipts.torch_server import TorchServer
from tests.unit.trainer.receipts.training import Run
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 64 tokens with a tied head: 26 letters and 38 pairs of them."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    letters = string.ascii_lowercase
    pairs = [(left, right) for left, right in itertools.islice(itertools.product(letters, letters), 38)]
    vocabulary = {text: number for number, text in enumerate([*letters, *map("".join, pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.decoder = decoders.Fuse()
    saved: Any = PreTrainedTokenizerFast
    saved(tokenizer_object=tokenizer, unk_token=None).save_pretrained(folder)
    return folder


@pytest.fixture
def serve(model: Path) -> Iterator[Callable[..., TorchServer]]:
    """Starts a server: `serve(fault)`, with the arguments of TorchServer."""
    servers: list[TorchServer] = []

    def start(fault: str | None = None, **options: Any) -> TorchServer:
        servers.append(TorchServer(model, fault, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def begin(model: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Creates a training that publishes to servers: `begin([server], lora="merged")`."""
    runs: list[Run] = []

    def create(servers: list[TorchServer], **options: object) -> Run:
        runs.append(Run(model, tmp_path / str(len(runs)), servers, **options))  # type: ignore[arg-type]
        return runs[-1]

    yield create
    for run in runs:
        run.close()
