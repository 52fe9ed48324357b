"""Processes for code that must not run on the service's event loop.

A `code_process.CodeProcess` runs a user's code, many calls at a time. A `processes.ProcessPool` has several of them. It
runs jobs with limits of processor time, one at a time in each process.
"""
