"""The errors that every Gristmill package derives from.

Each error has a code: a stable snake_case word that programs, tests and bug reports can rely on. The message says the
same in a sentence that names the thing, the place and the remedy; its wording may change in any release.
"""

from __future__ import annotations

from typing import Any


class GristmillError(Exception):
    """Base class of the errors of all packages.

    `code`: the stable word for the mistake, "field_missing" for example. docs/errors.md lists all codes.
    `values`: the names and numbers that the message quotes, by name.
    """

    def __init__(self, code: str, message: str, /, **values: object) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.values: dict[str, Any] = values

    def __str__(self) -> str:
        return str(self.args[1])

    def report(self) -> str:
        """Returns the message, which may have several lines, with the code in brackets at its start."""
        return f"[{self.code}] {self}"


class ConfigError(GristmillError):
    """A setting is wrong: an unknown key, a wrong type, a missing file, an unset variable.

    If several settings were validated together, `values["problems"]` maps each wrong key to the code of its mistake.
    The key is as the user wrote it ("dataset.prompt_field"). The codes are "unknown_key" and pydantic's error types
    ("missing", "greater_than", ...).
    """


class UnknownKeyError(ConfigError):
    """At least one of the keys is unknown."""


class PluginError(GristmillError):
    """Code that a configuration names does not exist, or cannot be imported."""


class GroupError(GristmillError):
    """A trajectory group that cannot be trained on: wrong lengths, NaN, negative ids, an unknown format."""


class ManifestError(GristmillError):
    """The model service's manifest is missing or unreadable."""


class ApiError(GristmillError):
    """The trajectory API answered with an error.

    `code` is the API's code ("fenced", "permit_lost", ...); `status` the HTTP status.
    """

    def __init__(self, code: str, status: int, message: str, remedy: str = "") -> None:
        super().__init__(code, f"{message} {remedy}".strip())
        self.status = status
        self.message = message
        self.remedy = remedy


class ApiUnreachable(GristmillError):
    """The trajectory API did not answer within the client's outage time-out."""


class LeaseLostError(GristmillError):
    """Leases of a trainer expired, and their groups went back to the queue."""


class RunReplacedError(GristmillError):
    """Another run has the run's id now."""
