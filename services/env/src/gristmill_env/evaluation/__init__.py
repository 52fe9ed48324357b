"""Measures a model on a fixed set of prompts: scored completions, and figures with confidence intervals.

`estimators` holds the formulas. `plan` defines the measurement, and `records` the record of one prompt. `samples`
stores records so that they survive a kill. `summary` turns records into figures, and `results` into files. `compare`
compares two evaluations. `command` is `gristmill-env evaluate`, and `during` the evaluation of a run in training.
"""
