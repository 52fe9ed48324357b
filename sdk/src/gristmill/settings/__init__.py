"""Settings: a service reads them once at start, validates and freezes them, and passes them in.

A value comes from the first source that has one: command line, GRISTMILL_* (URLs, directories, ids only), YAML,
default.
"""

from gristmill.settings.flags import parse_flag_sets, parse_flags
from gristmill.settings.layers import Settings, find_config, load_yaml, merge, parse

__all__ = ["Settings", "find_config", "load_yaml", "merge", "parse", "parse_flag_sets", "parse_flags"]
