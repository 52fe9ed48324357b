"""Faulty groups. The SDK refuses some of these groups when it reads them; here they are built without those checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.groups import make_group

from gristmill import PolicyVersion, TrajectoryGroup
from gristmill_trainer.data.checks import Limits

POLICY = PolicyVersion(1, 5)


def limits(**changed: Any) -> Limits:
    """A vocabulary of 64, as in make_group, and limits that its groups do not reach."""
    return replace(Limits(vocabulary=64, seq_len=512, policy=POLICY), **changed)


def group_with(group_id: str = "g00000001", **fields: Any) -> TrajectoryGroup:
    """Two sequences of 3 + 4 and 3 + 2 tokens, with `fields` set without checks."""
    group = make_group(group_id, version="1.5", rewards=(1.0, 0.0))
    for name, value in fields.items():
        object.__setattr__(group, name, value)
    return group
