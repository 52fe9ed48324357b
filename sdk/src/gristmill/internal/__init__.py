"""Modules that Gristmill's own packages share. They are not part of the contract: a release may change any of them.

settings        checked models of what a user sets; config_files, dotenv, flags and assignments read the forms of it
plugins         functions that a configuration names
connections     HTTP clients, with or without a proxy; calls and backoff repeat requests; compression
hosts           names that a server answers for; redaction removes secrets
disk, lines     files that are written completely or not at all, and files of lines; foreign opens another's files
archive_writer  writes what gristmill.archive reads; saved has the format of saved groups, receipts that of receipts
metrics         the fields of a step; prometheus and tracking send them elsewhere
trouble         what goes wrong in a run, with remedies; check has the results of checks
logs            log lines; stall and signals end processes
model_port      a program: one port for several model servers
"""
