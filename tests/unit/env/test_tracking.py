"""W&B without credentials."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.groups import make_group

from gristmill_env.tally import Tally
from gristmill_env.tracking import WandbTracker, _has_credentials


def test_without_credentials_it_logs_offline_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    environ = {"NETRC": str(tmp_path / "netrc")}
    tracker = WandbTracker("sums", None, {"group_size": 2}, tmp_path, environ)
    tracker.group(make_group(run_id="sums"), Tally())
    tracker.close()
    assert "W&B runs offline: there are no credentials" in caplog.text
    assert list((tmp_path / "sums" / "wandb").glob("offline-run-*/*.wandb"))


def test_credentials_are_a_key_or_a_netrc_entry(tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    netrc.chmod(0o600)
    assert _has_credentials({"WANDB_API_KEY": "x", "NETRC": "/nowhere"})
    assert _has_credentials({"NETRC": str(netrc)})
    assert not _has_credentials({"NETRC": str(netrc), "WANDB_BASE_URL": "https://wandb.example.org"})
    assert not _has_credentials({"NETRC": str(tmp_path / "none")})
