"""Equality of mathematical expressions, decided by Math-Verify in separate processes that can be killed.

This module imports nothing, because each checker process imports it at its start and at each restart.
"""
