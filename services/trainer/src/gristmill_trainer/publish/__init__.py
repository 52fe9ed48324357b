"""Publication of new weights to the running model servers."""
