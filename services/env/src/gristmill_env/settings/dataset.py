"""`dataset:` rows, prompts, sampling, rewards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from gristmill.errors import ConfigError
from gristmill.internal.redaction import is_secret, redact
from gristmill.internal.settings import Settings


class RewardSpec(Settings):
    """One reward of a run, with its weight and options."""

    type: str
    """Registered name (accuracy, format, length), path/to/file.py:function, package.module:function, or a TRL reward
    function: trl:package.module:function."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Name in scores and metrics. Default: its own name. Distinguishes two uses of one reward."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor in the total. 0 keeps the reward as a metric only."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Options of the reward, e.g. {target_tokens: 64}."""

    process: bool = False
    """Call the reward in its own processes (reward_processes), so that it delays no other reward. Otherwise the
    rewards of a run share one process. Processes share no memory. No effect on rewards that ship."""

    @model_serializer(mode="wrap")
    def _without_what_is_unset(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A run's record is the same as before there were names and processes."""
        return {key: value for key, value in write(self).items() if key not in ("name", "process") or value}

    def recorded(self) -> dict[str, Any]:
        """Returns the settings that distinguish this reward from others, without secrets, addresses and `process`."""
        fields = self.model_dump(mode="json", exclude={"process"})
        return {**fields, "params": without_secrets(fields["params"], "base_url")}


ROW_SOURCES: Final = ("dataset_name", "dataset_path", "rows")
"""Settings of which each names where rows come from."""
_EVALUATED: Final = ("dataset_name", "dataset_config", "dataset_path", "dataset_revision")
"""Settings that an evaluation set has with the prefix eval_."""


def whole_split(split: str) -> str:
    """Returns a split without its slices: `train` for `train[10:]`. A slice of one data set says nothing of another."""
    return re.sub(r"\[[^\]]*\]", "", split)


class DatasetConfig(Settings):
    """Where the rows come from, how they become prompts, how completions are sampled and scored."""

    dataset_name: str | None = None
    """Data set on the Hugging Face hub (or in its offline cache), e.g. openai/gsm8k. A path works too."""

    dataset_config: str | None = None
    """Configuration of a hub data set, e.g. main; for a local copy of one, the folder of its files."""

    dataset_revision: str | None = None
    """Commit, tag or branch of a hub data set. A commit pins the rows; without it they may change between runs."""

    dataset_path: str | None = None
    """Local data instead: a .jsonl, .json, .csv or .parquet file, a folder made by save_to_disk, or a copy of a hub
    data set. Relative to the configuration file, then to the working directory."""

    rows: str | None = None
    """Rows made in Python instead: a function that yields dicts, as path/to/file.py:name or package.module:name. It
    must yield the same rows at each call (docs/data.md)."""

    rows_params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function of `rows`, e.g. {digits: 3}. Secrets (api_key) are not recorded."""

    split: str = "train"
    """Split, with slices: train, train[:100], test[10%:20%]. For a single local file every name means the file."""

    prompt_field: str = "prompt"
    """Column that holds the user's message, or a list of messages with role and content. A path reaches into columns:
    metadata.question, turns.0."""

    prompt_template: str | None = None
    """The user's message as a Jinja template over the row's columns, instead of prompt_field: "{{ question }}"."""

    answer_field: str | None = None
    """Column that holds the reference answer; rewards that compare with it need this, or ground_truth_field. A path
    works."""

    ground_truth_field: str | None = None
    """Column with the canonical answer. If set, rewards compare with it and not with answer_field."""

    system_prompt: str | None = None
    """System message before every prompt. A row that contains its own system message keeps it."""

    prefill: str | None = None
    """Beginning of the model's answer, written into the prompt: "<think>\n". It is not trained on; rewards see it. Chat
    templates that open <think> themselves need none."""

    shuffle_dataset: bool = True
    """Take the rows in a random order that changes with each epoch and is fixed by `seed`."""

    seed: int = Field(default=42, ge=0)
    """Seed of the shuffle. Replicas and restarts with the same seed agree on the order."""

    max_tokens: int = Field(default=256, ge=1)
    """Most tokens of a completion, and of each turn. serve and check warn if it is above max_token_length."""

    min_tokens: int = Field(default=0, ge=0)
    """Start of the warm-up of max_tokens. Short answers stay possible."""

    length_warmup_steps: int = Field(default=0, ge=0)
    """Training steps over which the limit of a completion rises linearly from min_tokens to max_tokens."""

    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature, at most 2, as for vLLM. The trainer divides its logits by the same number."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. Anything but 1 biases the trainer's importance ratio; serve and check warn."""

    top_k: int | None = Field(default=None, ge=1)
    """Sample from the k likeliest tokens only. Biases the trainer's importance ratio, as do min_p and the penalties;
    serve and check warn. Default: all tokens."""

    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample only tokens whose probability is at least this part of the likeliest token's."""

    repetition_penalty: float = Field(default=1.0, gt=0)
    """Above 1, tokens of the prompt and of the completion so far become less likely."""

    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Above 0, tokens of the completion so far become less likely."""

    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Above 0, tokens become less likely with each time that the completion has them."""

    chat_template: str | None = None
    """Chat template in place of the tokenizer's: Jinja, or the path of its file, relative to the configuration file."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Values for the chat template, e.g. {enable_thinking: false, add_date: true}."""

    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts that end a completion, in addition to the model's own end token. They stay in the completion, and are
    trained on."""

    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Tokens that end a completion. They stay in it."""

    eval_dataset_name: str | None = None
    """Data set to evaluate on, from the hub or a path. Default: the run's own data set, with `eval_split`."""

    eval_dataset_config: str | None = None
    """Configuration of eval_dataset_name."""

    eval_dataset_revision: str | None = None
    """Commit, tag or branch of eval_dataset_name."""

    eval_dataset_path: str | None = None
    """Local data to evaluate on, like dataset_path."""

    eval_split: str | None = None
    """Split to evaluate on. Default: `split`."""

    eval_limit: int | None = Field(default=None, ge=1)
    """Most prompts of an evaluation, from the first row. Default: 100 in serve, all in `evaluate`."""

    eval_samples: int = Field(default=1, ge=1)
    """Completions per prompt in an evaluation."""

    eval_temperature: float | None = Field(default=None, ge=0, le=2)
    """Sampling temperature of an evaluation; 0 is greedy. Default: greedy for one completion per prompt, `temperature`
    for several."""

    reward_functions: list[str | RewardSpec] = Field(default_factory=list)
    """Rewards: names, or {type, weight, params}. A bare name has weight 1."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if len(names := [name for name in ROW_SOURCES if getattr(self, name)]) > 1:
            raise PydanticCustomError("two_sources", "{names} are set; keep one", {"names": " and ".join(names)})
        if self.eval_dataset_name and self.eval_dataset_path:
            raise PydanticCustomError(
                "two_sources", "both eval_dataset_name and eval_dataset_path are set; keep one of them"
            )
        if self.eval_samples > 1 and self.eval_temperature == 0:
            raise PydanticCustomError(
                "greedy_samples",
                "eval_samples is {samples} but eval_temperature is 0: greedy completions are all the same; "
                "take one sample, or a temperature above 0",
                {"samples": self.eval_samples},
            )
        return self

    @model_validator(mode="after")
    def _warmup_rises(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise PydanticCustomError(
                "min_tokens_too_large",
                "min_tokens is {min_tokens}, above max_tokens, {max_tokens}",
                {"min_tokens": self.min_tokens, "max_tokens": self.max_tokens},
            )
        return self

    @property
    def more_sampling(self) -> dict[str, Any]:
        """The sampling parameters of vLLM that differ from its defaults, except temperature and top_p."""
        return {name: value for name in MORE_SAMPLING if (value := getattr(self, name)) != default_of(name)}

    @property
    def has_rows(self) -> bool:
        """Whether the section names where the rows come from."""
        return any(getattr(self, name) for name in ROW_SOURCES)

    @property
    def has_evaluation_set(self) -> bool:
        """Whether the section names prompts to evaluate on. Training prompts are not evaluated by default."""
        return bool(self.eval_dataset_name or self.eval_dataset_path or self.eval_split)

    def evaluation_set(self) -> DatasetConfig:
        """Returns the settings of the data set to evaluate on, in the data set's order."""
        update: dict[str, Any] = {"shuffle_dataset": False, "split": self.eval_split or self.split}
        if self.eval_dataset_name or self.eval_dataset_path:
            update |= {name: getattr(self, f"eval_{name}") for name in _EVALUATED} | {"rows": None}
            update["split"] = self.eval_split or whole_split(self.split)
        return self.model_copy(update=update)

    @property
    def gold_field(self) -> str | None:
        """Field of a row with which rewards compare; None if rows have no answer."""
        return self.ground_truth_field or self.answer_field

    def with_template(self, folder: Path | None) -> Self:
        """Returns these settings with the text of the chat template in place of its path, so that a run's record has
        the text. `folder`: where a relative path starts; also looked at: the working directory. Raises ConfigError."""
        if self.chat_template is None or "{" in self.chat_template:
            return self
        paths = [(base / self.chat_template).resolve() for base in (folder, Path()) if base is not None]
        path = next((path for path in paths if path.is_file()), None)
        try:
            if path is None:
                raise FileNotFoundError(
                    f"looked at {', '.join(map(str, dict.fromkeys(paths)))}; a template as text has braces"
                )
            return self.model_copy(update={"chat_template": path.read_text(encoding="utf-8")})
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "chat_template_missing",
                f"chat_template '{self.chat_template}' cannot be read: {error}",
                path=self.chat_template,
            ) from error

    def recorded(self) -> dict[str, Any]:
        """Returns the settings that distinguish a run from others, without secrets and evaluation."""
        names = {name for name in type(self).model_fields if not name.startswith("eval_")} - {"reward_functions"}
        if self.dataset_revision is None:
            names -= {"dataset_revision"}  # a record is the same as before there were revisions
        names -= {"rows", "rows_params"} if self.rows is None else set()
        # nor are there keys of later versions that are not set
        names -= {name for name in (*MORE_SAMPLING, *_TEMPLATE) if getattr(self, name) == default_of(name)}
        rewards = [spec.recorded() for spec in self.rewards()]
        written = self.model_dump(mode="json", include=names)
        if self.rows is not None:
            written["rows_params"] = without_secrets(written["rows_params"], "base_url")
        public: dict[str, Any] = redact({**written, "reward_functions": rewards})
        return public

    def rewards(self) -> list[RewardSpec]:
        """Returns `reward_functions` as specs."""
        return [RewardSpec(type=item) if isinstance(item, str) else item for item in self.reward_functions]


MORE_SAMPLING: Final = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Sampling parameters that change the distribution of the tokens, under vLLM's names."""
_TEMPLATE: Final = ("chat_template", "chat_template_kwargs")


def default_of(name: str) -> Any:
    """Returns the default of a setting of the data set."""
    return DatasetConfig.model_fields[name].get_default(call_default_factory=True)


def without_secrets(value: Any, *others: str) -> Any:
    """Returns a copy without the keys that name a secret, and without the keys `others`, at any depth."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in others and not is_secret(str(key))}
        return {key: without_secrets(item, *others) for key, item in kept.items()}
    return [without_secrets(item, *others) for item in value] if isinstance(value, list) else value
