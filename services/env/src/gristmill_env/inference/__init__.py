"""Completions from model servers."""

from gristmill_env.inference.server import Thinking
from gristmill_env.inference.servers import ModelServers
from gristmill_env.inference.types import Completion, GenerationRequest, LabelSpan, ServedModel

__all__ = ["Completion", "GenerationRequest", "LabelSpan", "ModelServers", "ServedModel", "Thinking"]
