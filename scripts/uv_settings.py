"""Prints the settings of pip on this machine as shell commands that set them for uv, which reads none of them.

    eval "$(.venv/bin/python scripts/uv_settings.py)"

`pip config list` merges pip's files and the variables PIP_*. A variable of uv that is set already stays as it is.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

LISTS = {"extra-index-url": ("UV_EXTRA_INDEX_URL", " "), "trusted-host": ("UV_INSECURE_HOST", " ")}
"""pip separates several values by white space, uv by the second item."""
VALUES = {
    "index-url": "UV_DEFAULT_INDEX",
    "timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
    "client-cert": "SSL_CLIENT_CERT",
}
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
TRUE = ("1", "true", "yes", "on", "y", "t")


def merged(listing: str) -> dict[str, str]:
    """Returns value by option from the output of `pip config list`. A variable overrides the section `install`, which
    overrides `global`."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        name, equals, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if equals and section in found:
            found[section][option] = str(ast.literal_eval(value)).strip()
    return found["global"] | found["install"] | found[":env:"]


def for_uv(pip: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables with which uv finds the same packages as pip.

    `pip`: value by option. Empty values count as not set, as in pip.
    """
    set_here = {option: value for option, value in pip.items() if value}
    found = {VALUES[option]: value for option, value in set_here.items() if option in VALUES}
    for option, (variable, separator) in LISTS.items():
        if option in set_here:
            found[variable] = separator.join(set_here[option].split())
    links = [place for place in map(_link, set_here.get("find-links", "").split()) if place]
    if links:
        found["UV_FIND_LINKS"] = ",".join(links)
    if set_here.get("no-index", "").lower() in TRUE:
        found["UV_NO_INDEX"] = "1"
    if "proxy" in set_here:
        found |= {name: set_here["proxy"] for upper in PROXIES for name in (upper, upper.lower())}
    # A package may be in several indexes, in other versions. pip takes each version from any index that has it.
    found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if environ.get("UV_INDEX_URL"):
        found.pop("UV_DEFAULT_INDEX", None)
    found = {name: value for name, value in found.items() if not (name.startswith("UV_") and environ.get(name))}
    certificates = set_here.get("cert") or environ.get("REQUESTS_CA_BUNDLE") or environ.get("CURL_CA_BUNDLE")
    if certificates:
        found["SSL_CERT_DIR" if Path(certificates).is_dir() else "SSL_CERT_FILE"] = certificates
    return found


def _link(place: str) -> str | None:
    """Returns a folder or an address of wheels for uv. None: the folder is not there, which pip only warns of."""
    if "://" in place:
        return place
    folder = Path(place).expanduser()
    if folder.exists():
        return str(folder)
    print(f"uv_settings: pip's setting find-links names {place}, which does not exist", file=sys.stderr)
    return None


def read_settings() -> dict[str, str]:
    """Returns this machine's settings of pip as environment variables for uv."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    return for_uv(merged(listed.stdout), os.environ)


if __name__ == "__main__":
    for name, value in read_settings().items():
        print(f"export {name}={shlex.quote(value)}")
