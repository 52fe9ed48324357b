"""`make secure`: files that only their owner can read, the switch in .env, and the way back."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill_api.access.settings import Role, Tokens
from gristmill_api.settings import REDIS_USER
from gristmill_cli.local.redis_acl import USER
from gristmill_cli.local.secret_files import ACL, FILES, FOLDER, PASSWORD, RANDOM, ROLES, Secrets, SecretsError
from secure import ROOT, main


def _contents(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (root / FOLDER).iterdir()}


def test_secure_writes_the_files_that_the_api_and_redis_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([], tmp_path) == 0
    written = _contents(tmp_path)
    assert set(written) == set(FILES)
    words = {written[name].strip() for name in RANDOM}
    assert len(words) == len(RANDOM)
    assert all(len(word) >= 40 for word in words)
    tokens = Tokens.read(tmp_path / FOLDER)
    assert [tokens.role_of(f"Bearer {written[role].strip()}") for role in Role] == list(Role)
    assert f"#{hashlib.sha256(written[PASSWORD].strip().encode()).hexdigest()} " in written[ACL]
    told = capsys.readouterr().out
    assert not any(word in told for word in words)
    assert tuple(Role) == ROLES
    assert USER == REDIS_USER


def test_secure_files_are_readable_by_owner_and_group_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        main([], tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700
    assert {stat.S_IMODE((tmp_path / FOLDER / name).stat().st_mode) for name in FILES} == {0o640}


def test_secure_run_again_writes_only_missing_files(tmp_path: Path) -> None:
    """This is how a token is rotated: remove its file, and run `make secure` again."""
    main([], tmp_path)
    before = _contents(tmp_path)
    main([], tmp_path)
    assert _contents(tmp_path) == before
    (tmp_path / FOLDER / "trainer").unlink()
    (tmp_path / FOLDER / PASSWORD).unlink()
    main([], tmp_path)
    after = _contents(tmp_path)
    assert {name for name in FILES if before[name] != after[name]} == {"trainer", PASSWORD, ACL}


def test_secure_run_again_updates_an_old_user_list(tmp_path: Path) -> None:
    main([], tmp_path)
    before = _contents(tmp_path)
    (tmp_path / FOLDER / ACL).write_text("user api on +get")
    main([], tmp_path)
    assert _contents(tmp_path) == before


def test_secure_off_removes_all_of_its_files_and_no_other(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("CONFIG=gsm8k\n# mine\nAPI_AUTH=none\n")
    main([], tmp_path)
    (tmp_path / FOLDER / "mine").write_text("x")
    assert main(["--off"], tmp_path) == 0
    assert _contents(tmp_path) == {"mine": "x"}
    assert (tmp_path / ".env").read_text() == "CONFIG=gsm8k\n# mine\n"
    (tmp_path / FOLDER / "mine").unlink()
    main(["--off"], tmp_path)
    assert not (tmp_path / FOLDER).exists()


def test_secure_off_removes_the_env_file_that_it_created(tmp_path: Path) -> None:
    main([], tmp_path)
    main(["--off"], tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert main(["--off"], tmp_path) == 0, "off twice is off"


def test_token_of_another_site_is_kept_without_and_with_api_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(text: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))

    env, line = tmp_path / ".env", "HF_TOKEN_FILE=./.secrets/hf_token"
    env.write_text("HF_WRITE_TOKEN_FILE=/home/me/token\n")
    answer("hf_secret\n")
    assert main(["--set", "hf_token"], tmp_path) == 0
    file = tmp_path / FOLDER / "hf_token"
    assert file.read_text() == "hf_secret\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert Secrets.find(tmp_path) is None, "the API asks for no tokens"
    assert f"SECRETS_GID={file.stat().st_gid}" in env.read_text().splitlines()
    main([], tmp_path)
    assert env.read_text().splitlines().count(line) == 1
    main(["--off"], tmp_path)
    lines = env.read_text().splitlines()
    assert {line, "HF_WRITE_TOKEN_FILE=/home/me/token"} < set(lines)
    assert "API_AUTH=token" not in lines
    assert file.exists()
    answer("\n")
    main(["--set", "hf_token"], tmp_path)
    assert env.read_text() == "HF_WRITE_TOKEN_FILE=/home/me/token\n"
    assert not (tmp_path / FOLDER).exists()
    answer("two words\n")
    with pytest.raises(SystemExit):
        main(["--set", "hf_token"], tmp_path)
    assert "hf_secret" not in capsys.readouterr().out


def test_incomplete_secrets_folder_is_an_error(tmp_path: Path) -> None:
    assert Secrets.find(tmp_path) is None
    main([], tmp_path)
    assert Secrets.find(tmp_path) == Secrets(tmp_path / FOLDER)
    (tmp_path / FOLDER / "admin").unlink()
    with pytest.raises(SecretsError) as raised:
        Secrets.find(tmp_path)
    assert (raised.value.code, raised.value.missing) == ("secrets_missing", ["admin"])
    assert "`make secure`" in str(raised.value)


def test_folders_of_a_stack_with_tokens_are_closed_to_other_accounts(tmp_path: Path) -> None:
    """In a separate process, because the umask belongs to the process."""
    (tmp_path / "runs").mkdir(mode=0o755)
    program = (
        "from pathlib import Path; from gristmill_cli.local.secret_files import Secrets\n"
        "Secrets.close_to_others(Path('runs'), Path('state/a'))\n"
        "Path('state/a/file').write_text('x'); Path('other').mkdir()"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "cli" / "src")}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environ, check=True)
    modes = {
        name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("runs", "state/a", "state/a/file", "other")
    }
    assert modes == {"runs": 0o700, "state/a": 0o700, "state/a/file": 0o600, "other": 0o700}


def test_secrets_folder_is_ignored_by_git() -> None:
    assert f"{FOLDER}/" in (ROOT / ".gitignore").read_text().splitlines()
    for name in (*RANDOM, "unset"):
        assert (ROOT / "compose" / "no-auth" / name).read_bytes() == b"", "the default stack has no secrets"


@pytest.mark.slow
def test_secure_runs_without_our_packages(tmp_path: Path) -> None:
    for folder in ("scripts", "cli/src"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    subprocess.run(["python3", "-S", "scripts/secure.py"], cwd=tmp_path, env={"PATH": os.environ["PATH"]}, check=True)
    assert Secrets.find(tmp_path) is not None
