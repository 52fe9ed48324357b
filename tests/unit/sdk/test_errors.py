"""Errors keep their codes and values in another process."""

from __future__ import annotations

import pickle

from gristmill import ApiError, ConfigError, GristmillError


def test_pickled_errors_keep_their_code_and_values() -> None:
    config = pickle.loads(pickle.dumps(ConfigError("field_missing", "no field 'prompt'", field="prompt")))
    assert (type(config), config.code, config.values) == (ConfigError, "field_missing", {"field": "prompt"})
    error = ApiError("suspended", 409, "another run took the stack", "resume the run")
    found: GristmillError = pickle.loads(pickle.dumps(error))
    assert isinstance(found, ApiError)
    assert (found.code, found.status, found.remedy, str(found)) == ("suspended", 409, "resume the run", str(error))
