"""A model server that stays between commands. A small HTTP server is in the place of vLLM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.errors import raises
from tests.support.ports import free_port

from gristmill import Manifest
from gristmill_cli.local import model_command
from gristmill_cli.local.processes import LocalStack, LocalStackError
from gristmill_cli.local.warm_server import Record, WarmServer
from gristmill_env.run_settings import RunSettings
from gristmill_model import revision

pytestmark = pytest.mark.slow

SERVER = """
import http.server, json, os, sys
from pathlib import Path

class Handler(http.server.BaseHTTPRequestHandler):
    label = "default"
    def do_GET(self):
        self.answer(200, {"/v1/models": {"data": [{"id": "tiny"}]}, "/weight_info": {"weight_version": self.label}}[self.path])
    def do_POST(self):
        if self.path == "/gristmill/reset":
            token = Path(os.environ["GRISTMILL_WEIGHTS_DIR"], "token").read_text()
            if self.headers["Authorization"] != f"Bearer {token}":
                return self.answer(401, {})
            Handler.label = "default"
        else:
            Handler.label = self.path.strip("/")
        self.answer(200, {})
    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

Path(os.environ["GRISTMILL_MODELS_DIR"], "manifest.json").write_text(os.environ["MANIFEST"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""  # noqa: E501


def manifest(**changes: Any) -> Manifest:
    paths = dict.fromkeys(("tokenizer_path", "weights_path", "serve_path"), "/m/tiny")
    values = {"name": "tiny", "requested": "tiny", "revision": revision.tiny(), "sha256": "0", "dtype": "float32"}
    return Manifest.model_validate({**values, **paths, "max_model_len": 2048, **changes})


def start(server: WarmServer) -> Record:
    weights = server.models_dir.parent / "weights"
    weights.mkdir(exist_ok=True)
    (weights / "token").write_text("secret")
    environ = {
        "GRISTMILL_MODELS_DIR": str(server.models_dir),
        "GRISTMILL_WEIGHTS_DIR": str(weights),
        "MANIFEST": manifest().model_dump_json(),
    }
    return server.start([sys.executable, "-c", SERVER, str(server.port)], environ, "tiny")


def publish(server: WarmServer, version: str) -> None:
    httpx.post(f"{server.url}/{version}").raise_for_status()


def label(server: WarmServer) -> str:
    return str(httpx.get(f"{server.url}/weight_info").json()["weight_version"])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WarmServer]:
    server = WarmServer(tmp_path / "models", free_port())
    yield server
    server.stop()


def test_server_stays_and_another_command_finds_and_stops_it(server: WarmServer) -> None:
    record = start(server)
    assert record.manifest == manifest()
    again = WarmServer(server.models_dir, server.port)
    assert again.record() == record
    assert again.stop()
    assert not record.alive
    assert again.record() is None
    assert not again.stop()


def test_use_resets_the_weights_of_an_earlier_run(server: WarmServer) -> None:
    start(server)
    said: list[str] = []
    with server.use(None, {}, said.append, alone=True):
        assert (label(server), said) == ("default", [])
        publish(server, "1.7")
    with server.use("tiny", {"DEVICE": "cpu"}, said.append, alone=True):
        assert label(server) == "default"
    assert "1.7" in said[0]


def test_server_that_cannot_be_reset_is_refused(server: WarmServer) -> None:
    record = start(server)
    publish(server, "1.7")
    (record.weights_dir / "token").unlink()
    with (
        raises(LocalStackError, "model_server_not_reset", version="1.7"),
        server.use(None, {}, print, alone=True),
    ):
        pass
    assert label(server) == "1.7"


def test_use_restores_the_manifest_that_a_server_on_another_port_replaced(server: WarmServer) -> None:
    start(server)
    manifest(name="other", requested="other").write(server.models_dir)
    with server.use(None, {}, print, alone=True):
        assert Manifest.read(server.models_dir) == manifest()


@pytest.mark.parametrize(
    ("served", "model", "environ", "needed"),
    [
        ({}, "smollm2", {}, {"model": "smollm2"}),
        ({"revision": "0" * 12}, None, {}, {"revision": revision.tiny()}),
        ({}, "tiny", {"DEVICE": "cuda"}, {"dtype": "bfloat16"}),
        ({"name": "a/b", "requested": "a/b", "revision": "c0ffee"}, "a/b@beef", {}, {"revision": "beef"}),
    ],
)
def test_server_with_another_model_revision_or_dtype_is_refused(
    tmp_path: Path, served: dict[str, str], model: str | None, environ: dict[str, str], needed: dict[str, str]
) -> None:
    record = Record(pid=1, born="", model="tiny", weights_dir=tmp_path, manifest=manifest(**served))
    with raises(LocalStackError, "model_server_differs", needed=needed):
        WarmServer(tmp_path, 9).check(record, model, environ)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LORA_RANK", "16"),
        ("MODEL_MAX_LENGTH", "256"),
        ("MODEL_SLEEP", "1"),
        ("VLLM_ARGS", "--seed 3"),
        ("MODEL_TOOL_PARSER", "mistral"),
        ("MODEL_REASONING_PARSER", "qwen3"),
    ],
)
def test_server_with_other_settings_is_refused(server: WarmServer, variable: str, value: str) -> None:
    record = start(server)
    server.check(record, "tiny", {"LORA_RANK": "0", "MODEL_MAX_LENGTH": "", "MODEL_SLEEP": "0", "VLLM_ARGS": ""})
    with raises(LocalStackError, "model_server_differs") as refused:
        server.check(record, "tiny", {variable: value})
    assert refused.value.values["needed"].keys() == {variable}
    of_older_version = record.model_copy(update={"settings": {}})
    server.check(of_older_version, "tiny", {variable: value})


@pytest.mark.parametrize("model", ["a/b", "a/b@main", "a/b@c0ff"])
def test_server_with_the_model_of_the_hub_is_used(tmp_path: Path, model: str) -> None:
    there = manifest(name="a/b", requested="a/b@main", revision="c0ffee")
    record = Record(pid=1, born="", model="a/b@main", weights_dir=tmp_path, manifest=there)
    WarmServer(tmp_path, 9).check(record, model, {"DEVICE": "cpu"})


def test_server_of_a_folder_whose_weights_changed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    name = str(tmp_path)
    there = manifest(name=name, requested=name, revision=revision.fingerprint(tmp_path))
    record = Record(pid=1, born="", model=name, weights_dir=tmp_path, manifest=there)
    WarmServer(tmp_path / "models", 9).check(record, name, {})
    (tmp_path / "model.safetensors").write_text("new")
    with raises(LocalStackError, "model_server_differs"):
        WarmServer(tmp_path / "models", 9).check(record, name, {})


def test_process_that_has_the_id_of_an_ended_server_is_left_alone(server: WarmServer) -> None:
    record = start(server)
    assert server.stop()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        now = record.model_copy(update={"pid": other.pid})
        (server.models_dir / f"server-{server.port}.json").write_text(now.model_dump_json())
        assert server.record() is None
        assert not server.stop()
        assert other.poll() is None
        other.communicate(b"\n")
    assert other.returncode == 0


def test_training_has_the_server_alone_and_other_commands_use_it_with_its_weights(server: WarmServer) -> None:
    start(server)
    said: list[str] = []
    with server.use(None, {}, print, alone=True):
        publish(server, "1.3")
        with raises(LocalStackError, "model_server_in_use"), server.use(None, {}, print, alone=True):
            pass
        with raises(LocalStackError, "model_server_in_use"):
            server.stop()
        with server.use(None, {}, said.append, alone=False):
            assert label(server) == "1.3"
    assert "1.3" in said[0]
    with server.use(None, {}, print, alone=False), server.use(None, {}, print, alone=False):
        assert label(server) == "default"
        with raises(LocalStackError, "model_server_in_use"), server.use(None, {}, print, alone=True):
            pass


def test_server_that_another_command_starts_is_not_used(server: WarmServer) -> None:
    record = start(server)
    with server.use(None, {}, print, alone=True):
        server._write(record.model_copy(update={"manifest": None}))
        with raises(LocalStackError, "model_server_in_use"), server.use(None, {}, print, alone=False):
            pass


def test_lock_is_held_by_the_trainer_of_a_launcher_that_was_killed(server: WarmServer) -> None:
    start(server)
    with LocalStack() as stack:
        with server.use(None, {}, print, alone=True) as lock:
            trainer = stack.start("trainer", [sys.executable, "-c", "import time; time.sleep(600)"], keeps=(lock,))
        with raises(LocalStackError, "model_server_in_use"), server.use(None, {}, print, alone=True):
            pass
        trainer.process.kill()
        trainer.process.wait()
        with server.use(None, {}, print, alone=True):
            pass


def test_server_that_does_not_start_leaves_no_process_and_no_record(server: WarmServer, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no memory'); raise SystemExit(3)"]
    with raises(LocalStackError, "service_ended") as failed:
        server.start(command, {"GRISTMILL_WEIGHTS_DIR": str(tmp_path)}, "tiny")
    assert "no memory" in str(failed.value)
    assert server.record() is None
    assert not list(server.models_dir.glob("*.json"))


def test_interrupted_start_ends_the_process(server: WarmServer, tmp_path: Path) -> None:
    interrupt = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGINT); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        server.start([sys.executable, "-c", interrupt], {"GRISTMILL_WEIGHTS_DIR": str(tmp_path)}, "tiny")
    assert server.record() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_during_the_start_or_the_command_ends_the_server(
    server: WarmServer, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANIFEST", manifest().model_dump_json())
    monkeypatch.setattr(model_command, "MODEL_PYTHON", Path(sys.executable))
    kill = f"import os, signal, time; os.kill({os.getpid()}, {int(number)}); time.sleep(600)"
    monkeypatch.setattr(model_command, "MODEL_COMMAND", [sys.executable, "-c", kill])
    with pytest.raises(SystemExit) as ended:
        model_command._start(server, server.models_dir.parent, "tiny")
    assert ended.value.code == 128 + number
    assert server.record() is None
    monkeypatch.setattr(model_command, "MODEL_COMMAND", [sys.executable, "-c", SERVER, str(server.port)])
    flags = ["--base_url", server.url, "--dataset_path", "rows.jsonl"]
    run = RunSettings.read(flags, {"GRISTMILL_MODELS_DIR": str(server.models_dir)}, "test")
    found: list[Record | None] = []
    with contextlib.suppress(SystemExit), model_command.for_command("try", run):
        found.append(server.record())
        os.kill(os.getpid(), number)
        found.append(None)
    (record,) = found
    assert record is not None
    assert not record.alive
    assert server.record() is None


@pytest.mark.parametrize(("name", "starts"), [("try", True), ("evaluate", False)])
def test_try_starts_a_server_if_none_answers_and_stops_it(
    server: WarmServer, monkeypatch: pytest.MonkeyPatch, name: str, starts: bool
) -> None:
    monkeypatch.setenv("MANIFEST", manifest().model_dump_json())
    monkeypatch.setattr(model_command, "MODEL_COMMAND", [sys.executable, "-c", SERVER, str(server.port)])
    monkeypatch.setattr(model_command, "MODEL_PYTHON", Path(sys.executable))
    flags = ["--base_url", server.url, "--dataset_path", "rows.jsonl"]
    run = RunSettings.read(flags, {"GRISTMILL_MODELS_DIR": str(server.models_dir)}, "test")
    with model_command.for_command(name, run):
        assert (server.record() is not None) == starts
    assert server.record() is None


def test_commands_use_the_server_that_stays_and_leave_it(server: WarmServer) -> None:
    record = start(server)
    publish(server, "1.7")
    flags = ["--base_url", server.url, "--dataset_path", "rows.jsonl"]
    run = RunSettings.read(flags, {"GRISTMILL_MODELS_DIR": str(server.models_dir)}, "test")
    with model_command.for_command("evaluate", run):
        assert label(server) == "default"
    assert server.record() == record
    other = RunSettings.read([*flags, "--model", "smollm2"], {"GRISTMILL_MODELS_DIR": str(server.models_dir)}, "test")
    with raises(LocalStackError, "model_server_differs"), model_command.for_command("evaluate", other):
        pass


def test_run_ends_when_its_server_has_ended(server: WarmServer) -> None:
    record = start(server)
    os.kill(record.pid, signal.SIGKILL)
    while record.alive:
        time.sleep(0.01)
    server.log.write_text('INFO:     127.0.0.1:4 - "POST /collective_rpc HTTP/1.1" 200 OK\n')
    with raises(LocalStackError, "service_ended") as ended:
        server.raise_if_ended()
    assert "200 OK" not in str(ended.value), "the last line is of work that went well"
    assert "the same command" in str(ended.value)
