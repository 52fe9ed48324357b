"""Metadata of the seven packages: one version, the same license, authors and Python versions, and their images."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from packaging.requirements import Requirement

import gristmill
from secure import ROOT

SERVICES = sorted(path.parent for path in (ROOT / "services").glob("*/pyproject.toml"))
PACKAGES = [ROOT / "sdk", ROOT / "view", ROOT / "cli", *SERVICES]
FOLDERS = [str(path.relative_to(ROOT)) for path in PACKAGES]


def project(folder: str | Path) -> dict[str, Any]:
    content = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
    table: dict[str, Any] = content["project"]
    return table


def test_rooms_and_services_are_packages() -> None:
    assert [project(folder)["name"] for folder in FOLDERS] == [
        "gristmill",
        "gristmill-view",
        "gristmill-cli",
        "gristmill-api",
        "gristmill-env",
        "gristmill-model",
        "gristmill-sandbox",
        "gristmill-trainer",
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_package_is_built_with_the_version_of_the_sdk(folder: str) -> None:
    assert "version" not in project(folder)
    assert ProjectMetadata(str(ROOT / folder), PluginManager()).version == gristmill.__version__


@pytest.mark.parametrize("key", ["license", "authors", "requires-python"])
def test_packages_agree_in_their_metadata(key: str) -> None:
    values = [project(folder)[key] for folder in FOLDERS]
    assert values == [values[0]] * len(FOLDERS)


@pytest.mark.parametrize("service", [path.name for path in SERVICES])
def test_image_has_the_packages_that_its_service_depends_on(service: str) -> None:
    folders = {project(folder)["name"]: folder for folder in FOLDERS}
    needed = {Requirement(text).name for text in project(f"services/{service}")["dependencies"]} & folders.keys()
    dockerfile = (ROOT / "services" / service / "Dockerfile").read_text()
    (wheels,) = re.findall(r"^RUN pip wheel (.*)$", dockerfile, re.MULTILINE)
    expected = {folders[name] for name in needed} | {f"services/{service}"}
    assert set(re.findall(r"/src/(\S+)", wheels)) == expected
    assert set(re.findall(r"^COPY (\S+) /src/\1$", dockerfile, re.MULTILINE)) == expected
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    assert {Path(folder).parts[0] for folder in expected} <= sent
