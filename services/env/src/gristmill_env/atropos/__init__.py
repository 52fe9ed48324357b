"""Support for Atropos' configuration files. `keys` holds tables, from which docs/from-atropos.md is generated."""

from gristmill_env.atropos.translate import could_be_of_atropos, read_file, translate, without_section

__all__ = ["could_be_of_atropos", "read_file", "translate", "without_section"]
