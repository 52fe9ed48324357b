"""One file that holds a run: `gristmill pack` writes it, and `gristmill view`, `sql` and `unpack` read it elsewhere.

The file is a ZIP archive, so any ZIP program can list it. It has the files of the run's folder below `<run id>/`, and
`pack.json` with the size and the SHA-256 of each file. Models, checkpoints and derived files are left out, because they
are large: `pack.json` lists them, and the rollouts and the initial model reproduce them.

A pack has no secrets that this machine knows: `secrets.py` finds them. Texts lose their secrets. Other files are copied
byte for byte; a retraining must read the same groups. Then the bytes of every packed file are searched, and a secret in
them is an error. Only files with known names are packed, others by `include`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import os
import re
import shutil
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final

import msgspec

from gristmill.archive import segment
from gristmill.archive.trained import TOKENIZER_FOLDER, TRAINED_FOLDER
from gristmill.deployment import RUN_ID
from gristmill.errors import GristmillError
from gristmill.folders import ORIGIN_FOLDER, RunFolder, is_run_folder
from gristmill.internal import foreign
from gristmill.internal.disk import complete_file
from gristmill.internal.redaction import redact, redact_text
from gristmill_view.secrets import SecretSearch, cannot_be_searched, gzip_parts, is_gzip

SUFFIX: Final = ".gristmill.zip"
CONTENTS_FILE: Final = "pack.json"
FORMAT: Final = 1
LEFT_OUT: Final = ("checkpoints", "model", "dataset", "tensorboard", "wandb")
"""Folders of a run that a pack leaves out: weights, and files that another program makes from the run's files."""
PACKED: Final = (
    "run.json", "metrics.jsonl", "drops.jsonl", "drops.1.jsonl", "receipts.jsonl", "probes.json", "digests.jsonl",
    "fork.json", "retrain.json", "report.html", "rollouts/*.gmz", "trained/*.gmz", "trained/tokenizer/*",
    "evaluations/*.json", "evaluations/*.jsonl", "evaluations/*.html", "dropped/*.jsonl", "logs/*.log", "origin/*",
    "aside/*",
)  # fmt: skip
"""Names of the files that a pack has. A `*` also matches folders."""
_EXACT: Final = frozenset({TOKENIZER_FOLDER, ORIGIN_FOLDER})
"""Folders whose files have no settings of a person, and must not change: checkpoints have hashes."""
_TEXTS: Final = frozenset({".csv", ".html", ".log", ".md", ".txt", ".yaml", ".yml"})
_RUN_ID: Final = re.compile(RUN_ID)
_QUARANTINED = ".groups"
"""Groups of steps that changed no weights, which the trainer keeps in aside/."""
_CHUNK: Final = 1 << 20
_LONGEST_QUARANTINED: Final = 4 << 30
_START: Final = 16
_LONGEST_CONTENTS: Final = 64 << 20
MAX_SIZE: Final = 32 << 30
"""Most bytes that a pack may become, unless the user allows more."""
_MOST_FILES, _MOST_FOLDERS, _LONGEST_NAME = 100_000, 16, 512
_MOST_TIMES, _SMALL = 200, 64 << 20
"""A pack that becomes more than `_SMALL` bytes may become at most `_MOST_TIMES` times its own size."""
_LATEST_NS: Final = 253_402_300_799_000_000_000
"""The end of the year 9999."""
_CACHE_S: Final = 30 * 86400
"""A pack in the cache that was not read for so long is removed."""
_EARLIEST: Final = (1980, 1, 1, 0, 0, 0)
"""The date of every member, so that packing the same files twice gives the same bytes. `mtime_ns` has the real one."""


_BROKEN: Final = (KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error, lzma.LZMAError)
"""Errors of a ZIP archive that is damaged, encrypted or packed in another way."""


class PackError(GristmillError):
    """A pack cannot be written, or a file is not a whole pack."""


class PackedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a pack."""

    path: str
    """Relative to the run's folder, with slashes."""
    size: int
    """Bytes."""
    sha256: str
    """Of the bytes in the pack, as 64 hexadecimal digits."""
    mtime_ns: int
    """Time of the last change of the original, in ns since 1970."""
    redacted: bool = False
    """Whether the bytes differ from the original's, because the original has secrets."""


class PackContents(msgspec.Struct, frozen=True, kw_only=True):
    """`pack.json`: the contents of a pack."""

    format: int = FORMAT
    run_id: str
    files: tuple[PackedFile, ...]
    left_out: dict[str, int]
    """Bytes of each file or folder of the run that the pack does not have, by its path."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


# --- Writing ---------------------------------------------------------------------------------------------------
def write_pack(
    target: Path,
    run_id: str,
    folders: Sequence[Path],
    *,
    secrets: Iterable[str] = (),
    tokenizer: Path | None = None,
    include: Sequence[str] = (),
) -> PackContents:
    """Writes the files of a run to `target`, completely or not at all, and returns the contents.

    `folders`: folders of the run; a file counts from the first folder that has it. `secrets`: from `secrets_of`.
    `tokenizer`: a tokenizer.json that is packed if the trainer's records have none, so that the texts can be read
    elsewhere. `include`: patterns such as "notes/*.md" of files that are packed although their names are not known. The
    run may be open: a file is packed up to its current end, and a file that is removed meanwhile is left out.

    Raises PackError if `target` exists or cannot be written, or if a packed file has a secret or cannot be searched.
    """
    if target.exists():
        raise PackError("pack_exists", f"{target} exists; remove it, or name another file with --out", path=target)
    search = SecretSearch(secrets)
    sources, left_out = _collect(folders, include)
    own_tokenizer = f"{TRAINED_FOLDER}/{TOKENIZER_FOLDER}/tokenizer.json"
    if tokenizer is not None:
        sources.setdefault(own_tokenizer, tokenizer.resolve())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            complete_file(target, mode=None, several=True) as partial,
            zipfile.ZipFile(partial, "x", zipfile.ZIP_DEFLATED, allowZip64=True) as archive,
        ):
            files = []
            for name in sorted(sources):
                try:
                    files.append(_add(archive, run_id, name, sources[name], search))
                except FileNotFoundError:  # The archive lets its oldest segment go, for example.
                    left_out[name] = 0
            contents = PackContents(run_id=run_id, files=tuple(files), left_out=dict(sorted(left_out.items())))
            archive.writestr(_member(CONTENTS_FILE), msgspec.json.format(msgspec.json.encode(contents), indent=2))
    except OSError as error:
        raise PackError(
            "pack_not_written", f"{target} cannot be written: {error}; name another file with --out", path=target
        ) from error
    return contents


def _collect(folders: Sequence[Path], include: Sequence[str]) -> tuple[dict[str, Path], dict[str, int]]:
    """Returns the files to pack by their paths in the run's folder, and the bytes of the files that are left out."""
    sources: dict[str, Path] = {}
    left_out: dict[str, int] = {}
    for folder in map(Path.resolve, folders):
        # `rglob` raises an error if a folder is removed meanwhile.
        for path in sorted(Path(base, name) for base, _, names in os.walk(folder) for name in names):
            parts = path.relative_to(folder).parts
            if not foreign.is_file(path) or any(part.startswith(".") or part.endswith(".partial") for part in parts):
                continue
            name = "/".join(parts)
            if parts[0] not in LEFT_OUT and any(fnmatchcase(name, pattern) for pattern in (*PACKED, *include)):
                sources.setdefault(name, path)
                continue
            whole = parts[0] if parts[0] in LEFT_OUT else name
            with contextlib.suppress(FileNotFoundError):
                left_out[whole] = left_out.get(whole, 0) + path.stat().st_size
    return sources, left_out


def _add(archive: zipfile.ZipFile, run_id: str, name: str, path: Path, search: SecretSearch) -> PackedFile:
    digest, size, redacted = hashlib.sha256(), 0, False
    with foreign.open_file(path) as file:
        stat = os.fstat(file.fileno())
        # A file of an open run grows. What is written from now on is not searched, and not packed.
        end = min(stat.st_size, _refuse_in_groups(path, search))
        with archive.open(_member(f"{run_id}/{name}"), "w", force_zip64=True) as member:

            def written() -> Iterator[bytes]:
                nonlocal redacted, size
                for original, packed in _pieces(file, name, end):
                    redacted |= original != packed
                    member.write(packed)
                    digest.update(packed)
                    size += len(packed)
                    yield packed

            if search.finds_in(written()):
                raise _secret_in(name, path)
    return PackedFile(path=name, size=size, sha256=digest.hexdigest(), mtime_ns=stat.st_mtime_ns, redacted=redacted)


def _secret_in(name: str, path: Path) -> PackError:
    text = (
        f"{path} has a secret of this machine in its bytes, and a pack copies such a file unchanged. Remove the file, "
        "or revoke the secret and remove it from the environment and from .env; then pack the run again"
    )
    return PackError("secret_in_file", text, path=path, file=name)


def _member(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _EARLIEST)
    info.external_attr = 0o644 << 16
    # Segments are compressed already.
    info.compress_type = zipfile.ZIP_STORED if name.endswith(segment.SUFFIX) else zipfile.ZIP_DEFLATED
    return info


def _pieces(file: BinaryIO, name: str, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yields (bytes of the file, the same bytes without secrets), up to `size`. `_EXACT` and binary files stay."""
    suffix = PurePosixPath(name).suffix
    if not _EXACT.isdisjoint(PurePosixPath(name).parts) or suffix not in _TEXTS | {".json", ".jsonl"}:
        while size > 0 and (chunk := file.read(min(_CHUNK, size))):
            size -= len(chunk)
            yield chunk, chunk
    elif suffix == ".json":
        content = file.read()
        yield content, _without_secrets(content, named=True)
    else:
        while size > 0 and (line := file.readline(size)):
            size -= len(line)
            yield line, _without_secrets(line, named=False) if suffix == ".jsonl" else _text_without_secrets(line)


def _without_secrets(content: bytes, *, named: bool) -> bytes:
    """Returns JSON without secrets. `named`: values with the name of a secret are masked too, as in settings.

    Rows of data keep such values, because a column named `key` may be the answer key of a question.
    """
    try:
        value = json.loads(content)
        clean = redact(value) if named else _strings_without_secrets(value)
    except (ValueError, RecursionError):  # a line that is being written, or nested too deep
        return _text_without_secrets(content)
    if clean == value:
        return content
    return json.dumps(clean, indent=2 if named else None, ensure_ascii=False).encode() + b"\n"


def _strings_without_secrets(value: Any) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, dict):
        return {redact_text(name): _strings_without_secrets(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_strings_without_secrets(item) for item in value]
    return value


def _text_without_secrets(content: bytes) -> bytes:
    text = content.decode("utf-8", "surrogateescape")
    return redact_text(text).encode("utf-8", "surrogateescape")


def _refuse_in_groups(path: Path, search: SecretSearch) -> int:
    """Raises PackError if a file has a secret that is packed in it: in a group of a segment, or by gzip.

    Returns where the last whole group of a segment ends; for another file a size that no file has.
    """
    searched = 0 if path.suffix == segment.SUFFIX else sys.maxsize
    with foreign.open_file(path) as file:
        start = file.read(_START)
        file.seek(0)
        try:
            if is_gzip(start) and search.finds_in(gzip_parts(file)):
                raise _secret_in(path.name, path)
        except (OSError, ValueError) as error:
            raise _not_searched(path, str(error)) from error
        if path.suffix != segment.SUFFIX and cannot_be_searched(file):
            raise _not_searched(path, "it is packed in a form that the search does not read")
    for body, group, end in _bodies(path) if path.suffix in (segment.SUFFIX, _QUARANTINED) else ():
        searched = end
        if search.finds(body):
            raise PackError(
                "secret_in_group",
                f"{f'group {group}' if group else 'a group'} in {path} has a secret of this machine in its messages or "
                "its meta, and a pack copies groups unchanged. Revoke the secret, remove it from the environment and "
                "from .env, and pack the run again",
                group=group,
                path=path,
            )
    return searched


def _not_searched(path: Path, why: str) -> PackError:
    text = f"{path} cannot be searched for secrets: {why}. Leave it out, or unpack it first"
    return PackError("file_not_searched", text, path=path)


def _bodies(path: Path) -> Iterator[tuple[bytes, str, int]]:
    """Yields the uncompressed bytes of the groups in a file, and for a segment each group's id and end."""
    if path.suffix == _QUARANTINED:
        yield foreign.read_file(path, _LONGEST_QUARANTINED), "", sys.maxsize
        return
    for _, frames, head_size, end in segment.read_segment(path):
        group = segment.parse(frames, head_size)
        yield group.body, group.group_id, end


# --- Reading ---------------------------------------------------------------------------------------------------
def read_contents(path: Path) -> PackContents:
    """Returns the contents of a pack. Raises PackError for a file that is not a pack, and for a newer format."""
    with _opened(path) as archive:
        return _contents(path, archive)


def unpack(path: Path, root: Path, max_size: int | None = None) -> Path:
    """Writes the run of a pack to `root`/<run id>, completely or not at all, and returns that folder.

    `max_size`: most bytes that the run may have. Without it, the run may have `MAX_SIZE` bytes, and not very many times
    the bytes of the pack. Raises PackError if the folder exists, if `path` is not a pack, if it is damaged, or if the
    run is too large.
    """
    with _opened(path) as archive:
        contents = _contents(path, archive)
        folder = root / contents.run_id
        if folder.exists():
            raise PackError(
                "run_exists",
                f"{folder} exists; choose another folder of runs with --runs, or move the run that is there",
                path=folder,
            )
        root.mkdir(parents=True, exist_ok=True)
        _check_size(path, contents, root, max_size)
        partial = Path(tempfile.mkdtemp(dir=root, prefix=f".{contents.run_id}-"))
        try:
            for file in contents.files:
                _extract(path, archive, contents.run_id, file, partial)
            partial.chmod(0o755)
            partial.rename(folder)
        except OSError as error:
            raise PackError("run_not_written", f"{folder} cannot be written: {error}", path=folder) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def open_run(run: str | Path | RunFolder, roots: Iterable[str | Path] | None = None) -> RunFolder:
    """Returns a run as `RunFolder.open` does. `run` may also be a packed run such as "quickstart.gristmill.zip".

    A packed run is unpacked to the user's cache. Raises PackError if it cannot be read.
    """
    if roots is None and not isinstance(run, RunFolder) and Path(run).is_file():
        return RunFolder.open(_unpacked(Path(run)))
    return RunFolder.open(run, roots)


def named_run(name: str, roots: Iterable[Path]) -> RunFolder:
    """Returns the run that a person names on a command line: the folder of a run or a packed run, or else an id.

    A folder without files of a run is not the folder of a run: a data set may have the name of a run. `roots`: the
    folders that have the run of an id. Raises as `open_run` does.
    """
    path = Path(name)
    is_pack = path.is_file() and (name.endswith(SUFFIX) or zipfile.is_zipfile(path))
    is_path = is_pack or (name != "" and is_run_folder(path.resolve()))
    return open_run(name, None if is_path else roots)


def _unpacked(path: Path) -> Path:
    """Returns the folder of a pack's run in the user's cache, and unpacks the pack there the first time.

    Raises PackError as `unpack` does.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gristmill" / "packs"
    contents = read_contents(path)
    root = cache / hashlib.sha256(msgspec.json.encode(contents)).hexdigest()[:16]
    folder = root / contents.run_id
    _expire(cache, root)
    return folder if folder.is_dir() else unpack(path, root)


def _expire(cache: Path, used: Path) -> None:
    """Removes the packs that were not read for a long time."""
    with contextlib.suppress(OSError):  # Another process removes them, or the cache cannot be written.
        if used.is_dir():
            os.utime(used)
        for other in foreign.entries(cache.resolve()):
            if other.name != used.name and other.stat().st_mtime < time.time() - _CACHE_S:
                shutil.rmtree(other, ignore_errors=True)


def _check_size(path: Path, contents: PackContents, root: Path, max_size: int | None) -> None:
    size, own = contents.size, path.stat().st_size
    if size > (MAX_SIZE if max_size is None else max_size):
        why = f"more than {MAX_SIZE if max_size is None else max_size}"
    elif max_size is None and size > max(_SMALL, _MOST_TIMES * own):
        why = f"more than {_MOST_TIMES} times its own {own}"
    else:
        free = shutil.disk_usage(root).free
        if size > free:
            text = f"{path} becomes {size} bytes, and the disk of {root} has {free} free; name another folder"
            raise PackError("pack_no_space", text, path=path, size=size, free=free)
        return
    text = f"{path} becomes {size} bytes, {why}; if you trust it, use `gristmill unpack --max-size {size}`"
    raise PackError("pack_too_large", text, path=path, size=size)


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise _not_a_pack(path, "it is not a ZIP archive") from error
    except OSError as error:
        raise PackError("pack_unreadable", f"{path} cannot be read: {error.strerror}", path=path) from error


def _not_a_pack(path: Path, why: str) -> PackError:
    return PackError("not_a_pack", f"{path} is not a packed run, because {why}; `gristmill pack` makes one", path=path)


def _contents(path: Path, archive: zipfile.ZipFile) -> PackContents:
    try:
        info = archive.getinfo(CONTENTS_FILE)
    except KeyError as error:
        raise _not_a_pack(path, f"it has no {CONTENTS_FILE}") from error
    if info.file_size > _LONGEST_CONTENTS:
        raise _not_a_pack(path, f"its {CONTENTS_FILE} has {info.file_size} bytes")
    try:
        content = archive.read(info)
        found = msgspec.json.decode(content, type=dict[str, Any]).get("format")
        if isinstance(found, int) and found > FORMAT:
            raise PackError(
                "pack_format",
                f"{path} has format {found}; this gristmill reads format {FORMAT}: install the version that wrote it",
                path=path,
                format=found,
            )
        contents = msgspec.json.decode(content, type=PackContents)
    except (ValueError, RecursionError, *_BROKEN) as error:
        raise _not_a_pack(path, f"its {CONTENTS_FILE} is not readable: {error}") from error
    if len(contents.files) > _MOST_FILES:
        raise _not_a_pack(path, f"it has {len(contents.files)} files, more than {_MOST_FILES}")
    for file in contents.files:
        if len(file.path) > _LONGEST_NAME or file.path.count("/") > _MOST_FOLDERS:
            raise _not_a_pack(path, f"a name is too long or in too many folders: {file.path[:80]!r}")
        if file.size < 0 or not 0 <= file.mtime_ns <= _LATEST_NS:
            raise _not_a_pack(path, f"{file.path} has the size {file.size} and the time {file.mtime_ns}")
        if PurePosixPath(file.path).parts[:1] == ("dataset",):
            raise _not_a_pack(path, f"{file.path} is a table, which readers make themselves")
    unsafe = [file.path for file in contents.files if not _is_inside(file.path)]
    if unsafe or not _RUN_ID.fullmatch(contents.run_id):
        raise _not_a_pack(path, f"it names a file outside the run's folder: {(unsafe or [contents.run_id])[0]!r}")
    return contents


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    plain = "\\" not in name and name.isprintable()
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and plain


def _extract(path: Path, archive: zipfile.ZipFile, run_id: str, file: PackedFile, folder: Path) -> None:
    target = folder / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    try:
        with archive.open(f"{run_id}/{file.path}") as member, target.open("xb") as output:
            while size <= file.size and (chunk := member.read(_CHUNK)):
                output.write(chunk)
                digest.update(chunk)
                size += len(chunk)
    except _BROKEN as error:
        raise _damaged(path, file, str(error)) from error
    if (size, digest.hexdigest()) != (file.size, file.sha256):
        raise _damaged(path, file, "its SHA-256 is not the one in pack.json")
    os.utime(target, ns=(file.mtime_ns, file.mtime_ns))


def _damaged(path: Path, file: PackedFile, why: str) -> PackError:
    return PackError(
        "pack_damaged",
        f"{path} is damaged at {file.path}: {why}. Copy the pack again from the machine that wrote it",
        path=path,
        file=file.path,
    )
