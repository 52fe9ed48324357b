"""Chooses vLLM's parsers of tool calls and of reasoning, which split a completion into content, reasoning and calls.

vLLM parses chat completions and the token ids of /v1/chat/completions/derender. Its generation by token ids
(/inference/v1/generate) has no parsers.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gristmill_model.errors import ModelError
from gristmill_model.settings import NO_PARSER, Settings

_REGISTRIES: Final = {
    "MODEL_TOOL_PARSER": ("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER", "--tool-parser-plugin"),
    "MODEL_REASONING_PARSER": ("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER", "--reasoning-parser-plugin"),
}
"""For each variable: the file and the dictionary where vLLM registers its parsers, and the option that loads others."""


@dataclass(frozen=True)
class Family:
    """Models whose completions `parser` parses. All conditions must hold."""

    parser: str
    model_types: frozenset[str]
    """Values of `model_type` in config.json."""
    template: str
    """Text of the chat template that requests this form of completions."""
    token: str = ""
    """A token of the tokenizer, without which vLLM refuses to start with this parser; empty: no token is needed."""


_QWEN: Final = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"})
_LLAMA: Final = frozenset({"llama"})
_MISTRAL: Final = frozenset({"mistral", "mixtral"})
_GPT_OSS: Final = frozenset({"gpt_oss"})

# From vLLM's documentation (features/tool_calling.md and features/reasoning_outputs.md). The first match counts.
TOOL_FAMILIES: Final = (
    Family("qwen3_xml", _QWEN, "<function="),  # Qwen3-Coder
    Family("hermes", _QWEN | _LLAMA | _MISTRAL, "<tool_call>"),  # Qwen2.5, Qwen3, QwQ, Hermes 2 Pro
    Family("llama3_json", _LLAMA, "dictionary of argument name and its value", "<|python_tag|>"),  # Llama 3.1 to 3.3
    Family("mistral", _MISTRAL, "[TOOL_CALLS]", "[TOOL_CALLS]"),  # Mistral 7B v0.3 and later
    Family("openai", _GPT_OSS, "<|channel|>"),
)
REASONING_FAMILIES: Final = (
    # Qwen3 thinks unless the switch is off. Qwen3-Thinking and QwQ always think: their templates begin the thought.
    Family("qwen3", _QWEN - {"qwen2", "qwen2_moe"}, "enable_thinking", "</think>"),
    Family("qwen3", _QWEN - {"qwen2", "qwen2_moe"}, r"assistant\n<think>\n", "</think>"),
    Family("deepseek_r1", _QWEN, r"assistant\n<think>\n", "</think>"),  # QwQ
    Family("deepseek_r1", _QWEN | _LLAMA, r"<｜Assistant｜><think>\n", "</think>"),  # distilled R1
    Family("openai_gptoss", _GPT_OSS, "<|channel|>"),
)


@dataclass(frozen=True)
class Parsers:
    """Names of vLLM's parsers. None: vLLM leaves these parts in the content."""

    tool: str | None
    reasoning: str | None


def choose(settings: Settings, folder: Path) -> Parsers:
    """Returns the parsers that `settings` name, or that the family of the model in `folder` requires.

    Raises ModelError if the installed vLLM has no parser of a name in `settings`.
    """
    model = _Model.read(folder)
    return Parsers(
        tool=_chosen("MODEL_TOOL_PARSER", settings.tool_parser, settings, TOOL_FAMILIES, model),
        reasoning=_chosen("MODEL_REASONING_PARSER", settings.reasoning_parser, settings, REASONING_FAMILIES, model),
    )


def registered(vllm: Path, variable: str) -> tuple[str, ...]:
    """Returns the names that the package in folder `vllm` registers, sorted. `variable`: the variable of the parser.

    Reads vLLM's source, because the import takes 10 seconds. Returns no names if the source has another form.
    """
    file, dictionary, _ = _REGISTRIES[variable]
    try:
        tree = ast.parse((vllm / file).read_text(encoding="utf-8"))
    except OSError:
        return ()
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Dict)
            and ast.unparse(node.targets[0]) == dictionary
        ):
            return tuple(sorted(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)))
    return ()


@dataclass(frozen=True)
class _Model:
    """The facts about a model that decide its family."""

    model_type: str
    template: str
    """All chat templates of the model. Some models have another one for tools."""
    tokens: frozenset[str]
    """Tokens that the tokenizer never splits."""

    @classmethod
    def read(cls, folder: Path) -> _Model:
        tokenizer, settings = _json(folder / "tokenizer.json"), _json(folder / "tokenizer_config.json")
        templates = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))]
        given = settings.get("chat_template") or []
        templates += [given] if isinstance(given, str) else [template["template"] for template in given]
        added = [*(tokenizer.get("added_tokens") or []), *(settings.get("added_tokens_decoder") or {}).values()]
        return cls(
            model_type=str(_json(folder / "config.json").get("model_type")),
            template="\n".join(templates),
            tokens=frozenset(str(token["content"]) for token in added),
        )

    def belongs_to(self, family: Family) -> bool:
        known = self.model_type in family.model_types and family.template in self.template
        return known and (not family.token or family.token in self.tokens)


def _chosen(
    variable: str, requested: str, settings: Settings, families: tuple[Family, ...], model: _Model
) -> str | None:
    if requested == NO_PARSER:
        return None
    if not requested:
        return next((family.parser for family in families if model.belongs_to(family)), None)
    known = _installed(variable)
    plugin = _REGISTRIES[variable][2]
    if known and requested not in known and not any(text.startswith(plugin) for text in settings.vllm_args):
        raise ModelError(
            "invalid_variable",
            f"{variable}={requested!r} is not a parser of vLLM; leave it empty to choose by the model, or set it to "
            f"none or one of {', '.join(known)}",
            variable=variable,
            value=requested,
            known=known,
        )
    return requested


def _installed(variable: str) -> tuple[str, ...]:
    """Returns the names of the installed vLLM; no names if vLLM is not installed."""
    package = importlib.util.find_spec("vllm")
    folders = (package.submodule_search_locations or []) if package else []
    return next((names for folder in folders if (names := registered(Path(folder), variable))), ())


def _json(path: Path) -> dict[str, Any]:
    """Returns the content of a file of the model; empty if the file does not exist. Others report a broken file."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
