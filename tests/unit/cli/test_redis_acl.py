"""The commands that Redis allows the API are exactly the commands of its scripts."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files

from gristmill_cli.local.redis_acl import IN_SCRIPTS, REPLAY, commands, users_acl

LUA = {entry.name: entry.read_text(encoding="utf-8") for entry in (files("gristmill_api.store") / "lua").iterdir()}
_CALL = re.compile(r"redis\.p?call\(\s*(.)([A-Za-z. ]*)")


def _called() -> dict[str, str]:
    """Command -> one script that calls it."""
    found = {}
    for name, text in LUA.items():
        for quote, command in _CALL.findall(text):
            assert quote in "'\"", f"{name}: a command that is computed cannot be listed: {quote}{command}"
            found[command] = name
    return found


def test_redis_acl_allows_every_command_of_the_scripts() -> None:
    assert len(LUA) > 20
    missing = {command: name for command, name in _called().items() if command.upper() not in commands()}
    assert missing == {}, "add them to IN_SCRIPTS in cli/src/gristmill_cli/local/redis_acl.py"


def test_redis_acl_allows_no_command_that_no_script_calls() -> None:
    assert sorted(set(IN_SCRIPTS.split()) - {command.upper() for command in _called()}) == []


DANGEROUS = """
    FLUSHALL FLUSHDB CONFIG KEYS SCAN ACL DEBUG SHUTDOWN SAVE BGSAVE MIGRATE REPLICAOF MODULE MONITOR CLIENT EVAL SCRIPT
    DUMP RESTORE SWAPDB
"""


def test_redis_acl_allows_no_dangerous_command() -> None:
    assert not set(DANGEROUS.split()) & set(commands())
    assert not [command for command in commands() if command.startswith(("@", "ALL"))]


def test_redis_acl_file_has_three_users_and_no_plain_password() -> None:
    default, api, health = users_acl("s3cret").splitlines()
    assert default == f"user default off resetpass resetkeys resetchannels {REPLAY}"
    assert f" #{hashlib.sha256(b's3cret').hexdigest()} " in api
    assert " resetkeys ~gm:* resetchannels &gm:events -@all +" in api
    assert "nopass" not in api
    assert health == "user health on nopass resetkeys resetchannels -@all +ping"
    assert "s3cret" not in users_acl("s3cret")
