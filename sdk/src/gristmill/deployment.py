"""Where the parts of a stack are: the GRISTMILL_* variables, read once at the edge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

API_URL = "http://127.0.0.1:8000"
MODEL_URL = "http://127.0.0.1:9001"


@dataclass(frozen=True)
class Deployment:
    """URLs, directories and ids. They stand above the YAML, so one file works with and without Docker."""

    api_url: str | None
    """Trajectory API; None when the environment does not say."""
    model_url: str | None
    run_id: str | None
    stack: str
    """The stack's name at an API that several stacks share: each works on one open run at a time."""
    config_dir: Path
    models_dir: Path
    weights_dir: Path
    runs_dir: Path

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Deployment:
        """From `os.environ`. An empty variable counts as unset, as Compose passes unset ones so."""

        def get(name: str) -> str | None:
            return environ.get(f"GRISTMILL_{name}") or None

        return cls(
            api_url=get("API_URL"),
            model_url=get("MODEL_URL"),
            run_id=get("RUN_ID"),
            stack=get("STACK") or "default",
            config_dir=Path(get("CONFIG_DIR") or "configs"),
            models_dir=Path(get("MODELS_DIR") or ".gristmill/models"),
            weights_dir=Path(get("WEIGHTS_DIR") or ".gristmill/weights"),
            runs_dir=Path(get("RUNS_DIR") or "runs"),
        )
