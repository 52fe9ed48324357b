"""Which tests a mutant must pass: first the tests that most mutants fail, then the slow tests for the other mutants."""

from __future__ import annotations

from typing import Final

_API: Final = "tests/integration/api"
_ATROPOS: Final = "tests/integration/atropos_queue"
_SLOW: Final = (
    f"{_API}/test_lease_amounts.py::test_a_batch_may_be_larger_than_what_lua_unpacks_at_once",
    f"{_API}/test_dead_letters.py::test_oldest_dead_letters_are_removed_above_the_limit",
    f"{_API}/test_published_changes.py::test_event_stream_is_trimmed_to_the_newest_events",
    f"{_API}/test_bounds.py::test_lists_in_bodies_have_a_bound",
    f"{_API}/test_bounds.py::test_no_verb_makes_redis_grow_beyond_its_maxmemory",
    f"{_API}/test_bounds.py::test_redis_busy_with_a_script_gives_503",
    f"{_API}/test_bounds.py::test_only_trainer_and_admin_may_write_metrics_of_source_trainer",
)

Tests = tuple[str, ...]
"""Arguments for pytest."""

NATIVE: Final[Tests] = (
    *(f"{_API}/test_{name}.py" for name in ("submit", "lease", "permits", "runs", "run_life")),
    *(f"{_API}/test_{name}.py" for name in ("lease_amounts", "dead_letters", "published_changes", "caps", "status")),
    *(f"{_API}/test_{name}.py" for name in ("deadlines", "environments", "claims", "journal", "archive_queue")),
    *(f"{_API}/test_{name}.py" for name in ("bounds", "retention", "curriculum")),
    "tests/mutation/histories.py",
    *(f"--deselect={test}" for test in _SLOW),
)
NATIVE_SLOW: Final[Tests] = (*_SLOW, f"{_API}/test_machine.py")
ATROPOS: Final[Tests] = tuple(
    f"{_ATROPOS}/test_{name}.py" for name in ("queue", "batches", "environments", "buffers", "model")
)
ATROPOS_SLOW: Final[Tests] = (f"{_ATROPOS}/test_packing.py",)

_OF_ATROPOS: Final = ("_atropos.lua",)
_OF_BOTH: Final = (
    *("_keys.lua", "_moves.lua", "_select.lua", "_sums.lua", "lease.lua", "ack.lua", "extend.lua", "nack.lua"),
    *("delete.lua", "environment.lua", "version.lua"),
)


def stages(script: str) -> list[Tests]:
    """Stage by stage, the slow tests last."""
    if script.startswith("atropos_") or script in _OF_ATROPOS:
        return [ATROPOS, ATROPOS_SLOW]
    return [NATIVE, ATROPOS, NATIVE_SLOW] if script in _OF_BOTH else [NATIVE, NATIVE_SLOW]
