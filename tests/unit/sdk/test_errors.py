"""Errors keep their codes and values in another process."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from gristmill import ApiError, ConfigError, GristmillError
from gristmill.errors import FileError


def test_pickled_errors_keep_their_code_and_values() -> None:
    config = pickle.loads(pickle.dumps(ConfigError("field_missing", "no field 'prompt'", field="prompt")))
    assert (type(config), config.code, config.values) == (ConfigError, "field_missing", {"field": "prompt"})
    error = ApiError("suspended", 409, "another run took the stack", "resume the run")
    found: GristmillError = pickle.loads(pickle.dumps(error))
    assert isinstance(found, ApiError)
    assert (found.code, found.status, found.remedy, str(found)) == ("suspended", 409, "resume the run", str(error))


@pytest.mark.parametrize(("place", "name"), [("file/x", "ENOTDIR"), ("gone/x", "ENOENT"), ("folder", "EISDIR")])
def test_error_of_a_file_names_the_path_and_the_cause(tmp_path: Path, place: str, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=place) as raised:
        (tmp_path / place).open("w")
    error = FileError.of(raised.value)
    assert (error.code, error.values) == ("file_unusable", {"path": str(tmp_path / place), "errno": name})
