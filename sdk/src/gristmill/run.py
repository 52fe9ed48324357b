"""Records of a run, as the API returns and accepts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from gristmill.group import SequenceText, Tokenizer, sequence_texts
from gristmill.internal.metrics import pace
from gristmill.policy_version import PolicyVersion


class RunState(StrEnum):
    """A run is open until its trainer has done `training_steps`."""

    OPEN = "open"
    SUSPENDED = "suspended"
    """Another run took the stack while no environment of this run was alive. Nothing is lost: an environment that
    creates the run again, with the same settings, resumes it."""
    FINISHED = "finished"


class Protocol(StrEnum):
    """How a run's groups come in: under permits at /v1, or as Atropos' clients send them at the root."""

    GRISTMILL = "gristmill"
    ATROPOS = "atropos"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class RunRecord(_Record):
    """One run: the environment's settings, the trainer's settings, and the progress."""

    run_id: str
    state: RunState
    digest: str
    """SHA-256 of the environment's settings."""
    group_size: int
    """Sequences per group; 1 if groups differ in size (protocol "atropos")."""
    stack: str | None = None
    """The stack (one model server and its trainer) that works on the run; None: any stack that names the run."""
    protocol: Protocol = Protocol.GRISTMILL
    env: dict[str, Any]
    trainer: dict[str, Any] | None = None
    """The trainer's settings; None until a trainer has taken the run."""
    incarnation: int = 0
    """How many times a trainer has taken the run."""
    taker: str = ""
    """The word of the last `take`, which distinguishes one trainer from another."""
    version: str | None = None
    """The newest published policy version ("1.20")."""
    groups_per_step: int | None = None
    training_steps: int | None = None
    max_staleness: int | None = None
    created_at: float
    """Unix time, seconds."""
    creation: str = ""
    """Random id of this creation of the run. A run that is deleted and created again under its id has another one. A
    checkpoint keeps it, because group ids start again in each creation."""

    @property
    def created_ms(self) -> int:
        """The time of the creation in ms, as archives and drops have it."""
        return round(self.created_at * 1000)


class Progress(_Record):
    """How far a run is, from its record and the trainer's newest metrics."""

    run_id: str
    state: RunState
    step: int
    """Finished optimizer steps."""
    total: int | None
    """Steps of the whole run; None until a trainer has taken the run."""
    reward: float | None
    """Mean reward of the newest step; None before the first step."""
    reward_parts: dict[str, float] = Field(default_factory=dict)
    """Mean of each reward in the newest step."""
    tokens_per_second: float | None
    """Trained and prompt tokens per second of wall time, over the last ten steps."""
    seconds_left: float | None
    """Estimate from the last ten steps; 0 for a finished run; None if unknown."""

    @classmethod
    def of(cls, record: RunRecord, rows: Sequence[Mapping[str, Any]]) -> Progress:
        """`rows`: the trainer's metrics in order of steps, each with its `step`. The last ones are enough."""
        step = PolicyVersion.parse(record.version).step if record.version else 0
        # A trainer that resumed from an older checkpoint replaces the rows of later steps one by one.
        current = [row for row in rows if row["step"] <= step + 1]
        newest = current[-1] if current else {}
        step = max(step, newest.get("step", 0))
        speed = pace(current)
        seconds_left: float | None = None
        if record.state == RunState.FINISHED:
            seconds_left = 0.0
        elif speed is not None and record.training_steps is not None:
            seconds_left = max(record.training_steps - step, 0) * speed.seconds_per_step
        return cls(
            run_id=record.run_id,
            state=record.state,
            step=step,
            total=record.training_steps,
            reward=newest.get("reward_mean"),
            reward_parts=newest.get("reward_parts", {}),
            tokens_per_second=speed.tokens_per_second if speed is not None else None,
            seconds_left=seconds_left,
        )


class Permit(_Record):
    """Leave to generate one group: for dataset row `row`, to be submitted as `group_id`."""

    group_id: str
    row: int
    run_id: str = Field(default="", exclude=True)
    """The permit's run. The client sets it, and the API does not send it; empty in a permit without a client."""
    holder: str = Field(default="", exclude=True)
    """The name of the process that asked for the permit. The client sets it."""


MOST_TURNS = 64
"""Most turns for which a row can rest."""
MOST_GROUPS_OF_ROW = 16
"""Most groups of a row over which its mean reward is taken."""


class RowResult(_Record):
    """The reward of a group of a data row, by which the API decides whether the row rests (docs/data.md#curriculum)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    row: str = Field(pattern=r"^[A-Za-z0-9_./-]{1,100}$")
    """The data row, whatever the permit: its index in the data, as INDEX or SOURCE/INDEX."""
    reward: float = Field(allow_inf_nan=False)
    """Mean reward of the group's rollouts."""
    band: tuple[Annotated[float, Field(allow_inf_nan=False)], Annotated[float, Field(allow_inf_nan=False)]]
    """Least and greatest mean reward of a row that does not rest."""
    groups: int = Field(default=1, ge=1, le=MOST_GROUPS_OF_ROW)
    """The mean is over this number of the row's last groups. A row with fewer groups does not rest."""
    turns: list[Annotated[int, Field(ge=0, le=2**53)]] = Field(max_length=MOST_TURNS)
    """The numbers of the row's next permits (`Permit.row`), which are passed over if the row rests."""


class AtroposRegistration(_Record):
    """The trainer's settings for Atropos' environments, named as in their protocol (POST /register)."""

    batch_size: int
    """Sequences per optimizer step."""
    max_token_len: int
    """Environments drop a group with a sequence of this many tokens or more."""
    num_steps: int
    starting_step: int = 0
    save_checkpoint_interval: int
    checkpoint_dir: str = ""
    wandb_group: str = ""
    wandb_project: str = ""


class PermitGrant(_Record):
    """Answer to a request for permits; without permits if none became free in time."""

    permits: list[Permit]
    state: RunState
    version: str | None = None
    creation: str = ""
    """`RunRecord.creation`. If it differs from the creation that the environment opened, the run was replaced since."""

    def to(self, run_id: str, holder: str) -> PermitGrant:
        """Returns the grant with the run and the holder in each permit."""
        named = {"run_id": run_id, "holder": holder}
        return self.model_copy(update={"permits": [permit.model_copy(update=named) for permit in self.permits]})


class RunStatus(_Record):
    """Counts of a run. Groups: ready + leased + trained + dead + Σ dropped = all that were ever stored or given up."""

    state: RunState
    version: str | None = None
    ready: int
    leased: int
    trained: int
    dead: int
    sequences: dict[str, int]
    """Sequences of the groups that are ready, leased and dead. A rollout with branches counts once."""
    bytes_by_state: dict[str, int]
    """Payload bytes of the groups that are ready, leased and dead."""
    accepted: int
    """Groups submitted and neither dead nor dropped since."""
    outstanding: int
    """Permits that environments hold."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """Groups given up, by reason."""
    left_out: dict[str, int] = Field(default_factory=dict)
    """Groups of Atropos' clients that were stored without an optional field that did not fit their tokens, by field."""
    rows_issued: int
    """Permits of new rows."""
    rows_passed_over: int = 0
    """Turns of rows that rested (RowResult)."""
    rows: dict[str, int] = Field(default_factory=dict)
    """Data rows with a result (RowResult) by the place of their mean reward: below, within or above the band."""
    bytes: int
    """Payload bytes held."""
    archiving: int = 0
    """Trained groups whose bytes wait to be archived."""
    archive_lost: int = 0
    """Trained groups that the API freed without archiving, because the archive's disk failed or was nearly full."""
    envs: int = 0
    """Registered environments that are alive."""
    oldest_ready_s: float | None = None
    """Seconds since the group at the head of the queue was submitted; None when the queue is empty."""
    oldest_ready_staleness: int | None = None
    """Policy steps between that group and the newest published weights."""
    lease_expiries: int = 0
    """Leases that expired."""
    redeliveries: int = 0
    """Groups that were leased again after a lease ended without an ack."""
    last_submit_s: float | None = None
    """Seconds since a group was submitted; None if no group was."""
    last_asked_s: float | None = None
    """Seconds since an environment asked for permits, accurate to one second; None if no environment asked."""
    last_registered_s: float | None = None
    """Seconds since an environment registered, which it does when it starts; None if none registered."""


_ON_THE_WAY_S = 1.0
"""Seconds that a heartbeat may take to the API."""


class Environment(_Record):
    """A registered environment."""

    env_id: str
    weight: float | None = None
    min_batch_allocation: float | None = None
    """Its share of every batch, in a run of Atropos' environments."""
    heartbeat_s: float | None = None
    """Seconds between its heartbeats, as it registered; None if it sends none, or at irregular times."""
    alive: bool
    """Whether the environment sent a request within the API's environment time-out."""
    last_seen_s: float | None = None
    """Seconds since its last heartbeat; requests for permits count too, to a tenth of the time-out."""

    @property
    def late(self) -> bool:
        """Whether two heartbeats in a row are missing: the environment ended without leaving, or hangs."""
        if self.heartbeat_s is None or self.last_seen_s is None:
            return False
        return self.last_seen_s > 2 * self.heartbeat_s + _ON_THE_WAY_S


class Claim(_Record):
    """A piece of work that one process should do, and the process that has the work now."""

    name: str
    holder: str


class DeadLetter(_Record):
    """A group that no trainer will lease again, unless an operator replays it."""

    group_id: str
    env_id: str
    reason: str
    attempts: int
    sequences: int
    bytes: int


class MetricsRow(_Record):
    """One row of a source's metrics."""

    source: str
    step: int
    values: dict[str, Any]


class RunEvent(_Record):
    """Something that happened in a run."""

    id: str
    """Place in the run's event stream. Last-Event-ID takes it."""
    kind: str
    """open, extend, suspend, resume, take, version, submit, drop, dead, replay, lease, expire, nack, ack, env, metrics,
    finish."""
    fields: dict[str, str]


class Example(_Record):
    """The readable beginning of a group. Lists have one entry per sequence, of the first 256 sequences."""

    group_id: str
    env_id: str
    sequences: int
    """Sequences of the whole group."""
    lengths: list[int]
    """Tokens of each whole sequence. `tokens` and `trained` have fewer entries if the sequence was cut."""
    cut: bool
    """Sequences, tokens or text are missing, because the group is too large to be shown whole."""
    rewards: list[float]
    reward_parts: dict[str, list[float | None]]
    finish_reasons: list[str]
    version: str | None
    """The oldest weights that sampled any token. For a group that came in at the API's root, the version that the run
    had then; None if it had none."""
    tokens: list[list[int]]
    trained: list[list[bool]]
    """Whether the token was sampled, and is trained on."""
    messages: list[Any] | None
    """A text that was cut ends with `[... N characters cut]`."""
    rollouts: list[int] | None = None
    """The rollout of each sequence. A rollout of an agent may have several sequences, its branches. None: each sequence
    is a rollout."""

    @property
    def last_branches(self) -> list[int]:
        """The last sequence of each rollout. Its last reply is the last reply of the rollout."""
        numbers = range(len(self.rewards)) if self.rollouts is None else self.rollouts
        return list({rollout: sequence for sequence, rollout in enumerate(numbers)}.values())

    def texts(self, tokenizer: Tokenizer) -> list[SequenceText]:
        """Returns prompt and completion of each sequence as text: of its tokens here, which may be cut."""
        return sequence_texts(tokenizer, self.tokens, self.trained)


class GroupAudit(_Record):
    """Every group id of a run, by the group's state. For audits and tests, because the cost grows with the run."""

    trained: list[str]
    ready: list[str]
    leased: list[str]
    dead: list[str]
    dropped: dict[str, str]
    """Group id to reason."""
    outstanding: list[str]
