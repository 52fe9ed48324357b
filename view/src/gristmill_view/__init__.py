"""Reads runs: facts of a run, the table of its rollouts, the page, reports and packs.

The modules, in the order in which to read them:

    facts       what the API and the files of a run say; `phases` reads the logs
    overview    the state of a run; `trouble` has the rules that find what is wrong with a run
    series      the metrics of a run, decimated to the points of a chart
    rollouts    the table of all rollouts of a run; `rows` makes its rows, `highlights` reads single rollouts without it
    app         the routes of the page: `source` defines its data, `run_source` and `queries` read the data from files,
                `tables` asks the table of rollouts, `groups` and `timeline` shape a group and a step
    report      one HTML file about a run, and the templates of all reports
    pack        one file with a run; `secrets` keeps secrets out of it
    run_checks  the checks of a run's files

For a notebook or a script:

    from gristmill_view import dataset, sql

    table = dataset("runs/quickstart").to_table(columns=["step", "reward", "completion"])
    worst = sql("runs/quickstart", "SELECT * FROM rollouts WHERE acked ORDER BY reward LIMIT 10")

docs/look-at-a-run.md explains the columns, and answers ten questions with them. The table and the page need the
packages of the extra `page`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gristmill.errors import GristmillError

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.dataset

    from gristmill.folders import RunFolder

__all__ = ["ExtraMissingError", "dataset", "needs_page", "sql"]


class ExtraMissingError(GristmillError):
    """A package of the extra `page` is not installed."""


@contextmanager
def needs_page() -> Iterator[None]:
    """Imports in this block need the extra `page`. Raises ExtraMissingError if a package of it is not installed."""
    try:
        yield
    except ImportError as error:
        package = error.name or str(error)
        raise ExtraMissingError(
            "extra_missing",
            f"the table of rollouts and the page need a package that is not installed ({package}): "
            "pip install './view[page]'",
            package=package,
        ) from error


def dataset(
    run: str | Path | RunFolder, *, roots: Iterable[str | Path] | None = None, update: bool = True
) -> pyarrow.dataset.Dataset:
    """Returns the table of all rollouts of a run as a pyarrow dataset, which reads only what is asked for.

    `run`: a folder such as "runs/quickstart", a packed run, or a run id. `roots`: folders of runs in which to look for
    the id. Default: GRISTMILL_RUNS_DIR, else runs/. `update`: read what is new in the run's folder first. The run may
    be open.

    Raises ExtraMissingError without the packages, and RunMissingError if the run has no folder.
    """
    with needs_page():
        from gristmill_view import rollouts
    return rollouts.dataset(run, roots=roots, update=update)


def sql(
    run: str | Path | RunFolder, query: str, *, roots: Iterable[str | Path] | None = None, update: bool = True
) -> pyarrow.Table:
    """Returns the result of a DuckDB query over the tables `rollouts` and `steps` of a run.

    `to_pylist()` converts the result. The arguments are as in `dataset`. Raises SqlError for a query that DuckDB
    refuses.
    """
    with needs_page():
        from gristmill_view import rollouts
    return rollouts.sql(run, query, roots=roots, update=update)
