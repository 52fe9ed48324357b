"""Receipts: after each publication, each model server proves that it serves the trainer's weights.

`probes` chooses the questions, `sums` compares tensors exactly, and `receipts` judges both. `diagnosis` names the cause
of a wrong answer.
"""

from gristmill_trainer.receipts.diagnosis import Case, Cause, Diagnosis, diagnose
from gristmill_trainer.receipts.probes import (
    ANY_PROBES,
    Probe,
    Probes,
    ProbeScores,
    distance,
    own_scores,
    scale,
    served_scores,
)
from gristmill_trainer.receipts.receipts import (
    Expectation,
    Receipts,
    first_bound,
    later_bound,
    receipt_metrics,
    rounding_of,
)
from gristmill_trainer.receipts.sums import published_sums

__all__ = [
    "ANY_PROBES",
    "Case",
    "Cause",
    "Diagnosis",
    "Expectation",
    "Probe",
    "ProbeScores",
    "Probes",
    "Receipts",
    "diagnose",
    "distance",
    "first_bound",
    "later_bound",
    "own_scores",
    "published_sums",
    "receipt_metrics",
    "rounding_of",
    "scale",
    "served_scores",
]
