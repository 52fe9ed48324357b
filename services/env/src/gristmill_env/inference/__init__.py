"""Completions from model servers."""

from gristmill_env.inference.server import Completion, ModelServer, ServedModel
from gristmill_env.inference.wire import LabelSpan

__all__ = ["Completion", "LabelSpan", "ModelServer", "ServedModel"]
