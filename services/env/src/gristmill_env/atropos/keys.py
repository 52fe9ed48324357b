"""The translation of every key that Atropos reads from a file, of the other keys in its files, and of its rewards.

docs/from-atropos.md is generated from these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """The effect of a key in Gristmill."""

    HONOURED = "honoured"
    """The key has the same effect here as in Atropos."""
    WARNED = "honoured with a warning"
    """The key works, but a warning explains a difference."""
    NO_EFFECT = "no effect, with a warning"
    """Nothing here corresponds to the key, and the results are the same without it."""
    REFUSED = "refused"
    """The file does not load, because the results would differ from the results that the user asked for."""


class Part(StrEnum):
    """The section in which Atropos reads a key."""

    FILE = "of the file itself"
    BASE = "of every environment"
    DATASET = "of the dataset environment"
    SERVER = "of a server"


@dataclass(frozen=True)
class Key:
    """One key of Atropos."""

    name: str
    part: Part
    verdict: Verdict = Verdict.HONOURED
    text: str = ""
    """A note for users. For a key with a warning or a refused key, the message contains this note."""
    here: str | None = None
    """Our key's path from the top: "dataset.split", "server_configs.timeout". None: no such key, or see the text."""
    default: Any = None
    """Atropos' default, if our default differs. Applied to Atropos' files that do not set the key."""
    unset: tuple[Any, ...] = ()
    """Values that mean "not set", in addition to null."""
    quiet: tuple[Any, ...] = ()
    """Values that need no warning, or that are not refused."""


def _base(name: str, text: str = "", **more: Any) -> Key:
    return Key(name, Part.BASE, **{"text": text, "here": name, **more})


def _dataset(name: str, text: str = "", **more: Any) -> Key:
    return Key(name, Part.DATASET, **{"text": text, "here": f"dataset.{name}", **more})


def _server(name: str, text: str = "", **more: Any) -> Key:
    return Key(name, Part.SERVER, **{"text": text, "here": f"server_configs.{name}", **more})


KEYS: tuple[Key, ...] = (
    Key("dataset", Part.FILE, text="the keys in it may also stand at the top level (the flat form)", here="dataset"),
    Key("env", Part.FILE, text="its keys are read as if they stood at the top level"),
    Key("server_configs", Part.FILE, text="one section or a list of them", here="server_configs"),
    Key("openai", Part.FILE, text="another name of server_configs", here="server_configs"),
    Key(
        "generation",
        Part.FILE,
        Verdict.WARNED,
        "its keys count as keys of dataset:, whose own keys override them; Atropos documents the section and does not "
        "read it",
    ),
    Key("slurm", Part.FILE, text="servers are discovered from Slurm's variables", here="slurm"),
    Key(
        "testing",
        Part.FILE,
        Verdict.WARNED,
        "prompts and completions are logged in full; nothing is faked, although Atropos fakes completions",
        here="testing",
        quiet=(False,),
    ),
    Key(
        "max_n_completions",
        Part.FILE,
        Verdict.NO_EFFECT,
        "a group's completions are one request, which shares the prompt's computation",
    ),
    Key(
        "proxy_url",
        Part.FILE,
        Verdict.REFUSED,
        "it is of Atropos' environments (`python -m gristmill_env proxy`); name the model server in base_url",
    ),
    Key("use_local_agents", Part.FILE, Verdict.NO_EFFECT, "nothing of Atropos reads it either", quiet=(False,)),
    _base("tokenizer_name", "the served model's own tokenizer overrides it, if that is known"),
    _base("group_size", default=4),
    _base("max_num_workers", "-1: max_num_workers_per_node for each server", default=-1),
    _base("max_num_workers_per_node"),
    _base("max_token_length", "a prompt and its completion together"),
    _base("rollout_server_url", "GRISTMILL_API_URL overrides it"),
    _base("ensure_scores_are_not_same"),
    _base("worker_timeout", "the group is dropped and counted", default=600),
    _base("total_steps", "trainer.training_steps; -1: the trainer's own", default=1000, unset=(-1,)),
    _base(
        "batch_size",
        "sequences per optimizer step, in one micro-batch; trainer.gradient_accumulation_steps splits it. "
        "-1: the trainer's own",
        unset=(-1,),
    ),
    _base(
        "max_batches_offpolicy",
        "trainer.max_staleness: the API issues permits only while every sample can stay that fresh; 0 is synchronous",
        default=3,
    ),
    _base("inference_weight", "a share of the permits to generate; -1: no fixed share", unset=(-1,)),
    Key(
        "min_batch_allocation",
        Part.BASE,
        Verdict.NO_EFFECT,
        "set inference_weight: a share of the permits becomes the same share of the groups",
    ),
    _base("include_messages"),
    _base("data_path_to_save_groups", "relative to the run's folder"),
    _base("use_wandb", "offline without credentials", default=True),
    _base("wandb_name"),
    _base("num_rollouts_to_keep"),
    _base("num_rollouts_per_group_for_logging"),
    _base("min_items_sent_before_logging"),
    _base("max_eval_workers", "0: no evaluation (steps_per_eval: 0)", unset=(0,)),
    _base("steps_per_eval", "evaluates only if an evaluation data set is named"),
    _base("eval_handling"),
    _base("eval_limit_ratio"),
    _base("data_dir_to_save_evals", "relative to the run's folder"),
    _base("thinking_mode"),
    _base("reasoning_effort", "some servers and chat templates know only some of the words"),
    _base(
        "max_reasoning_tokens",
        "for text APIs; no effect in training, with a warning, because no thought is truncated by force",
    ),
    _base("custom_thinking_prompt", "placed before system_prompt"),
    _dataset("dataset_name"),
    _dataset("dataset_config"),
    _dataset("dataset_path", "overrides dataset_name, as in Atropos; a bare .jsonl file works"),
    _dataset("split"),
    _dataset("prompt_field"),
    _dataset("answer_field"),
    _dataset("ground_truth_field", "if it is set, rewards compare with it and not with answer_field"),
    _dataset("system_prompt"),
    _dataset("prefill", "the model continues it; Atropos closes the turn after it"),
    _dataset("shuffle_dataset", "with dataset.seed, 42: the order is the same after a restart"),
    _dataset("max_tokens", default=4096),
    _dataset("min_tokens", "the start of the warm-up; as in Atropos, short answers stay possible"),
    _dataset("length_warmup_steps", "Atropos reads it in evaluation only; here it works in training"),
    _dataset("temperature", default=0.7),
    _dataset(
        "top_p",
        "other than 1 biases the trainer's importance ratio; the run's record keeps it",
        verdict=Verdict.WARNED,
        default=0.9,
        quiet=(1, 1.0),
    ),
    _dataset("reward_functions", "names or {type, weight, params}; the total is the sum of weight x score"),
    Key(
        "reward_funcs",
        Part.DATASET,
        text="read if reward_functions is not set; accuracy_reward is accuracy",
        here="dataset.reward_functions",
    ),
    Key(
        "<name>_reward_weight",
        Part.DATASET,
        text="the weight of that reward in a list of names; Atropos does not read it",
        here="dataset.reward_functions",
    ),
    Key("include_messages_in_scoring", Part.DATASET, text="as include_messages", here="include_messages"),
    Key(
        "max_generations_per_prompt",
        Part.DATASET,
        text="completions per prompt in evaluation, the only use in Atropos; in training it is group_size",
        here="dataset.eval_samples",
    ),
    _dataset("eval_dataset_name"),
    _dataset("eval_dataset_config"),
    _dataset("eval_split"),
    _server("model_name", 'the model that must be served there; "default": any', unset=("default",)),
    _server(
        "base_url",
        "default https://api.openai.com/v1, as in Atropos; GRISTMILL_MODEL_URL overrides the URL of a single server",
        unset=("",),
    ),
    _server("api_key", "${VAR} is read from the environment and must be set there", unset=("",)),
    _server("timeout", "a request keeps waiting while its server answers; rollout_timeout is a limit", default=1200),
    _server("num_max_requests_at_once"),
    _server("num_requests_for_eval"),
    _server("n_kwarg_is_ignored"),
    _server("weight", "the server's share of the load; Atropos does not read it"),
    _server(
        "health_check",
        "a server that fails is always paused and tried again",
        here=None,
        verdict=Verdict.NO_EFFECT,
        quiet=(True,),
    ),
    _server(
        "server_type",
        "the server reports its kind; serve needs vLLM, other commands work with any OpenAI-compatible server",
        here=None,
        verdict=Verdict.NO_EFFECT,
        quiet=("openai", "vllm"),
    ),
    _server("tokenizer_name", "used if the file has no other", here="tokenizer_name", unset=("none",)),
    _server(
        "rolling_buffer_length",
        "the log and the metrics report rates as they change",
        here=None,
        verdict=Verdict.NO_EFFECT,
        quiet=(1000,),
    ),
)

SERVER_KEYS = {key.name: key for key in KEYS if key.part is Part.SERVER}
"""Keys of a server's section, by name."""
OTHER_KEYS = {key.name: key for key in KEYS if key.part is not Part.SERVER}
"""All other keys, by name. Atropos merges the sections, so each name belongs to one section only."""

OPENAI_URL = "https://api.openai.com/v1"
"""Atropos' default for base_url in a server's section."""

WEIGHT_SUFFIX = "_reward_weight"


@dataclass(frozen=True)
class RewardName:
    """One reward of Atropos."""

    name: str
    here: str | None
    """Our name; None if the reward does not ship here."""
    text: str = ""


@dataclass(frozen=True)
class RewardOption:
    """An option that has no effect here; a warning reports it."""

    reward: str
    name: str
    text: str


REWARDS = (
    RewardName("accuracy", "accuracy", "reads marked answers; extract: anywhere reads all that Math-Verify finds"),
    RewardName("format", "format"),
    RewardName("r1", "r1"),
    RewardName(
        "cosine_scaled", "cosine_scaled", "without base_url the model runs in this process: gristmill-env[embeddings]"
    ),
    RewardName("reasoning_steps", "reasoning_steps"),
    RewardName("repetition_penalty", "repetition_penalty"),
    RewardName("cascading_r1_math", "cascading_r1"),
    RewardName("combined", "combined"),
    RewardName("length", "length", "Atropos' guide uses it, but ships none"),
    RewardName("crossword_format", None, "made for one kind of puzzle"),
    RewardName("chandas_meter", None, "made for one kind of verse"),
)

OPTIONS = (
    RewardOption("reasoning_steps", "min_words", "markers of steps are counted, no words"),
    RewardOption("reasoning_steps", "base_score", "the score is min(1, markers / min_steps)"),
    RewardOption("reasoning_steps", "pattern_weights", "all markers count alike"),
    RewardOption("repetition_penalty", "min_words", "a short answer is never punished"),
    RewardOption("repetition_penalty", "min_sentences", "a short answer is never punished"),
    RewardOption("repetition_penalty", "short_text_penalty", "a short answer is never punished"),
    RewardOption("repetition_penalty", "paragraph_repetition_base_penalty", "n-grams are counted, no paragraphs"),
    RewardOption("repetition_penalty", "component_weights", "n-grams are counted and nothing else"),
    RewardOption("repetition_penalty", "stopwords", "all words count"),
    RewardOption("cosine_scaled", "default_reward", "a row without an answer has no score instead"),
)

REWARDS_BY_NAME = {reward.name: reward for reward in REWARDS}
OPTIONS_BY_NAME = {(option.reward, option.name): option for option in OPTIONS}
