"""Packed runs: the same answers from the file as from the folder, no secrets in it, and damage that is found."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import html
import json
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import httpx
import msgspec
import pytest
from tests.support.errors import raises
from tests.support.groups import make_group
from tests.support.ports import free_port
from tests.support.run_folder import CREATED, RunFolderWriter, synthetic_run
from tests.unit.view.recorded import LOGS, record

import gristmill
from gristmill.archive import read_archive
from gristmill.archive.run_file import read_run_file, write_run_file
from gristmill.internal import redaction
from gristmill_cli.local.processes import LocalStack, answers
from gristmill_cli.main import main
from gristmill_view import pack, sql
from gristmill_view.pack import PackContents, PackError, open_run, read_contents, unpack, write_pack
from gristmill_view.rollouts import build
from gristmill_view.secrets import secrets_of, short_secrets

SECRET = "sk-f81d4fae7dec11d0"
OTHER = 'pass"word&<1>'
QUERY = "SELECT * FROM rollouts ORDER BY group_id, sequence"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of this user, the remembered secrets and the current folder are the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(redaction, "_values", set())
    monkeypatch.setattr(redaction, "_pattern", None)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> RunFolderWriter:
    """A run with all kinds of files, a model and a checkpoint."""
    found = synthetic_run(tmp_path / "runs", steps=3, groups_per_step=4, group_size=2, tokens=20, run_id="quickstart")
    write_run_file(found.path, record(state="finished", created_at=CREATED / 1000))
    for name in ("model/model.safetensors", "checkpoints/step-000003/model.safetensors", "logs/trainer.log"):
        (found.path / name).parent.mkdir(parents=True, exist_ok=True)
        (found.path / name).write_bytes(LOGS["trainer"].encode())
    return found


def packed(run: RunFolderWriter, name: str = "run.gristmill.zip", *secrets: str) -> Path:
    target = run.path.parents[1] / name
    write_pack(target, run.path.name, [run.path], secrets=secrets)
    return target


def everything(path: Path) -> bytes:
    """Returns the bytes of all members, and of the segments' groups."""
    with zipfile.ZipFile(path) as archive:
        return b"".join(archive.read(name) for name in archive.namelist())


@pytest.mark.slow
def test_packed_run_answers_queries_as_its_folder(run: RunFolderWriter) -> None:
    before = sql(run.path, QUERY).to_pylist()
    assert len(before) > 20
    path = packed(run)
    shutil.rmtree(run.path)
    assert sql(path, QUERY).to_pylist() == before
    found = build(path)
    assert (found.trained, found.without_record, found.damaged) == (12, 0, [])
    assert [group.group_id for group in gristmill.read_rollouts(open_run(path).folders[0])] == sorted(
        {row["group_id"] for row in before if row["outcome"] == "trained"}
    )


@pytest.mark.slow
def test_commands_accept_a_packed_run(run: RunFolderWriter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", "runs", "pack", "quickstart", "--json"]) == 0
    contents = json.loads(capsys.readouterr().out)
    assert (contents["path"], contents["run_id"]) == ("quickstart.gristmill.zip", "quickstart")
    assert set(contents["left_out"]) == {"model", "checkpoints"}
    run.path.parent.rename("hidden")
    assert main(["sql", "SELECT count(*) AS n FROM steps", "--run", contents["path"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"n": 3}
    assert main(["rollouts", contents["path"], "--step", "2", "--json"]) == 0
    assert {json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()} == {2}
    assert main(["report", contents["path"], "--out", "report.html"]) == 0
    assert "quickstart" in Path("report.html").read_text()
    capsys.readouterr()
    assert main(["--runs", "other", "unpack", contents["path"]]) == 0
    assert capsys.readouterr().out.strip() == "other/quickstart"
    assert main(["--runs", "other", "unpack", contents["path"]]) == 1
    assert "error [run_exists]: " in capsys.readouterr().err


@pytest.mark.slow
def test_page_shows_a_packed_run(run: RunFolderWriter, tmp_path: Path) -> None:
    path, port = packed(run), free_port()
    shutil.rmtree(run.path)
    command = [sys.executable, "-m", "gristmill_cli", "--runs", "other", "view", str(path), "--port", str(port)]
    with LocalStack(lambda name, text: None) as stack:
        page = stack.start("view", command, {"XDG_CACHE_HOME": str(tmp_path / "cache")})
        stack.wait_until(page, lambda: answers(f"http://127.0.0.1:{port}/view/quickstart"), timeout=60)
        found = httpx.get(f"http://127.0.0.1:{port}/view/api/runs/quickstart").json()
    assert (found["run"], found["step"]) == ("quickstart", 3)


def test_proofs_and_the_checkpoint_of_a_fork_are_packed_unchanged(run: RunFolderWriter, tmp_path: Path) -> None:
    """The names of some values look secret, and a changed file would not have its hash any more."""
    named = {"state": {"access_key": "bos", "api_tokens": [1, 2]}, "url": "http://me:password@host"}
    names = ["origin/step-000002/config.json", "origin/step-000002/manifest.json", "origin/step-000002/weights.bin"]
    proofs = ["receipts.jsonl", "probes.json", "digests.jsonl", "fork.json"]
    for name in [*names, *proofs]:
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text(json.dumps(named if name in names else {"tokens": [1, 2], "version": "1.2"}))
    folder = unpack(packed(run, "p.zip", SECRET), tmp_path / "there")
    for name in [*names, *proofs]:
        assert (folder / name).read_bytes() == (run.path / name).read_bytes(), name


def test_unpacked_files_are_the_packed_files(run: RunFolderWriter, tmp_path: Path) -> None:
    os.utime(run.path / "metrics.jsonl", (1_700_000_000, 1_700_000_000))
    contents = read_contents(packed(run))
    folder = unpack(tmp_path / "run.gristmill.zip", tmp_path / "there")
    assert folder == tmp_path / "there" / "quickstart"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {file.path for file in contents.files}
    assert {"run.json", "metrics.jsonl", "rollouts/000001.gmz", "trained/000001.gmz", "logs/trainer.log"} < names
    for name in names:
        assert (folder / name).read_bytes() == (run.path / name).read_bytes(), name
    assert (folder / "metrics.jsonl").stat().st_mtime == 1_700_000_000
    assert not any(file.redacted for file in contents.files)
    assert packed(run, "again.zip").read_bytes() == (tmp_path / "run.gristmill.zip").read_bytes()


def test_file_counts_from_the_first_folder_that_has_it(run: RunFolderWriter, tmp_path: Path) -> None:
    trainer = tmp_path / "volume" / "quickstart"
    trainer.mkdir(parents=True)
    (trainer / "metrics.jsonl").write_text("{}\n")
    (trainer / "receipts.jsonl").write_text('{"state": "ok"}\n')
    write_pack(tmp_path / "p.zip", "quickstart", [trainer, run.path])
    folder = unpack(tmp_path / "p.zip", tmp_path / "there")
    assert (folder / "metrics.jsonl").read_text() == "{}\n"
    assert (folder / "receipts.jsonl").is_file()
    assert (folder / "run.json").is_file()


@pytest.mark.slow
def test_tokenizer_of_the_model_travels_with_a_run_without_records(run: RunFolderWriter, tmp_path: Path) -> None:
    tokenizer = run.path / "trained" / "tokenizer" / "tokenizer.json"
    texts = sql(run.path, "SELECT completion FROM rollouts ORDER BY group_id, sequence").to_pylist()
    tokenizer = tokenizer.rename(tmp_path / "tokenizer.json")
    shutil.rmtree(run.path / "dataset")
    write_pack(tmp_path / "p.zip", "quickstart", [run.path], tokenizer=tokenizer)
    found = sql(tmp_path / "p.zip", "SELECT completion FROM rollouts ORDER BY group_id, sequence").to_pylist()
    assert found == texts


def test_secrets_of_a_machine_come_from_variables_env_file_and_files(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(
        "# HF_TOKEN=not-this-one\nHF_TOKEN='hf-of-env-file'\nMODEL=tiny-and-long\n"
        "export WANDB_API_KEY=key-before-comment # a comment\nPIN_SECRET=1234\n"
        "OPENAI_API_KEY=overridden-by-the-shell\n"
    )
    (tmp_path / ".secrets").mkdir()
    (tmp_path / ".secrets" / "trainer").write_text("token-of-trainer\n")
    (tmp_path / ".secrets" / "users.acl").write_text("user default on >password-in-acl +@all\n")
    (tmp_path / "judge").write_text("token-of-judge\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password key-of-wandb\n")
    hub = tmp_path / "home" / ".cache" / "huggingface"
    hub.mkdir(parents=True)
    (hub / "token").write_text("token-of-hub")
    (hub / "stored_tokens").write_text("[work]\nhf_token = token-of-work\n")
    environ = {
        "OPENAI_API_KEY": SECRET, "PWD": "/home/me/gristmill", "HOME": str(tmp_path / "home"), "API_KEY": "short",
        "GRISTMILL_API_TOKEN_FILE": "judge", "GRISTMILL_RUNS_DIR": "/somewhere/runs",
    }  # fmt: skip
    assert set(secrets_of(environ, tmp_path)) == {
        SECRET, "hf-of-env-file", "token-of-trainer", "token-of-judge", "token-of-hub", "token-of-work",
        "key-of-wandb",
        "key-before-comment",
        "overridden-by-the-shell",
    }  # fmt: skip


def test_hubs_token_is_where_the_hub_looks_for_it(tmp_path: Path) -> None:
    for variable, folder in (("XDG_CACHE_HOME", "cache/huggingface"), ("HF_HOME", "hub")):
        place = tmp_path / folder
        place.mkdir(parents=True)
        (place / "token").write_text(f"token-of-{variable}")
        value = str(place if variable == "HF_HOME" else place.parent)
        assert secrets_of({variable: value, "HOME": str(tmp_path)}, tmp_path) == [f"token-of-{variable}"]


def test_secrets_in_urls_count_in_every_variable(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("MONGO_URI=mongodb+srv://u:of-mongo%2Fdb@h/db\nMODEL=tiny\n")
    environ = {
        "DATABASE_URL": "postgres://u:S3cret-of-db@h:5432/db", "SHORT_URL": "redis://:S3cret@h",
        "JUDGE_URL": "https://h/v1?model=m&api_key=key-of-judge", "HOME": str(tmp_path),
        "PLAIN_URL": "https://example.org/v1?model=a-long-name",
    }  # fmt: skip
    expected = {"S3cret-of-db", "key-of-judge", "of-mongo%2Fdb", "of-mongo/db"}
    assert set(secrets_of(environ, tmp_path)) == expected
    assert short_secrets(environ, tmp_path) == ["SHORT_URL"]


def test_secrets_that_are_too_short_are_named(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("PIN_SECRET=1234\nHF_TOKEN=hf-of-env-file\n")
    assert short_secrets({"API_KEY": "short", "HOME": str(tmp_path)}, tmp_path) == ["API_KEY", "PIN_SECRET"]


def test_pack_has_no_secrets(run: RunFolderWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.setenv("DB_PASSWORD", OTHER)
    monkeypatch.setenv("PWD", str(run.path))
    log = (
        f"POST https://me:{SECRET}x@judge/v1?api_key=abcdef {OTHER}\nAuthorization: Bearer abcdefgh12345\n{run.path}\n"
    )
    (run.path / "logs" / "env.log").write_text(log + json.dumps({"password": OTHER}))
    (run.path / "report.html").write_text(f"<p>{html.escape(OTHER)}</p>")
    (run.path / "receipts.jsonl").write_text(json.dumps({"why": f'{OTHER}?token=zzz"', "key": "B", "x": float("nan")}))
    with (run.path / "receipts.jsonl").open("a") as file:  # A line that is nested too deep, and the name of a value.
        file.write("\n" + "[" * 100_000 + "]" * 100_000 + "\n" + json.dumps({f"https://me:{SECRET}y@judge/": 1}))
    (run.path / "probes.json").write_text(json.dumps({"judge": {"api_key": "qwertyuiop"}, "url": SECRET}))
    path = packed(run, "p.zip", *secrets_of(dict(os.environ), run.path.parents[1]))
    found = everything(path)
    for secret in (
        SECRET,
        OTHER,
        json.dumps(OTHER)[1:-1],
        html.escape(OTHER),
        "abcdef",
        "qwertyuiop",
        "abcdefgh12345",
        "zzz",
    ):
        assert secret.encode() not in found, secret
    folder = unpack(path, run.path.parents[1] / "there")
    assert str(run.path) in (folder / "logs" / "env.log").read_text(), "PWD is a path, not a password"
    receipt = json.loads((folder / "receipts.jsonl").read_text().partition("\n")[0])
    assert receipt["key"] == "B", "a column of data keeps its value"
    assert receipt["why"].startswith("***")
    assert json.loads((folder / "probes.json").read_text()) == {"judge": {"api_key": "***"}, "url": "***"}
    changed = {file.path for file in read_contents(path).files if file.redacted}
    assert changed == {"logs/env.log", "receipts.jsonl", "report.html", "probes.json"}
    assert read_run_file(folder / "run.json").run_id == "quickstart"


WRITTEN: dict[str, Callable[[str], bytes]] = {
    "plain": str.encode,
    "json": lambda text: json.dumps(text).encode(),
    "html": lambda text: html.escape(text).encode(),
    "url": lambda text: quote(text, safe="").encode(),
    "form": lambda text: quote_plus(text).encode(),
    "repr": lambda text: repr(text).encode(),
    "utf-16": lambda text: text.encode("utf-16"),
    "base64": lambda text: base64.b64encode(text.encode()),
    "basic": lambda text: base64.b64encode(f"a:{text}".encode()),
    "url base64": lambda text: base64.urlsafe_b64encode(f"ab{text}xyz".encode()),
    "hex": lambda text: text.encode().hex().encode(),
    "gzip": lambda text: gzip.compress(f"key {text}".encode()),
    "at a border": lambda text: b"x" * ((1 << 20) - 5) + text.encode(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["notes.py", "a.LOG", "a.log.1", "nothing", "x.tsv", "origin/step-000001/a.json"])
@pytest.mark.parametrize("form", WRITTEN)
def test_file_with_a_secret_ends_the_pack(run: RunFolderWriter, tmp_path: Path, name: str, form: str) -> None:
    path = run.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"first\n" + WRITTEN[form](OTHER + "é") if form != "gzip" else WRITTEN[form](OTHER + "é"))
    with raises(PackError, "secret_in_file"):
        write_pack(tmp_path / "p.zip", "quickstart", [run.path], secrets=[OTHER + "é"], include=["*"])
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


@pytest.mark.slow
@pytest.mark.parametrize("form", WRITTEN)
def test_log_with_a_secret_is_masked_or_ends_the_pack(run: RunFolderWriter, tmp_path: Path, form: str) -> None:
    (run.path / "logs" / "env.log").write_bytes(WRITTEN[form](OTHER) + b"\n")
    if form in ("utf-16", "gzip"):
        with pytest.raises(PackError):
            write_pack(tmp_path / "p.zip", "quickstart", [run.path], secrets=[OTHER])
    else:
        write_pack(tmp_path / "p.zip", "quickstart", [run.path], secrets=[OTHER])
        assert WRITTEN[form](OTHER) not in everything(tmp_path / "p.zip")


def test_other_files_are_packed_if_they_are_named(run: RunFolderWriter, tmp_path: Path) -> None:
    (run.path / "notes").mkdir()
    for name in ("notes/a.md", "b.py", "logs/env.log.1"):
        (run.path / name).write_text("text")
    (run.path / "packed.bin").write_bytes(b"PK\x03\x04")
    (run.path / "logs" / "linked.log").symlink_to("/etc/hostname")
    found = write_pack(tmp_path / "p.zip", "quickstart", [run.path], include=["notes/*.md"])
    names = {file.path for file in found.files}
    assert names & {"notes/a.md", "b.py", "logs/env.log.1", "logs/linked.log", "packed.bin"} == {"notes/a.md"}
    assert found.left_out.keys() >= {"b.py", "logs/env.log.1", "packed.bin"}
    with raises(PackError, "file_not_searched", path=run.path / "packed.bin"):
        write_pack(tmp_path / "q.zip", "quickstart", [run.path], include=["*.bin"])


def test_zip_file_is_packed_if_it_compresses_nothing(run: RunFolderWriter, tmp_path: Path) -> None:
    """torch.save writes such a file, and a fork has one in origin/."""
    kept = run.path / "origin" / "step-000002" / "optimizer.pt"
    kept.parent.mkdir(parents=True)
    for compression, content in ((zipfile.ZIP_STORED, b"state"), (zipfile.ZIP_STORED, OTHER.encode())):
        with zipfile.ZipFile(kept, "w", compression) as file:
            file.writestr("data", content)
        if content == b"state":
            found = write_pack(tmp_path / "p.zip", "quickstart", [run.path], secrets=[OTHER])
            assert str(kept.relative_to(run.path)) in {file.path for file in found.files}
        else:
            with pytest.raises(PackError):
                write_pack(tmp_path / "q.zip", "quickstart", [run.path], secrets=[OTHER])
    with zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data", b"state")
    with raises(PackError, "file_not_searched", path=kept):
        write_pack(tmp_path / "r.zip", "quickstart", [run.path])


def test_quarantined_group_with_a_secret_is_an_error(run: RunFolderWriter, tmp_path: Path) -> None:
    aside = run.path / "aside" / "step-000002.1.groups"
    aside.parent.mkdir()
    aside.write_bytes(f"\x91\xc4 x-key {SECRET}".encode("latin-1"))
    with raises(PackError, "secret_in_group", path=aside):
        packed(run, "p.zip", SECRET)
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_group_with_a_secret_is_an_error_and_leaves_no_file(run: RunFolderWriter, tmp_path: Path) -> None:
    group = make_group("g00000099", "quickstart", lengths=((3, 4),))
    fields = {name: getattr(group, name) for name in type(group).__dataclass_fields__}
    run.archive(gristmill.TrajectoryGroup(**{**fields, "meta": {"headers": f"x-key {SECRET}"}}))
    with raises(PackError, "secret_in_group", group="g00000099"):
        packed(run, "p.zip", SECRET)
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_group_that_comes_after_the_search_is_not_packed(
    run: RunFolderWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group("g00000099", "quickstart", lengths=((3, 4),))
    fields = {name: getattr(group, name) for name in type(group).__dataclass_fields__}
    late = gristmill.TrajectoryGroup(**{**fields, "meta": {"headers": f"x-key {SECRET}"}})
    search = pack._refuse_in_groups

    def then_appended(path: Path, words: Any) -> int:
        end = search(path, words)
        if path.suffix == ".gmz":
            run.archive(late)
        return end

    monkeypatch.setattr(pack, "_refuse_in_groups", then_appended)
    folder = unpack(packed(run, "p.zip", SECRET), tmp_path / "there")
    ids = [group.group_id for group in read_archive(folder / "rollouts")]
    assert ids
    assert "g00000099" not in ids


@pytest.mark.parametrize("function", ["_add", "_refuse_in_groups"])
def test_file_that_is_removed_meanwhile_is_left_out(
    run: RunFolderWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    original, lost = getattr(pack, function), run.path / "rollouts" / "000001.gmz"

    def removes(*arguments: Any) -> Any:
        if lost in arguments:
            lost.unlink()
        return original(*arguments)

    monkeypatch.setattr(pack, function, removes)
    path = packed(run)
    contents = read_contents(path)
    assert contents.left_out["rollouts/000001.gmz"] == 0
    with zipfile.ZipFile(path) as archive:
        names = {f"quickstart/{file.path}" for file in contents.files}
        assert {*archive.namelist()} == names | {"pack.json"}
    assert unpack(path, tmp_path / "other").is_dir()


def test_pack_of_an_open_run_ends_in_a_torn_line(run: RunFolderWriter, tmp_path: Path) -> None:
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "policy_ver')
    folder = unpack(packed(run), tmp_path / "there")
    assert [row["step"] for row in open_run(folder).metrics()] == [1, 2, 3]


def rewritten(path: Path, member: str, content: bytes) -> Path:
    """Returns a copy of a pack with another content of one member, as a program that knows no hashes makes it."""
    copy = path.with_name("rewritten.zip")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(copy, "w") as new:
        for name in old.namelist():
            new.writestr(name, content if name == member else old.read(name))
    return copy


def test_damaged_pack_names_the_file_and_leaves_no_folder(run: RunFolderWriter, tmp_path: Path) -> None:
    path = packed(run)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("quickstart/rollouts/000001.gmz").header_offset + 400
    content[at] ^= 1
    torn = path.with_name("torn.zip")
    torn.write_bytes(content)
    with raises(PackError, "pack_damaged", file="rollouts/000001.gmz"):
        unpack(torn, tmp_path / "there")
    with raises(PackError, "pack_damaged", file="metrics.jsonl"):
        unpack(rewritten(path, "quickstart/metrics.jsonl", b"{}\n"), tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []
    half = path.with_name("half.zip")
    half.write_bytes(content[: len(content) // 2])
    with raises(PackError, "not_a_pack", path=half):
        open_run(half)


@pytest.mark.parametrize("name", ["../../outside", "/outside", "a/../../outside", "..\\outside"])
def test_pack_cannot_write_outside_its_folder(run: RunFolderWriter, tmp_path: Path, name: str) -> None:
    path = packed(run)
    contents = read_contents(path)
    first = msgspec.structs.replace(contents.files[0], path=name)
    other = msgspec.structs.replace(contents, files=(first,))
    with raises(PackError, "not_a_pack"):
        unpack(rewritten(path, pack.CONTENTS_FILE, msgspec.json.encode(other)), tmp_path / "there")
    named = msgspec.structs.replace(contents, run_id="..")
    with raises(PackError, "not_a_pack"):
        unpack(rewritten(path, pack.CONTENTS_FILE, msgspec.json.encode(named)), tmp_path / "there")
    assert not (tmp_path / "outside").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"mtime_ns": 10**30},
        {"mtime_ns": -(10**18)},
        {"size": -1},
        {"path": "a/" * 2000 + "b"},
        {"path": "a/" * 17 + "b"},
        {"path": "a" * 600},
        {"path": "a\u0000b"},
        {"path": "a\nb"},
        {"path": "dataset/part-000001.parquet"},
        {"path": ""},
        {"path": "."},
    ],
    ids=str,
)
def test_absurd_pack_is_an_error_with_a_code(run: RunFolderWriter, tmp_path: Path, change: dict[str, object]) -> None:
    found = json.loads(msgspec.json.encode(read_contents(packed(run))))
    found["files"][0] |= change
    with zipfile.ZipFile("absurd.zip", "w") as archive:
        archive.writestr("pack.json", json.dumps(found))
        with contextlib.suppress(ValueError):
            archive.writestr(f"quickstart/{found['files'][0]['path']}", "x")
    with raises(PackError, "not_a_pack"):
        unpack(Path("absurd.zip"), tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.slow
def test_pack_that_becomes_very_large_needs_a_word(run: RunFolderWriter, tmp_path: Path) -> None:
    contents = read_contents(packed(run))
    zeros = bytes(80 << 20)
    large = pack.PackedFile(path="logs/a.log", size=len(zeros), sha256=hashlib.sha256(zeros).hexdigest(), mtime_ns=0)
    path = tmp_path / "large.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pack.json", msgspec.json.encode(msgspec.structs.replace(contents, files=(large,))))
        archive.writestr("quickstart/logs/a.log", zeros)
    with raises(PackError, "pack_too_large"):
        unpack(path, tmp_path / "there")
    with raises(PackError, "pack_too_large"):
        open_run(path)
    with raises(PackError, "pack_too_large"):
        unpack(path, tmp_path / "there", max_size=(80 << 20) - 1)
    assert main(["--runs", "there", "unpack", str(path), "--max-size", str(100 << 20)]) == 0
    contents = msgspec.structs.replace(contents, files=(msgspec.structs.replace(large, size=1 << 60),))
    with zipfile.ZipFile("full.zip", "w") as archive:
        archive.writestr("pack.json", msgspec.json.encode(contents))
    with raises(PackError, "pack_no_space"):
        unpack(Path("full.zip"), tmp_path / "full", max_size=1 << 61)


def test_cache_of_packs_expires(run: RunFolderWriter, tmp_path: Path) -> None:
    path = packed(run)
    old, used = (tmp_path / "cache" / "gristmill" / "packs" / name for name in ("old", "used"))
    for folder, age in ((old, 40), (used, 10)):
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age * 86400,) * 2)
    open_run(path)
    assert (old.exists(), used.exists()) == (False, True)
    assert len(list(old.parent.iterdir())) == 2


def test_newer_format_and_existing_files_are_errors(run: RunFolderWriter, tmp_path: Path) -> None:
    path = packed(run)
    newer = PackContents(format=2, run_id="quickstart", files=(), left_out={})
    with raises(PackError, "pack_format", format=2):
        read_contents(rewritten(path, pack.CONTENTS_FILE, msgspec.json.encode(newer)))
    with raises(PackError, "pack_exists", path=path):
        packed(run)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a", "b")
    with raises(PackError, "not_a_pack"):
        unpack(tmp_path / "other.zip", tmp_path / "there")
    with raises(PackError, "pack_unreadable"):
        unpack(tmp_path / "missing.zip", tmp_path / "there")
