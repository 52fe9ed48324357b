"""Equality of mathematical expressions, decided by Math-Verify in processes of its own that can be killed.

Imports nothing: a checker process starts here, and starts again after each bomb.
"""
