"""Training again on the groups of a recorded run: `gristmill retrain`, `bisect` and `fork`."""
