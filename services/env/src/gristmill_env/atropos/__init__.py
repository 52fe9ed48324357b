"""Support for Atropos' configuration files: recognition of the format, and a translation of every key.

`keys` and `rewards` are tables; docs/from-atropos.md is generated from them.
"""

from gristmill_env.atropos.reading import read_file, without_section
from gristmill_env.atropos.translate import Translation, translate

__all__ = ["Translation", "read_file", "translate", "without_section"]
