"""Memory of a training process, in bytes, computed before the run.

    memory = Memory.of(config, parameters, settings, cuda=True)
    memory.fixed + memory.per_token * token_budget

The result is None if the config does not give the model's shape. The doctor, the trainer's first log line and the table
of docs/gpu.md use the result. The activations of a layer are the tensors that autograd saves in a decoder of
transformers with a gated MLP. `h` is the hidden size, `q` and `k` are the widths of all query and all key heads, and
`i` is the intermediate size:

    float32                    24 h + 8 q + 8 k + 16 i    per token
    bfloat16 by autocast       26 h + 4 q + 4 k +  8 i    the residual stream stays float32; each linear casts its input
    LoRA on a bfloat16 base    22 h + 6 q + 4 k +  8 i
    autocast, compiled         10 h + 4 q + 4 k +  6 i    fused operations are computed again, and save nothing
    LoRA, compiled             12 h + 4 q + 4 k +  6 i

Norms of queries and keys, as in Qwen3, save 8 (q + k) in float32, 6 (q + k) by autocast and 2 (q + k) compiled. The
last norm and the rotary tables are counted once. The first three rows are what autograd saves. The last two rows were
fitted on an H200: one to Qwen3-0.6B and Qwen2.5-1.5B, the other to Qwen3-4B at rank 16. A test compares the results
with the peaks in benchmarks/results.

Several GPUs gather weights: layers in turn in bfloat16, and embeddings, head and last norm in float32. With `l`
parameters in a layer, `t` in the embedding table and `r` outside of the layers, and before the activations are freed:

    4 r         these weights, during the whole update
    6 t         the gradient of the head, and the head in bfloat16
    12 l        weights of two layers, and the buffer that gathers a third; gradients of one layer, also in float32

The segments after a shared prefix save copies of their keys and values in each layer: 8 k per key in float32, 4 k in
bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gristmill_trainer.settings import TrainerSettings

CHUNK_BYTES: Final = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Bytes of one buffer of chunk logits, and of one block of the head's gradient if it is summed in another dtype.

A few such buffers exist at once. On CPU, a chunk of about the caches' size is fastest; a GPU needs large products.
"""
LARGEST_MICRO_BATCH: Final = 32_768
"""Tokens. We expect no more speed from larger ones; not measured above 16,384."""
_USED: Final = 0.92
"""Share of a GPU's free memory that micro-batches are planned for."""
_FLOAT32: Final = 4
_BFLOAT16: Final = 2
MOMENTS: Final = 8
"""Bytes of AdamW's moments, per trained parameter."""
_NORMED_QUERIES: Final = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2"})
"""Model types with norms of queries and keys."""
_HEAD_BUFFERS: Final = 3
"""Buffers of chunk logits that exist at once."""


@dataclass(frozen=True)
class Memory:
    """Bytes that a process needs, by part. Several GPUs divide weights, gradients, moments and reference."""

    weights: int
    gradients: int
    moments: int
    copies: int
    """Copies of trained weights. One GPU has all in bfloat16, which autocast keeps until the backward pass. Several
    GPUs have the gathered weights, and the gradients that they are about to share."""
    reference: int
    """The reference model of a KL penalty. On one GPU, the weights of its linear layers are bfloat16."""
    staged: int
    """The copy of the state that a thread writes as a checkpoint, on a CPU. On CUDA this copy is in main memory."""
    published: int
    """The buffer of weights for model servers, with `publisher: ipc` or `nccl` and without LoRA; on rank 0. A
    publication has copies of the same size. They need no memory of their own, unless the servers sleep during a step:
    no activations exist meanwhile."""
    head: int
    """Logits: a few chunks, however many tokens there are."""
    per_token: int
    """Activations that are kept for the backward pass, per token of a micro-batch."""
    per_copied_key: int
    """The same per key that attention copies, because its sequence follows a shared prefix (`Tree.copied`)."""

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the tokens of a micro-batch."""
        return self.state + self.copies + self.head

    @property
    def state(self) -> int:
        """Bytes that exist during the whole training."""
        return self.weights + self.gradients + self.moments + self.reference + self.staged + self.published

    def tokens(self, room: float) -> int:
        """Returns the most tokens of a micro-batch that fit in `room` bytes; 0 if not even the fixed part does."""
        return max(int((room - self.fixed) // self.per_token), 0)

    def planned(self, room: float) -> int:
        """Returns the tokens of a micro-batch that the trainer plans for `room` bytes of a GPU, without a setting."""
        return min(self.tokens(_USED * room), LARGEST_MICRO_BATCH)

    @property
    def checkpoint(self) -> int:
        """Bytes of the trained weights and the optimizer's moments, which a checkpoint holds."""
        return self.gradients + self.moments

    def __str__(self) -> str:
        return f"{gigabytes(self.fixed)} and {self.per_token / 1e6:.2f} MB per token of a micro-batch"

    @classmethod
    def of(
        cls, config: object, parameters: int, settings: TrainerSettings, *, cuda: bool, gpus: int = 1
    ) -> Memory | None:
        """Returns the memory of training a model; None if the config does not give the model's shape.

        `config`: the model's config of transformers, or the shape as a mapping with the same names. `parameters`: their
        number. `gpus`: processes that share the state.
        """
        lora = settings.lora_rank > 0
        shape = Shape.of(config)
        if shape is None:
            return None
        trained = shape.adapters(settings.lora_rank) if lora else parameters
        frozen = (_BFLOAT16 if cuda else _FLOAT32) * parameters if lora else 0
        weights = frozen + _FLOAT32 * trained
        wanted = settings.kl_beta > 0 and (not lora or settings.ref_model is not None)
        table = shape.vocabulary * shape.hidden
        linear = parameters - table
        # A reference that GPUs share stays float32, because FSDP does not mix dtypes.
        reference = (_BFLOAT16 if cuda and gpus == 1 else _FLOAT32) * linear + _FLOAT32 * table
        return cls(
            weights=weights // gpus,
            gradients=_FLOAT32 * trained // gpus,
            moments=MOMENTS * trained // gpus,
            copies=0 if lora or not cuda else _BFLOAT16 * linear if gpus == 1 else shape.gathered(parameters, config),
            reference=reference // gpus if wanted else 0,
            staged=(_FLOAT32 + MOMENTS) * trained if not cuda and gpus == 1 else 0,
            published=_BFLOAT16 * parameters if settings.publishes_from_device and cuda and not lora else 0,
            head=_HEAD_BUFFERS * CHUNK_BYTES["cuda" if cuda else "cpu"],
            per_token=shape.activations(
                cuda=cuda,
                lora=lora,
                recompute=bool(settings.gradient_checkpointing),
                offload=settings.gradient_checkpointing == "offload" and cuda,
                compiled=cuda and settings.compile is not False,
            ),
            per_copied_key=2
            * (_BFLOAT16 if cuda else _FLOAT32)
            * shape.keys
            * (1 if settings.gradient_checkpointing else shape.layers),
        )


@dataclass(frozen=True)
class Shape:
    """The widths of a decoder of transformers."""

    hidden: int
    intermediate: int
    """Of all experts that a token uses."""
    queries: int
    keys: int
    layers: int
    vocabulary: int
    head: int
    normed: bool
    """Whether queries and keys have norms."""

    @classmethod
    def of(cls, config: object) -> Shape | None:
        """Reads a config of transformers, whose attributes have one name for all architectures, or a mapping.

        A number that differs between layers counts with its largest value. Returns None if a number is missing.
        """
        text = _value(config, "text_config") or config
        hidden, heads = _number(text, "hidden_size"), _number(text, "num_attention_heads")
        layers, vocabulary = _number(text, "num_hidden_layers"), _number(text, "vocab_size")
        if hidden is None or heads is None or layers is None or vocabulary is None:
            return None
        head = _number(text, "head_dim") or hidden // heads
        experts = _number(text, "num_experts_per_tok") or 1
        wide = _number(text, "moe_intermediate_size") if experts > 1 else None
        return cls(
            hidden=hidden,
            intermediate=experts * (wide or _number(text, "intermediate_size") or 4 * hidden),
            queries=heads * head,
            keys=(_number(text, "num_key_value_heads") or heads) * head,
            layers=layers,
            vocabulary=vocabulary,
            head=head,
            normed=_value(text, "model_type") in _NORMED_QUERIES,
        )

    def adapters(self, rank: int) -> int:
        """Returns the parameters of adapters on every linear layer of the decoder."""
        hidden, queries, keys, wide = self.hidden, self.queries, self.keys, self.intermediate
        ends = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
        ends += [(hidden, wide), (hidden, wide), (wide, hidden)]
        return self.layers * rank * sum(map(sum, ends))

    def gathered(self, parameters: int, config: object) -> int:
        """Returns the bytes of weights and gradients that several GPUs hold whole at a time. `parameters`: of all GPUs.

        `config`: tells whether the head is the embedding table.
        """
        table = self.vocabulary * self.hidden
        outside = table if _value(config, "tie_word_embeddings") is True else 2 * table
        layer = max(parameters - outside, 0) // self.layers
        return _FLOAT32 * outside + (_FLOAT32 + _BFLOAT16) * table + 6 * _BFLOAT16 * layer

    def activations(self, *, cuda: bool, lora: bool, recompute: bool, offload: bool, compiled: bool) -> int:
        """Returns the bytes that autograd saves per token on the device."""
        if compiled:
            factors, norms = (12 if lora else 10, 4, 4, 6), 2
        elif cuda:
            factors, norms = (22, 6, 4, 8) if lora else (26, 4, 4, 8), 6
        else:
            factors, norms = (24, 8, 8, 16), 8
        widths = (self.hidden, self.queries, self.keys, self.intermediate)
        layer = sum(factor * width for factor, width in zip(factors, widths, strict=True))
        if self.normed:
            layer += norms * (self.queries + self.keys)
        once = 8 * (self.hidden + self.head)
        if recompute:  # each layer keeps its input, and one layer at a time is computed again
            return once + layer + (0 if offload else self.layers * _FLOAT32 * self.hidden)
        return once + self.layers * layer


def _value(config: object, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _number(config: object, name: str) -> int | None:
    """Returns a positive number of a config, or the largest number of a list with one per layer; None otherwise."""
    value = _value(config, name)
    values = value if isinstance(value, list | tuple) else [value]
    if not values or not all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in values):
        return None
    return int(max(values))


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2g} GB" if size < 1e10 else f"{size / 1e9:.0f} GB"
