"""Mathematical answers: finds them in texts, parses them, and compares them, by algebra if necessary.

This module imports nothing, because each process that checks by algebra imports it at its start and at each restart.
"""
