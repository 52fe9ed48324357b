"""A second, naive implementation of the store: Python dicts instead of Lua over Redis."""

from __future__ import annotations

from dataclasses import dataclass, field

STEPS, STALENESS, PER_STEP, MAX_ATTEMPTS = 8, 1, 3, 2
SIZE, SEQUENCES = 100, 2
"""Of every group."""
LATEST = 8
LATELY, LEAST, MOST_AHEAD = 64, 8, 16


@dataclass
class Group:
    content: str
    seq: int
    env: str
    state: str = "ready"
    """ready, leased, trained, dead or dropped."""
    step: int = 0
    attempts: int = 0


@dataclass
class Batch:
    members: list[str]
    expired: bool = False
    """Whether the batch's groups are back in the queue, and no batch has leased any of them since."""


@dataclass
class Model:
    """The model of the store, which returns refusals as their code."""

    incarnation: int = 0
    version: tuple[int, int] | None = None
    rows: int = 0
    seq: int = 0
    holders: dict[str, str] = field(default_factory=dict)
    overdue_permits: set[str] = field(default_factory=set)
    waiting: dict[str, str] = field(default_factory=dict)
    """Permits to be issued again, with the holder that had each last."""
    dropped: dict[str, str] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    batches: dict[str, Batch] = field(default_factory=dict)
    overdue_leases: set[str] = field(default_factory=set)
    acked: set[str] = field(default_factory=set)
    latest: list[str] = field(default_factory=list)
    expiries: int = 0
    redeliveries: int = 0
    lately: list[int] | None = None
    """Groups that were accepted and dropped lately; None before the first drop."""
    ahead: int = 0
    """Issued permits beyond the need."""
    envs: set[str] = field(default_factory=set)
    """The registered environments. None has a weight."""

    def take(self, covered: set[str]) -> None:
        self.incarnation += 1
        for group_id, group in self.groups.items():
            if group_id in covered and group.state in ("ready", "leased", "dead"):
                group.state = "trained"
            elif group.state == "leased":
                group.state = "ready"
        self.batches.clear()
        self.overdue_leases.clear()
        self.acked.clear()

    def record_version(self, step: int) -> str | None:
        if self.version is not None and self.version[0] == self.incarnation and step < self.version[1]:
            return "version_backwards"
        self.version = (self.incarnation, step)
        return None

    def permits(self, holder: str, count: int) -> list[str]:
        if self.version is None:
            return []
        for group_id in self.overdue_permits:
            self.waiting[group_id] = self.holders.pop(group_id)
        self.overdue_permits.clear()
        most = min(count, self.free())
        granted: list[str] = []
        while len(granted) < most:
            if self.waiting:
                group_id = min(self.waiting)
                del self.waiting[group_id]
            else:
                group_id = f"g{self.rows:08d}"
                self.rows += 1
            self.holders[group_id] = holder
            granted.append(group_id)
        if granted:
            self.ahead = max(0, len(self.holders) - self.needed())
        return granted

    def renew(self, holder: str, group_ids: list[str]) -> list[str]:
        lost = []
        for group_id in group_ids:
            if self.waiting.get(group_id) == holder and not self._surplus(None):
                del self.waiting[group_id]
                self.holders[group_id] = holder
            elif self.holders.get(group_id) == holder and self._surplus(holder):
                self._reissue(group_id)
                lost.append(group_id)
                continue
            if self.holders.get(group_id) == holder:
                self.overdue_permits.discard(group_id)
            else:
                lost.append(group_id)
        return lost

    def give_back(self, holder: str, group_id: str, reason: str) -> str | None:
        if group_id in self.groups and self.groups[group_id].state != "dropped":
            return "conflict"
        if group_id in self.dropped:
            return None if self.dropped[group_id] == reason else "permit_lost"
        if holder not in (self.waiting.get(group_id), self.holders.get(group_id)):
            return "permit_lost"
        self._release(group_id)
        if reason == "abandoned":
            self.waiting[group_id] = holder
        else:
            self.dropped[group_id] = reason
            if self.lately is None:
                self.lately = [min(self.accepted(), LATELY // 2), 0]
            self._count_lately(1)
            self.ahead = max(0, self.ahead - 1)
        return None

    def abandon(self, holder: str) -> int:
        mine = [group_id for group_id, by in self.holders.items() if by == holder]
        for group_id in mine:
            self._release(group_id)
            self.waiting[group_id] = holder
        return len(mine)

    def submit(self, holder: str, group_id: str, content: str) -> str | bool:
        known = self.groups.get(group_id)
        if known is not None and known.state != "dropped":
            return False if known.content == content else "conflict"
        if holder not in (self.waiting.get(group_id), self.holders.get(group_id)):
            return "permit_lost"
        if self._surplus(self.holders.get(group_id)):
            if group_id in self.holders:
                self._reissue(group_id)
            return "permit_lost"
        self._release(group_id)
        self.seq += 1
        self.groups[group_id] = Group(content, self.seq, holder, step=self.step())
        self.latest = [group_id, *self.latest][:LATEST]
        self._count_lately(0)
        return True

    def lease(self, batch_id: str, amount: int) -> str | list[str] | None:
        """Leases an exact number of groups."""
        batch = self.batches.get(batch_id)
        if batch is not None:
            self._hold(batch_id)
            return batch.members
        if batch_id in self.acked:
            return "batch_acked"
        for overdue in self.overdue_leases:
            self.batches[overdue].expired = True
            self.expiries += 1
            for group_id in self.batches[overdue].members:
                self.groups[group_id].state = "ready"
        self.overdue_leases.clear()
        chosen: list[str] = []
        if len(self.ready()) >= amount:
            for group_id in self.ready():
                if len(chosen) == amount:
                    break
                if self.groups[group_id].attempts >= MAX_ATTEMPTS:
                    self._leave_expired(group_id)
                    self.groups[group_id].state = "dead"
                else:
                    chosen.append(group_id)
        if len(chosen) < amount:
            return None
        for group_id in chosen:
            self._leave_expired(group_id)
            group = self.groups[group_id]
            group.state = "leased"
            group.attempts += 1
            self.redeliveries += group.attempts > 1
        self.batches[batch_id] = Batch(chosen)
        return chosen

    def nack(self, batch_ids: list[str]) -> int:
        count = 0
        for batch_id in batch_ids:
            if batch_id in self.batches and not self.batches[batch_id].expired:
                self.overdue_leases.discard(batch_id)
                for group_id in self.batches.pop(batch_id).members:
                    self.groups[group_id].state = "ready"
                    count += 1
        return count

    def replay(self, group_ids: list[str]) -> int:
        dead = [group_id for group_id in group_ids if group_id in self._of("dead")]
        for group_id in dead:
            self.groups[group_id].state, self.groups[group_id].attempts = "ready", 0
        return len(dead)

    def purge(self, group_ids: list[str]) -> int:
        dead = [group_id for group_id in group_ids if group_id in self._of("dead")]
        for group_id in dead:
            self._drop(group_id, "purged")
        return len(dead)

    def extend(self, batch_ids: list[str]) -> list[str]:
        for batch_id in batch_ids:
            if batch_id in self.batches:
                self._hold(batch_id)
        return [batch_id for batch_id in batch_ids if batch_id not in self.batches and batch_id not in self.acked]

    def ack(self, batch_ids: list[str]) -> list[str]:
        lost = []
        for batch_id in batch_ids:
            batch = self.batches.pop(batch_id, None)
            if batch is not None:
                self.acked.add(batch_id)
                self.overdue_leases.discard(batch_id)
                for group_id in batch.members:
                    self.groups[group_id].state = "trained"
            elif batch_id not in self.acked:
                lost.append(batch_id)
        return lost

    def free(self) -> int:
        """Returns the number of permits that may still be issued. An expired permit does not count as issued."""
        needed = self.needed()
        if self.version is None or needed <= 0:
            return 0
        if self.lately is not None and sum(self.lately) >= LEAST:
            needed += int(needed * min(self.lately[1] / max(self.lately[0], 1), MOST_AHEAD))
        return max(0, needed - len({*self.holders} - self.overdue_permits))

    def needed(self) -> int:
        """Returns the number of groups that the run still takes."""
        step = self.version[1] if self.version is not None else -1 - STALENESS
        return min(step + 1 + STALENESS, STEPS) * PER_STEP - self.accepted()

    def step(self) -> int:
        return self.version[1] if self.version else 0

    def accepted(self) -> int:
        return sum(group.state not in ("dead", "dropped") for group in self.groups.values())

    def held(self) -> set[str]:
        """Returns the groups whose bytes count."""
        return {group_id for group_id, group in self.groups.items() if group.state not in ("trained", "dropped")}

    def ready(self) -> list[str]:
        return self._of("ready")

    def whereabouts(self) -> dict[str, list[str]]:
        states = {state: self._of(state) for state in ("ready", "leased", "trained", "dead")}
        return {
            **states,
            "leased": sorted(states["leased"]),
            "trained": sorted(states["trained"]),
            "outstanding": sorted(self.holders),
        }

    def _surplus(self, holder: str | None) -> bool:
        """Whether the run has all its groups, and the holder's permit is one too many."""
        return self.version is not None and self.needed() <= 0 and (holder is None or self.ahead > 0)

    def _reissue(self, group_id: str) -> None:
        holder = self.holders[group_id]
        self._release(group_id)
        self.waiting[group_id] = holder
        self.ahead = max(0, self.ahead - 1)

    def _count_lately(self, place: int) -> None:
        if self.lately is not None:
            self.lately[place] += 1
            if sum(self.lately) >= LATELY:
                self.lately = [groups // 2 for groups in self.lately]

    def _drop(self, group_id: str, reason: str) -> None:
        self.groups[group_id].state = "dropped"
        self.dropped[group_id] = reason

    def _of(self, state: str) -> list[str]:
        found = [group_id for group_id, group in self.groups.items() if group.state == state]
        return sorted(found, key=lambda group_id: self.groups[group_id].seq)

    def _release(self, group_id: str) -> None:
        self.holders.pop(group_id, None)
        self.overdue_permits.discard(group_id)
        self.waiting.pop(group_id, None)

    def _hold(self, batch_id: str) -> None:
        batch = self.batches[batch_id]
        batch.expired = False
        self.overdue_leases.discard(batch_id)
        for group_id in batch.members:
            self.groups[group_id].state = "leased"

    def _leave_expired(self, group_id: str) -> None:
        for batch_id, batch in list(self.batches.items()):
            if batch.expired and group_id in batch.members:
                del self.batches[batch_id]
