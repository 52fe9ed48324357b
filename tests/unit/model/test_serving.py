"""The manifest and vLLM's command line."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.support.errors import raises
from tests.support.http_server import Answer, HttpServer, Request
from tests.unit.model.models import save_random

from gristmill import Manifest
from gristmill_model.__main__ import describe, main
from gristmill_model.errors import ModelError
from gristmill_model.resolve import resolve
from gristmill_model.server import arguments, environment
from gristmill_model.settings import Settings

ROOT = Path(__file__).parents[3]


def settings(tmp_path: Path, **environ: str) -> Settings:
    folders = {"GRISTMILL_MODELS_DIR": str(tmp_path / "models"), "GRISTMILL_WEIGHTS_DIR": str(tmp_path / "weights")}
    return Settings.read({**folders, **environ}, cuda_available=False)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    chosen = settings(tmp_path, MODEL=str(save_random(tmp_path / "model", tied=True)))
    return describe(resolve(chosen.model, chosen.models_dir), chosen)


def test_manifest_names_the_model_as_asked_and_survives_the_file(tmp_path: Path, manifest: Manifest) -> None:
    assert manifest.name == manifest.requested == str(tmp_path / "model")
    assert manifest.max_model_len == 64  # the model's own limit is below the default
    assert manifest.dtype == "float32"
    assert Path(manifest.weights_path) != Path(manifest.serve_path)
    assert all(Path(path).is_absolute() for path in (manifest.weights_path, manifest.tokenizer_path))
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest


def test_server_runs_no_code_of_the_models(tmp_path: Path, manifest: Manifest) -> None:
    assert "--trust-remote-code" not in arguments(settings(tmp_path), manifest)


def test_vllm_command_has_the_options_that_rl_needs(tmp_path: Path, manifest: Manifest) -> None:
    command = arguments(settings(tmp_path, MODEL_HOST="0.0.0.0", MODEL_PORT="9100"), manifest)
    options = dict(itertools.pairwise(command))
    assert options["--model"] == manifest.serve_path
    assert options["--host"] == "0.0.0.0"
    assert options["--port"] == "9100"
    assert options["--logprobs-mode"] == "processed_logprobs"
    assert options["--middleware"] == "gristmill_model.gate.DeveloperGate"
    assert json.loads(options["--override-generation-config"])["top_p"] == 1.0
    assert json.loads(options["--hf-overrides"]) == {"head_dtype": "float32"}
    assert {"--enable-scale-out", "--enforce-eager"} <= set(command)


def test_command_names_the_parsers_of_the_manifest(tmp_path: Path, manifest: Manifest) -> None:
    assert (manifest.tool_parser, manifest.reasoning_parser) == (None, None)
    without = arguments(settings(tmp_path), manifest)
    assert not {"--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser"} & set(without)
    chosen = manifest.model_copy(update={"tool_parser": "hermes", "reasoning_parser": "qwen3"})
    command = arguments(settings(tmp_path), chosen)
    options = dict(itertools.pairwise(command))
    assert (options["--tool-call-parser"], options["--reasoning-parser"]) == ("hermes", "qwen3")
    assert "--enable-auto-tool-choice" in command


def test_manifest_names_the_parsers_that_are_served(tmp_path: Path) -> None:
    chosen = settings(tmp_path, MODEL="tiny", MODEL_REASONING_PARSER="qwen3")
    manifest = describe(resolve(chosen.model, chosen.models_dir), chosen)
    assert (manifest.tool_parser, manifest.reasoning_parser) == ("hermes", "qwen3")


def cuda(tmp_path: Path, manifest: Manifest, **environ: str) -> dict[str, str]:
    """Returns vLLM's options on CUDA. The value of an option without an argument is the option after it."""
    return dict(itertools.pairwise([*arguments(settings(tmp_path, DEVICE="cuda", **environ), manifest), ""]))


def test_cuda_server_captures_graphs_unless_they_are_turned_off(tmp_path: Path, manifest: Manifest) -> None:
    assert "--enforce-eager" not in cuda(tmp_path, manifest)
    assert "--enforce-eager" in cuda(tmp_path, manifest, MODEL_CUDA_GRAPHS="0")


@pytest.mark.parametrize(("device", "option"), [("cuda", True), ("cpu", False)])
def test_server_that_may_sleep_says_so_in_the_manifest(tmp_path: Path, device: str, option: bool) -> None:
    """vLLM on a CPU has the endpoints, and does not start with the option."""
    for value, sleeps in (("1", True), ("0", False), ("", False)):
        chosen = settings(tmp_path, MODEL="tiny", DEVICE=device, MODEL_SLEEP=value)
        manifest = describe(resolve(chosen.model, chosen.models_dir), chosen)
        assert manifest.sleep is sleeps
        assert ("--enable-sleep-mode" in arguments(chosen, manifest)) is (sleeps and option)


@pytest.mark.parametrize(
    ("environ", "memory", "parallel"),
    [
        ({}, "0.45", "1"),
        ({"MODEL_GPU": "0", "TRAINER_GPU": "0"}, "0.45", "1"),
        ({"MODEL_GPU": "0", "TRAINER_GPU": "1"}, "0.85", "1"),
        ({"MODEL_GPU": "GPU-a", "TRAINER_GPU": "GPU-b"}, "0.85", "1"),
        ({"MODEL_GPU": "0", "TRAINER_GPU": "GPU-b"}, "0.45", "1"),
        ({"MODEL_GPU": "0,1", "TRAINER_GPU": "2,3"}, "0.85", "2"),
        ({"MODEL_GPU": "0, 1", "TRAINER_GPU": "1,2"}, "0.45", "2"),
        ({"MODEL_GPU": "0,1", "MODEL_TENSOR_PARALLEL": "1", "GPU_MEMORY_UTILIZATION": "0.6"}, "0.6", "1"),
    ],
)
def test_gpus_decide_memory_share_and_tensor_parallel_size(
    tmp_path: Path, manifest: Manifest, environ: dict[str, str], memory: str, parallel: str
) -> None:
    options = cuda(tmp_path, manifest, **environ)
    assert (options["--gpu-memory-utilization"], options["--tensor-parallel-size"]) == (memory, parallel)


def test_extra_arguments_reach_vllm(tmp_path: Path, manifest: Manifest) -> None:
    extra = """--max_num_seqs 8 --hf-overrides '{"a": 1}' --seed=7"""
    command = arguments(settings(tmp_path, VLLM_ARGS=extra), manifest)
    assert command[-5:] == ["--max_num_seqs", "8", "--hf-overrides", '{"a": 1}', "--seed=7"]
    assert "--max-num-seqs" not in command, "given twice, vLLM would warn"
    assert command.count("--hf-overrides") == 1


@pytest.mark.parametrize(
    ("extra", "option", "variable"),
    [
        ("--host 0.0.0.0", "--host", "MODEL_HOST"),
        ("--port=80", "--port", "MODEL_PORT"),
        ("--max_model_len 8", "--max-model-len", "MODEL_MAX_LENGTH"),
        ("-tp 2", "--tensor-parallel-size", "MODEL_TENSOR_PARALLEL"),
        ("-tp=2", "--tensor-parallel-size", "MODEL_TENSOR_PARALLEL"),
        ("--no-enforce-eager", "--enforce-eager", "MODEL_CUDA_GRAPHS"),
        ("--enable_sleep_mode", "--enable-sleep-mode", "MODEL_SLEEP"),
        ("--no-enable-prefix-caching", "--enable-prefix-caching", ""),
        ("--override-generation-config.top_p 0.5", "--override-generation-config", ""),
        ("--seed 1 --trust-remote-code", "--trust-remote-code", ""),
        ("--config file.yaml", "--config", ""),
        ("--api_key secret", "--api-key", ""),
        ("--ssl-keyfile=k.pem --ssl-certfile=c.pem", "--ssl-keyfile", ""),
        ("--uds /tmp/socket", "--uds", ""),
        ("--root-path /v", "--root-path", ""),
        ("--middlew x.Y", "--middleware", ""),
        ("--tool-call-parser hermes", "--tool-call-parser", "MODEL_TOOL_PARSER"),
        ("--no-enable-auto-tool-choice", "--enable-auto-tool-choice", "MODEL_TOOL_PARSER"),
        ("--reasoning_parser=qwen3", "--reasoning-parser", "MODEL_REASONING_PARSER"),
    ],
)
def test_extra_arguments_that_the_service_sets_are_rejected(extra: str, option: str, variable: str) -> None:
    with raises(ModelError, "vllm_option_taken", option=option, variable=variable) as raised:
        Settings.read({"VLLM_ARGS": extra}, cuda_available=False)
    assert (variable or option) in str(raised.value)


def test_extra_arguments_that_cannot_be_split_are_rejected() -> None:
    with raises(ModelError, "invalid_variable", variable="VLLM_ARGS"):
        Settings.read({"VLLM_ARGS": "--seed 'x"}, cuda_available=False)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("lora_rank", ["", "8"])
def test_every_option_that_the_service_sets_is_rejected_as_an_extra_argument(
    tmp_path: Path, manifest: Manifest, device: str, lora_rank: str
) -> None:
    chosen = settings(tmp_path, DEVICE=device, LORA_RANK=lora_rank, MODEL_CUDA_GRAPHS="0", MODEL_SLEEP="1")
    manifest = manifest.model_copy(update={"tool_parser": "hermes", "reasoning_parser": "qwen3"})
    command = arguments(chosen, manifest, tmp_path if lora_rank else None)
    ours = {word for word in command if word.startswith("--")} - {"--max-num-seqs", "--hf-overrides"}
    for option in ours:
        with raises(ModelError, "vllm_option_taken", option=option):
            Settings.read({"VLLM_ARGS": option}, cuda_available=False)


def test_server_listens_on_loopback_by_default(tmp_path: Path) -> None:
    assert settings(tmp_path).host == "127.0.0.1"
    assert settings(tmp_path, MODEL_HOST="").host == "127.0.0.1"


def test_environment_can_choose_the_cache_size_but_not_lose_the_gate(tmp_path: Path, manifest: Manifest) -> None:
    given = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_SERVER_DEV_MODE": "0"}
    told = environment(settings(tmp_path), manifest, None, given)
    assert told["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert told["VLLM_SERVER_DEV_MODE"] == "1"
    assert told["TORCHDYNAMO_DISABLE"] == "1"
    assert told["OMP_WAIT_POLICY"] == "PASSIVE"
    assert told["GRISTMILL_WEIGHTS_DIR"] == str(tmp_path / "weights")


@pytest.mark.parametrize(("paused", "generates", "healthy"), [(0, 1, True), (0, 0, False), (1, 0, True)])
def test_compose_asks_for_a_token_unless_the_server_sleeps(paused: bool, generates: bool, healthy: bool) -> None:
    def answer(request: Request) -> Answer:
        if request.method == "POST":
            assert request.json == {"model": "tiny", "prompt": "1", "max_tokens": 1}
            return Answer(200 if generates else 500)
        answers = {"/v1/models": {"data": [{"id": "tiny"}]}, "/is_paused": {"is_paused": bool(paused)}}
        return Answer(200, answers[request.path])

    check = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["model"]["healthcheck"]["test"]
    with HttpServer(answer) as server:
        program = check[-1].replace("http://127.0.0.1:9001", server.url)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert (done.returncode == 0) == healthy


def test_gpu_samples_without_a_kernel_that_the_first_request_compiles(tmp_path: Path, manifest: Manifest) -> None:
    chosen = settings(tmp_path, DEVICE="cuda")
    assert environment(chosen, manifest, None, {})["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    given = {"VLLM_USE_FLASHINFER_SAMPLER": "1"}
    assert environment(chosen, manifest, None, given)["VLLM_USE_FLASHINFER_SAMPLER"] == "1"


def test_model_service_computes_in_bfloat16_on_a_gpu(tmp_path: Path) -> None:
    assert Settings.read({}, cuda_available=True).dtype == "bfloat16"
    assert Settings.read({"DEVICE": "cpu"}, cuda_available=True).dtype == "float32"


def test_wrong_host_name_stops_the_start(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_ALLOWED_HOSTS", "http://gpu-box:9001")
    assert main([]) == 1
    error = capsys.readouterr().err
    assert "[host_name]" in error
    assert "API_ALLOWED_HOSTS" in error


@pytest.mark.parametrize(
    "environ",
    [
        {"DEVICE": "tpu"},
        *({"MODEL_PORT": port} for port in ("high", "nan", "9001.7", "-5", "0", "65536")),
        {"MODEL_MAX_LENGTH": "inf"},
        {"GPU_MEMORY_UTILIZATION": "nan"},
        {"MODEL_TENSOR_PARALLEL": "two"},
        {"MODEL_CUDA_GRAPHS": "no", "DEVICE": "cuda"},
    ],
)
def test_a_variable_with_a_wrong_value_is_rejected(environ: dict[str, str]) -> None:
    variable, value = next(iter(environ.items()))
    with raises(ModelError, "invalid_variable", variable=variable, value=value):
        Settings.read(environ, cuda_available=False)


def test_a_model_split_over_gpus_needs_cuda() -> None:
    with raises(ModelError, "needs_cuda", setting="MODEL_TENSOR_PARALLEL"):
        Settings.read({"MODEL_TENSOR_PARALLEL": "2", "DEVICE": "cpu"}, cuda_available=False)


def test_errors_are_one_line_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL", "no such model")
    monkeypatch.setenv("GRISTMILL_MODELS_DIR", str(tmp_path))
    assert main([]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "[model_missing]" in lines[0]
    assert "no such model" in lines[0]
