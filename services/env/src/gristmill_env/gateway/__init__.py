"""The gateway for agents. Unchanged programs call the model in training through a base URL, and every reply is trained
on as the tokens that were sampled."""

from gristmill_env.gateway.dialects import ChatRequest, Reply, RequestError
from gristmill_env.gateway.server import PORT, Gateway, serving
from gristmill_env.gateway.sessions import Policy, Session, Sessions
from gristmill_env.gateway.turns import Branch, Turn, Turns

__all__ = [
    "PORT", "Branch", "ChatRequest", "Gateway", "Policy", "Reply", "RequestError", "Session",
    "Sessions", "Turn", "Turns", "serving",
]  # fmt: skip
