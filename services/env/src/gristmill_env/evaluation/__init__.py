"""Measures a model on a fixed set of prompts: scored completions, and figures with confidence intervals.

`estimators` holds the formulas. `plan` defines the measurement. `samples` stores the record of each prompt so that it
survives a kill. `results` turns records into figures and files, and `report` into tables. `compare` compares two
evaluations. `run` evaluates, for `gristmill-env evaluate` and for a run in training.
"""
