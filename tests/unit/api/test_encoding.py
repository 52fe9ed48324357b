"""Who accepts zstd."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from gristmill_api.encoding import accepts_zstd


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        (None, False),
        ("", False),
        ("gzip, br", False),
        ("zstd", True),
        ("gzip, ZSTD;q=0.5", True),
        ("*", True),
        ("*;q=0", False),
        ("zstd; q=0, *", False),
        ("*;q=0, zstd;q=0.001", True),
        ("zstd;q=0.000", False),
    ],
)
def test_accept_encoding_is_read_with_its_weights(header: str | None, accepted: bool) -> None:
    assert accepts_zstd(Headers({} if header is None else {"accept-encoding": header})) is accepted
