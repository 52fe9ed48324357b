"""Which trainer may publish into a real vLLM, and the server's state after a failed or interrupted publication."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from safetensors.torch import save_file
from tests.support.errors import raises
from tests.support.ports import free_port
from tests.support.stack import ROOT, Output, Vllm, start_api, start_redis

from gristmill import Manifest, PolicyVersion, SyncClient
from gristmill.internal.device_memory import FILE, DeviceMemory
from gristmill.internal.lines import read_jsonl
from gristmill_cli.local.processes import LocalStack
from gristmill_trainer.errors import PublishError
from gristmill_trainer.policy import ModelSource, Policy
from gristmill_trainer.publish.device_memory import DeviceMemoryTransport
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.publisher import FilesystemTransport, claim_publishing
from gristmill_trainer.publish.servers import ModelServer

PUBLISH = "/gristmill/publish"
KEYS = "model.layers.0.self_attn.k_proj.weight"
"""vLLM joins this tensor with the queries, which a load has before it, and the values, which come after it."""


@pytest.fixture
def policy(vllm: Vllm) -> Policy:
    manifest = Manifest.read(vllm.models_dir)
    return Policy(ModelSource(manifest.weights_path, manifest.tokenizer_path, None, 512), "cpu")


@pytest.fixture
def folder(vllm: Vllm, policy: Policy) -> Iterator[Path]:
    """Weights that the server can load, under any version."""
    token = claim_publishing(vllm.weights_dir)
    target = ModelServers([ModelServer(vllm.url, token, patience=30)])
    FilesystemTransport(target, vllm.weights_dir / "fenced", None).publish(policy.served_tensors(), PolicyVersion(1, 0))
    target.close()
    yield vllm.weights_dir / "fenced" / "1.0"
    shutil.rmtree(vllm.weights_dir / "fenced")


def _label(vllm: Vllm) -> str:
    label: str = httpx.get(f"{vllm.url}/weight_info").json()["weight_version"]
    return label


def _paused(vllm: Vllm) -> bool:
    paused: bool = httpx.get(f"{vllm.url}/is_paused").json()["is_paused"]
    return paused


def _sampled_under(vllm: Vllm, watch: Callable[[str, Any], None] = lambda event, details: None) -> set[str]:
    """Returns the labels of a completion's tokens. `watch`: called with httpx's events of the request."""
    sampling = {"max_tokens": 8, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    body = {"model": "tiny", "token_ids": [40, 41, 42], "sampling_params": sampling}
    with httpx.Client(timeout=60) as client:
        url, extensions = f"{vllm.url}/inference/v1/generate", {"trace": watch}
        answer = client.post(url, json=body, extensions=extensions).json()
    return {span["version"] for span in answer["choices"][0]["weight_versions"]}


def _ask(vllm: Vllm, token: str, path: Path, version: str) -> httpx.Response:
    body = {"path": str(path), "version": version}
    return httpx.post(
        f"{vllm.url}{PUBLISH}", json=body, headers={"Authorization": f"Bearer {token}"}, timeout=60
    )  # fmt: skip


def _code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_previous_trainer_gets_fenced_and_a_stranger_gets_unauthorized(vllm: Vllm, folder: Path) -> None:
    first = claim_publishing(vllm.weights_dir)
    assert _ask(vllm, first, folder, "1.1").status_code == 200
    second = claim_publishing(vllm.weights_dir)
    assert _ask(vllm, second, folder, "2.1").status_code == 200
    assert _code(_ask(vllm, first, folder, "1.2")) == (409, "fenced")
    assert _code(_ask(vllm, "0" * 64, folder, "3.0")) == (401, "unauthorized")
    with raises(PublishError, "model_server_refused", status=409) as refused:
        ModelServer(vllm.url, first).publish(folder, PolicyVersion(1, 2))
    assert refused.value.permanent
    assert _label(vllm) == "2.1"
    assert _sampled_under(vllm) == {"2.1"}


def _scores(vllm: Vllm) -> list[float]:
    """Returns the log-probabilities of a greedy completion's tokens."""
    body = {"model": "tiny", "prompt": [40, 41, 42], "max_tokens": 8, "temperature": 0, "logprobs": 1}
    answer = httpx.post(f"{vllm.url}/v1/completions", json=body, timeout=60).json()
    scores: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return scores


def test_reset_brings_back_the_first_weights_bit_for_bit(vllm: Vllm, policy: Policy) -> None:
    token = claim_publishing(vllm.weights_dir)
    reset: dict[str, Any] = {
        "url": f"{vllm.url}/gristmill/reset",
        "headers": {"Authorization": f"Bearer {token}"},
        "timeout": 60,
    }
    assert httpx.post(**reset).json() == {"weight_version": "default"}
    first = _scores(vllm)
    target = ModelServers([ModelServer(vllm.url, token, patience=30)])
    halved = {name: tensor / 2 for name, tensor in policy.served_tensors().items()}
    FilesystemTransport(target, vllm.weights_dir / "halved", None).publish(halved, PolicyVersion(1, 3))
    target.close()
    assert (_label(vllm), _scores(vllm) != first) == ("1.3", True)
    assert _code(httpx.post(f"{vllm.url}/gristmill/reset")) == (401, "unauthorized")
    assert httpx.post(**reset).is_success
    shutil.rmtree(vllm.weights_dir / "halved")
    assert (_label(vllm), _scores(vllm)) == ("default", first)
    assert _sampled_under(vllm) == {"default"}


def test_server_that_sleeps_computes_nothing_before_the_next_version(
    vllm: Vllm, folder: Path, policy: Policy, tmp_path: Path
) -> None:
    """vLLM frees no memory on a CPU. Everything else about a sleep is as on a GPU."""
    token = claim_publishing(vllm.weights_dir)
    assert _ask(vllm, token, folder, "1.1").status_code == 200
    server = ModelServer(vllm.url, token)
    for level in (1, 2, 2):
        server.sleep(level)
        assert httpx.get(f"{vllm.url}/health", timeout=60).is_success
        assert (_label(vllm), _sleeps(vllm, token)) == ("1.1", True)
        with _waiting_request(vllm) as versions:
            server.sleep(level)  # changes nothing
            assert _code(_ask(vllm, token, folder.with_name("1.9"), "1.9")) == (503, "weights_missing")
            assert _sleeps(vllm, token), "the refusal woke nothing"
            assert not versions
            assert _ask(vllm, token, folder, "1.2").status_code == 200
        assert versions == [{"1.2"}]
        assert not _sleeps(vllm, token)
        _assert_sampled_by(vllm, policy, "1.2")
        assert _ask(vllm, token, folder, "1.1").status_code == 200


@contextmanager
def _waiting_request(vllm: Vllm) -> Iterator[list[set[str]]]:
    """Sends a request for a completion. Yields a list that gets the labels of its tokens before the context ends."""
    sent, versions = threading.Event(), list[set[str]]()

    def watch(event: str, details: object) -> None:
        if event == "http11.send_request_body.complete":
            sent.set()

    request = threading.Thread(target=lambda: versions.append(_sampled_under(vllm, watch)))
    request.start()
    assert sent.wait(60)
    yield versions
    request.join()


@pytest.mark.parametrize("body", [b"", b"{}", b'{"level": 0}', b'{"level": "deep"}', b"[2]"])
def test_sleep_needs_a_level_and_the_token(vllm: Vllm, body: bytes) -> None:
    token = claim_publishing(vllm.weights_dir)
    headers = {"Authorization": f"Bearer {token}"}
    url = f"{vllm.url}/gristmill/sleep"
    assert _code(httpx.post(url, content=body, headers=headers, timeout=60)) == (422, "bad_request")
    assert _code(httpx.post(url, json={"level": 2}, timeout=60)) == (401, "unauthorized")
    assert not _sleeps(vllm, token)


def test_sleeping_server_never_serves_the_weights_that_it_dropped(
    vllm: Vllm, folder: Path, policy: Policy, tmp_path: Path
) -> None:
    """A publication fails, or is refused, after the server woke up without weights."""
    torn, spoiled = tmp_path / "torn", tmp_path / "spoiled"
    shutil.copytree(folder, torn)
    os.truncate(torn / "model.safetensors", 1000)
    spoiled.mkdir()
    tenth = {name: tensor / 10 for name, tensor in policy.served_tensors().items()}
    save_file(tenth, spoiled / "model.safetensors", metadata={"format": "pt"})
    token = claim_publishing(vllm.weights_dir)
    assert _ask(vllm, token, folder, "1.1").status_code == 200
    ModelServer(vllm.url, token).sleep(2)
    _spoil(vllm, token, spoiled)
    assert _code(_ask(vllm, token, torn, "1.2")) == (500, "publish_failed")
    _assert_sampled_by(vllm, policy, "1.1")
    assert not _sleeps(vllm, token)

    target = ModelServers([ModelServer(vllm.url, token, patience=30)])
    memory = vllm.weights_dir / "memory"
    transport = DeviceMemoryTransport(target, memory, None, device=torch.device("cpu"))
    transport.publish(policy.served_tensors(), PolicyVersion(1, 3))
    first = _first_scores(vllm, token)
    assert _ask(vllm, token, memory / "1.3", "1.3").status_code == 200
    transport.copied({name: tensor / 2 for name, tensor in policy.served_tensors().items()})
    ModelServer(vllm.url, token).sleep(2)
    _spoil(vllm, token, spoiled)
    assert _code(_ask(vllm, token, memory / "1.3", "1.3")) == (503, "weights_replaced")
    assert (_label(vllm), _scores(vllm), _sleeps(vllm, token)) == ("default", first, False)
    target.close()
    shutil.rmtree(memory)


def _first_scores(vllm: Vllm, token: str) -> list[float]:
    """Returns the log-probabilities of the first weights."""
    reset = {"Authorization": f"Bearer {token}"}
    assert httpx.post(f"{vllm.url}/gristmill/reset", headers=reset, timeout=60).is_success
    return _scores(vllm)


def _sleeps(vllm: Vllm, token: str) -> bool:
    headers = {"Authorization": f"Bearer {token}"}
    sleeps: bool = httpx.get(f"{vllm.url}/is_sleeping", headers=headers, timeout=60).json()["is_sleeping"]
    return sleeps


def _spoil(vllm: Vllm, token: str, path: Path) -> None:
    """Gives the sleeping server other weights: it keeps its own on a CPU, and drops them on a GPU."""
    load = {"method": "load_files", "kwargs": {"path": str(path)}}
    headers = {"Authorization": f"Bearer {token}"}
    assert httpx.post(f"{vllm.url}/collective_rpc", json=load, headers=headers, timeout=60).is_success


def test_weights_that_are_no_longer_in_device_memory_are_not_served(vllm: Vllm, policy: Policy) -> None:
    """The trainer writes the next version into its buffer while a server, which was slow, asks for the last one."""
    token = claim_publishing(vllm.weights_dir)
    reset = {"Authorization": f"Bearer {token}"}
    assert httpx.post(f"{vllm.url}/gristmill/reset", headers=reset, timeout=60).is_success
    first = _scores(vllm)
    target = ModelServers([ModelServer(vllm.url, token, patience=30)])
    folder = vllm.weights_dir / "memory"
    transport = DeviceMemoryTransport(target, folder, None, device=torch.device("cpu"))
    halved, tenth = ({name: tensor / part for name, tensor in policy.served_tensors().items()} for part in (2, 10))
    transport.publish(halved, PolicyVersion(1, 1))
    served = _scores(vllm)
    assert (_label(vllm), served != first) == ("1.1", True)
    copied = transport.copied(tenth)
    assert (_label(vllm), _scores(vllm)) == ("1.1", served), "the server holds no view of the buffer"

    assert _code(_ask(vllm, token, folder / "1.1", "1.1")) == (503, "weights_replaced")
    assert (_label(vllm), _scores(vllm), _paused(vllm)) == ("1.1", served, False)
    transport.publish(copied, PolicyVersion(1, 2))
    assert _label(vllm) == "1.2"
    assert (newest := _scores(vllm)) not in (first, served)

    description = folder / "1.2" / FILE
    memory = DeviceMemory.read(description.parent)
    description.write_bytes(msgspec.json.encode(msgspec.structs.replace(memory, device="GPU-0")))
    refused = _ask(vllm, token, description.parent, "1.3")
    assert _code(refused) == (422, "device_memory_unusable")
    assert "GPU-0" in refused.json()["error"]["message"]
    assert (_label(vllm), _scores(vllm)) == ("1.2", newest)

    # A failure within the load: the server goes back to the weights that it was started with.
    wrong = memory.tensors | {KEYS: msgspec.structs.replace(memory.tensors[KEYS], offset=memory.size)}
    description.write_bytes(msgspec.json.encode(msgspec.structs.replace(memory, tensors=wrong)))
    assert _code(_ask(vllm, token, description.parent, "1.3")) == (500, "publish_failed")
    assert (_label(vllm), _scores(vllm), _paused(vllm)) == ("default", first, False)
    target.close()
    shutil.rmtree(folder)


_DIES = """
import os, signal, sys
from pathlib import Path
import torch
from gristmill import Manifest, PolicyVersion
from gristmill_trainer.policy import ModelSource, Policy
from gristmill_trainer.publish import sender
from gristmill_trainer.publish.device_memory import DeviceMemoryTransport
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.servers import ModelServer
url, token, folder, models = sys.argv[1:]
sender.PART = 1 << 16
join = sender.join
class Dying:
    def __init__(self, *arguments, **options):
        self.group, self.left = join(*arguments, **options), 4
    def send(self, *arguments):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.group.send(*arguments)
sender.join = Dying
manifest = Manifest.read(Path(models))
policy = Policy(ModelSource(manifest.weights_path, manifest.tokenizer_path, None, 512), "cpu")
halved = {name: tensor / 2 for name, tensor in policy.served_tensors().items()}
cpu = torch.device("cpu")
servers = ModelServers([ModelServer(url, token, patience=60)])
transport = DeviceMemoryTransport(
    servers, Path(folder), None, device=cpu, sender=sender.WeightSender(("127.0.0.1", 9), cpu)
)
transport.publish(halved, PolicyVersion(1, 1))
"""


def test_trainer_killed_while_it_sends_weights_leaves_the_weights_before(
    vllm: Vllm, folder: Path, policy: Policy
) -> None:
    token = claim_publishing(vllm.weights_dir)
    assert _ask(vllm, token, folder, "1.0").status_code == 200
    sent = vllm.weights_dir / "sent"
    dying = [sys.executable, "-c", _DIES, vllm.url, token, str(sent), str(vllm.models_dir)]
    assert subprocess.run(dying, timeout=300, check=False).returncode == -signal.SIGKILL
    _until_not_paused(vllm)
    _assert_sampled_by(vllm, policy, "1.0")
    assert _code(_ask(vllm, token, sent / "1.1", "1.1")) == (503, "trainer_unreachable")
    assert _ask(vllm, token, folder, "2.0").status_code == 200
    _assert_sampled_by(vllm, policy, "2.0")
    shutil.rmtree(sent)


def test_trainer_paused_during_its_request_is_refused_after_its_successor(vllm: Vllm, folder: Path) -> None:
    """The request's headers came while its sender was the run's trainer; the body came after the successor had
    published."""
    first = claim_publishing(vllm.weights_dir)
    body = f'{{"path": "{folder}", "version": "1.5"}}'.encode()
    url = httpx.URL(vllm.url)
    with socket.create_connection((url.host, url.port or 80), timeout=60) as connection:
        head = f"POST {PUBLISH} HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nAuthorization: Bearer {first}\r\n"
        connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body[:10])
        assert not _paused(vllm)  # answered after the server has seen the head
        second = claim_publishing(vllm.weights_dir)
        assert _ask(vllm, second, folder, "2.0").status_code == 200
        connection.sendall(body[10:])
        answered = b"".join(iter(lambda: connection.recv(4096), b""))
    assert b" 409 " in answered.splitlines()[0]
    assert b'"fenced"' in answered
    assert _label(vllm) == "2.0"
    assert not _paused(vllm)


def test_publications_in_progress_end_before_the_successors(vllm: Vllm, folder: Path) -> None:
    for turn in range(5):
        first = claim_publishing(vllm.weights_dir)
        under_way = [
            threading.Thread(target=_ask, args=(vllm, first, folder, f"{2 * turn + 1}.{step}")) for step in range(6)
        ]
        for thread in under_way:
            thread.start()
        time.sleep(0.03 * turn)  # The successor publishes before, among and after them.
        second = claim_publishing(vllm.weights_dir)
        assert _ask(vllm, second, folder, f"{2 * turn + 2}.0").status_code == 200
        for thread in under_way:
            thread.join()
        assert _label(vllm) == f"{2 * turn + 2}.0"
        assert not _paused(vllm)


_PUBLISHING = """
import sys
from pathlib import Path
from gristmill import PolicyVersion
from gristmill_trainer.publish.servers import ModelServer
url, token, folder = sys.argv[1:]
step = 0
while True:
    ModelServer(url, token).publish(Path(folder), PolicyVersion(1, step := step + 1))
    print(step, flush=True)
"""


@pytest.mark.long
def test_trainer_killed_during_a_publication_leaves_a_working_server(vllm: Vllm, folder: Path) -> None:
    for kill in range(6):
        token = claim_publishing(vllm.weights_dir)
        process = subprocess.Popen(
            [sys.executable, "-c", _PUBLISHING, vllm.url, token, str(folder)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.02 * kill)
        process.kill()
        process.wait()
        process.stdout.close()
        _until_not_paused(vllm)
        # The last publication, whichever it was, completed: the server now samples from one version.
        (label,) = _sampled_under(vllm)
        assert PolicyVersion.parse(label).incarnation == 1


def _until_not_paused(vllm: Vllm) -> None:
    deadline = time.monotonic() + 60
    while _paused(vllm):
        assert time.monotonic() < deadline, "the server was left paused"
        time.sleep(0.05)


@pytest.mark.parametrize("where", ["between layers", "within a layer"])
def test_load_that_fails_half_way_restores_the_previous_weights_and_version(
    vllm: Vllm, folder: Path, policy: Policy, tmp_path: Path, where: str
) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(Path(Manifest.read(vllm.models_dir).serve_path), torn)
    shards = sorted(torn.glob("*.safetensors"))
    assert len(shards) == 2
    if where == "within a layer":
        (torn / "model.safetensors.index.json").unlink(missing_ok=True)
        halved = {name: tensor / 2 for name, tensor in policy.served_tensors().items() if name != KEYS}
        save_file(halved, shards[0], metadata={"format": "pt"})
    os.truncate(shards[1], 1000)

    token = claim_publishing(vllm.weights_dir)
    assert _ask(vllm, token, folder, "1.1").status_code == 200
    assert _code(_ask(vllm, token, torn, "1.2")) == (500, "publish_failed")
    assert _label(vllm) == "1.1"
    assert not _paused(vllm)
    _assert_sampled_by(vllm, policy, "1.1")
    assert _ask(vllm, token, folder, "1.3").status_code == 200
    _assert_sampled_by(vllm, policy, "1.3")


def test_partly_loaded_weights_have_no_version(vllm: Vllm, folder: Path, policy: Policy, tmp_path: Path) -> None:
    """Neither the new weights nor the old weights can be read. The next publication heals the server."""
    before, torn = tmp_path / "before", tmp_path / "torn"
    for copy in (before, torn):
        shutil.copytree(folder, copy)
    token = claim_publishing(vllm.weights_dir)
    assert _ask(vllm, token, before, "1.1").status_code == 200
    for copy in (before, torn):
        os.truncate(copy / "model.safetensors", 1000)
    assert _code(_ask(vllm, token, torn, "1.2")) == (500, "publish_failed")
    assert _label(vllm) == "invalid"
    assert not _paused(vllm)
    assert _ask(vllm, token, folder, "1.3").status_code == 200
    _assert_sampled_by(vllm, policy, "1.3")


def _assert_sampled_by(vllm: Vllm, policy: Policy, version: str) -> None:
    """Checks that the server samples by the policy's weights, and labels them `version`."""
    prompt = [40, 41, 42]
    sampling = {"max_tokens": 8, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    body = {"model": "tiny", "token_ids": prompt, "sampling_params": sampling}
    choice = httpx.post(f"{vllm.url}/inference/v1/generate", json=body, timeout=60).json()["choices"][0]
    assert {span["version"] for span in choice["weight_versions"]} == {version}
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([prompt + choice["token_ids"]])).logits[0].double()
    wanted = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1].gather(1, torch.tensor([choice["token_ids"]]).T)
    found = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    assert float((wanted.squeeze(1) - found).abs().max()) < 1e-3


def test_missing_weights_folder_is_reported_as_a_temporary_error(vllm: Vllm, folder: Path) -> None:
    token = claim_publishing(vllm.weights_dir)
    assert _ask(vllm, token, folder, "1.1").status_code == 200
    assert _code(_ask(vllm, token, folder.with_name("1.9"), "1.9")) == (503, "weights_missing")
    with raises(PublishError, "model_server_refused", status=503) as missing:
        ModelServer(vllm.url, token).publish(folder.with_name("1.9"), PolicyVersion(1, 9))
    assert not missing.value.permanent
    assert _label(vllm) == "1.1", "nothing was begun"


_STOPS_ITSELF = """
import os, signal, sys
from gristmill_trainer.__main__ import main
from gristmill_trainer.publish.publisher import FilesystemTransport
write = FilesystemTransport._write
def stop_before_the_server_hears(self, tensors, version):
    path = write(self, tensors, version)
    if path.name == "1.2":
        os.kill(os.getpid(), signal.SIGSTOP)
    return path
FilesystemTransport._write = stop_before_the_server_hears
sys.exit(main())
"""


def _state(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.long
def test_paused_trainer_leaves_the_run_and_the_server_to_its_successor(vllm: Vllm, tmp_path: Path) -> None:
    """SIGSTOP after the trainer wrote its weights and before their publication; SIGCONT when its successor is at
    work."""
    steps, output = 5, Output()
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        api_url = f"http://127.0.0.1:{api_port}"
        places = vllm.environ(api_url, tmp_path / "runs", ROOT / "configs")
        flags = ["--training_steps", str(steps), "--checkpoint_interval", "1"]
        env = stack.start("env", [sys.executable, "-m", "gristmill_env", "--config", "quickstart"], places)
        old = stack.start("old", [sys.executable, "-c", _STOPS_ITSELF, *flags], places)
        stack.wait_until(old, lambda: _state(old.process) == "T", timeout=120)
        assert _label(vllm) == "1.1"

        new = stack.start("new", [sys.executable, "-m", "gristmill_trainer", *flags], places)
        with SyncClient(api_url) as api:
            stack.wait_until(new, lambda: (api.get_run("quickstart").version or "").startswith("2."), timeout=120)
            old.process.send_signal(signal.SIGCONT)
            stack.wait_until(old, lambda: old.exit_code is not None, timeout=240)
            stack.wait_until(new, lambda: new.exit_code is not None, timeout=120)
            stack.wait_until(env, lambda: env.exit_code is not None, timeout=240)
            audit, run = api.audit("quickstart"), api.get_run("quickstart")
    assert (old.exit_code, new.exit_code, env.exit_code) == (0, 0, 0), output.lines[-40:]
    assert "ERROR" in output.of("old"), "it says why it ends"
    assert "[fenced]" in output.of("old")
    assert "Traceback" not in output.of("old")
    assert run.incarnation == 2
    assert _label(vllm) == f"2.{steps}", "the old trainer's weights never came back"
    assert len(audit.trained) == steps * 16
    rows = read_jsonl(tmp_path / "runs" / "quickstart" / "metrics.jsonl")
    assert max(row["rollout_logprob_diff_max"] for row in rows) <= 0.01


@pytest.mark.long
def test_one_of_two_live_trainers_exits_with_0_and_the_other_finishes(vllm: Vllm, tmp_path: Path) -> None:
    """Under a restart policy for failures, neither comes back to take the run from the other."""
    steps, output = 4, Output()
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        api_url = f"http://127.0.0.1:{api_port}"
        places = vllm.environ(api_url, tmp_path / "runs", ROOT / "configs")
        command = [sys.executable, "-m", "gristmill_trainer", "--training_steps", str(steps)]
        trainers = [stack.start(name, command, places) for name in ("one", "two")]
        for trainer in trainers:
            stack.wait_until(trainer, lambda name=trainer.name: "waiting" in output.of(name), timeout=120)  # type: ignore[misc]
        env = stack.start("env", [sys.executable, "-m", "gristmill_env", "--config", "quickstart"], places)
        for service in (*trainers, env):
            stack.wait_until(service, lambda service=service: service.exit_code is not None, timeout=180)  # type: ignore[misc]
        with SyncClient(api_url) as api:
            audit, run = api.audit("quickstart"), api.get_run("quickstart")
    assert [service.exit_code for service in (*trainers, env)] == [0, 0, 0], output.lines[-40:]
    errors = [line for line in output.lines if line.startswith(("one |", "two |")) and "ERROR" in line]
    assert len(errors) == 1, "one trainer reports, in one line, which incarnation has replaced it"
    assert "[fenced]" in errors[0]
    assert "quickstart" in errors[0]
    assert "incarnation 2" in errors[0]
    assert run.incarnation == 2
    assert _label(vllm) == f"2.{steps}"
    assert len(audit.trained) == steps * 16
