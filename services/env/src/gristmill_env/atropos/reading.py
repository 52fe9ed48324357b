"""Reads Atropos' files and flags for the command line."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.settings import load_yaml
from gristmill_env.atropos.translate import translate

logger = logging.getLogger(__name__)

_SECTION = re.compile(r"^--(no[-_])?(?:env|openai|dataset|server_configs)\.")


def read_file(path: Path, environ: Mapping[str, str], told: Any = None) -> dict[str, Any]:
    """Returns a configuration file's values in our form, and logs each note on the translation of an Atropos file.

    `told`: the format that the command line names. Raises ConfigError.
    """
    translation = translate(load_yaml(path, environ), str(path), told)
    for note in translation.notes:
        logger.warning("%s: %s", path, note)
    return translation.values


def without_section(word: str) -> str:
    """Returns a flag without its section: --group_size for --env.group_size, --base_url for --openai.base_url."""
    return _SECTION.sub(r"--\1", word)
