"""Export of the finished model: a folder for from_pretrained and vLLM with a card of the run, and a push to a hub."""

from gristmill_trainer.export.card import RunFacts, told_command
from gristmill_trainer.export.folder import export_model
from gristmill_trainer.export.hub import Hub

__all__ = ["Hub", "RunFacts", "export_model", "told_command"]
