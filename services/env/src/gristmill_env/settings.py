"""Everything that can be set in a run's YAML or on the command line of the environment.

The key names are those that users of Atropos know. Each field's text is also its `--help`.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from gristmill.deployment import API_URL, MODEL_URL
from gristmill.settings import Settings


def _http(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"a URL starts with http:// or https://, not '{url}'")
    return url.rstrip("/")


Url = Annotated[str, AfterValidator(_http)]


class RewardSpec(Settings):
    """One reward of a run, with its weight and options."""

    type: str
    """Registered name: accuracy, format, length."""

    weight: float = 1.0
    """Factor in the total. 0 keeps the reward as a metric only."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Options of the reward, e.g. {target_tokens: 64}."""


class DatasetConfig(Settings):
    """Where the rows come from, how they become prompts, how completions are sampled and scored."""

    dataset_name: str | None = None
    """Data set on the Hugging Face hub (or in its offline cache), e.g. openai/gsm8k. A path works too."""

    dataset_config: str | None = None
    """Configuration of a hub data set, e.g. main."""

    dataset_path: str | None = None
    """Local data instead: a .jsonl, .json, .csv or .parquet file, or a folder made by save_to_disk. Relative to the
    configuration file, then to the working directory."""

    split: str = "train"
    """Split, with slices: train, train[:100], test[10%:20%]. Of a single local file all names mean the file."""

    prompt_field: str = "prompt"
    """Column that holds the user's message."""

    answer_field: str | None = None
    """Column that holds the reference answer; rewards that compare with it need this."""

    system_prompt: str | None = None
    """System message before every prompt."""

    shuffle_dataset: bool = True
    """Take the rows in a random order, another one each epoch, fixed by `seed`."""

    seed: int = 42
    """Seed of the shuffle. Replicas and restarts with the same seed agree on the order."""

    max_tokens: int = Field(default=256, ge=1)
    """Most tokens a completion may have."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature. The trainer divides its logits by the same number."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. Anything but 1 biases the trainer's importance ratio; serve warns."""

    reward_functions: list[str | RewardSpec] = Field(default_factory=list)
    """Rewards: names, or {type, weight, params}. A bare name has weight 1."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.dataset_name and self.dataset_path:
            raise ValueError("both dataset_name and dataset_path are set; keep one of them")
        return self

    def rewards(self) -> list[RewardSpec]:
        """`reward_functions` with names spelled out."""
        return [RewardSpec(type=item) if isinstance(item, str) else item for item in self.reward_functions]


class ServerConfig(Settings):
    """A model server: vLLM with --enable-scale-out, as the model service starts it."""

    model_name: str | None = None
    """Model that must be served there. Unset: whatever is."""

    base_url: Url = MODEL_URL
    """Its address, with or without /v1. GRISTMILL_MODEL_URL stands above a YAML's."""

    api_key: str | None = None
    """Sent as a bearer token; write ${VAR} to keep it out of the file. Never recorded."""

    timeout: float = Field(default=600.0, gt=0)
    """Seconds that one request for a group's completions may take."""

    @property
    def root_url(self) -> str:
        """The address without /v1."""
        return self.base_url.removesuffix("/v1").rstrip("/")


class EnvConfig(Settings):
    """A run, as the environment sees it: one YAML file is one run."""

    run_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the run. GRISTMILL_RUN_ID (RUN_ID in .env) stands above a YAML's; unset, the file's name is taken."""

    tokenizer_name: str | None = None
    """Tokenizer, a hub id or a path. Only needed where the model service's manifest is not at hand."""

    group_size: int = Field(default=8, ge=1)
    """Completions a prompt. 1 means no group: the advantage is the reward itself."""

    max_num_workers: int = Field(default=16, ge=1, le=1024)
    """Prompts worked on at a time by this process."""

    rollout_server_url: Url = API_URL
    """The trajectory API. GRISTMILL_API_URL stands above a YAML's."""

    max_token_length: int = Field(default=2048, ge=2)
    """Most tokens of prompt and completion together. Prompts that leave no room are skipped and counted."""

    total_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the run; the same as trainer.training_steps, which may be set instead."""

    ensure_scores_are_not_same: bool = True
    """Drop groups whose completions all score the same: they carry no gradient."""

    use_wandb: bool = False
    """Log rewards to Weights & Biases; offline where there are no credentials."""

    wandb_name: str | None = None
    """Name of the W&B run; unset, the run id."""

    slurm: bool = False
    """Accepted for launch scripts. There is no server discovery yet: base_url is used, and a line says so."""

    testing: bool = False
    """Log every prompt and completion in full. Nothing is faked and nothing else changes."""

    startup_patience: float | None = Field(default=None, gt=0)
    """Seconds to wait at the start for the model server and the API. Unset: 300 in serve, 20 in try."""

    patience: float = Field(default=600.0, gt=0)
    """Seconds that an API or model server may be away in mid-run before serve gives up."""

    dataset: DatasetConfig = Field(default_factory=DatasetConfig)
    """Rows, prompts, sampling, rewards."""

    server_configs: list[ServerConfig] = Field(default_factory=lambda: [ServerConfig()], min_length=1, max_length=1)
    """The model server (one, for now)."""

    trainer: dict[str, Any] = Field(default_factory=dict)
    """Settings of the trainer that belong to this run; they stand above trainer.yaml. The trainer checks them."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        theirs = self.trainer.get("training_steps")
        if self.total_steps is not None and theirs is not None and theirs != self.total_steps:
            raise ValueError(f"total_steps is {self.total_steps} but trainer.training_steps is {theirs}; keep one")
        return self

    @property
    def server(self) -> ServerConfig:
        """The model server."""
        return self.server_configs[0]

    def recorded(self, model: str) -> dict[str, Any]:
        """The half of the run's record that is the environment's: what makes it this run and no other.

        Addresses, keys, time-outs, worker counts and logging are left out: they may change between restarts.
        """
        trainer = dict(self.trainer)
        if self.total_steps is not None:
            trainer["training_steps"] = self.total_steps
        return {
            "model": model,
            "max_token_length": self.max_token_length,
            "ensure_scores_are_not_same": self.ensure_scores_are_not_same,
            "dataset": {
                **self.dataset.model_dump(mode="json", exclude={"reward_functions"}),
                "reward_functions": [spec.model_dump(mode="json") for spec in self.dataset.rewards()],
            },
            "trainer": trainer,
        }
