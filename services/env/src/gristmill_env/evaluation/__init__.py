"""How good is the model? Completions of a fixed set of prompts, scored, with how sure the figures are.

`estimators` are the formulas; `plan` says what is measured and `records` what one prompt leaves; `samples` keeps
them through a kill; `summary` turns them into figures and `results` into files; `compare` sets two evaluations side
by side. `command` is `gristmill-env evaluate`, `during` the evaluation of a run while it trains.
"""
