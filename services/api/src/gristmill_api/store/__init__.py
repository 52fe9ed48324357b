"""The trajectory store: runs, permits, groups and leases in Redis. Every change of state is one Lua script."""

from gristmill_api.store.store import DEFAULT_STACK, Amount, Batch, Leased, Renewal, Store, Submission

__all__ = ["DEFAULT_STACK", "Amount", "Batch", "Leased", "Renewal", "Store", "Submission"]
