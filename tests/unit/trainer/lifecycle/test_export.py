"""transformers loads the finished model, its card contains no secrets, and a push fails early or clearly."""

from __future__ import annotations

import contextlib
import math
import resource
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tests.support.errors import raises
from tests.support.http_server import Answer, HttpServer, Request
from tests.support.small_disk import mounted
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from gristmill_trainer.errors import ModelError, TrainerError
from gristmill_trainer.export import Hub, RunFacts, export_model, model_card, public_command
from gristmill_trainer.loop import finish_run
from gristmill_trainer.policy import Policy

FACTS = RunFacts(
    run_id="sums",
    base_model="/srv/models/tiny",
    dataset="quickstart",
    rewards=["accuracy", "format"],
    objective="grpo",
    steps=20,
    policy_version="1.20",
    final_reward=0.8312,
    command="python -m gristmill_trainer",
    versions={"torch": "2.13"},
)
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    raw = Tokenizer(BPE({byte: number for number, byte in enumerate(sorted(ByteLevel.alphabet()))}, []))
    raw.pre_tokenizer = ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_exported_folder_loads_as_the_trained_model(policy: Policy, tokenizer: Path, tmp_path: Path) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    folder = tmp_path / "model"
    for _ in range(2):  # The second replaces the first.
        export_model(folder, policy.save, str(tokenizer), FACTS)
    tokens = torch.arange(20)[None]
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(loaded(input_ids=tokens).logits, policy.model(input_ids=tokens).logits)
    messages = [{"role": "user", "content": "what is one and two"}]
    before, after = (AutoTokenizer.from_pretrained(path) for path in (tokenizer, folder))
    told = before.apply_chat_template(messages, tokenize=False)
    assert after.apply_chat_template(messages, tokenize=False) == told
    assert after(told).input_ids == before(told).input_ids
    assert after.decode(after(told).input_ids) == told
    assert (folder / "generation_config.json").is_file()
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}
    assert {path.name for path in tmp_path.iterdir()} == {"model", "tokenizer"}


def test_export_without_a_tokenizer_keeps_the_last_model(policy: Policy, tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    export_model(folder, policy.save, str(tokenizer), FACTS)
    nowhere, partial = str(tmp_path / "nowhere"), tmp_path / ".model.partial"
    with raises(ModelError, "tokenizer_unreadable", tokenizer=nowhere, weights=partial):
        export_model(folder, policy.save, nowhere, FACTS)
    assert partial.is_dir()
    assert (folder / "model.safetensors").is_file()


def test_export_empties_neither_a_mount_point_nor_the_folder_of_a_link(
    policy: Policy, tokenizer: Path, tmp_path: Path
) -> None:
    folder, linked, other = (tmp_path / name for name in ("model", "linked", "other"))
    other.mkdir()
    (other / "mine").touch()
    linked.symlink_to(other)
    for _ in range(2):
        export_model(linked, policy.save, str(tokenizer), FACTS)
    assert (linked / "model.safetensors").is_file()
    assert [path.name for path in other.iterdir()] == ["mine"]
    folder.mkdir()
    with mounted(folder, 1):
        (folder / "mine").touch()
        with raises(TrainerError, "write_failed", path=folder):
            export_model(folder, policy.save, str(tokenizer), FACTS)
        assert (folder / "mine").is_file()


@pytest.mark.parametrize("size", [5_000, 2_000], ids=["weights", "tokenizer"])
def test_export_to_a_full_disk_fails_with_one_line(policy: Policy, tokenizer: Path, tmp_path: Path, size: int) -> None:
    """No file may grow larger than this many bytes."""

    def save(folder: Path) -> None:
        if size == 5_000:  # room for the configuration
            policy.save(folder)
        else:
            folder.mkdir()

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with raises(TrainerError, "write_failed", path=tmp_path / "model"):
            export_model(tmp_path / "model", save, str(tokenizer), FACTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_model_card_describes_the_run_without_paths(policy: Policy, tokenizer: Path, tmp_path: Path) -> None:
    export_model(tmp_path / "model", policy.save, str(tokenizer), FACTS)
    card = (tmp_path / "model" / "README.md").read_text()
    for fact in ("# sums", "| Base model | tiny |", "accuracy, format", "0.8312", "1.20", "torch 2.13"):
        assert fact in card
    assert "/srv" not in card
    assert "base_model:" not in card, "a folder's name is not an id of a hub"
    assert "| Mean reward of the last step | not known |" in model_card(replace(FACTS, final_reward=math.nan))


def test_model_card_shows_the_command_without_secrets_addresses_and_paths() -> None:
    arguments = [
        "--model_name", "/home/me/models/tiny", "--rollout_server_url", "http://me:pw@host:8000",
        "--wandb_api_key", "abc",
        "--api_token=xyz", "--max_tokens", "64", "--token_budget", "4096", "--resume=/runs/a/checkpoints/step-000020",
        "--model", "Qwen/Qwen2.5-0.5B",
    ]  # fmt: skip
    assert public_command("python -m gristmill_trainer", arguments) == (
        "python -m gristmill_trainer --model_name tiny --rollout_server_url URL --wandb_api_key '***' "
        "--api_token='***' --max_tokens 64 --token_budget 4096 --resume=step-000020 --model Qwen/Qwen2.5-0.5B"
    )


def test_model_card_shows_no_addresses_without_a_scheme_and_no_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    arguments = [
        "--metrics_address", "10.1.2.3:9100", "--base_url=gpu17.lan:9001", "--rollout_server_url", "[::1]:8000",
        "--ref_model", "home/me/secret/model", "--resume", "runs/a/checkpoints/step-000002", "--model_name",
        "models/mine", "--policy_loss", "loss.py:mine", "--model", "Qwen/Qwen2.5-0.5B",
    ]  # fmt: skip
    assert public_command("p", arguments) == (
        "p --metrics_address ADDRESS --base_url=ADDRESS --rollout_server_url ADDRESS --ref_model model --resume "
        "step-000002 --model_name mine --policy_loss loss.py:mine --model Qwen/Qwen2.5-0.5B"
    )


def test_push_without_its_requirements_fails_at_the_start() -> None:
    assert Hub.read(None, {}) is None
    with raises(TrainerError, "hub_token_missing", repository="me/model"):
        Hub.read("me/model", {})
    with raises(TrainerError, "repository_name", repository="model"):
        Hub.read("model", {"HF_TOKEN": "hf_secret"})
    hub = Hub.read("me/model", {"HF_TOKEN": "hf_secret"})
    assert "hf_secret" not in repr(hub)


def test_push_reads_its_token_from_the_file_in_hf_token_path(tmp_path: Path) -> None:
    file = tmp_path / "hf_write_token"
    file.write_text("hf_write\n")
    hub = Hub.read("me/model", {"HF_TOKEN_PATH": str(file)})
    assert hub is not None
    assert hub.token == "hf_write"
    file.write_text("")
    with raises(TrainerError, "hub_token_missing") as raised:
        Hub.read("me/model", {"HF_TOKEN_PATH": str(file)})
    assert "HF_WRITE_TOKEN_FILE" in str(raised.value)


def test_failed_push_names_the_folder_of_the_model(tmp_path: Path) -> None:
    with HttpServer(lambda request: Answer(403)) as server:
        hub = Hub("me/model", "hf_secret", server.url)
        with raises(TrainerError, "push_failed", repository="me/model", folder=tmp_path) as raised:
            hub.push(tmp_path)
    assert "403" in str(raised.value)
    assert "hf_secret" not in repr((raised.value, raised.value.values))
    with raises(TrainerError, "push_failed", folder=tmp_path):
        hub.push(tmp_path)


def test_run_ends_after_the_push_even_if_the_push_fails(tmp_path: Path) -> None:
    calls: list[str] = []

    def refuse(request: Request) -> Answer:
        calls.append("push")
        return Answer(403)

    with HttpServer(refuse) as server:
        main = Mock()
        main.finish.hub = Hub("me/model", "hf_secret", server.url)
        main.guard.unwatched.return_value = contextlib.nullcontext()
        main.session.finish.side_effect = lambda: calls.append("finish")
        with raises(TrainerError, "push_failed"):
            finish_run(main, 3, tmp_path)
    assert calls[0] == "push"
    assert calls[1:].count("finish") == 1
    assert calls[-1] == "finish"
