"""Tells in OpenAPI which role an operation needs."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI

from gristmill_api.access.table import Need, needed

_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "The token of a role: env, trainer or admin."},
    "basic": {
        "type": "http",
        "scheme": "basic",
        "description": "The token as the password, with any user name: http://env:TOKEN@host:8000.",
    },
}
_METHODS: Final = ("get", "post", "put", "delete")


def install(app: FastAPI, tokens: bool) -> None:
    """Every operation says its role as `x-role`, and how it is refused; with `tokens`, also that it needs one."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = make()
            for path, operations in schema["paths"].items():
                for method in _METHODS:
                    if method in operations:
                        _describe(operations[method], needed(method.upper(), path), tokens)
            if tokens:
                schema.setdefault("components", {})["securitySchemes"] = _SCHEMES
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend the schema


def _describe(operation: dict[str, Any], need: Need, tokens: bool) -> None:
    operation["x-role"] = need.value
    refusals = []
    if tokens and need.roles:
        operation["security"] = [{"bearer": []}, {"basic": []}]
        operation["responses"]["401"] = _answer("No token, or one that is not known.")
        refusals.append(f"The token's role may not; this is for: {need.value}.")
    if not need.reads:
        refusals.append("A browser sent it for a page of another site.")
    if refusals:
        operation["responses"]["403"] = _answer(" Or: ".join(refusals))


def _answer(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}},
    }
