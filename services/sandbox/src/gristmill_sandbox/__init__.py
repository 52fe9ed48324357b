"""Runs programs that a model wrote, each in a process of its own that reaches no file, no network and no other
process."""
