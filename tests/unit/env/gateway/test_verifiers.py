"""`environment: {type: verifiers}`: its meaning, and (long) its rollouts by the real package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises

from gristmill_env.adapters import verifiers
from gristmill_env.errors import EpisodeError
from gristmill_env.settings.run import EnvConfig

HERE = Path(__file__).parent
PYTHON = HERE.parents[3] / ".venv-verifiers" / "bin" / "python"
MODULE = "gristmill_env.adapters.verifiers"

_RUN = """
import sys
sys.path.append(sys.argv.pop(1))  # the other modules that tests import
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.long
def test_rollouts_of_the_real_package() -> None:
    assert PYTHON.exists(), f"no {PYTHON}: run `scripts/make_venv.sh verifiers`"
    options = ["-q", "-n", "0", "-p", "no:schemathesis", "-o", "python_files=*_cases.py"]
    command = [str(PYTHON), "-c", _RUN, sysconfig.get_path("purelib"), *options, str(HERE / "verifiers_cases.py")]
    elsewhere = (sys.base_prefix, sys.prefix)
    sources = [path for path in sys.path if path and "site-packages" not in path and not path.startswith(elsewhere)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sources)}
    done = subprocess.run(command, cwd=HERE.parents[3], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_environment_is_an_agent_with_the_rows_of_its_taskset() -> None:
    params = {"taskset": {"id": "sums", "most": 3}, "harness": "null"}
    config = EnvConfig.model_validate(
        {"environment": {"type": "verifiers", "params": params, "step_timeout": 9}, "dataset": {"split": "train[:5]"}}
    )
    assert config.agent is not None
    assert (config.agent.function, config.agent.params, config.agent.timeout) == (f"{MODULE}:run", params, 9)
    assert (config.dataset.rows, config.dataset.rows_params) == (f"{MODULE}:rows", {"taskset": params["taskset"]})
    assert config.dataset.split == "train[:5]"
    assert config.environment.type == "dataset"
    assert config.recorded("tiny")["agent"]["params"] == params


def test_rows_of_a_data_set_override_those_of_the_taskset() -> None:
    config = EnvConfig.model_validate(
        {"environment": {"type": "verifiers", "params": {"taskset": "sums"}}, "dataset": {"dataset_path": "rows.jsonl"}}
    )
    assert (config.dataset.rows, config.dataset.dataset_path) == (None, "rows.jsonl")


@pytest.mark.parametrize("call", [lambda: next(verifiers.rows(taskset="sums"))])
def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(EpisodeError, "package_missing", extra="verifiers"):
        call()
