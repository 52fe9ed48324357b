"""A model server that stays between commands, so that the next command does not wait for its start.

`gristmill model start` starts the server. `gristmill run`, `try`, `process` and `evaluate` use it after three checks:

1. The process still runs. Another process may get the id of a process that ended, so the record of the server has the
   time at which the process started.
2. Model, revision, dtype and the settings in variables are those that the command needs.
3. The server has the weights with which it was started. After a training it has the last weights of that run, so `use`
   resets it. A training then publishes its first version and receives the receipt for it, as on a new server.

A training locks the server for itself. Other commands share the lock. The kernel releases the lock of a process that
ends, and the trainer has the lock too, so that it is kept if only the launcher was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from gristmill import Manifest, ManifestError
from gristmill.internal import connections
from gristmill.internal.disk import write_file
from gristmill_cli.local.processes import GRACE, WENT_WELL, LocalStackError, answers, listens
from gristmill_model.revision import revision
from gristmill_model.settings import NO_PARSER, Settings, named, served_name

MODEL_TIMEOUT: Final = 3600.0
"""Seconds. A first start may download the model."""
_RESET_TIMEOUT: Final = 600.0
_FIRST_WEIGHTS: Final = "default"
"""vLLM's label for the weights that it was started with."""
_SETTINGS: Final = {
    "MODEL_MAX_LENGTH": "max_length",
    "LORA_RANK": "lora_rank",
    "MODEL_SLEEP": "sleep",
    "VLLM_ARGS": "vllm_args",
    "MODEL_TOOL_PARSER": "tool_parser",
    "MODEL_REASONING_PARSER": "reasoning_parser",
}
"""Variables of a model server, and the names of their values in its settings."""


class Record(BaseModel):
    """A model server that was started to stay."""

    model_config = ConfigDict(frozen=True)

    pid: int
    born: str
    """`_born` of the process."""
    model: str
    """MODEL."""
    weights_dir: Path
    """The folder of the token that allows a reset."""
    manifest: Manifest | None = None
    """The model that the server loaded; None until the server answers."""
    settings: dict[str, str] = {}
    """The values of `_SETTINGS` at the start, by variable. Empty in the record of an older version."""

    @property
    def alive(self) -> bool:
        """Whether the process runs, and is not another process with the same id."""
        return _born(self.pid) == self.born


class WarmServer:
    """The model server of one port, if it was started to stay."""

    def __init__(self, models_dir: Path, port: int) -> None:
        """`models_dir`: folder of the model service's manifest, in which record, log and lock of the server are too."""
        self.models_dir = models_dir
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = models_dir / f"server-{port}.log"
        self._file = models_dir / f"server-{port}.json"
        self._lock = models_dir / f"server-{port}.lock"

    def record(self) -> Record | None:
        """Returns the record of the server, or None if no server was started or its process has ended."""
        try:
            record = Record.model_validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise LocalStackError(
                "model_server_record",
                f"{self._file} is not readable: {error}; end the model server by its process id, and remove the file",
                path=self._file,
            ) from error
        return record if record.alive else None

    def start(self, command: Sequence[str], environ: Mapping[str, str], model: str) -> Record:
        """Starts the server and waits until it answers. `environ`: added to this process' environment.

        Raises LocalStackError if the port is taken, or if the server does not start; then no process stays.
        """
        self.models_dir.mkdir(parents=True, exist_ok=True)
        settings = _settings({**os.environ, **environ})
        with self._locked(alone=True):
            if listens(self.port):
                raise LocalStackError(
                    "port_taken",
                    f"port {self.port} of the model server is taken: stop the process that listens there, or choose "
                    "another port with --model_port",
                    port=self.port,
                )
            with self.log.open("wb") as log:
                process = subprocess.Popen(
                    command, env={**os.environ, **environ}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
            record = Record(
                pid=process.pid, born=_born(process.pid) or "", model=model,
                weights_dir=Path(environ["GRISTMILL_WEIGHTS_DIR"]), settings=settings,
            )  # fmt: skip
            try:
                return self._complete(self._write(record))
            except BaseException:
                _end(record, 0.0)
                process.wait()
                self._file.unlink(missing_ok=True)
                raise

    def stop(self) -> bool:
        """Ends the server. Returns False if no server ran. Raises LocalStackError if a command uses the server."""
        record = self.record()
        if record is not None:
            with self._locked(alone=True):
                _end(record, GRACE)
        self._file.unlink(missing_ok=True)
        return record is not None

    @contextlib.contextmanager
    def use(
        self, model: str | None, environ: Mapping[str, str], say: Callable[[str], None], *, alone: bool
    ) -> Iterator[int]:
        """Checks the server, resets its weights if necessary, and holds its lock within the block.

        `model`: as MODEL; None takes the server's model. `alone`: no other command may use the server meanwhile.
        Without it, a server that a training uses is used with the weights that it has. Yields the descriptor of the
        lock. Raises LocalStackError.
        """
        with self._locked(alone=alone) as (lock, kind):
            record = self.record()
            if record is None:
                raise self._ended()
            if kind == fcntl.LOCK_EX:
                record = self._complete(record)
            elif record.manifest is None:  # The command that starts the server has the lock.
                raise self._in_use()
            self.check(record, model, environ)
            if kind == fcntl.LOCK_EX:
                self._reset(record, say)
                if not alone:
                    _flock(lock, fcntl.LOCK_SH)
            elif kind is None:
                say(f"{self.describe(record)} has the weights {self._version()} of the run that trains now")
            yield lock

    def check(self, record: Record, model: str | None, environ: Mapping[str, str]) -> None:
        """Compares model, revision, dtype and settings with the values of a server that would start now.

        Raises LocalStackError, or ModelError if `model` is not valid. Checks nothing while the server starts.
        """
        manifest = record.manifest
        if manifest is None:
            return
        model = model or record.model
        wanted = {"model": served_name(model)}
        known = None if named(model) and model == manifest.requested else revision(model)
        if known is not None and wanted["model"] == manifest.name and not manifest.revision.startswith(known):
            wanted["revision"] = known
        if environ.get("DEVICE"):
            wanted["dtype"] = Settings.read(environ, cuda_available=False).dtype
        served = {"model": manifest.name, "revision": manifest.revision, "dtype": manifest.dtype, **record.settings}
        if record.settings:
            served["MODEL_TOOL_PARSER"] = manifest.tool_parser or NO_PARSER
            served["MODEL_REASONING_PARSER"] = manifest.reasoning_parser or NO_PARSER
        settings = _settings(environ)
        wanted |= {name: value for name, value in settings.items() if name in served and environ.get(name)}
        differ = {name: value for name, value in wanted.items() if value != served[name]}
        if differ:
            needed = " and ".join(f"the {name} {value}" for name, value in differ.items())
            use = f"add --model {manifest.requested} to use it, or " if differ.keys() == {"model"} else ""
            raise LocalStackError(
                "model_server_differs",
                f"{self.describe(record)} stays from an earlier command, and this command needs {needed}: {use}end "
                "it with `gristmill model stop`",
                url=self.url,
                needed=differ,
                served=served,
            )

    def describe(self, record: Record) -> str:
        """Returns a phrase that names the server and its model."""
        manifest = record.manifest
        model = record.model if manifest is None else f"{manifest.requested} ({manifest.revision}, {manifest.dtype})"
        return f"the model server at {self.url} with {model}"

    def state(self) -> str:
        """Returns a phrase about the weights that the server has now."""
        if not answers(f"{self.url}/v1/models"):
            return f"it does not answer (log: {self.log})"
        version = self._version()
        if version == _FIRST_WEIGHTS:
            return "it has the weights with which it was started"
        return f"it has the weights {version} of a run, and the next command resets them"

    def raise_if_ended(self) -> None:
        """Raises LocalStackError if the server has ended, while a run used it."""
        if self.record() is None:
            raise self._ended("; the same command starts a model server, and continues the run")

    def _complete(self, record: Record) -> Record:
        """Waits until the server answers, and adds its manifest to the record. Restores a replaced manifest."""
        deadline = time.monotonic() + MODEL_TIMEOUT
        while not answers(f"{self.url}/v1/models"):
            if not record.alive:
                raise self._ended()
            if time.monotonic() > deadline:
                raise LocalStackError(
                    "service_not_ready",
                    f"the model server at {self.url} does not answer (log: {self.log})",
                    log=self.log,
                )
            time.sleep(0.2)
        if record.manifest is None:
            manifest = Manifest.read(self.models_dir)
            if manifest.requested != record.model:
                raise LocalStackError(
                    "model_server_differs",
                    f"another model server has written the manifest of {manifest.requested} to {self.models_dir}; use "
                    "another --state_dir",
                    url=self.url,
                )
            return self._write(record.model_copy(update={"manifest": manifest}))
        with contextlib.suppress(ManifestError):
            if Manifest.read(self.models_dir) == record.manifest:
                return record
        record.manifest.write(self.models_dir)  # A server on another port has written its own.
        return record

    def _reset(self, record: Record, say: Callable[[str], None]) -> None:
        """Sets the server back to its first weights, unless it has them."""
        version = self._version()
        if version == _FIRST_WEIGHTS:
            return
        try:
            token = (record.weights_dir / "token").read_text().strip()
            headers = {"Authorization": f"Bearer {token}"}
            with connections.client(self.url, timeout=_RESET_TIMEOUT) as http:
                http.post("/gristmill/reset", headers=headers).raise_for_status()
        except (OSError, httpx.HTTPError) as error:
            raise LocalStackError(
                "model_server_not_reset",
                f"{self.describe(record)} has the weights {version} of an earlier run, and cannot load its first "
                f"weights: {error}; end it with `gristmill model stop`",
                version=version,
            ) from error
        if (found := self._version()) != _FIRST_WEIGHTS:
            raise LocalStackError(
                "model_server_not_reset",
                f"{self.describe(record)} has the weights {found} after its reset; end it with `gristmill model stop`",
                version=found,
            )
        say(f"the model server had the weights {version} of an earlier run; it has its first weights again")

    def _version(self) -> str:
        """Returns the server's label of its weights. Raises LocalStackError."""
        try:
            with connections.client(self.url, timeout=30.0) as http:
                return str(http.get("/weight_info").raise_for_status().json()["weight_version"])
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise LocalStackError(
                "model_server_unusable",
                f"the model server at {self.url} does not name its weights ({error}); `gristmill model stop` ends it",
                url=self.url,
            ) from error

    def _ended(self, remedy: str = "") -> LocalStackError:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        wrong = (line for line in reversed(lines) if line.strip() and not WENT_WELL.match(line))
        last = next(wrong, "it reported no error, as if it was killed")
        text = f"the model server at {self.url} ended: {last} (log: {self.log}){remedy}"
        return LocalStackError("service_ended", text, log=self.log)

    def _write(self, record: Record) -> Record:
        write_file(self._file, record.model_dump_json(indent=2).encode(), mode=0o600)
        return record

    @contextlib.contextmanager
    def _locked(self, *, alone: bool) -> Iterator[tuple[int, int | None]]:
        """Holds the lock within the block. Yields its descriptor and kind: exclusive if no other process has it.

        Without `alone` the lock is shared with other commands, or None if a training has it. With `alone`, raises
        LocalStackError if another command has the lock.
        """
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            kind = next((kind for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH) if _flock(lock, kind)), None)
            if alone and kind != fcntl.LOCK_EX:
                raise self._in_use()
            yield lock, kind
        finally:
            os.close(lock)

    def _in_use(self) -> LocalStackError:
        return LocalStackError(
            "model_server_in_use",
            f"another command uses or starts the model server at {self.url}; wait for its end, or choose another port "
            "with --model_port",
            url=self.url,
        )


def _flock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _born(pid: int) -> str | None:
    """Returns the boot and the clock tick at which a process started; None if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot} {fields[19]}"


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the values of `_SETTINGS` by variable, with their defaults. Raises ModelError for a wrong value."""
    settings = Settings.read(environ, cuda_available=False)
    return {variable: str(getattr(settings, name)) for variable, name in _SETTINGS.items()}


def _end(record: Record, grace: float) -> None:
    """Sends SIGTERM to the process and waits up to `grace` seconds. Then sends SIGKILL to its whole group."""
    deadline = time.monotonic() + grace
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.pid, signal.SIGTERM)
    while record.alive and time.monotonic() < deadline:
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):  # The server's workers are in its group, and may outlive it.
        os.killpg(record.pid, signal.SIGKILL)
