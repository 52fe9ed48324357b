"""The errors every Gristmill package derives from."""

from __future__ import annotations


class GristmillError(Exception):
    """Base of all errors of all packages. Its message names the thing, the place and the remedy."""


class ConfigError(GristmillError):
    """A setting is wrong: unknown key, wrong type, missing file, unset variable."""


class UnknownKeyError(ConfigError):
    """Among what is wrong is a key that nobody knows."""


class PluginError(GristmillError):
    """Code that a configuration names is not there, or does not import."""


class GroupError(GristmillError):
    """A trajectory group that cannot be trained on: wrong lengths, NaN, negative ids, not the format."""


class ManifestError(GristmillError):
    """The model service's manifest is missing or unreadable."""


class ApiError(GristmillError):
    """The trajectory API answered with an error.

    `code` is the API's stable word for it ("fenced", "permit_lost", ...); `status` the HTTP status.
    """

    def __init__(self, code: str, status: int, message: str, remedy: str = "") -> None:
        super().__init__(f"{message} {remedy}".strip())
        self.code = code
        self.status = status
        self.message = message
        self.remedy = remedy


class ApiUnreachable(GristmillError):
    """The trajectory API gave no usable answer for as long as the client was told to try."""
