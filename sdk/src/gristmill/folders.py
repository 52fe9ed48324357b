"""The files of a run, which may be in several folders.

Locally one folder `runs/<id>` has everything. In Compose the API, the trainer and the environment each write to their
own volume. So a reader has an ordered list of roots, and looks for `<root>/<id>/...` in each of them.

A folder may hold files of an earlier run with the same id. A file that was last written before the creation in run.json
belongs to that earlier run, and `own_file`, `metrics`, `receipts`, `logs` and `model` leave the file out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from gristmill.archive import segment
from gristmill.archive.drops import DROPS_FILE, OLDER_DROPS_FILE
from gristmill.archive.run_file import RUN_FILE, read_run_file
from gristmill.archive.trained import TOKENIZER_FOLDER, TRAINED_FOLDER
from gristmill.deployment import RUN_ID, Manifest
from gristmill.errors import GristmillError
from gristmill.internal import foreign
from gristmill.internal.lines import read_growing_jsonl
from gristmill.internal.metrics import METRICS_FILE, number, readable
from gristmill.internal.receipts import RECEIPTS_FILE, Receipt, parse_receipts
from gristmill.run import RunRecord

_LOG = logging.getLogger(__name__)
ROLLOUTS_FOLDER, EVALUATIONS_FOLDER, LOGS_FOLDER, MODEL_FOLDER = "rollouts", "evaluations", "logs", "model"
EVALUATION_FILE, EVALUATION_GROUPS_FILE = "evaluation.json", "groups.jsonl"
EVALUATION_RESULTS_FILE = "results.json"
REPORT_FILE = "report.html"
FORK_FILE = "fork.json"
"""The run and the step from which `gristmill fork` began this run."""
ORIGIN_FOLDER = "origin"
"""In a fork's folder: the checkpoint of another run from which the fork began."""
_TRACES = (
    RUN_FILE, METRICS_FILE, ROLLOUTS_FOLDER, TRAINED_FOLDER, DROPS_FILE, EVALUATIONS_FOLDER, LOGS_FOLDER, "checkpoints",
    MODEL_FOLDER,
)  # fmt: skip
"""A folder with one of these is the folder of a run."""
_TOKENIZER_FILE = "tokenizer.json"
_COARSE_S = 1.0
"""Most seconds by which the times of files are behind the clock of the API on the same machine."""
_RUN_ID = re.compile(RUN_ID)
"""As the API accepts them. No other name may lead out of the roots."""


class _Fork(msgspec.Struct):
    """The part of fork.json that readers need."""

    step: Annotated[int, msgspec.Meta(ge=0)]


class RunMissingError(GristmillError):
    """No folder of the run exists."""


@dataclass(frozen=True)
class RunFolder:
    """The files of one run. Files are read when a method is called, so a run may still be open."""

    run_id: str
    roots: tuple[Path, ...]

    @classmethod
    def open(cls, run: str | Path | RunFolder, roots: Iterable[str | Path] | None = None) -> RunFolder:
        """`run`: a folder such as "runs/quickstart", or a run id.

        `roots`: default is GRISTMILL_RUNS_DIR, else runs/. Raises RunMissingError if no root has a folder of the run.
        """
        if isinstance(run, RunFolder):
            return run
        path = Path(run)
        if roots is None and path.is_dir():
            path = path.resolve()
            folder = cls(path.name, (path.parent,))
        else:
            folder = cls(str(run), tuple(map(Path, default_roots() if roots is None else roots)))
        if not _RUN_ID.fullmatch(folder.run_id) or not folder.folders:
            places = ", ".join(map(str, folder.roots))
            raise RunMissingError(
                "run_folder_missing",
                f"no folder of run {folder.run_id!r} is in {places}; name the folder, as in runs/quickstart; "
                "`gristmill runs` lists the runs",
                run=folder.run_id,
                roots=places,
            )
        return folder

    @property
    def folders(self) -> list[Path]:
        """The run's folders that exist, in the order of the roots. Their paths have no links."""
        return [folder for root in self.roots if foreign.is_folder(folder := root.resolve() / self.run_id)]

    def find(self, name: str) -> Path | None:
        """Returns the first regular file or folder of this name in the run's folders, or None."""
        return self.file(name) or self.folder(name)

    def file(self, name: str) -> Path | None:
        """Returns the first regular file of this name in the run's folders, or None. No link leads to it."""
        return next((path for folder in self.folders if foreign.is_file(path := folder / name)), None)

    def folder(self, name: str) -> Path | None:
        """Returns the first folder of this name in the run's folders, or None. No link leads to it."""
        return next((path for folder in self.folders if foreign.is_folder(path := folder / name)), None)

    def own_file(self, name: str, record: RunRecord | None = None) -> Path | None:
        """Returns the first regular file of this name that was written since the run's creation, or None.

        `record`: default is run.json. Without a record, every file counts.
        """
        since = self._since(record)
        return next((path for folder in self.folders if _is_own_file(path := folder / name, since)), None)

    def metrics(self, record: RunRecord | None = None) -> list[dict[str, Any]]:
        """Returns the trainer's rows of metrics, one per step. Leaves out rows without a step and wrong values."""
        path = self.own_file(METRICS_FILE, record)
        rows = [] if path is None else read_growing_jsonl(path)
        return [readable(row) for row in rows if _is_step(row.get("step"))]

    def receipts(self, record: RunRecord | None = None) -> list[Receipt]:
        """Returns the receipts of model servers, oldest first."""
        path = self.own_file(RECEIPTS_FILE, record)
        return [] if path is None else parse_receipts(read_growing_jsonl(path))

    def model(self, record: RunRecord | None = None) -> Path | None:
        """Returns the folder of the finished model, or None."""
        since = self._since(record)
        folders = (path for folder in self.folders if foreign.is_folder(path := folder / MODEL_FOLDER))
        return next((folder for folder in folders if last_change(folder, *foreign.entries(folder)) >= since), None)

    def record(self) -> RunRecord | None:
        """Returns the settings and the state of the run; None if no API wrote them. Warns of a file of no use."""
        path = self.file(RUN_FILE)
        if path is None:
            return None
        try:
            return read_run_file(path)
        except (GristmillError, OSError) as error:
            _LOG.warning("the settings of run %s are unknown: %s", self.run_id, error)
            return None

    def fork_step(self) -> int:
        """Returns the step of another run after which this run began; 0 if the run is not a fork."""
        path = self.file(FORK_FILE)
        if path is None:
            return 0
        try:
            return msgspec.json.decode(foreign.read_file(path), type=_Fork).step
        except (ValueError, RecursionError, OSError, GristmillError) as error:
            _LOG.warning("%s does not say after which step run %s began: %s", path, self.run_id, error)
            return 0

    def archive_segments(self) -> list[Path]:
        """Returns the files of the archive, oldest first."""
        return self._segments(ROLLOUTS_FOLDER)

    def trained_segments(self) -> list[Path]:
        """Returns the files of the trainer's records, oldest first."""
        return self._segments(TRAINED_FOLDER)

    def drops(self) -> list[Path]:
        """Returns the files of dropped groups, oldest first."""
        return [path for name in (OLDER_DROPS_FILE, DROPS_FILE) if (path := self.file(name)) is not None]

    def evaluations(self) -> list[Path]:
        """Returns the folders of evaluations, by name."""
        base = self.folder(EVALUATIONS_FOLDER)
        folders = () if base is None else foreign.entries(base)
        return [folder for folder in folders if foreign.is_file(folder / EVALUATION_GROUPS_FILE)]

    def made(self, evaluation: Path, record: RunRecord | None) -> bool:
        """Returns whether the training of `record` made the evaluation, not an earlier training of the same run id.

        An evaluation without a recorded creation counts if it began after the run was created. Without a record, every
        evaluation counts.
        """
        if record is None:
            return True
        path = evaluation / EVALUATION_FILE
        try:
            creation = json.loads(foreign.read_file(path)).get("creation")
            return last_change(path) >= record.created_at if creation is None else creation == record.creation
        except (OSError, ValueError, RecursionError, AttributeError, GristmillError):
            return False

    def logs(self, record: RunRecord | None = None) -> dict[str, Path]:
        """Returns the log file of each service by the service's name."""
        since = self._since(record)
        base = self.folder(LOGS_FOLDER)
        found = [] if base is None else [path for path in foreign.entries(base) if path.suffix == ".log"]
        return {path.stem: path for path in found if _is_own_file(path, since)}

    def tokenizer(self, models_dir: Path | None = None) -> Path | None:
        """Returns the tokenizer.json of the run's model, or None.

        It is in the trainer's records, in the finished model, or where the manifest of this machine's models says.
        `models_dir`: the folder of the manifest; default GRISTMILL_MODELS_DIR, else .gristmill/models.
        """
        if (path := self.file(f"{TRAINED_FOLDER}/{TOKENIZER_FOLDER}/{_TOKENIZER_FILE}")) is not None:
            return path
        if (model := self.model()) is not None and foreign.is_file(path := model / _TOKENIZER_FILE):
            return path
        manifest = Manifest.find(models_dir or Path(os.environ.get("GRISTMILL_MODELS_DIR") or ".gristmill/models"))
        if manifest is None:
            return None
        path = Path(manifest.tokenizer_path).resolve() / _TOKENIZER_FILE
        return path.resolve() if path.is_file() else None

    def writable(self, name: str) -> Path:
        """Returns a folder of this name for files that readers make: in the run's folder, else in the user's cache.

        The run's folder counts in the first root only: the other roots belong to other services.
        """
        folder = self.roots[0].resolve() / self.run_id / name
        if foreign.is_folder(folder.parent):
            with contextlib.suppress(OSError):  # A volume that is mounted read-only.
                folder.mkdir(exist_ok=True)
                if foreign.is_folder(folder):
                    with tempfile.TemporaryFile(dir=folder):
                        return folder
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        digest = hashlib.sha256("\n".join(str(folder.resolve()) for folder in self.folders).encode()).hexdigest()
        folder = cache / "gristmill" / f"{self.run_id}-{digest[:12]}" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder.resolve()

    def _since(self, record: RunRecord | None) -> float:
        """Returns the time from which a file is of the run, in seconds; 0 if no record of the run can be read."""
        if record is None and (path := self.file(RUN_FILE)) is not None:
            with contextlib.suppress(GristmillError, OSError):  # `record` warns of such a file.
                record = read_run_file(path)
        return 0.0 if record is None else record.created_at - _COARSE_S

    def _segments(self, name: str) -> list[Path]:
        folder = self.folder(name)
        return [] if folder is None else segment.files(folder)


def default_roots() -> Sequence[Path]:
    """Returns the folders of GRISTMILL_RUNS_DIR, separated as in PATH; runs/ if it is not set."""
    return [
        Path(name).expanduser() for name in (os.environ.get("GRISTMILL_RUNS_DIR") or "runs").split(os.pathsep) if name
    ]


def list_runs(roots: Iterable[str | Path] | None = None) -> list[RunFolder]:
    """Returns the runs in the roots, the one that was written last first."""
    places = tuple(map(Path, default_roots() if roots is None else roots))
    newest: dict[str, float] = {}
    for folder in (folder for root in places for folder in foreign.entries(root.resolve())):
        written = [modified for name in _TRACES if (modified := _modified(folder / name)) is not None]
        if written:
            newest[folder.name] = max(newest.get(folder.name, 0.0), *written)
    return [RunFolder(name, places) for name in sorted(newest, key=lambda name: -newest[name])]


def is_run_folder(folder: Path) -> bool:
    """Returns whether a folder has a file or a folder that only runs have. `folder`: a path without links."""
    return any(_modified(folder / name) is not None for name in _TRACES)


def last_change(*paths: Path) -> float:
    """Returns the time of the last change of files and folders; 0 if none of them exists."""
    return max((modified for path in paths if (modified := _modified(path)) is not None), default=0.0)


def _is_own_file(path: Path, since: float) -> bool:
    return foreign.is_file(path) and last_change(path) >= since


def _is_step(value: object) -> bool:
    """Returns whether the API takes `value` as the step of a row of metrics."""
    return isinstance(value, int) and number(value) is not None and 0 <= value <= 2**53


def _modified(path: Path) -> float | None:
    """Returns the time of the last change of a regular file or a folder; None for links, other things and nothing."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_mtime if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) else None
