"""The SDK's blocking client is the text that scripts/sync_client.py writes from the async client."""

from __future__ import annotations

from pathlib import Path

import pytest

import sync_client


def test_committed_blocking_client_is_current() -> None:
    assert sync_client.TARGET.read_text(encoding="utf-8") == sync_client.sync_client()


def test_async_word_without_a_replacement_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "client.py"
    text = sync_client.SOURCE.read_text(encoding="utf-8")
    source.write_text(text + "\n\nasync_lock = asyncio.Lock()\n", encoding="utf-8")
    monkeypatch.setattr(sync_client, "SOURCE", source)
    with pytest.raises(ValueError, match="'asyncio'"):
        sync_client.sync_client()


def test_replacement_that_matches_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "client.py"
    source.write_text(sync_client.SOURCE.read_text(encoding="utf-8").replace("aiter_bytes", "aiter_text"))
    monkeypatch.setattr(sync_client, "SOURCE", source)
    with pytest.raises(ValueError, match="aiter_bytes"):
        sync_client.sync_client()
