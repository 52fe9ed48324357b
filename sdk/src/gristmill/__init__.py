"""Gristmill's contract, shared by every service: groups, runs, versions, the API's client, rollouts, settings."""

from gristmill.archive import ArchivedGroup, ArchiveError, read_archive, read_rollouts
from gristmill.client import Client
from gristmill.deployment import Deployment, Manifest
from gristmill.errors import (
    ApiError,
    ApiUnreachable,
    ConfigError,
    ErrorCode,
    GristmillError,
    GroupError,
    LeaseLostError,
    ManifestError,
    RunReplacedError,
)
from gristmill.group import (
    BATCH_MEDIA_TYPE,
    GROUP_MEDIA_TYPE,
    PolicyVersion,
    SamplingParams,
    TrajectoryGroup,
    VersionSpan,
)
from gristmill.hyperparameters import Hyperparameters
from gristmill.leases import LeaseSession
from gristmill.permits import PermitSession
from gristmill.run import (
    AtroposRegistration,
    Claim,
    DeadLetter,
    Environment,
    Example,
    GroupAudit,
    MetricsRow,
    Permit,
    PermitGrant,
    Protocol,
    RunEvent,
    RunRecord,
    RunState,
    RunStatus,
)
from gristmill.sync_client import SyncClient

__version__ = "0.1.0"
"""Version of the SDK and of the four services, which read it from this file when they are built."""

__all__ = [
    "BATCH_MEDIA_TYPE",
    "GROUP_MEDIA_TYPE",
    "ApiError",
    "ApiUnreachable",
    "ArchiveError",
    "ArchivedGroup",
    "AtroposRegistration",
    "Claim",
    "Client",
    "ConfigError",
    "DeadLetter",
    "Deployment",
    "Environment",
    "ErrorCode",
    "Example",
    "GristmillError",
    "GroupAudit",
    "GroupError",
    "Hyperparameters",
    "LeaseLostError",
    "LeaseSession",
    "Manifest",
    "ManifestError",
    "MetricsRow",
    "Permit",
    "PermitGrant",
    "PermitSession",
    "PolicyVersion",
    "Protocol",
    "RunEvent",
    "RunRecord",
    "RunReplacedError",
    "RunState",
    "RunStatus",
    "SamplingParams",
    "SyncClient",
    "TrajectoryGroup",
    "VersionSpan",
    "read_archive",
    "read_rollouts",
]
