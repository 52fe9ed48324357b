"""The model service: it resolves MODEL, writes the manifest that environment and trainer read, and becomes vLLM."""
