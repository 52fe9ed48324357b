"""`docker compose run env close RUN`: a user ends a run by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.compose import ComposeStack

from gristmill import SyncClient

CLOSE = ("run", "--rm", "-T", "--no-deps", "env", "close")


def test_close_ends_the_run_and_frees_the_stack(tmp_path: Path) -> None:
    with ComposeStack(tmp_path, "gristmill-close", {}) as stack:
        stack.up("redis", "api", wait=True)
        with SyncClient(stack.api_url, patience=10) as api:
            api.create_run("abandoned", {}, 2)
            stack.compose(*CLOSE, "abandoned")
            assert api.get_run("abandoned").state == "finished"
            assert api.create_run("next", {}, 2).state == "open"
        with pytest.raises(AssertionError, match=r"exit 1\n(?s:.*)\[run_missing\](?s:.*)no-such-run"):
            stack.compose(*CLOSE, "no-such-run")
