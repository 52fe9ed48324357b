"""Looking at runs: in the terminal, as a page, as a table of rollouts, as a report.

The modules import the contract of the SDK only. They need packages of the extra `view` of the SDK; the terminal's
modules (overview, trouble, phases, terminal, doctor, cli) need only `rich`, the extra `cli` of the SDK.
"""
