"""The launcher refuses a setup that cannot work before it starts a service."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import pytest
from tests.support.errors import raises
from tests.support.grids import rest_is_long
from tests.support.small_disk import mounted

from gristmill.errors import FileError
from gristmill_cli.local.checks import check_folder
from gristmill_cli.local.launcher import main, watch
from gristmill_cli.local.options import command, read_dotenv, read_options
from gristmill_cli.local.processes import LocalStack, LocalStackError
from gristmill_cli.local.services import Services, _as_in_compose
from gristmill_cli.main import main as commands
from gristmill_model.settings import served_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "launch_local_dataset_run.py"
CONFIG = {
    "group_size": 8,
    "dataset": {
        "dataset_path": "rows.jsonl", "prompt_field": "question", "answer_field": "answer",
        "reward_functions": ["accuracy"],
    },
    "trainer": {"training_steps": 4, "batch_size": 8},
}  # fmt: skip

Launch = Callable[..., str]


def dataset(**changes: object) -> dict[str, object]:
    """Returns settings that replace the settings of `CONFIG`: its data set with `changes`."""
    return {"dataset": {**CONFIG["dataset"], **changes}}  # type: ignore[dict-item]


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Launch:
    """Returns what a launcher that is refused prints as errors, with `changes` to a config that works.

    The launcher runs in this process, because its imports take longer than its checks.
    """
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")

    def run(*arguments: str, env_file: str | None = None, environ: Mapping[str, str] = {}, **changes: object) -> str:
        (tmp_path / "mine.yaml").write_text(json.dumps(CONFIG | changes))
        (tmp_path / ".env").write_text(env_file or "")
        with socket.socket() as api, socket.socket() as model, monkeypatch.context() as patch:
            api.bind(("127.0.0.1", 0))  # Bound and not listened on: free for the launcher's checks.
            model.bind(("127.0.0.1", 0))
            ports = [f"--api_port={api.getsockname()[1]}", f"--model_port={model.getsockname()[1]}"]
            folders = [f"--state_dir={tmp_path / 'state'}", f"--runs_dir={tmp_path / 'runs'}"]
            config = [] if "CONFIG=" in (env_file or "") else ["--config", str(tmp_path / "mine.yaml")]
            patch.setattr(logging.getLogger(), "handlers", [])  # Another test may have left one.
            patch.chdir(ROOT if env_file is None else tmp_path)
            # The launcher adds the variables of .env.
            own = {"RUN_ID": "", "COMPOSE_DISABLE_ENV_FILE": str(int(env_file is None)), **environ}
            interrupt = signal.getsignal(signal.SIGINT)
            with mock.patch.dict(os.environ, own):
                assert main([*config, *ports, *folders, *arguments]) == 1
            signal.signal(signal.SIGINT, interrupt)
        assert not (tmp_path / "state" / "redis").is_dir(), "a service was started"
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"trainer": {"learnig_rate": 1e-6}}, "unknown_key", "learning_rate"),
        ({"trainer": {"batch_size": 10, "gradient_accumulation_steps": 2}}, "partial_groups", "20"),
        ({"trainer": {"batch_size": 10}}, "partial_groups", "10"),
        ({"trainer": {"on_step": "mine.py:f"}}, "trainer_only_key", "on_step"),
        ({"gruop_size": 8}, "unknown_key", "group_size"),
        (dataset(reward_functions=["acuracy"]), "unknown_reward", "accuracy"),
        (dataset(dataset_path="gone.jsonl"), "dataset_missing", "gone.jsonl"),
        (dataset(prompt_field="questoin"), "field_missing", "question"),
        ({"server_configs": [{"model_name": "smollm2"}]}, "model_mismatch", "--model smollm2"),
    ],
)
def test_launcher_refuses_a_run_that_cannot_work(
    refusal: Launch, changes: dict[str, object], code: str, named: str
) -> None:
    error = refusal(**changes)
    assert re.search(rf"^error \[{code}\]: ", error, re.MULTILINE), error
    assert named in error


@pytest.mark.parametrize(
    ("flag", "code"),
    [
        ("--resume=runs/gone/checkpoints/step-000020", "checkpoint_missing"),
        (f"--resume={ROOT}", "checkpoint_missing"),
        ("--policy_loss=gone.py:loss", "plugin_file_missing"),
        (f"--policy_loss={ROOT / 'configs' / 'agents' / 'two_steps.py'}:gone", "plugin_attribute_missing"),
    ],
)
def test_launcher_refuses_files_of_the_training_that_do_not_exist(refusal: Launch, flag: str, code: str) -> None:
    error = refusal(flag)
    assert f"error [{code}]: " in error


@pytest.mark.parametrize("model", ["tinny", "gone/for/good", "./gone", str(ROOT)])
def test_launcher_refuses_a_model_that_does_not_exist(refusal: Launch, model: str) -> None:
    error = refusal(f"--model={model}").replace("'", "")
    assert f"error [{'model_config_missing' if model == str(ROOT) else 'model_missing'}]: " in error
    assert f"MODEL={model}" in error


@pytest.mark.parametrize(
    ("line", "arguments", "environ", "code", "named"),
    [
        ("MODEL=tinny", [], {}, "model_missing", "MODEL=tinny"),
        ('MODEL="tinny" # mine', [], {}, "model_missing", "MODEL=tinny"),
        ("NAME=tinny\nMODEL=${NAME}", [], {}, "model_missing", "MODEL=tinny"),
        ("MODEL=tinny", ["--model=./gone"], {}, "model_missing", "MODEL=./gone"),
        ("MODEL=tinny", [], {"MODEL": "./gone"}, "model_missing", "MODEL=./gone"),
        ("CONFIG=gone", [], {}, "config_missing", "gone"),
        ("MODEL='tinny", [], {}, "env_file_invalid", "line 1"),
    ],
)
def test_launcher_reads_the_env_file_of_compose(
    refusal: Launch, line: str, arguments: list[str], environ: dict[str, str], code: str, named: str
) -> None:
    error = refusal(*arguments, env_file=line, environ=environ)
    assert f"error [{code}]: " in error
    assert named in error.replace("'", "")


@pytest.mark.parametrize("name", rest_is_long("API_PORT", "MODEL_PORT"))
def test_launcher_reads_its_ports_from_the_env_file(tmp_path: Path, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        (tmp_path / ".env").write_text(f"{name}={number}\nRUN_ID=other\n")
        done = subprocess.run(
            [sys.executable, str(SCRIPT), "--state_dir", str(tmp_path / "state"), "--runs_dir", str(tmp_path)],
            capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False,
            env={key: value for key, value in os.environ.items() if key not in ("RUN_ID", "COMPOSE_DISABLE_ENV_FILE")},
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, f"from .env: {name}={number}, RUN_ID=other\n")
    assert "error [port_taken]: " in done.stderr
    assert str(number) in done.stderr


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({"GATEWAY_PORT": "9300"}, "9300"),
        ({"GATEWAY_PORT": "9300-9309"}, "9300"),
        ({"GATEWAY_PORT": "9300", "GRISTMILL_GATEWAY_ADDRESS": "0.0.0.0:9400"}, None),
        ({}, None),
    ],
)
def test_gateway_listens_at_the_port_of_the_env_file(environ: dict[str, str], address: str | None) -> None:
    assert _as_in_compose(environ).get("GRISTMILL_GATEWAY_ADDRESS") == address


def test_arguments_of_vllm_are_shown_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("VLLM_ARGS", "COMPOSE_DISABLE_ENV_FILE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # and the end of the test removes what read_dotenv sets
    (tmp_path / ".env").write_text("VLLM_ARGS=--seed 3 --hf-token verysecretvalue\n")
    read_dotenv()
    assert capsys.readouterr().out == "from .env: VLLM_ARGS=--seed 3 --hf-token ***\n"


def test_served_name_leaves_out_the_revision() -> None:
    assert served_name("Qwen/Qwen2.5-1.5B@8faed76") == "Qwen/Qwen2.5-1.5B"
    assert served_name("tiny") == "tiny"


@pytest.mark.parametrize("folder", ["state", "state/redis", "runs/mine/logs"])
def test_launcher_refuses_a_folder_that_is_a_file(refusal: Launch, tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / folder).touch()
    assert re.fullmatch(rf"error \[file_unusable\]: {tmp_path / folder}: .* \(ENOTDIR\): .*\n", refusal())


def test_folder_that_does_not_exist_is_checked_above(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    for name, target in (("dangling", "gone"), ("loop", "loop")):
        (tmp_path / name).symlink_to(tmp_path / target)
        with pytest.raises(OSError, match=str(tmp_path / name)):
            check_folder(tmp_path / name / "x")
    with pytest.raises(OSError, match="'/sys/kernel'"):  # No user may create files there.
        check_folder(Path("/sys/kernel/runs"))
    with mounted(tmp_path, megabytes=1):
        check_folder(tmp_path)
        with contextlib.suppress(OSError), (tmp_path / "large").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(OSError, match=str(tmp_path)) as full:
            check_folder(tmp_path / "runs")
    assert FileError.of(full.value).values == {"path": str(tmp_path), "errno": "ENOSPC"}


@pytest.mark.parametrize("port", ["api_port", "model_port"])
def test_launcher_refuses_a_taken_port(refusal: Launch, port: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        error = refusal(f"--{port}={number}")
    assert "error [port_taken]: " in error
    assert str(number) in error
    assert f"--{port}" in error


def test_server_of_another_protocol_on_the_model_port_is_no_model_server(refusal: Launch) -> None:
    def greet() -> None:
        with contextlib.suppress(OSError):  # The end of the test closes the port.
            while True:
                with taken.accept()[0] as client, contextlib.suppress(ConnectionError):
                    client.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                    while client.recv(4096):  # Closing earlier could reset the connection before the client reads.
                        pass

    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = threading.Thread(target=greet, daemon=True)
        server.start()
        error = refusal(f"--model_port={taken.getsockname()[1]}")
        taken.shutdown(socket.SHUT_RDWR)
        server.join()
    assert "error [port_taken]: " in error


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["--api_port=99999"], "--api_port 99999"),
        (["--model_port=-5"], "--model_port -5"),
        (["--api_port=0"], "--api_port 0"),
        (["--api_port=80a"], "--api_port 80a"),
        (["--api_port=9444", "--model_port=9444"], "port 9444"),
    ],
)
def test_launcher_refuses_a_port_that_is_none(refusal: Launch, arguments: list[str], where: str) -> None:
    error = refusal(*arguments)
    assert "error [port_invalid]: " in error
    assert where in error


@pytest.mark.parametrize("command", [["run"], ["model", "status"], ["doctor"]])
def test_port_of_a_variable_that_is_none_is_an_error_of_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setenv("MODEL_PORT", "90o1")
    assert commands(command) == 1
    assert capsys.readouterr().err.startswith("error [port_invalid]: MODEL_PORT=90o1 ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--training_steps=0"], "'total_steps'"),
        (["--run_id=a/b"], "'run_id'"),
        (["--set", "group_size=0"], "'group_size'"),
        (["--set", "trainer=[a"], "--set trainer=[a"),
    ],
)
def test_wrong_value_of_the_command_line_is_not_said_to_be_in_the_file(
    refusal: Launch, arguments: list[str], named: str
) -> None:
    [line] = refusal(*arguments).splitlines()
    assert re.match(rf"error \[\w+\]: command line: {re.escape(named)}", line), line


def test_launcher_refuses_a_finished_run_with_the_next_commands(refusal: Launch, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    (folder / "model").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 5)))
    error = refusal()
    assert "error [run_finished]: " in error
    assert "4 steps" in error
    same = f"gristmill run {tmp_path / 'mine.yaml'} "
    assert error.count(same) == 3, "a command without the config would train another run"
    assert error.count(f"--runs_dir {tmp_path / 'runs'}") == 3
    assert all(flag in error for flag in ("--training_steps 20", "--fresh", "--run_id mine-2"))
    (tmp_path / "runs" / "mine").rename(tmp_path / "runs" / "other")
    assert refusal("--run_id=other").count("--run_id other --") == 2
    (tmp_path / "runs" / "other").rename(tmp_path / "runs" / "mine")
    assert "error [run_finished]: " in refusal("--training_steps=3")
    another = {"server_configs": [{"model_name": "smollm2"}]}
    assert "error [model_mismatch]: " in refusal("--training_steps=8", **another)
    assert "error [model_mismatch]: " in refusal("--fresh", **another)


def test_failure_repeats_the_last_error_and_names_the_log(tmp_path: Path) -> None:
    code = (
        "print('12:00:00 mine    INFO    fine'); print('12:00:01 mine    ERROR   the disk is full'); "
        "print('12:00:02 mine    INFO    bye'); raise SystemExit(3)"
    )
    shown: list[str] = []
    with LocalStack(lambda name, text: shown.append(text), logs=tmp_path / "logs") as stack:
        service = stack.start("mine", [sys.executable, "-c", code])
        values = {"exit_code": 3, "last_error": "the disk is full", "log": tmp_path / "logs" / "mine.log"}
        with raises(LocalStackError, "service_ended", service="mine", **values):
            stack.wait_until(service, lambda: False, timeout=30)
    log = (tmp_path / "logs" / "mine.log").read_text().splitlines()
    assert log[0].startswith("--- started ")
    assert log[1:-1] == shown
    assert len(shown) == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_failure_of_a_killed_service_names_the_signal(number: signal.Signals) -> None:
    code = f"import os; print('loading', flush=True); os.kill(os.getpid(), {int(number)})"
    with LocalStack(lambda name, text: None) as stack:
        service = stack.start("mine", [sys.executable, "-c", code])
        values = {"service": "mine", "exit_code": -number, "signal": number.name}
        with raises(LocalStackError, "service_killed", **values):
            stack.wait_until(service, lambda: False, timeout=30)


def test_failure_without_an_error_line_repeats_the_last_line() -> None:
    with LocalStack(lambda name, text: None) as stack:
        service = stack.start("mine", [sys.executable, "-c", "import sys; sys.exit('no such thing')"])
        with raises(LocalStackError, "service_ended", service="mine", exit_code=1, last_error="no such thing"):
            stack.wait_until(service, lambda: False, timeout=30)


def test_failure_repeats_the_begin_of_a_long_line_and_the_log_has_all_of_it(tmp_path: Path) -> None:
    shown: list[str] = []
    log = tmp_path / "mine.log"
    with LocalStack(lambda name, text: shown.append(text), logs=tmp_path) as stack:
        service = stack.start("mine", [sys.executable, "-c", "import sys; sys.exit('x' * 200_000)"])
        with raises(LocalStackError, "service_ended", service="mine", exit_code=1, last_error="x" * 2000, log=log):
            stack.wait_until(service, lambda: False, timeout=30)
    assert "".join(log.read_text().splitlines()[1:-1]) == "x" * 200_000
    assert shown == ["x" * 2**16]


def test_server_that_ends_after_its_start_ends_the_run_with_its_error() -> None:
    with LocalStack(lambda name, text: None) as stack:
        stack.start("model", [sys.executable, "-c", "import sys; sys.exit('no memory')"])
        env, trainer = (stack.start(name, ["sleep", "60"]) for name in ("env", "trainer"))
        with raises(LocalStackError, "service_ended", service="model", exit_code=1, last_error="no memory"):
            watch(stack, env, trainer)


STACK = """
import sys
from gristmill_cli.local.processes import LocalStack, StopReceived, StopSignals

CODE = '''
import os, signal, sys, time

def finish(number, frame):
    print('finishing', flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    sys.exit()

signal.signal(signal.SIGTERM, finish)
print('ready', os.getpid(), flush=True)
while True:
    time.sleep(0.01)
'''
try:
    with LocalStack(signals=StopSignals()) as stack:
        for name in ("first", "second"):
            service = stack.start(name, [sys.executable, "-Sc", CODE, sys.argv[1] + name], grace=60)
            stack.wait_until(service, lambda: service.last_line.startswith("ready"), 60)
        stack.wait_until(service, lambda: False, 60)
except StopReceived as stop:
    print("everything stopped", flush=True)
    sys.exit(128 + stop.number)
"""
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels send no signal when a parent ends")
def test_services_stop_when_the_launcher_is_killed(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).touch()  # they end at once after SIGTERM
    command = [sys.executable, "-c", STACK, f"{tmp_path}/"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids = [int(next(launcher.stdout).split()[-1]) for _ in range(2)]
        ends = [os.pidfd_open(pid) for pid in pids]
        launcher.kill()
    ended = [bool(select.select([end], [], [], 20)[0]) for end in ends]
    for pid, end, has_ended in zip(pids, ends, ended, strict=True):
        if not has_ended:
            os.kill(pid, signal.SIGKILL)
        os.close(end)
    assert ended == [True, True]


@pytest.mark.parametrize(
    "signals",
    [
        [("second | ready", INT)],
        [("second | ready", TERM, TERM)],  # timeout signals make and the launcher, and make forwards the signal
        [("second | ready", INT), ("second | finishing", INT)],
        [("second | ready", HUP), ("second | finishing", TERM)],
        [("second | ready", TERM), ("first | finishing", INT)],
        [("first | ready", INT, HUP)],  # before the second service is ready
        [("second | ready", INT, TERM), ("second | finishing", HUP)],
        [("second | ready", HUP, INT, TERM)],
    ],
)
def test_stop_signals_of_any_kind_and_spacing_end_every_service(
    tmp_path: Path, signals: list[tuple[str, *tuple[signal.Signals, ...]]]
) -> None:
    release = f"{tmp_path}/"
    process = subprocess.Popen(
        [sys.executable, "-c", STACK, release], stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    waiting = {line: rest for line, *rest in signals}
    kills, first = sum(len(rest) for rest in waiting.values()) == 3, signals[0][1:]
    pids = list[int]()
    with process:
        for shown in process.stdout:
            name, state, *pid = shown.replace("|", "").split()
            pids += map(int, pid)
            for number in waiting.pop(f"{name} | {state}", []):
                process.send_signal(number)
            if state == "finishing" and not kills:
                Path(release + name).touch()
    assert process.returncode in {128 + number for number in first}  # signals that are sent together have no order
    assert (name, state) == ("everything", "stopped")
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_service_that_is_not_ready_in_time_is_named_with_its_last_line_and_log(tmp_path: Path) -> None:
    with LocalStack(lambda name, text: None, logs=tmp_path) as stack:
        service = stack.start("mine", [sys.executable, "-c", "print('loading'); import time; time.sleep(60)"])
        stack.wait_until(service, lambda: bool(service.last_line), timeout=30)
        values = {"last_error": "loading", "log": tmp_path / "mine.log"}
        with raises(LocalStackError, "service_not_ready", service="mine", **values):
            stack.wait_until(service, lambda: False, timeout=0)


def test_launcher_checks_without_the_libraries_that_take_seconds_to_import() -> None:
    code = "import gristmill_cli.local.launcher, sys; sys.exit(' '.join({'torch', 'transformers'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "\n"


# --- GPUs ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("environ", "model", "trainer", "module"),
    [
        ({"DEVICE": "cuda", "MODEL_GPU": "0", "TRAINER_GPU": "1"}, "0", "1", "gristmill_trainer.per_gpu"),
        ({"DEVICE": "cuda", "MODEL_GPU": "0, 1", "TRAINER_GPU": "2,3"}, "0,1", "2,3", "gristmill_trainer.per_gpu"),
        ({"DEVICE": "cuda", "MODEL_GPU": "GPU-a", "TRAINER_GPU": ""}, "GPU-a", "0", "gristmill_trainer.per_gpu"),
        ({"DEVICE": "cuda"}, None, "0", "gristmill_trainer.per_gpu"),
        ({"DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": "2,3"}, None, "2", "gristmill_trainer.per_gpu"),
        ({"DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""}, None, "", "gristmill_trainer.per_gpu"),
        ({"DEVICE": "cpu", "MODEL_GPU": "0", "TRAINER_GPU": "1,2"}, None, None, "gristmill_trainer"),
        ({"MODEL_GPU": "0", "TRAINER_GPU": "1"}, "0", "1", "gristmill_trainer"),
        ({}, None, None, "gristmill_trainer"),
    ],
    ids=str,
)
def test_each_service_sees_its_own_gpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    model: str | None,
    trainer: str | None,
    module: str,
) -> None:
    for name in ("DEVICE", "MODEL_GPU", "TRAINER_GPU", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    arguments = [f"--state_dir={tmp_path}", f"--runs_dir={tmp_path}", "--model_port=9"]
    services = Services(read_options(arguments, "gristmill run"))
    stack = mock.create_autospec(LocalStack, instance=True)
    services.start_model(stack, print)
    services.start_trainer(stack, grace=1)
    services.start_env(stack)
    started = {call.args[0]: call.args[1:] for call in stack.start.call_args_list}
    seen = {name: call[1].get("CUDA_VISIBLE_DEVICES") for name, call in started.items()}
    assert seen == {"model": model, "trainer": trainer, "env": None}
    assert started["trainer"][0][2] == module


def test_set_reaches_the_environment_and_the_commands_to_continue() -> None:
    options = read_options(["my.yaml", "--set", "trainer.seed=3", "--set", "group_size=4"], "gristmill run")
    given = ["--set", "trainer.seed=3", "--set", "group_size=4"]
    assert Services(options).env_flags() == ["--config", "my.yaml", *given]
    assert command(options, fresh=True).split() == [".venv/bin/gristmill", "run", "my.yaml", *given, "--fresh"]


def test_output_that_lacks_a_character_shows_its_code(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("CONFIG=süß\n", encoding="utf-8")
    for program in ([str(SCRIPT)], ["-m", "gristmill_cli", "run"]):
        done = subprocess.run(
            [sys.executable, *program], cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "from .env: CONFIG=s\\xfc\\xdf" in done.stdout
        assert "error [config_missing]: " in done.stderr


def test_run_is_named_by_the_variable_of_compose_or_of_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_RUN_ID", "mine")
    assert read_options([], "gristmill run").run_id == "mine"
    monkeypatch.setenv("RUN_ID", "of-compose")
    assert read_options([], "gristmill run").run_id == "of-compose"


def test_folders_of_the_command_line_may_be_below_the_home_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    services = Services(read_options(["--runs_dir=~/r", "--state_dir=~/s"], "gristmill run"))
    assert (services.runs_dir, services.state) == (tmp_path / "r", tmp_path / "s")


def test_second_launcher_does_not_train_the_run_of_another(tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    ours, theirs = (
        Services(read_options([f"--runs_dir={tmp_path}", f"--state_dir={tmp_path / name}"], "gristmill run"))
        for name in ("ours", "theirs")
    )
    with LocalStack(logs=folder / "logs") as first, LocalStack() as second:
        ours.lock_run(first, "sums")
        with raises(LocalStackError, "run_in_use", run="sums", path=folder):
            theirs.lock_run(second, "sums")
        trainer = ours.start_trainer(first, grace=1)
        files = Path(f"/proc/{trainer.process.pid}/fd").iterdir()
        assert folder / "logs" / "lock" in {file.readlink() for file in files}
    with LocalStack() as third:
        theirs.lock_run(third, "sums")


def test_set_of_an_unknown_trainer_key_is_refused(refusal: Launch) -> None:
    error = refusal("--set=trainer.learnig_rate=1")
    assert "error [unknown_key]: " in error
    assert "'learning_rate'" in error


# --- Stops -----------------------------------------------------------------------------------------------------
def test_stop_signal_while_close_starts_the_services_ends_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The services' start waits for Redis, and finds the signal there."""

    def start_store(services: Services, stack: LocalStack) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        stack.raise_if_stopped()

    monkeypatch.setattr(Services, "start_store", start_store)
    monkeypatch.setenv("COMPOSE_DISABLE_ENV_FILE", "1")
    arguments = ["--close", "mine", "--api_port=9", f"--state_dir={tmp_path}", f"--runs_dir={tmp_path}"]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        assert main(arguments) == 128 + signal.SIGINT
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "mine" in capsys.readouterr().out
