"""The settings and the state of a run on disk: `<run>/run.json`, the run record as the API answers it.

The trajectory API writes the file when a run opens, when a trainer takes it, and when its state changes. The
file therefore has everything that distinguishes the run from others: model, data set, rewards, seed, objective, batch
sizes. It has no secrets. `version` is only in the file of a finished run, because a running trainer changes it at each
step; the metrics have it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import BaseModel, ValidationError

from gristmill.errors import GristmillError
from gristmill.internal import foreign
from gristmill.internal.disk import make_folder, sync, write_file
from gristmill.internal.redaction import redact
from gristmill.run import RunRecord, RunState

RUN_FILE: Final = "run.json"
FORMAT: Final = 1


class _File(BaseModel):
    format: int
    run: RunRecord


class _Format(BaseModel):
    format: int


def write_run_file(folder: Path, record: RunRecord) -> bool:
    """Writes `folder`/run.json completely or not at all. Returns False if the file has this content already.

    Makes the folder if it does not exist. Raises OSError.
    """
    recorded = record.model_copy(
        update={
            "env": redact(record.env),
            "trainer": redact(record.trainer),
            "version": record.version if record.state == RunState.FINISHED else None,
        }
    )
    content = _File(format=FORMAT, run=recorded).model_dump_json(indent=2).encode() + b"\n"
    path = folder / RUN_FILE
    if path.is_file() and path.read_bytes() == content:
        sync(folder)  # An earlier call may have failed there.
        return False
    make_folder(folder)
    write_file(path, content, several=True)
    return True


def read_run_file(path: Path) -> RunRecord:
    """Reads a run.json. Raises GristmillError for a file of a newer format or other content, and OSError."""
    content = foreign.read_file(path)
    try:
        number = _Format.model_validate_json(content).format
        if number != FORMAT:
            raise GristmillError(
                "run_file_format",
                f"{path} has format {number}; this gristmill reads format {FORMAT}: install the version that wrote it",
                path=path,
                format=number,
            )
        return _File.model_validate_json(content).run
    except ValidationError as error:
        raise GristmillError("not_a_run_file", f"{path} is not the record of a run: {error}", path=path) from error
