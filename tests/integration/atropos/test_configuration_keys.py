"""Every key of atroposlib's models is in our table, and Atropos' files get atroposlib's defaults."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from pydantic import BaseModel
from tests.support.atropos_reference import PYTHON

from gristmill_env.atropos.keys import OTHER_KEYS, SERVER_KEYS, Key
from gristmill_env.settings.run import EnvConfig

_ASK = """
import json
from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManagerConfig

models = {"base": BaseEnvConfig, "server": APIServerConfig, "manager": ServerManagerConfig}
fields = {name: model.model_construct().model_dump(mode="json") for name, model in models.items()}
print(json.dumps(fields))
"""

OTHER_DEFAULTS = {
    "tokenizer_name": "the served model's is taken",
    "rollout_server_url": "localhost is 127.0.0.1",
    "inference_weight": "1 for every environment is the same as none for any",
    "base_url": "Atropos takes an empty one for OpenAI's; the translation writes it out",
}
"""Keys whose defaults differ on purpose."""


@pytest.fixture(scope="module")
def fields() -> dict[str, dict[str, Any]]:
    """Returns atroposlib's fields by model, with their defaults."""
    assert PYTHON.exists(), f"no {PYTHON}: run `make dev`"
    answer = subprocess.run([PYTHON, "-c", _ASK], capture_output=True, text=True, check=True, timeout=120)
    models: dict[str, dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    return models


@pytest.mark.long
def test_key_table_has_every_field_of_the_atropos_models(fields: dict[str, dict[str, Any]]) -> None:
    assert fields["base"].keys() - OTHER_KEYS.keys() == set()
    assert fields["manager"].keys() - OTHER_KEYS.keys() == set()
    assert fields["server"].keys() - SERVER_KEYS.keys() == set()
    assert len(fields["base"]) > 25


@pytest.mark.long
def test_atropos_file_gets_the_defaults_of_atropos(fields: dict[str, dict[str, Any]]) -> None:
    theirs = [(OTHER_KEYS[name], value) for name, value in {**fields["base"], **fields["manager"]}.items()]
    theirs += [(SERVER_KEYS[name], value) for name, value in fields["server"].items()]
    for key, value in theirs:
        if key.name in OTHER_DEFAULTS or value is None or value in key.unset:
            continue
        there, ours = _default(key)
        if there and not (ours is None and value is False):
            assert ours == value, key.name


def _default(key: Key) -> tuple[bool, Any]:
    """Returns whether we have such a setting, and the value that an Atropos file gets if it does not name the key."""
    if key.default is not None:
        return True, key.default
    here: Any = EnvConfig()
    for part in (key.here or "").split("."):
        if isinstance(here, list):
            here = here[0]
        if not isinstance(here, BaseModel) or part not in type(here).model_fields:
            return False, None
        here = getattr(here, part)
    return True, here
