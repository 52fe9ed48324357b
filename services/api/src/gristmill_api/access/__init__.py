"""Who may ask for what, and from where.

settings   API_AUTH, API_TOKENS_DIR, API_CORS_ORIGINS, API_ALLOWED_HOSTS
hosts      the middleware that refuses requests for other hosts: 421
tokens     the three roles and the files that hold their tokens
table      which role each route needs
guard      the middleware that asks: 401, 403
origins    what web pages of other sites may do: nothing, unless they are named
bind       tells where the process listens; warns when other machines reach it and no token is asked
describe   the same, told in OpenAPI
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from gristmill_api.access import describe
from gristmill_api.access.bind import tell_bind
from gristmill_api.access.guard import Guard
from gristmill_api.access.settings import AccessSettings

__all__ = ["AccessSettings", "install", "tell_bind"]


def install(app: FastAPI, settings: AccessSettings) -> None:
    """Put the guard, and CORS when origins are named, around what `app` has so far."""
    app.add_middleware(Guard, tokens=settings.tokens, origins=settings.cors_origins)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Content-Encoding", "Last-Event-ID"],
            expose_headers=["Retry-After", "Gristmill-Dropped"],
        )
    describe.install(app, settings.tokens is not None)
