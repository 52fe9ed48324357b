"""OpenEnv's real package as the service `openenv`: the environment plays with it, and it reaches nothing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.compose import BUILD_ENV, ROOT, ComposeStack
from tests.support.openenv_reference import PYTHON

from gristmill.internal.saved import SavedGroup

IMAGE = "gristmill-test-openenv"
SERVE = (
    "import uvicorn; from openenv_server import GAMES, create_app; "
    "uvicorn.run(create_app(*GAMES['word'], max_concurrent_envs=64), host='0.0.0.0', port=8000)"
)
DOCKERFILE = f"""
ARG PYTHON_IMAGE
FROM $PYTHON_IMAGE
COPY --from=packages . /packages
COPY openenv_server.py /packages/
ENV PYTHONPATH=/packages
CMD ["python3", "-c", "{SERVE}"]
"""
TURNS, GROUPS, SIZE = 2, 2, 4
PLAYS = [
    "environment.type=openenv", "environment.params.base_url=http://openenv:8000",
    f"environment.params.max_turns={TURNS}", "dataset.reward_functions=[episode]", f"group_size={SIZE}",
]  # fmt: skip


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    packages = PYTHON.parents[1] / "lib" / "python3.11" / "site-packages"
    assert packages.is_dir(), f"no {packages}: run `scripts/make_venv.sh openenv`"
    folder = tmp_path_factory.mktemp("openenv-image")
    (folder / "Dockerfile").write_text(DOCKERFILE)
    shutil.copy(ROOT / "tests/support/openenv_server.py", folder)
    lines = dict(line.split("=", 1) for line in BUILD_ENV.read_text().splitlines() if not line.startswith("#"))
    build = ["docker", "build", "--tag", IMAGE, "--build-context", f"packages={packages}"]
    build += ["--build-arg", f"PYTHON_IMAGE={lines['PYTHON_IMAGE']}", str(folder)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    yield IMAGE
    subprocess.run(["docker", "image", "rm", "--force", IMAGE], capture_output=True, check=False)


@pytest.mark.long
def test_rollouts_are_played_at_an_openenv_service(image: str, tmp_path: Path) -> None:
    settings = {"OPENENV_IMAGE": image, "COMPOSE_PROFILES": "openenv"}
    with ComposeStack(tmp_path, "gristmill-openenv", settings) as stack:
        stack.up("model", "openenv", wait=True)
        flags = [word for setting in PLAYS for word in ("--set", setting)]
        process = ("process", "--config", "quickstart", "--groups", str(GROUPS), "--out", "/runs/played.jsonl")
        stack.compose("run", "--rm", "--no-deps", "env", *process, *flags)
        read = ("run", "--rm", "--no-deps", "--entrypoint", "cat", "env", "/runs/played.jsonl")
        lines = [line for line in stack.compose(*read).splitlines() if line.startswith("{")]
        reach = "import socket; socket.gethostbyname('model')"  # which runs
        tried = stack.compose("exec", "-T", "openenv", "python3", "-c", reach, check=False)
        [network] = stack.inspect("openenv")["NetworkSettings"]["Networks"]
    groups = msgspec.json.decode("[" + ",".join(lines) + "]", type=list[SavedGroup])
    assert [len(group.completions) for group in groups] == [SIZE] * GROUPS
    for group in groups:
        assert f"Say {group.row}-cake." in str(group.messages)
        assert {completion.total for completion in group.completions} == {-0.25 * TURNS}
        assert all("is wrong." in str(completion.messages) for completion in group.completions)
    assert "gaierror" in tried
    assert network.endswith("_openenv")
