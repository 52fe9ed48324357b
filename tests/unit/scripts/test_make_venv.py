"""`make setup` and scripts/make_venv.sh: the environments belong to a device. The packages are left out here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from secure import ROOT

PYTHON = """#!/bin/sh
# Stands in for Python: makes an "environment" whose Python does nothing, pip included.
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in ("scripts", "requirements", "sdk", "services"):
        names = shutil.ignore_patterns("src", "__pycache__", "wheels")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=names)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def make(checkout: Path, *arguments: str, device: str = "", target: str = "setup") -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "PYTHON": str(checkout / "python")} | ({"DEVICE": device} if device else {})
    command = ["make", *arguments, target]
    return subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, check=False)


def stamps(checkout: Path) -> set[str]:
    return {str(path.relative_to(checkout)) for path in checkout.glob(".venv*/.*-*")}


def test_setup_makes_two_environments_and_dev_adds_the_tests_packages(checkout: Path) -> None:
    assert make(checkout).returncode == 0
    assert stamps(checkout) == {".venv/.ready-cpu", ".venv-model/.ready-cpu"}
    assert "Nothing to be done" in make(checkout).stdout
    assert make(checkout, target="dev").returncode == 0
    assert stamps(checkout) == {
        ".venv/.ready-cpu", ".venv/.dev-cpu", ".venv-model/.ready-cpu", ".venv-atropos/.ready-any",
    }  # fmt: skip
    assert "Nothing to be done" in make(checkout, target="dev").stdout


def test_setup_makes_the_environments_again_for_another_device(checkout: Path) -> None:
    assert make(checkout, target="dev").returncode == 0
    (checkout / ".venv" / "left").touch()
    (checkout / ".venv-atropos" / "left").touch()
    assert make(checkout, device="cuda").returncode == 0
    assert stamps(checkout) == {".venv/.ready-cuda", ".venv-model/.ready-cuda", ".venv-atropos/.ready-any"}
    assert not (checkout / ".venv" / "left").exists(), "CPU and CUDA builds of a package would be mixed"
    assert (checkout / ".venv-atropos" / "left").exists()
    assert "Nothing to be done" in make(checkout, device="cuda").stdout


def test_setup_follows_changed_pins(checkout: Path) -> None:
    make(checkout)
    after = (checkout / ".venv-model" / ".ready-cpu").stat().st_mtime + 1
    os.utime(checkout / "requirements" / "model-cpu.txt", (after, after))
    assert make(checkout, "--dry-run").stdout.count("make_venv.sh") == 1


def test_setup_rejects_an_unknown_device(checkout: Path) -> None:
    done = make(checkout, device="tpu")
    assert done.returncode != 0
    assert "DEVICE=tpu" in done.stderr
