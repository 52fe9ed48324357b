"""Gristmill's contract: the code that a trainer, an environment or a tool needs to work with a trajectory API.

The modules, in the order in which to read them:

    group         TrajectoryGroup: the completions of one prompt, and its binary format
    group_checks  the checks of a group, and check_submitted: those of a new group
    policy_version PolicyVersion: which weights sampled a token
    sequence      Sequence: one scored completion, of which TrajectoryGroup.of makes a group
    client        Client: one async method for each call of /v1; sync_client has the same methods without async
    leases        LeaseSession: the calls of a trainer, with the heartbeat of its leases
    permits       PermitSession: the calls of an environment, with the heartbeat of its permits
    errors        the exceptions, and ErrorCode with the codes of the API's errors
    archive       read_rollouts: the trained groups of a run on disk
    folders       RunFolder: the files of a run, which may be in several folders
    run           the records that the API returns
    deployment    Deployment: the addresses and folders of a stack; Manifest: the model that the stack serves
    model_servers ServerAddresses: the model servers that a URL represents; dns+http:// finds them by name

docs/api.md ends with a complete trainer and a complete environment. The package `internal` is for Gristmill's own
services, and is not part of the contract.

The package gristmill_view reads runs, with the table of all rollouts (docs/look-at-a-run.md). The package
gristmill_cli has the program `gristmill` (docs/commands.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gristmill.archive import ArchivedGroup as ArchivedGroup
    from gristmill.archive import ArchiveError as ArchiveError
    from gristmill.archive import read_archive as read_archive
    from gristmill.archive import read_rollouts as read_rollouts
    from gristmill.client import Client as Client
    from gristmill.deployment import Deployment as Deployment
    from gristmill.deployment import Manifest as Manifest
    from gristmill.errors import ApiError as ApiError
    from gristmill.errors import ApiUnreachable as ApiUnreachable
    from gristmill.errors import ConfigError as ConfigError
    from gristmill.errors import ErrorCode as ErrorCode
    from gristmill.errors import GristmillError as GristmillError
    from gristmill.errors import GroupError as GroupError
    from gristmill.errors import LeaseLostError as LeaseLostError
    from gristmill.errors import ManifestError as ManifestError
    from gristmill.errors import RunReplacedError as RunReplacedError
    from gristmill.group import BATCH_MEDIA_TYPE as BATCH_MEDIA_TYPE
    from gristmill.group import GROUP_MEDIA_TYPE as GROUP_MEDIA_TYPE
    from gristmill.group import SamplingParams as SamplingParams
    from gristmill.group import SequenceText as SequenceText
    from gristmill.group import TrajectoryGroup as TrajectoryGroup
    from gristmill.hyperparameters import Hyperparameters as Hyperparameters
    from gristmill.leases import LeaseSession as LeaseSession
    from gristmill.permits import PermitSession as PermitSession
    from gristmill.policy_version import PolicyVersion as PolicyVersion
    from gristmill.policy_version import VersionSpan as VersionSpan
    from gristmill.run import AtroposRegistration as AtroposRegistration
    from gristmill.run import Claim as Claim
    from gristmill.run import DeadLetter as DeadLetter
    from gristmill.run import Environment as Environment
    from gristmill.run import Example as Example
    from gristmill.run import GroupAudit as GroupAudit
    from gristmill.run import MetricsRow as MetricsRow
    from gristmill.run import Permit as Permit
    from gristmill.run import PermitGrant as PermitGrant
    from gristmill.run import Progress as Progress
    from gristmill.run import Protocol as Protocol
    from gristmill.run import RowResult as RowResult
    from gristmill.run import RunEvent as RunEvent
    from gristmill.run import RunRecord as RunRecord
    from gristmill.run import RunState as RunState
    from gristmill.run import RunStatus as RunStatus
    from gristmill.sequence import Sequence as Sequence
    from gristmill.sync_client import SyncClient as SyncClient

__version__ = "0.1.0"
"""Version of all packages, which read it from this file when they are built."""

_NAMES = {
    "archive": "ArchivedGroup ArchiveError read_archive read_rollouts",
    "client": "Client",
    "deployment": "Deployment Manifest",
    "errors": "ApiError ApiUnreachable ConfigError ErrorCode GristmillError GroupError LeaseLostError "
    "ManifestError RunReplacedError",
    "group": "BATCH_MEDIA_TYPE GROUP_MEDIA_TYPE SamplingParams SequenceText TrajectoryGroup",
    "hyperparameters": "Hyperparameters",
    "leases": "LeaseSession",
    "permits": "PermitSession",
    "policy_version": "PolicyVersion VersionSpan",
    "run": "AtroposRegistration Claim DeadLetter Environment Example GroupAudit MetricsRow Permit "
    "PermitGrant Progress Protocol RowResult RunEvent RunRecord RunState RunStatus",
    "sequence": "Sequence",
    "sync_client": "SyncClient",
}
"""The public names of each module."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)

if not TYPE_CHECKING:  # type checkers read the imports above

    def __getattr__(name: str) -> object:
        """Imports the module of a public name when it is first used, so that a process that needs few starts faster."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value
