"""`tiny`: a Qwen2 of 0.6 million parameters, made on the spot. It adds small numbers, but does not yet answer in tags.

Its bytes depend on the recipe, the torch version and the processor's instruction set only: the seed and the number of
threads are fixed. The revision is a hash over the recipe's source, so a changed recipe is another model.
"""

from __future__ import annotations

import hashlib
import logging
import time
from functools import cache
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from gristmill.logs import line
from gristmill_model import quickstart, tokenizer, warmstart
from gristmill_model.quickstart import split
from gristmill_model.tokenizer import END_OF_TEXT_ID, IM_END_ID, VOCAB_SIZE, byte_tokenizer
from gristmill_model.warmstart import WarmStart, teach

MAX_LENGTH = 2048
LAYERS, HIDDEN, INNER, HEADS = 2, 128, 512, 4
THREADS = 1

log = logging.getLogger(__name__)


@cache
def revision() -> str:
    """Twelve hex digits that change with anything the model is made from."""
    sources = (Path(str(module.__file__)) for module in (quickstart, tokenizer, warmstart))
    total = hashlib.sha256(Path(__file__).read_bytes())
    for source in sources:
        total.update(source.read_bytes())
    return total.hexdigest()[:12]


def build(folder: Path) -> None:
    """Make the model and write it, its tokenizer and its generation config into `folder`."""
    plan = WarmStart()
    log.info(line("building", model="tiny", steps=plan.steps, note="once; about two minutes"))
    started = time.monotonic()
    # One thread: results do not depend on the number of cores, and a busy machine does not stall a parallel region.
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.seed)
            model = Qwen2ForCausalLM(_config())
            words = byte_tokenizer(MAX_LENGTH)
            teach(model, words, split()[0], plan, _report)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    # Stop tokens only: sampling defaults here would silently change what vLLM samples.
    stops = {"eos_token_id": [IM_END_ID, END_OF_TEXT_ID], "pad_token_id": END_OF_TEXT_ID}
    model.generation_config = GenerationConfig(**stops)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    log.info(line("built", model="tiny", revision=revision(), seconds=time.monotonic() - started))


def _config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=IM_END_ID,
        pad_token_id=END_OF_TEXT_ID,
        dtype=torch.float32,
    )


def _report(step: int, steps: int, loss: float) -> None:
    log.info(line("warm start", step=f"{step}/{steps}", loss=loss))
