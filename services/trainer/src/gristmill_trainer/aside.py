"""The earlier name of `gristmill_trainer.quarantine`, for programs that import it."""

from gristmill_trainer.quarantine import read_quarantine as read_aside

__all__ = ["read_aside"]
