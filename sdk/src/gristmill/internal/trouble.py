"""The troubles of a run: the table of all codes with their remedies, and the rules for a run whose trainer waits.

The rules here read the state of the store and of the model servers only, so the trainer's log, the page and `gristmill
status` name the same cause. `gristmill_view.trouble` adds the rules that read metrics, receipts and files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import httpx
import msgspec

from gristmill.internal.receipts import UNPROVEN
from gristmill.internal.redaction import redact_text
from gristmill.policy_version import PolicyVersion
from gristmill.run import RunStatus

_LOADED: Final = "default"
"""vLLM's label of weights that it loaded from disk."""
_ASKS_WITHIN: Final = 45.0
"""Seconds. An environment that needs permits asks again at least every 20 s."""
_PAUSED_S: Final = 60.0
"""Seconds without a submit. A publication pauses a server for less."""
_DROPPED_SHARE: Final = 0.5


class Trouble(msgspec.Struct, frozen=True):
    """One problem of a run."""

    code: str
    text: str
    remedy: str

    @staticmethod
    def of(code: str, text: str, **values: object) -> Trouble:
        """Returns the trouble with the remedy of its code. `values`: the values of the remedy's placeholders."""
        return Trouble(code, redact_text(text), CODES[code].remedy.format(**values))


class Kind(NamedTuple):
    """The documentation of a code."""

    meaning: str
    remedy: str


CODES: Final[Mapping[str, Kind]] = {
    "store_lost_run": Kind(
        "the run's files say that the run has not ended, and the API's store does not have the run",
        "docs/troubleshooting.md, 'Redis has lost a run'; remove the run's folder if the run is from another store",
    ),
    "receipt_failed": Kind(
        "a model server does not serve the weights that were published, and environments leave it out",
        "the trainer's log and the run's receipts.jsonl name the cause; docs/reproduce.md, 'Causes' has its remedy",
    ),
    "rewards_failing": Kind(
        "rewards failed on a tenth of the groups or more, which were dropped",
        "the environment's log has the first error with its traceback; test the reward with `gristmill try`",
    ),
    "model_server_unreachable": Kind(
        "a model server does not answer, or answers late and no groups come",
        "look at its log; the environment waits for it and continues",
    ),
    "model_server_paused": Kind(
        "a model server is paused, and no groups come",
        "restart the model server at {url} (docker compose restart model); the trainer then publishes to it",
    ),
    "publishing": Kind("the trainer publishes the newest weights to a model server", "none: wait"),
    "environment_silent": Kind(
        "an environment missed two heartbeats: it was killed, or it hangs",
        "look at its log and start it again; other environments work on its rows when its permits expire",
    ),
    "no_environment": Kind(
        "the trainer starves: no environment asks for permits",
        "start an environment (gristmill-env --config CONFIG), or look at its log: it may have ended with an error",
    ),
    "no_trainer": Kind(
        "a whole batch has been ready for a minute, and no trainer leases it",
        "start the trainer, or look at its log: it may have ended with an error",
    ),
    "scores_equal": Kind(
        "in three steps in a row, all completions of each group scored the same",
        "use a reward that grades completions, other rows, a higher temperature, or a larger group_size",
    ),
    "groups_dropped": Kind(
        "half of the groups or more were dropped",
        "docs/troubleshooting.md, 'Groups are dropped' has the remedy for each reason",
    ),
    "server_behind": Kind(
        "a model server has older weights than the run: it was restarted, or its publication failed",
        "the trainer publishes to a restarted server by itself; if it does not, look at the trainer's log",
    ),
    "no_permits": Kind(
        "the trainer starves: an environment asks for permits and gets none",
        "another trainer may work on this run: stop one of them",
    ),
    "no_groups_come": Kind(
        "the environment works, and for two minutes no group came",
        "completions are long, or a reward hangs: look at the environment's log; lower max_tokens, set max_staleness: "
        "1, or add model servers",
    ),
    "generation_slow": Kind(
        "groups come, and too few for a step",
        "lower max_tokens, set max_staleness: 1, add model servers, or use a GPU",
    ),
    "step_skipped": Kind(
        "the last step changed no weights",
        "the groups and the reason are in the run's folder aside/; lower learning_rate if it happens again",
    ),
    "logprob_diff": Kind(
        "trainer and model server disagree about the same weights: their log-probabilities differ by 0.1 or more",
        "docs/troubleshooting.md, '`logprob_diff` is large'",
    ),
    "archive_lost": Kind(
        "trained groups were not archived: the disk is nearly full or failed",
        "free some space; training continues. API_ARCHIVE_MIN_FREE_BYTES is the floor",
    ),
    "disk_floor": Kind(
        "less than 2 GiB are free on the disk of the run's files",
        "free some space: below 2 GiB the API archives no groups, and Redis stops on a full disk",
    ),
    "dead_letters": Kind(
        "groups were leased again and again without an ack",
        "read them: GET /v1/runs/{run}/dead; then replay or purge them (docs/api.md, 'Dead letters')",
    ),
}
"""The most important first: a trouble that explains others comes before them."""
_ORDER: Final = list(CODES)


def by_importance(found: Iterable[Trouble]) -> list[Trouble]:
    """Returns the first trouble of each code, with the most important code first."""
    first = {one.code: one for one in reversed([*found])}
    return [first[code] for code in CODES if code in first]


@dataclass(frozen=True)
class ServerFacts:
    """A model server, as it answered."""

    url: str
    version: str | None = None
    """Label of its weights; "default" for the weights that it loaded from disk. None: it reports no label."""
    paused: bool = False
    problem: str | None = None
    """Why it did not answer."""
    busy: bool = False
    """Whether it accepted the connection and did not answer in time, as a server does that generates."""


def read_server(url: str, http: httpx.Client) -> ServerFacts:  # noqa: TID251
    """Asks a model server for the label of its weights and whether it is paused. `http`: a client of the server."""
    try:
        answer = http.get("/weight_info")
        if answer.status_code == 404:  # not vLLM, or an older one
            http.get("/v1/models").raise_for_status()
            return ServerFacts(url)
        version = answer.raise_for_status().json().get("weight_version")
        paused = http.get("/is_paused").raise_for_status().json().get("is_paused")
    except httpx.HTTPError as error:
        busy = isinstance(error, httpx.ReadTimeout)
        return ServerFacts(url, problem=str(error) or type(error).__name__, busy=busy)
    except (ValueError, AttributeError) as error:
        return ServerFacts(url, problem=f"it answers, and is not a model server ({error})")
    return ServerFacts(url, version=None if version is None else str(version), paused=bool(paused))


@dataclass(frozen=True, kw_only=True)
class Live:
    """The state of an open run whose steps are not all done."""

    status: RunStatus
    version: str | None
    """The version that the model servers should serve; None before the first publication."""
    starving: bool
    """Whether the trainer waits for groups."""
    servers: Sequence[ServerFacts] = ()
    atropos: bool = False
    """Whether Atropos' environments feed the run. They do not ask for permits."""
    publishes: bool = True
    """Whether the trainer publishes its weights. Otherwise the servers may serve any version."""
    publishing: bool = False
    """Whether the trainer publishes `version` now, as it knows itself."""
    waited_s: float | None = None
    """Seconds for which the trainer has waited, as it knows itself. None for an observer: the rules then wait longer,
    because an observer may see a server in the middle of a publication, or an environment that has just started."""

    @property
    def quiet(self) -> bool:
        """Whether groups should have come, and did not."""
        least = 120.0 if self.waited_s is None else 60.0
        came, began = self.status.last_submit_s, self.status.last_registered_s
        return (came if came is not None else self.waited_s or 0.0) >= least and (began is None or began >= least)


def delays(run: Live) -> Iterator[Trouble]:
    """Yields what keeps the trainer from its groups."""
    servers = [*_servers(run)]
    yield from servers
    status, came = run.status, run.status.last_submit_s
    last = "no group ever came" if came is None else f"the last group came {came:.0f} s ago"
    if run.version is None:
        return
    if not (run.atropos or status.outstanding or asks(status)):
        seconds = status.last_asked_s
        why = "none ever did" if seconds is None else f"the last request was {seconds:.0f} s ago"
        if not status.envs:
            yield Trouble.of("no_environment", f"the trainer starves: no environment asks for permits ({why}; {last})")
        elif run.quiet:  # An environment asks for no permits while it evaluates.
            yield Trouble.of("no_groups_come", f"the environment is alive and asks for no permits ({why}), and {last}")
    elif run.quiet and status.outstanding:
        yield Trouble.of("no_groups_come", f"the environment works on {status.outstanding} rows, and {last}")
    elif run.quiet and run.starving and run.atropos:
        yield Trouble.of("no_groups_come", f"Atropos' environments submit nothing, and {last}")
    elif run.quiet and run.starving and not servers:
        yield Trouble.of("no_permits", f"an environment asks for permits and gets none, and {last}")


def asks(status: RunStatus) -> bool:
    """Returns whether an environment asks for permits."""
    return status.last_asked_s is not None and status.last_asked_s <= _ASKS_WITHIN


def _servers(run: Live) -> Iterator[Trouble]:
    came, version = run.status.last_submit_s, run.version
    for server in run.servers:
        at = f"the model server at {server.url}"
        if server.problem is not None:
            # A busy server answers late. It is in trouble only if no group comes either.
            if version is not None and (came is None or run.quiet or not server.busy):
                yield Trouble.of("model_server_unreachable", f"{at} does not answer: {server.problem}")
        elif run.publishing and (server.paused or server.version != version):
            yield Trouble.of("publishing", f"version {version} is being published to {at}")
        elif server.paused and version is not None and (came is None or came > _PAUSED_S):
            yield Trouble.of("model_server_paused", f"{at} is paused", url=server.url)
        elif server.version == UNPROVEN:
            text = f"{at} is left out, because it does not serve the weights that were published"
            yield Trouble.of("receipt_failed", text)
        elif run.publishes and version is not None and _is_behind(run, server.version or version, version):
            yield Trouble.of("server_behind", f"{at} has version {server.version}, and the run is at {version}")


def _is_behind(run: Live, served: str, newest: str) -> bool:
    # A server is published to after each step, and with asynchronous publication one step later.
    step, least = PolicyVersion.parse(newest).step, 2 if run.waited_s is None else 1
    if served == _LOADED:
        return step + 1 >= least
    try:
        return step - PolicyVersion.parse(served).step >= least
    except ValueError:  # a label during a publication
        return False


def groups_dropped(dropped: Mapping[str, int], accepted: int, least: int = 16) -> Iterator[Trouble]:
    """Yields the trouble if many groups were dropped. `least`: groups from which a share of them means something."""
    count = sum(dropped.values())
    if count < max(_DROPPED_SHARE * (count + accepted), 1) or count + accepted < least:
        return
    reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(dropped.items(), key=lambda pair: -pair[1]))
    yield Trouble.of("groups_dropped", f"{count} of {count + accepted} groups were dropped: {reasons}")
