"""The table of a run's rollouts, for a notebook or a script. It needs the packages of the extra `view` of the SDK.

    import gristmill

    table = gristmill.dataset("runs/quickstart").to_table(columns=["step", "reward", "completion"])
    worst = gristmill.sql("runs/quickstart", "SELECT * FROM rollouts ORDER BY reward LIMIT 10")

docs/rollouts.md explains the columns, and answers ten questions with them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill.errors import GristmillError

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.dataset


class ExtraMissingError(GristmillError):
    """A package of an optional part of gristmill is not installed."""


def dataset(
    run: str | Path, *, roots: Iterable[str | Path] | None = None, update: bool = True
) -> pyarrow.dataset.Dataset:
    """Returns the table of all rollouts of a run as a pyarrow dataset, which reads only what is asked for.

    `run`: a folder such as "runs/quickstart", or a run id. `roots`: folders of runs in which to look for the id.
    Default: GRISTMILL_RUNS_DIR, else runs/. `update`: read what is new in the run's folder first. The run may be open.

    Raises ExtraMissingError without the packages, and RunMissingError if the run has no folder.
    """
    return _view().dataset(run, roots=roots, update=update)


def sql(
    run: str | Path, query: str, *, roots: Iterable[str | Path] | None = None, update: bool = True
) -> pyarrow.Table:
    """Returns the result of a DuckDB query over the tables `rollouts` and `steps` of a run.

    `to_pylist()` and `to_pandas()` convert the result. The arguments are as in `dataset`. Raises SqlError for a query
    that DuckDB refuses.
    """
    return _view().sql(run, query, roots=roots, update=update)


def _view() -> Any:
    try:
        return importlib.import_module("gristmill.view.rollouts")
    except ModuleNotFoundError as error:
        raise ExtraMissingError(
            "view_extra_missing",
            f"the table of rollouts needs the package {error.name}: pip install './sdk[view]'",
            package=error.name,
        ) from error
