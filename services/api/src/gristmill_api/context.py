"""What a request handler works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Path, Request
from pydantic import BaseModel, ConfigDict, StringConstraints

from gristmill_api.changes import Changes
from gristmill_api.metrics import Metrics
from gristmill_api.settings import Limits
from gristmill_api.store import Store


@dataclass(frozen=True)
class Context:
    limits: Limits
    store: Store
    changes: Changes
    metrics: Metrics

    def wait(self, asked: float) -> float:
        """How long a long-poll may take, seconds."""
        return min(asked, self.limits.max_wait_s)


# async, although it awaits nothing: FastAPI runs a plain function in a thread.
async def _context(request: Request) -> Any:
    return request.app.state.context


Ctx = Annotated[Context, Depends(_context)]

# Run ids name folders, so none may be "..".
_ID = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"
NAME_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"
RunId = Annotated[str, Path(pattern=_ID)]
GroupId = Annotated[str, Path(pattern=_ID)]

Id = Annotated[str, StringConstraints(pattern=_ID)]
"""A run or group id."""
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""A permit holder or a batch id: chosen by the client."""


class Body(BaseModel):
    """A JSON request body. An unknown field is an error: it is a misspelt one."""

    model_config = ConfigDict(extra="forbid")
