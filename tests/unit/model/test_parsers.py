"""The choice of vLLM's parsers of tool calls and reasoning: by setting, and by the model's family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.errors import raises
from tests.support.stack import VLLM_PYTHON

from gristmill_model import parsers, tiny
from gristmill_model.errors import ModelError
from gristmill_model.parsers import REASONING_FAMILIES, TOOL_FAMILIES, Parsers, choose, registered
from gristmill_model.settings import Settings

# Parts of the templates that the models ship.
HERMES = r"""{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}"""
XML = r"""{{- "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>" }}"""
SWITCH = r"""{%- if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"""
BEGUN = r"""{{- '<|im_start|>assistant\n<think>\n' }}"""
R1 = r"""{{'<｜tool▁calls▁begin｜>'}}{% if add_generation_prompt %}{{'<｜Assistant｜><think>\n'}}{% endif %}"""
LLAMA = """{{- '{"name": function name, "parameters": dictionary of argument name and its value}.' }}"""
MISTRAL = """{{- "[TOOL_CALLS] [" }}"""
CHATML = r"""{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"""
THINK = ("<think>", "</think>")


def model(
    folder: Path, model_type: str, template: str | list[dict[str, str]] | None, tokens: tuple[str, ...] = ()
) -> Path:
    """Writes the files of a model that the choice reads."""
    folder.mkdir()
    added = [{"id": place, "content": token} for place, token in enumerate(tokens)]
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    return folder


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package named vllm with three parsers. The import of a vLLM would fail here."""
    package = tmp_path / "packages" / "vllm"
    for kind, dictionary, names in (
        ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER", ("mistral", "hermes")),
        ("reasoning", "_REASONING_PARSERS_TO_REGISTER", ("qwen3",)),
    ):
        (package / kind).mkdir(parents=True)
        entries = {name: (f"{name}_parser", "Parser") for name in names}
        (package / kind / "__init__.py").write_text(f"import no_such_module\n{dictionary} = {entries!r}\n")
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    return package


@pytest.mark.parametrize(
    ("model_type", "template", "tokens", "tool", "reasoning"),
    [
        pytest.param("qwen2", HERMES, (), "hermes", None, id="Qwen2.5"),
        pytest.param("qwen3", HERMES + SWITCH, THINK, "hermes", "qwen3", id="Qwen3"),
        pytest.param("qwen3_moe", HERMES, THINK, "hermes", None, id="Qwen3-Instruct-2507"),
        pytest.param("qwen3_moe", HERMES + BEGUN, THINK, "hermes", "qwen3", id="Qwen3-Thinking-2507"),
        pytest.param("qwen3_moe", XML, THINK, "qwen3_xml", None, id="Qwen3-Coder"),
        pytest.param("qwen3", HERMES + SWITCH, (), "hermes", None, id="Qwen3 without the tokens"),
        pytest.param("qwen2", HERMES + BEGUN, THINK, "hermes", "deepseek_r1", id="QwQ"),
        pytest.param("qwen2", R1, THINK, None, "deepseek_r1", id="R1-Distill-Qwen"),
        pytest.param("llama", R1, THINK, None, "deepseek_r1", id="R1-Distill-Llama"),
        pytest.param("llama", LLAMA, ("<|python_tag|>",), "llama3_json", None, id="Llama 3.2"),
        pytest.param("llama", LLAMA, (), None, None, id="Llama without the token"),
        pytest.param("llama", CHATML, (), None, None, id="SmolLM2"),
        pytest.param("llama", HERMES, (), "hermes", None, id="Hermes"),
        pytest.param("mistral", MISTRAL, ("[TOOL_CALLS]",), "mistral", None, id="Mistral"),
        pytest.param("gpt_oss", "<|channel|>", (), "openai", "openai_gptoss", id="gpt-oss"),
        pytest.param("unknown", HERMES + SWITCH, THINK, None, None, id="unknown family"),
        pytest.param("qwen3", None, THINK, None, None, id="no template"),
    ],
)
def test_family_chooses_the_parsers(
    tmp_path: Path, model_type: str, template: str, tokens: tuple[str, ...], tool: str | None, reasoning: str | None
) -> None:
    folder = model(tmp_path / "model", model_type, template, tokens)
    assert choose(Settings.read({}, cuda_available=False), folder) == Parsers(tool, reasoning)


def test_template_for_tools_and_template_files_count(tmp_path: Path) -> None:
    settings = Settings.read({}, cuda_available=False)
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": HERMES}]
    assert choose(settings, model(tmp_path / "named", "llama", named)).tool == "hermes"
    file = model(tmp_path / "file", "qwen2", None)
    (file / "chat_template.jinja").write_text(HERMES)
    assert choose(settings, file).tool == "hermes"


def test_unreadable_files_of_a_tokenizer_choose_no_parsers(tmp_path: Path) -> None:
    folder = model(tmp_path / "model", "qwen2", None)
    (folder / "tokenizer.json").write_text("{")
    (folder / "tokenizer_config.json").write_text("[]")
    assert choose(Settings.read({}, cuda_available=False), folder) == Parsers(None, None)


def test_tiny_has_the_hermes_parser_and_no_reasoning_parser(tmp_path: Path) -> None:
    tiny.build(tmp_path)
    assert choose(Settings.read({}, cuda_available=False), tmp_path) == Parsers("hermes", None)


def test_settings_override_the_family(tmp_path: Path, registry: Path) -> None:
    folder = model(tmp_path / "model", "qwen3", HERMES + SWITCH, THINK)
    none = {"MODEL_TOOL_PARSER": "none", "MODEL_REASONING_PARSER": "none"}
    assert choose(Settings.read(none, cuda_available=False), folder) == Parsers(None, None)
    named = {"MODEL_TOOL_PARSER": "mistral", "MODEL_REASONING_PARSER": ""}
    assert choose(Settings.read(named, cuda_available=False), folder) == Parsers("mistral", "qwen3")


@pytest.mark.parametrize(
    ("variable", "known"), [("MODEL_TOOL_PARSER", ("hermes", "mistral")), ("MODEL_REASONING_PARSER", ("qwen3",))]
)
def test_unknown_parser_is_refused_with_the_choices(
    tmp_path: Path, registry: Path, variable: str, known: tuple[str, ...]
) -> None:
    settings = Settings.read({variable: "hermess"}, cuda_available=False)
    with raises(ModelError, "invalid_variable", variable=variable, value="hermess", known=known) as raised:
        choose(settings, model(tmp_path / "model", "qwen2", HERMES))
    assert all(name in str(raised.value) for name in ("none", *known))


def test_parser_of_a_plugin_is_not_refused(tmp_path: Path, registry: Path) -> None:
    environ = {"MODEL_TOOL_PARSER": "mine", "VLLM_ARGS": "--tool-parser-plugin /models/mine.py"}
    assert choose(Settings.read(environ, cuda_available=False), model(tmp_path / "m", "qwen2", HERMES)).tool == "mine"


def test_families_name_parsers_of_the_installed_vllm() -> None:
    if not VLLM_PYTHON.exists():
        pytest.skip(f"no {VLLM_PYTHON}: run `make setup`")
    (package,) = VLLM_PYTHON.parents[1].glob("lib/python3.*/site-packages/vllm")
    for variable, families in (("MODEL_TOOL_PARSER", TOOL_FAMILIES), ("MODEL_REASONING_PARSER", REASONING_FAMILIES)):
        names = registered(package, variable)
        assert len(names) > 10
        assert {family.parser for family in families} <= set(names)


def test_source_of_another_form_registers_no_names(tmp_path: Path) -> None:
    for variable in parsers._REGISTRIES:
        assert registered(tmp_path, variable) == ()
    (tmp_path / "tool_parsers").mkdir()
    (tmp_path / "tool_parsers" / "__init__.py").write_text("PARSERS = {'a': 1}\n")
    assert registered(tmp_path, "MODEL_TOOL_PARSER") == ()
