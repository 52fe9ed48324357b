"""Bookkeeping of failure tests: where every group ended up, and whether that is exactly one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gristmill import GroupAudit


@dataclass(frozen=True)
class Ledger:
    """Three witnesses: the environments, the newest checkpoint, the store."""

    acknowledged: frozenset[str]
    """Ids whose submit was answered 2xx."""
    lineage: Sequence[str]
    """Ids that the surviving weights were trained on, in order, as recorded in the newest checkpoint."""
    audit: GroupAudit
    """The store's record, after the next trainer took the run and so settled the groups of that checkpoint."""

    @classmethod
    def of(cls, acknowledged: Iterable[str], lineage: Sequence[str], audit: GroupAudit) -> Ledger:
        return cls(frozenset(acknowledged), lineage, audit)

    @property
    def places(self) -> dict[str, set[str]]:
        """The places of a group. A trained group is a group that the weights were trained on, whatever the store
        records."""
        return {
            "trained": set(self.lineage),
            "ready": set(self.audit.ready),
            "leased": set(self.audit.leased),
            "dead": set(self.audit.dead),
            "dropped": set(self.audit.dropped),
        }

    @property
    def lost(self) -> set[str]:
        """Returns the groups that were acknowledged, or settled by the store as trained, and are in no place."""
        return {*self.acknowledged, *self.audit.trained} - set().union(*self.places.values())

    @property
    def trained_twice(self) -> set[str]:
        return {group_id for group_id, count in Counter(self.lineage).items() if count > 1}

    @property
    def in_two_places(self) -> dict[str, list[str]]:
        """Returns the places by id, for ids with several places. A trained and ready group will be trained a second
        time."""
        found: dict[str, list[str]] = {}
        for place, ids in self.places.items():
            for group_id in ids:
                found.setdefault(group_id, []).append(place)
        return {group_id: places for group_id, places in found.items() if len(places) > 1}

    def problems(self) -> dict[str, list[str]]:
        """Returns every violation of the promise, with the ids; empty if the promise holds."""
        found = {
            "lost": sorted(self.lost),
            "trained twice": sorted(self.trained_twice),
            "in two places": sorted(self.in_two_places),
            "dead": sorted(self.audit.dead),
        }
        return {name: ids for name, ids in found.items() if ids}

    def counts(self) -> dict[str, int]:
        places = {name: len(ids) for name, ids in self.places.items()}
        return {
            "acknowledged": len(self.acknowledged),
            **places,
            "lost": len(self.lost),
            "trained_twice": len(self.trained_twice),
            "in_two_places": len(self.in_two_places),
        }
