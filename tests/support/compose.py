"""The whole stack in containers, as a user runs it, under a separate project name and on separate ports."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testcontainers.compose import DockerCompose
from tests.support.ports import free_port

from gristmill.internal.lines import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
BUILD_ENV = ROOT / ".gristmill" / "build.env"
_DOWN = ("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5")
"""Also ends the services that a test started by a profile, and the containers of `run`. Otherwise `down` leaves them
running."""


class ComposeStack(DockerCompose):
    """`docker compose` on this repository. `settings` are the lines that a user would write into .env."""

    def __init__(
        self, folder: Path, project: str, settings: dict[str, str], overrides: list[Path] | None = None
    ) -> None:
        env_file = folder / f"{project}.env"
        # Free ports, so that a stack of the user is not in the way; fixed, so that they survive a restart.
        self.ports = {"API_PORT": str(free_port()), "MODEL_PORT": str(free_port())}
        self.ports |= {name: settings[name] for name in self.ports if name in settings}
        values = {"COMPOSE_PROJECT_NAME": project, **self.ports, **settings}
        env_file.write_text("".join(f"{key}={value}\n" for key, value in values.items()))
        files = ["compose.yaml", *(str(path) for path in overrides or [])]
        super().__init__(
            context=str(ROOT),
            compose_file_name=files,
            env_file=[str(BUILD_ENV), str(env_file)],
            pull=False,
            build=False,
            wait=False,
        )
        self.project = project

    def compose(self, *arguments: str, check: bool = True, timeout: float = 1200) -> str:
        """Runs `docker compose ARGUMENTS`. Returns its merged output. Raises AssertionError with that output if it
        fails."""
        command = [*self.compose_command_property, *arguments]
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False
        )
        assert not check or done.returncode == 0, (
            f"{' '.join(arguments)}: exit {done.returncode}\n{done.stdout[-6000:]}"
        )
        return done.stdout

    def up(self, *services: str, wait: bool = False, scale: dict[str, int] | None = None) -> None:
        replicas = [word for name, count in (scale or {}).items() for word in ("--scale", f"{name}={count}")]
        self.compose("up", "--detach", *(["--wait"] if wait else []), *replicas, *services)

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['API_PORT']}"

    @property
    def model_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['MODEL_PORT']}"

    def exit_code(self, service: str) -> int | None:
        """Returns the exit code of the service's container, the highest of several replicas; None while one of them
        runs."""
        found = [item for item in self.get_containers(include_all=True) if item.Service == service]
        if not found or any(item.State != "exited" for item in found):
            return None
        return max(item.ExitCode or 0 for item in found)

    def logs(self, service: str) -> str:
        return self.compose("logs", "--no-log-prefix", "--no-color", service)

    def inspect(self, service: str) -> dict[str, Any]:
        """Returns what `docker inspect` shows of the service's container, which need not run."""
        container = str(self.get_container(service, include_all=True).ID)
        shown = subprocess.run(["docker", "inspect", container], capture_output=True, text=True, check=True)
        described: dict[str, Any] = json.loads(shown.stdout)[0]
        return described

    def pid(self, service: str) -> int:
        """Returns the process id, on this machine, of the service's own process (below the init that Compose adds)."""
        init = self.inspect(service)["State"]["Pid"]
        return int(Path(f"/proc/{init}/task/{init}/children").read_text().split()[0])

    def addresses(self, service: str) -> list[str]:
        """Returns the addresses of the service's container in all of its networks."""
        networks = self.inspect(service)["NetworkSettings"]["Networks"].values()
        return [network["IPAddress"] for network in networks if network["IPAddress"]]

    def copy(self, source: str, target: Path) -> Path:
        """Copies SERVICE:PATH, a file or a folder, to `target`."""
        self.compose("cp", source, str(target))
        return target

    def run_file(self, run_id: str, name: str, folder: Path) -> Path:
        """Copies a file of the run folder out of the trainer's volume."""
        return self.copy(f"trainer:/runs/{run_id}/{name}", folder / f"{run_id}-{Path(name).name}")

    def metrics(self, run_id: str, folder: Path) -> list[dict[str, Any]]:
        return read_jsonl(self.run_file(run_id, "metrics.jsonl", folder))

    def wait_for_end(self, timeout: float) -> None:
        """Waits until env and trainer have both ended with exit code 0."""

        def ended() -> bool:
            codes = {service: self.exit_code(service) for service in ("env", "trainer")}
            for service, code in codes.items():
                assert code in (None, 0), f"{service} ended with exit code {code}:\n{self.logs(service)[-4000:]}"
            return None not in codes.values()

        self.wait_until(ended, timeout, "the end of the run")

    def wait_until(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            if time.monotonic() > deadline:
                raise self.late(what, timeout)
            time.sleep(1.0)

    def late(self, what: str, seconds: float) -> AssertionError:
        """Returns the error of a wait that took too long, with the ends of the services' logs."""
        tails = {service: self.logs(service)[-3000:] for service in ("env", "trainer", "model", "api")}
        return AssertionError(f"{what}: not after {seconds:.0f} s\n" + json.dumps(tails, indent=1))

    def __enter__(self) -> ComposeStack:
        """Prepares a stack and starts nothing yet, because each test decides which services start, and in which order.

        A test that was killed leaves its volumes with its runs. This fixture deletes those volumes first."""
        self.compose(*_DOWN, "--remove-orphans")
        return self

    def __exit__(self, *failure: Any) -> None:
        if os.environ.get("KEEP_STACK"):
            return
        self.compose(*_DOWN, check=False)


def build_images() -> None:
    """Builds the stack's images, which is quick if the layers exist."""
    assert BUILD_ENV.exists(), (
        f"no {BUILD_ENV}: run scripts/prepare_engine.sh and scripts/prepare_images.sh (make e2e does)"
    )
    command = ["docker", "compose", "--env-file", str(BUILD_ENV), "build"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
