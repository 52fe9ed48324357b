"""Web pages of other sites.

A page anywhere may have the user's browser send requests to 127.0.0.1, with the password that the browser remembers.
Without CORS the page does not see the answer, but a POST, or Atropos' GET /reset_data, would have done its work. So
what changes something is refused when the browser says that another site asked; API_CORS_ORIGINS names exceptions.
Programs that are no browsers send neither header and are not concerned.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from gristmill import ConfigError


def from_another_site(headers: Headers, allowed: Collection[str]) -> bool:
    """True when a browser sent this for a page that is neither the API's own nor of an allowed origin."""
    origin = headers.get("origin")
    if origin in allowed:
        return False
    # The browser's own judgement. It leaves it out towards plain http on other machines; then the origin tells.
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("cross-site", "same-site")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")


def parse_origins(text: str) -> tuple[str, ...]:
    """ "https://a.example, http://localhost:3000" as a tuple. Raises ConfigError for anything but full origins."""
    origins = tuple(part.strip() for part in text.split(",") if part.strip())
    for origin in origins:
        parts = urlsplit(origin)
        if parts.scheme not in ("http", "https") or not parts.hostname or origin != f"{parts.scheme}://{parts.netloc}":
            raise ConfigError(
                f"API_CORS_ORIGINS: {origin!r} is no origin; write full ones, https://host or http://host:port, "
                "with commas between. '*' is not accepted: it would let every web page act."
            )
    return origins
