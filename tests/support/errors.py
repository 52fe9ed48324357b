"""Assertions on Gristmill's errors: the code and the values, never the sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from gristmill import GristmillError

E = TypeVar("E", bound=GristmillError)


@contextmanager
def raises(kind: type[E], code: str, **values: object) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expects an error of `kind` with this code, whose values contain `values`."""
    with pytest.raises(kind) as raised:
        yield raised
    assert raised.value.code == code, str(raised.value)
    found = {name: value for name, value in raised.value.values.items() if name in values}
    assert found == values, str(raised.value)
