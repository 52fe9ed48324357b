"""Runs programs that a model wrote, each in a separate process that reaches no file, no network and no other
process."""
