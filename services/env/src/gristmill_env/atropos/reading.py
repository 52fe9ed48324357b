"""What the command line needs of Atropos: files and flags in its forms."""

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
    """A configuration file's values in our form. Of a file of Atropos the log tells what became of its keys.

    `told`: the format that the command line names. Raises ConfigError.
    """
    translation = translate(load_yaml(path, environ), str(path), told)
    for note in translation.notes:
        logger.warning("%s: %s", path, note)
    return translation.values


def without_section(word: str) -> str:
    """A flag by its own name: --group_size for --env.group_size, --base_url for --openai.base_url."""
    return _SECTION.sub(r"--\1", word)
