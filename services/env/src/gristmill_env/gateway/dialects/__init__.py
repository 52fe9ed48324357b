"""What clients say and expect: OpenAI's Chat Completions and Responses, and Anthropic's Messages.

A dialect reads a request as `ChatRequest`, whose messages have the form of chat templates, and writes a `Reply` as one
JSON object or as server-sent events. An answer is complete before its first event is written, because a tool parser
needs the whole text.
"""

from collections.abc import Mapping

from gristmill_env.gateway.dialects.base import ChatRequest, Dialect, Reply, RequestError, template_message
from gristmill_env.gateway.dialects.chat import ChatCompletions
from gristmill_env.gateway.dialects.messages import Messages
from gristmill_env.gateway.dialects.responses import Responses

DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
"""By path."""

__all__ = ["DIALECTS", "ChatRequest", "Dialect", "Reply", "RequestError", "template_message"]
