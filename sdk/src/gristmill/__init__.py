"""Gristmill's contract: what a trainer, an environment or a tool needs to work with a trajectory API.

The modules, in the order in which to read them:

    group         TrajectoryGroup: the completions of one prompt, and its binary format
    client        Client: one async method for each call of /v1; sync_client has the same methods without async
    leases        LeaseSession: the calls of a trainer, with the heartbeat of its leases
    permits       PermitSession: the calls of an environment, with the heartbeat of its permits
    errors        the exceptions, and ErrorCode with the codes of the API's errors
    archive       read_rollouts: the trained groups of a run on disk
    rollouts      dataset, sql: the table of all rollouts of a run (docs/rollouts.md), with the extra `view`
    run           the records that the API returns
    deployment    Deployment: the addresses and folders of a stack; Manifest: the model that the stack serves
    model_servers ServerAddresses: the model servers that a URL represents; dns+http:// finds them by name
    view          the program `gristmill`: the state of a run, in the terminal and as data (docs/commands.md)

docs/api.md ends with a complete trainer and a complete environment. The other modules are for Gristmill's own services:
settings, hyperparameters, plugins, tracking, metrics, logs, redaction, hosts, stall, calls, compression.
"""

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
    SequenceText,
    TrajectoryGroup,
    VersionSpan,
)
from gristmill.hyperparameters import Hyperparameters
from gristmill.leases import LeaseSession
from gristmill.permits import PermitSession
from gristmill.rollouts import dataset, sql
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
    Progress,
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
    "Progress",
    "Protocol",
    "RunEvent",
    "RunRecord",
    "RunReplacedError",
    "RunState",
    "RunStatus",
    "SamplingParams",
    "SequenceText",
    "SyncClient",
    "TrajectoryGroup",
    "VersionSpan",
    "dataset",
    "read_archive",
    "read_rollouts",
    "sql",
]
