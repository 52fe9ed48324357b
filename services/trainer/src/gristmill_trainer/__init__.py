"""Gristmill's trainer. Read loop.py first: it contains the whole training loop."""
