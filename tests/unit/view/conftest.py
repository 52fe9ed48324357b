"""The tests of the views need the packages of the extra `page`."""

from __future__ import annotations

import pytest

for _package in ("duckdb", "pyarrow", "tokenizers"):
    pytest.importorskip(_package)
