"""The errors that every Gristmill package derives from.

Each error has a code: a stable snake_case word that programs, tests and bug reports can rely on. The message says the
same in a sentence that names the thing, the place and the remedy; its wording may change in any release.
"""

from __future__ import annotations

import errno
from enum import StrEnum
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


class FileError(GristmillError):
    """A file or folder cannot be used: missing rights, a file in the place of a folder, a full or read-only disk."""

    @staticmethod
    def of(error: OSError) -> FileError:
        """Returns the error for an OSError that no code expected. `values`: the path and the name of errno."""
        path = error.filename if error.filename2 is None else error.filename2
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        where = f"{path}: " if path is not None else ""
        remedy = _REMEDIES.get(name, "the system reports no more")
        return FileError("file_unusable", f"{where}{error.strerror or error} ({name}): {remedy}", path=path, errno=name)


_REMEDIES = {
    "EACCES": "give this user the right, or name another folder",
    "EPERM": "give this user the right, or name another folder",
    "EROFS": "the file system is read-only; name a folder elsewhere",
    "ENOTDIR": "a file is in the place of a folder; remove it, or name another folder",
    "EEXIST": "a file is in the place of a folder; remove it, or name another folder",
    "EISDIR": "a folder is in the place of a file; remove it, or name another file",
    "ENOENT": "create it, or name another path",
    "ENOSPC": "the disk is full; free space, or name a folder on another disk",
    "EDQUOT": "the quota of this user is used up; free space, or name a folder on another disk",
    "ENAMETOOLONG": "choose a shorter name",
    "EMFILE": "this process has too many open files; raise `ulimit -n`",
}


class PluginError(GristmillError):
    """Code that a configuration names does not exist, or cannot be imported."""


class GroupError(GristmillError):
    """A trajectory group that cannot be trained on: wrong lengths, NaN, negative ids, an unknown format."""


class ManifestError(GristmillError):
    """The model service's manifest is missing or unreadable."""


class ErrorCode(StrEnum):
    """The codes of the trajectory API's errors, to compare with `ApiError.code`. docs/api.md has the remedies."""

    ARCHIVING = "archiving"
    """Groups of the run that should be deleted wait to be archived (409)."""
    BAD_CONFIG = "bad_config"
    """The settings of a trainer are not valid, or `env["trainer"]` is not an object (422)."""
    BAD_GROUP = "bad_group"
    """A group is not valid (400)."""
    BAD_REQUEST = "bad_request"
    """A field of the request is not valid (422)."""
    BATCH_ACKED = "batch_acked"
    """The batch id was acked already (409)."""
    BODY_STALLED = "body_stalled"
    """The body stopped arriving for 30 seconds (503)."""
    CLIENT_GONE = "client_gone"
    """The client disconnected during the request (400)."""
    CONFIG_DIFFERS = "config_differs"
    """The run exists with other settings (409)."""
    CONFLICT = "conflict"
    """Another group with this id was submitted (409)."""
    CONTENT_ENCODING = "content_encoding"
    """A group has an unknown Content-Encoding (415)."""
    CROSS_SITE = "cross_site"
    """A browser sent the request for a page of another site (403)."""
    ENV_MISSING = "env_missing"
    """The environment is not registered (404)."""
    FENCED = "fenced"
    """Another trainer took the run (409)."""
    FINISHED = "finished"
    """The run is finished (409)."""
    FORBIDDEN = "forbidden"
    """The role of the token may not do this (403)."""
    GROUP_MISSING = "group_missing"
    """The store does not hold the bytes of the group (404)."""
    HOST_NOT_ALLOWED = "host_not_allowed"
    """The request names an unknown host (421)."""
    INTERNAL = "internal"
    """An error of the API (500)."""
    LEASE_BY_SEQUENCES = "lease_by_sequences"
    """The run's groups may lack sequences, so it leases by groups (409)."""
    LEASE_LOST = "lease_lost"
    """The lease of a batch expired (410)."""
    LEASE_TOO_LARGE = "lease_too_large"
    """The run's environments may never be as far ahead as the lease asks (409)."""
    MEDIA_TYPE = "media_type"
    """A group has another content type (415)."""
    NO_PERMITS = "no_permits"
    """The run is fed by Atropos' protocol, which has no permits (409)."""
    NOT_ATROPOS = "not_atropos"
    """The run of ATROPOS_RUN is fed at /v1 (409)."""
    OTHER_CREATION = "other_creation"
    """The checkpoint belongs to an earlier run with this id (409)."""
    OTHER_REGISTRATION = "other_registration"
    """Another process registered the environment's name (409)."""
    PERMIT_LOST = "permit_lost"
    """The permit expired, was spent, or never existed (410)."""
    RUN_IN_USE = "run_in_use"
    """Other environments work on the run that would be replaced, extended or suspended (409)."""
    RUN_MISSING = "run_missing"
    """The run does not exist (404)."""
    RUN_OPEN = "run_open"
    """The stack works on another run, or the run that should be deleted is open (409)."""
    SOURCE_MISSING = "source_missing"
    """No such source reported metrics of the run (404)."""
    STORE_FULL = "store_full"
    """The store, or the run, is at its cap (429)."""
    STORE_UNAVAILABLE = "store_unavailable"
    """Redis does not answer (503)."""
    SUSPENDED = "suspended"
    """Another run took the stack (409)."""
    TOO_LARGE = "too_large"
    """The body, the settings or a row of metrics is too long (413)."""
    TOO_MANY_BODIES = "too_many_bodies"
    """Large bodies fill their memory (503)."""
    TOO_MANY_CLAIMS = "too_many_claims"
    """The run has 64 claims (409)."""
    TOO_MANY_ENVS = "too_many_envs"
    """The run has 1,024 living environments (409)."""
    TOO_MANY_GROUPS = "too_many_groups"
    """Atropos' environments have stored 100,000,000 groups in the run (409)."""
    TOO_MANY_RUNS = "too_many_runs"
    """The store holds 1,000 runs, or 32 that no trainer took and that living environments have (409)."""
    TOO_MANY_SOURCES = "too_many_sources"
    """The run has 64 sources of metrics (409)."""
    UNAUTHORIZED = "unauthorized"
    """The token is missing or unknown (401)."""
    VERSION_BACKWARDS = "version_backwards"
    """The version is older than the recorded version (409)."""
    UNEXPECTED = "unexpected"
    """The answer has no code: it came from a proxy, or from another server."""


class ApiError(GristmillError):
    """The trajectory API answered with an error.

    `code` is the API's code, to compare with the members of ErrorCode. `status` is the HTTP status.
    """

    def __init__(self, code: str, status: int, message: str, remedy: str = "") -> None:
        super().__init__(code, f"{message} {remedy}".strip())
        self.status = status
        self.message = message
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[ApiError], tuple[str, int, str, str]]:
        """Lets pickle and copy create the error again, for another process."""
        return type(self), (self.code, self.status, self.message, self.remedy)


class ApiUnreachable(GristmillError):
    """The trajectory API did not answer within the client's outage time-out."""


class LeaseLostError(GristmillError):
    """Leases of a trainer expired, and their groups went back to the queue."""


class RunReplacedError(GristmillError):
    """Another run has the run's id now."""


def of_thread(what: str, error: Exception) -> GristmillError:
    """Returns the error of a background thread for its owner to raise.

    A GristmillError is returned unchanged. Any other error becomes the cause of a GristmillError that names `what`.
    """
    if isinstance(error, GristmillError):
        return error
    failure = GristmillError(
        "unexpected_error",
        f"{what} failed: {type(error).__name__}: {error}",
        what=what,
        error=type(error).__name__,
    )
    failure.__cause__ = error
    return failure
