"""In PYTHONPATH, hides torch from a process, as in the image of `env`: transformers imports it if it is there."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
