"""The environment of a run: dataset rows become prompts, completions, scores and trajectory groups."""
