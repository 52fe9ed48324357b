"""The SDK and the model service on vLLM's own image, which brings a newer Python that the system manages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.compose import BUILD_ENV, ROOT

from uv_settings import read_settings

NEWER = ("3.13", pytest.param("3.12", marks=pytest.mark.long))
IMPORT_ALL = """
import importlib, pkgutil, gristmill
for module in pkgutil.walk_packages(gristmill.__path__, "gristmill."):
    importlib.import_module(module.name)
import gristmill_model.gate, gristmill_model.generate, gristmill_model.settings
print(gristmill_model.settings.Settings.read({"VLLM_ARGS": "--seed 1"}, cuda_available=True).vllm_args)
"""


@pytest.fixture(scope="session", autouse=True)
def images() -> None:
    """The stack's images are not needed here."""


def find_python(version: str) -> Path:
    """Returns an interpreter of this version, from pyenv or PATH. Without one, the test fails in CI and is skipped
    elsewhere."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    found = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    found += [Path(path) for path in [shutil.which(f"python{version}")] if path and "shims" not in path]
    if not found:
        assert not os.environ.get("CI"), f"no Python {version} here: CI must have one"
        pytest.skip(f"NOT TESTED: no Python {version} in pyenv or PATH")
    return found[0]


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=os.environ | read_settings(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("version", NEWER)
def test_wheels_install_and_import_on_newer_pythons(version: str, tmp_path: Path) -> None:
    newer = find_python(version)
    wheel = ["-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    run(sys.executable, *wheel, tmp_path / "dist", ROOT / "sdk", ROOT / "services" / "model")
    uv = Path(sys.executable).with_name("uv")
    python = tmp_path / "venv" / "bin" / "python"
    run(uv, "venv", "--quiet", "--python", newer, tmp_path / "venv")
    install: list[str | Path] = [uv, "pip", "install", "--quiet", "--no-deps", "--python", python]
    # api.txt holds the SDK's requirements that vLLM also brings; vllm-image.txt holds the others.
    pins = [f"--requirements={ROOT}/requirements/{name}.txt" for name in ("api", "vllm-image")]
    run(*install, "--only-binary", ":all:", "--require-hashes", *pins)
    run(*install, "--no-index", *(tmp_path / "dist").glob("*.whl"))
    assert "('--seed', '1')" in run(python, "-W", "error::SyntaxWarning", "-c", IMPORT_ALL)
    # The modules that need torch are only compiled.
    site = run(python, "-c", "import gristmill_model; print(gristmill_model.__path__[0])").strip()
    run(python, "-m", "compileall", "-q", "-f", site)


@pytest.mark.long
def test_cuda_image_builds_on_a_python_that_the_system_manages(tmp_path: Path) -> None:
    """PEP 668: in this image, pip refuses to install without an explicit option. The base image replaces vLLM's
    image."""
    settings = dict(line.split("=", 1) for line in BUILD_ENV.read_text().splitlines() if "=" in line)
    (tmp_path / "Dockerfile").write_text(
        f"""FROM {settings["PYTHON_IMAGE"]}
RUN python3 -m pip --version || (apt-get update -q && apt-get install -q -y --no-install-recommends python3-pip)
RUN python3 -c "import pathlib, sysconfig; pathlib.Path(sysconfig.get_path('stdlib'), 'EXTERNALLY-MANAGED').touch()"
"""
    )
    run("docker", "build", "--quiet", "--tag", "gristmill/test-managed-python", tmp_path)
    env_file = tmp_path / "env"
    env_file.write_text("DEVICE=cuda\nVLLM_IMAGE=gristmill/test-managed-python\nTAG=test-managed\n")
    run("docker", "compose", "--env-file", BUILD_ENV, "--env-file", env_file, "build", "model")
    versions = "import importlib.metadata as m; print(*map(m.version, ['gristmill', 'gristmill-model', 'zstandard']))"
    image = "gristmill/model:test-managed-cuda"
    assert len(run("docker", "run", "--rm", "--entrypoint", "python3", image, "-c", versions).split()) == 3
    assert run("docker", "run", "--rm", "--entrypoint", "id", image, "-u").strip() == "10001"
