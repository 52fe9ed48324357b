"""Completions from model servers."""

from gristmill_env.inference.request import Completion, GenerationRequest, ServedModel
from gristmill_env.inference.servers import ModelServers
from gristmill_env.inference.thinking import Thinking
from gristmill_env.inference.wire import LabelSpan

__all__ = ["Completion", "GenerationRequest", "LabelSpan", "ModelServers", "ServedModel", "Thinking"]
