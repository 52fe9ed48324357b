"""The model in training: loading, scores, and its tensors as in files, which is the only format that servers read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.errors import ModelError
from gristmill_trainer.out_of_memory import is_out_of_memory
from gristmill_trainer.policy.lora import (
    Lora,
    adapter_tensors,
    attach,
    check_saved,
    describe_adapters,
    load_adapters,
    merged_tensors,
    save_adapters,
    without_adapters,
)
from gristmill_trainer.policy.scoring import Scorer, check, fix_rotary
from gristmill_trainer.policy.source import ModelSource, config_without_attention

_LOG = logging.getLogger(__name__)
_HEAD = "lm_head.weight"
Visit = Callable[[str, torch.Tensor], object]


def no_visit(name: str, tensor: torch.Tensor) -> None:
    """A `Visit` that does nothing."""


class Policy:
    """A causal language model with float32 parameters; on CUDA it computes in bfloat16."""

    def __init__(
        self,
        source: ModelSource,
        device: Literal["auto", "cpu", "cuda"],
        weights: str | None = None,
        *,
        packing: bool = False,
        seq_len: int = 0,
        checkpointing: bool | Literal["offload"] = False,
        compiled: bool | None = False,
        lora: Lora | None = None,
        dist: DistContext | None = None,
    ) -> None:
        """Loads `source`, or the checkpoint folder `weights` of the same model.

        `packing`: layout of the scorer's micro-batches. `seq_len`: its longest sequence, or 0 if unknown.
        `checkpointing`, `compiled`: apply to the layers; `compiled` None means on CUDA. With `lora`, only adapters are
        trained, and `weights` is a folder with adapters. `dist`: with several ranks, rank 0 loads the weights into main
        memory, the others read the config only, and `model_state.shard` distributes and checks the weights. Raises
        ModelError.
        """
        there = torch.cuda.is_available()
        wanted = ("cuda" if there else "cpu") if device == "auto" else device
        if wanted == "cuda" and not there:
            raise ModelError(
                "no_gpu",
                f"device is cuda, and this PyTorch ({torch.__version__}) sees no CUDA device; install a CUDA build and "
                "look at nvidia-smi, or set device to auto",
            )
        if wanted == "cpu" and device == "auto" and torch.version.cuda is not None:
            _LOG.warning("this PyTorch is a CUDA build and sees no GPU, so it trains on the CPU; look at nvidia-smi")
        self.device = torch.device(wanted)
        self.source = source
        self.lora = lora
        if weights is not None:
            check_saved(Path(weights), lora)
        # A checkpoint of adapters does not contain the base model's weights.
        whole = source.weights if lora is not None or weights is None else weights
        self._dist = dist or DistContext()
        load = _load if self._dist.is_main else _without_weights
        try:
            # Frozen weights need no more digits than the products have. Trained weights are float32, because a learning
            # rate of 1e-6 vanishes in bfloat16.
            model = load(whole, torch.float32 if lora is None else self.arithmetic)
        except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
            if is_out_of_memory(error):
                raise
            raise ModelError("model_unreadable", f"cannot load the model '{whole}': {error}", model=whole) from error
        # As the model server computes: without dropout, and without the noise of a router of experts.
        self.model = (model if self._several else model.to(self.device)).train(False)
        fix_rotary(self.model, source.max_model_len)
        self.scorer = Scorer(self.model, packing=packing)
        if checkpointing:
            self.scorer.checkpoint_layers(offload=checkpointing == "offload" and self.device.type == "cuda")
        if not self._several:
            check(self.scorer, seq_len, self.compute)
        if lora is not None:
            attach(self.model, lora)
            if weights is not None:
                load_adapters(self.model, Path(weights))
        if self.device.type == "cuda" if compiled is None else compiled:
            self.scorer.compile_layers()
        counts = [parameter.numel() for parameter in self.model.parameters()]
        trained = sum(parameter.numel() for parameter in self.trained_parameters())
        _LOG.info(
            "model %s: %.1fM parameters, %.1fM of them trained, on %s",
            source.weights, sum(counts) / 1e6, trained / 1e6, self.device,
        )  # fmt: skip

    def runs_eagerly_after(self, error: BaseException) -> bool:
        """Returns whether torch.compile raised `error`, for example without a C compiler. The scorer then runs without
        torch.compile from now on, and the caller repeats the call that failed.

        With several ranks, raises ModelError: the other ranks wait in a collective.
        """
        # The classes are not imported, because their modules take seconds.
        of_compiler = any(
            cls.__module__.startswith(("torch._dynamo", "torch._inductor")) for cls in type(error).__mro__
        )
        if not of_compiler or not self.scorer.compiled:
            return False
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if self._several:
            raise ModelError(
                "compile_failed",
                f"torch.compile failed ({reason}); install a C compiler and the headers of Python, or set compile: "
                "false in the trainer's settings",
            ) from error
        _LOG.warning(
            "torch.compile failed, and the layers run without it from now on, more slowly; it needs a C compiler and "
            "the headers of Python; compile: false leaves out the attempt (%s)",
            reason,
        )
        self.scorer.run_eagerly()
        return True

    @property
    def _several(self) -> bool:
        return self._dist.size > 1

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding table; token ids are below this number."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def publishes_adapters(self) -> bool:
        """Whether the server gets only the adapters, because it was started with LoRA."""
        return self.lora is not None and self.source.lora_rank > 0

    @property
    def served_dtype(self) -> torch.dtype:
        found = getattr(torch, self.source.served_dtype, None)
        if not isinstance(found, torch.dtype):
            raise ModelError(
                "unknown_dtype",
                f"the model server's type '{self.source.served_dtype}' is not a type of torch",
                dtype=self.source.served_dtype,
            )
        return found

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """Returns the parameters for the optimizer: all parameters, or the adapters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def arithmetic(self) -> torch.dtype:
        """The dtype of the factors of every product: bfloat16 on CUDA, float32 on a CPU."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def compute(self) -> AbstractContextManager[Any]:
        """Returns the context of the forward pass: autocast to `arithmetic`, with a float32 residual stream."""
        if self.arithmetic == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.arithmetic)

    def freeze(self) -> None:
        """Makes the policy a reference, which is never trained.

        On CUDA, its linear weights then take half of the memory, unless ranks share them.
        """
        self.model.requires_grad_(False)
        if not self._several:
            cast_linear_weights(self.model, self.arithmetic)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Disables the adapters: the base model is the KL penalty's reference without extra memory."""
        if self.lora is None:
            raise ModelError(
                "reference_missing",
                "kl_beta is above 0, groups bring no log-probabilities of a reference model, and a policy that is "
                "trained whole has no reference; give the Learner a reference, or set kl_beta to 0",
            )
        return without_adapters(self.model)

    def served_tensors(self, *, on_device: bool = False, visit: Visit = no_visit) -> dict[str, torch.Tensor]:
        """Returns all tensors as in the server's files and in the server's dtype, or only adapters if the server takes
        adapters. Whole tensors have the adapters merged, and include the head even if it is tied here.

        `on_device`, `visit`: as in `as_in_files`.
        """
        if self.publishes_adapters:
            adapters = adapter_tensors(self.model)
            for name, tensor in adapters.items():
                visit(name, tensor)
            return adapters
        # Merged copies of all layers have no room next to a model for which LoRA was chosen.
        on_device = on_device and self.lora is None
        tied = tied_head(self.model)
        return as_in_files(self.model, self._tensors(), self.served_dtype, tied, on_device=on_device, visit=visit)

    def save(self, folder: Path) -> None:
        """Writes the `weights` folder of a later Policy: a Hugging Face model, tied as the original, or adapters."""
        if self.lora is not None:
            save_adapters(self.model, adapter_tensors(self.model), folder)
        elif self._several:
            tied = tied_head(self.model)
            tensors = {name: tensor.cpu() for name, tensor in self._tensors() if name != tied}
            self._dist.on_main(lambda: self.model.save_pretrained(folder, state_dict=tensors))
        else:
            self.model.save_pretrained(folder, safe_serialization=True)

    def describe_adapters(self, folder: Path) -> None:
        """Writes adapter_config.json, which describes the adapters' tensors."""
        describe_adapters(self.model, folder)

    def save_whole(self, folder: Path) -> None:
        """Writes a Hugging Face model folder, tied as the original, with merged adapters."""
        if self.lora is None:
            self.save(folder)
        else:
            self._merged_model().save_pretrained(folder, safe_serialization=True)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the live tensors by name, on rank 0. Merged tensors are copies, and so are those of several ranks."""
        if self.lora is not None:
            yield from merged_tensors(self.model)
            return
        for name, tensor in self.model.state_dict().items():
            whole = gathered(tensor.detach())
            if self._dist.is_main:
                yield name, whole

    def _merged_model(self) -> Any:
        with torch.device("meta"):
            model = type(self.model)(self.model.config)
        model.load_state_dict({name: tensor.cpu() for name, tensor in self._tensors()}, assign=True)
        model.tie_weights()
        model.generation_config = self.model.generation_config
        return model


def _load(folder: str, dtype: torch.dtype) -> Any:
    """Raises ModelError for a quantized model, adapters, and a model without some of its weights: transformers would
    train other weights than the model server serves."""
    config = config_without_attention(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            "model_quantized",
            f"the weights of '{folder}' are quantized, and cannot be trained; take the original model",
            model=folder,
        )
    if Path(folder, "adapter_config.json").is_file():
        raise ModelError(
            "model_has_adapters",
            f"'{folder}' has adapters; merge them into the weights, and train the merged model",
            model=folder,
        )
    model, found = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, trust_remote_code=False, config=config, output_loading_info=True
    )
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            "model_incomplete",
            f"{len(missing)} tensors of the model '{folder}' are in none of its files, such as {missing[0]}; copy or "
            "download it again",
            model=folder,
            missing=missing,
        )
    return model


def _without_weights(folder: str, dtype: torch.dtype) -> Any:
    """Returns the model with weights of any values. They take no main memory, because nothing writes them.

    On torch's meta device, the buffers would have no values either.
    """
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config_without_attention(folder), dtype=dtype, trust_remote_code=False)
    model.tie_weights()
    return model


def cast_linear_weights(model: Any, dtype: torch.dtype) -> None:
    """Casts the weights of the linear layers in place. Under autocast to `dtype`, every result keeps its bits.

    Autocast casts these weights at each use. It does not cast norms and the embedding table, with a tied head.
    """
    table = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight is not table:
            module.to(dtype)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, and the whole of a tensor that ranks share. Every rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tied_head(model: Any) -> str | None:
    """Returns the name of the head's weight if it is the embedding table; None for a separate head."""
    head = model.get_output_embeddings()
    if head.weight is not model.get_input_embeddings().weight:
        return None
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def as_in_files(
    model: Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    tied: str | None,
    *,
    on_device: bool = False,
    visit: Visit = no_visit,
) -> dict[str, torch.Tensor]:
    """Returns the model's tensors as in its files, in `dtype`.

    `tensors`: all of the model by their names in memory, or none. `tied`: its `tied_head`. The result has a copy of the
    tied weight as lm_head.weight, like the model server's copy of such a model. `visit`: called with the name of each
    result and its values, on the device of its tensor, so that sums of a GPU's tensors need no host.

    Tensors are converted one at a time. A GPU's tensors are copied to the CPU, unless `on_device`. transformers 5 joins
    some tensors at loading, such as expert weights, and renames others. Joined tensors are split on the CPU, because
    the device may have too little memory for them next to the model.
    """
    splits = bool(getattr(model, "_weight_conversions", None))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        converted = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if not splits:
            visit(name, converted)
            if name == tied:
                visit(_HEAD, converted)
        found[name] = converted if on_device and not splits else _on_host(converted)
    named = revert_weight_conversion(model, found) if splits else found
    if tied is not None and found:
        named = {**named, _HEAD: found[tied].clone()}
    for name, tensor in named.items() if splits else ():
        visit(name, tensor)
    return named


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a CUDA tensor into pinned memory, which torch keeps for the next publication."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
