"""Settings: read once at the edge, validated, frozen, passed in.

A value comes from the highest of: command line, GRISTMILL_* (URLs, directories, ids only), YAML, default.
"""

from gristmill.settings.base import Settings
from gristmill.settings.files import find_config, load_yaml
from gristmill.settings.flags import parse_flag_sets, parse_flags
from gristmill.settings.layers import merge, parse

__all__ = ["Settings", "find_config", "load_yaml", "merge", "parse", "parse_flag_sets", "parse_flags"]
