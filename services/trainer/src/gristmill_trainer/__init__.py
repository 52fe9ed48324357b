"""Gristmill's trainer. Read loop.py first: it is the whole of it."""
