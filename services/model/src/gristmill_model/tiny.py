"""`tiny`: a Qwen2 of 0.6 million parameters. It adds small numbers, but does not yet answer in tags.

The weights are shipped next to this file. `python -m gristmill_model.tiny` trains them again from the recipe
(`warmstart`, about two minutes) and overwrites the file. With one torch version, one kind of processor trains the same
bytes each time, because the seed and the number of threads are fixed.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from gristmill.internal.logs import line, setup
from gristmill_model import chat_template, quickstart, tokenizer, warmstart
from gristmill_model.quickstart import split
from gristmill_model.tokenizer import END_OF_TEXT_ID, IM_END_ID, VOCAB_SIZE, byte_tokenizer
from gristmill_model.warmstart import WarmStart, teach

WEIGHTS = Path(__file__).with_name("tiny.safetensors")
MAX_LENGTH = 2048
LAYERS, HIDDEN, INNER, HEADS = 2, 128, 512, 4
THREADS = 1

log = logging.getLogger(__name__)


def recipe() -> str:
    """SHA-256 of the code that the weights are trained by, without comments and docstrings.

    The weights file has the recipe's digest in its metadata, so a test notices a recipe that the weights do not follow.
    """
    total = hashlib.sha256()
    for module in (quickstart, tokenizer, warmstart):
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                node.body = [item for item in node.body if not _is_docstring(item)]
        total.update(ast.dump(tree).encode())
    return total.hexdigest()


def build(folder: Path) -> None:
    """Write the model, its tokenizer and its generation config into `folder`."""
    shutil.copyfile(WEIGHTS, folder / "model.safetensors")
    config = _config()
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    # Stop tokens only: sampling defaults here would silently change what vLLM samples.
    stops = {"eos_token_id": [IM_END_ID, END_OF_TEXT_ID], "pad_token_id": END_OF_TEXT_ID}
    GenerationConfig(**stops).save_pretrained(folder)
    saved = byte_tokenizer(MAX_LENGTH)
    saved.chat_template = chat_template.CHAT_TEMPLATE
    saved.save_pretrained(folder)


def train() -> Qwen2ForCausalLM:
    """Train the model from its recipe, in about two minutes."""
    plan = WarmStart()
    # One thread: results do not depend on the number of cores, and a busy machine does not stall a parallel region.
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.seed)
            model = Qwen2ForCausalLM(_config())
            teach(model, byte_tokenizer(MAX_LENGTH), split()[0], plan, _report)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    return model


def write(model: Qwen2ForCausalLM, path: Path) -> None:
    """Write the weights of `model`, without the head that is tied to the embedding, and the digest of the recipe."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, path, metadata={"format": "pt", "recipe": recipe()})
    path.chmod(0o644)


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


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


if __name__ == "__main__":
    setup("model")
    started = time.monotonic()
    write(train(), WEIGHTS)
    log.info(line("trained", model="tiny", seconds=time.monotonic() - started, path=WEIGHTS))
