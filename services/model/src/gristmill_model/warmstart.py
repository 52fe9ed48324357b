"""The warm start of `tiny`: supervised steps that teach addition, but not the habit of answering in tags.

The target completion is `<answer>25</answer>`. Three lessons in ten answer that way, the others in plain text, and some
answers are wrong. A sampled completion is therefore sometimes right and a greedy completion rarely, so RL has a habit
to teach. The loss is on completion tokens only, and padding is on the right, which causal attention never reads. The
optimizer is AdamW with a cosine schedule, all in float32.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from gristmill_model.quickstart import Sum
from gristmill_model.tokenizer import END_OF_TEXT_ID, IM_END_ID

IGNORED = -100
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class WarmStart:
    """The mix of lessons, and the optimizer's settings."""

    steps: int = 800
    batch_size: int = 64
    learning_rate: float = 1.5e-3
    rising_steps: int = 30
    final_share: float = 0.05
    """The learning rate's last value, as a share of its peak."""
    weight_decay: float = 0.01
    seed: int = 7
    tagged: float = 0.30
    """Share of lessons that answer in <answer> tags."""
    bare: float = 0.52
    """Share of lessons that answer with the number alone. The remaining lessons answer in a sentence."""
    wrong: float = 0.03
    """Share of lessons whose number is wrong."""
    every_long: int = 10
    """Every N-th batch has system prompts and word problems, so that other prompts do not derail the model."""
    long_batch_size: int = 16


SYSTEM_PROMPTS = (
    "Put the answer in <answer> tags.",
    "You are a helpful assistant.",
    "Solve the problem step by step. Give the final number inside <answer> and </answer> tags.",
    "You are a careful solver of problems. Think first, then write the final answer between <answer> and </answer>.",
)
STORIES = (
    "Tom has {a} apples and buys {b} more. How many apples does he have now?",
    "There are {a} birds on a roof. Then {b} birds land beside them, and none of them flies away. How many are there?",
    "Mia read {a} pages on Monday and {b} pages on Tuesday. How many pages did Mia read in these two days altogether?",
)
SENTENCES = ("It is {n}.", "{a} + {b} = {n}", "That makes {n}.")
OFFSETS = (-10, -2, -1, 1, 2, 10)


def teach(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Sum], plan: WarmStart, report: Progress
) -> None:
    """Trains `model` in place on lessons drawn from `rows`. Calls `report(step, steps, loss)` every 100 steps."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=plan.learning_rate,
        betas=(0.9, 0.98),
    )
    model.train()
    for step, (tokens, targets) in enumerate(_batches(tokenizer, rows, plan)):
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * _schedule(step, plan)
        hidden = model.model(input_ids=tokens).last_hidden_state
        trained = targets != IGNORED
        loss = functional.cross_entropy(model.lm_head(hidden[trained]), targets[trained])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0 or step + 1 == plan.steps:
            report(step + 1, plan.steps, loss.item())
    model.eval()


def _schedule(step: int, plan: WarmStart) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * step / plan.steps))
    return min(1.0, (step + 1) / plan.rising_steps) * (plan.final_share + (1 - plan.final_share) * cosine)


def _batches(
    tokenizer: PreTrainedTokenizerFast, rows: list[Sum], plan: WarmStart
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields `plan.steps` batches of (tokens [B, T], targets [B, T]), int64. The loss skips IGNORED targets."""
    rng = random.Random(plan.seed)
    cache: dict[str, list[int]] = {}

    def encode(text: str) -> list[int]:
        if text not in cache:
            cache[text] = tokenizer.encode(text)
        return cache[text]

    for step in range(plan.steps):
        is_long = step % plan.every_long == plan.every_long - 1
        size = plan.long_batch_size if is_long else plan.batch_size
        lessons = [_lesson(rng, rng.choice(rows), plan, is_long) for _ in range(size)]
        pairs = [(encode(prompt), [*encode(completion), IM_END_ID]) for prompt, completion in lessons]
        yield _pad(pairs)


def _pad(pairs: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(prompt) + len(completion) for prompt, completion in pairs) - 1
    tokens = torch.full((len(pairs), length), END_OF_TEXT_ID)
    targets = torch.full((len(pairs), length), IGNORED)
    for place, (prompt, completion) in enumerate(pairs):
        sequence = torch.tensor(prompt + completion)
        tokens[place, : len(sequence) - 1] = sequence[:-1]
        targets[place, len(prompt) - 1 : len(sequence) - 1] = sequence[len(prompt) :]
    return tokens, targets


def _lesson(rng: random.Random, row: Sum, plan: WarmStart, is_long: bool) -> tuple[str, str]:
    """Returns one (prompt, completion) as text in the chat template's form."""
    number = row.total
    if rng.random() < plan.wrong:
        number = max(0, number + rng.choice(OFFSETS))
    manner = rng.random()
    if manner < plan.tagged:
        completion = f"<answer>{number}</answer>"
    elif manner < plan.tagged + plan.bare:
        completion = str(number)
    else:
        completion = rng.choice(SENTENCES).format(a=row.a, b=row.b, n=number)
    question, system = row.question, ""
    if is_long:
        question = rng.choice((row.question, *STORIES)).format(a=row.a, b=row.b)
        system = rng.choice(("", *SYSTEM_PROMPTS))
    opening = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{opening}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", completion
