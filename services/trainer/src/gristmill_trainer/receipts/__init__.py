"""Receipts: after each publication, each model server proves that it serves the trainer's weights.

`probes` chooses the questions, `sums` compares tensors exactly, and `receipts` judges both. `diagnosis` names the cause
of a wrong answer.
"""
