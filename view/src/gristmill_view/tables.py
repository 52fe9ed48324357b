"""The page's way to the tables of runs: SQL over a run's rollouts, and ViewErrors for files that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from gristmill.errors import GristmillError
from gristmill.folders import RunFolder, RunMissingError
from gristmill_view import ExtraMissingError, needs_page
from gristmill_view.source import ViewError

Roots = tuple[Path, ...]


def literal(value: str) -> str:
    """Returns a literal of DuckDB, in which only the quote needs an escape. A text cannot hold a NUL."""
    return "'" + value.replace("\x00", "").replace("'", "''") + "'"


def folder_of(roots: Roots, run: str) -> RunFolder:
    """Returns the folder of a run. Raises ViewError for an unknown run and for a name that is not a run id."""
    try:
        # A run id is a folder's name, so "..", "/" and an empty id are not ids.
        if not run or run.startswith(".") or "/" in run or "\\" in run or "\x00" in run:
            raise RunMissingError("run_folder_missing", f"{run!r} is not a run id")
        return RunFolder.open(run, roots)
    except RunMissingError as error:
        raise ViewError(
            "run_missing", f"The run {run!r} does not exist here.", remedy="Choose a run from the list."
        ) from error


def load_table_reader() -> ModuleType:
    """Loads pyarrow and DuckDB, which takes seconds. Questions about runs and metrics do not wait for that."""
    with needs_tables():
        from gristmill_view import rollouts
    return rollouts


@contextmanager
def needs_tables() -> Iterator[None]:
    """Raises ViewError if an import in this block needs a package that is not installed."""
    try:
        with needs_page():
            yield
    except ExtraMissingError as error:
        raise ViewError(
            "view_not_installed",
            f"The page cannot read the groups of runs: {error.values['package']} is not installed.",
            status=503,
            remedy="pip install './view[page]'",
        ) from error


def rows_of(roots: Roots, run: str, query: str, *, update: bool = True) -> list[dict[str, Any]]:
    """Returns the result of a DuckDB query over the table of a run's rollouts.

    `update`: read what is new in the run's folder first.
    """
    rows: list[dict[str, Any]] = table_of(roots, run, query, update=update).to_pylist()
    return rows


def table_of(roots: Roots, run: str, query: str, *, update: bool = True) -> Any:
    """Returns the result as a pyarrow table."""
    folder = folder_of(roots, run)
    with as_view_errors():
        return load_table_reader().sql(folder, query, update=update)


@contextmanager
def as_view_errors() -> Iterator[None]:
    """Errors of the readers of runs become ViewErrors with status 500."""
    try:
        yield
    except ViewError:
        raise
    except GristmillError as error:
        raise ViewError(error.code, str(error), status=500, remedy="Read the server's log.") from error
