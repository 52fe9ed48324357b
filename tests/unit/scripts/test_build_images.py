"""scripts/build_images.sh, with a program in the place of Docker."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.stack import ROOT

DOCKER = """#!/bin/bash
echo "$@" >> calls
case "$*" in
*"build model") until [ -e started ]; do sleep 0.05; done; exit 17 ;;
*"build trainer") touch started; exec sleep 600 ;;
esac
"""


@pytest.mark.parametrize("own", [False, True])
def test_failed_build_ends_the_others(tmp_path: Path, own: bool) -> None:
    """The settings of .env count too, and those that prepare_images.sh found replace them."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "build_images.sh", tmp_path / "scripts")
    for program in ("scripts/prepare_engine.sh", "scripts/prepare_images.sh", "bin/docker"):
        (tmp_path / program).write_text(DOCKER if program == "bin/docker" else "#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    if own:
        (tmp_path / ".env").write_text("TAG=mine\n")
    environ = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    # The pipe ends with the last process that has it.
    done = subprocess.run(
        [tmp_path / "scripts" / "build_images.sh"],
        env=environ, cwd=tmp_path, timeout=60, check=False, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert done.returncode == 17
    calls = (tmp_path / "calls").read_text().splitlines()
    files = "--env-file .env --env-file .gristmill/build.env" if own else "--env-file .gristmill/build.env"
    assert f"compose --profile sandbox {files} build model" in calls
