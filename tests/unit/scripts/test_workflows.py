"""The workflows of GitHub run targets that exist, and pin each action to a commit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = {*re.findall(r"^([a-z0-9-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)}


def jobs(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load(path.read_text())["jobs"].values())


def targets(job: dict[str, Any]) -> set[str]:
    """Returns the targets of make that a job runs, for each entry of its matrix."""
    ran = "\n".join(step.get("run", "") for step in job["steps"])
    named = set(re.findall(r"^\s*make (.+?)\s*$", ran, re.MULTILINE))
    matrix = [entry["target"] for entry in job.get("strategy", {}).get("matrix", {}).get("include", [])]
    return {one for name in named for one in (matrix if name == "${{ matrix.target }}" else name.split())}


def test_workflows_run_targets_that_exist() -> None:
    found = {path.name: {one for job in jobs(path) for one in targets(job)} for path in WORKFLOWS}
    assert {name: sorted(ran - TARGETS) for name, ran in found.items() if ran - TARGETS} == {}
    assert {"lint", "docs", "types", "unit", "browser", "integration", "e2e"} <= found["ci.yml"]
    assert found["nightly.yml"] == {"test-long", "resilience"}
    assert found["release.yml"] == {"docs", "wheels"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_by_its_commit(path: Path) -> None:
    used = [step["uses"] for job in jobs(path) for step in job["steps"] if "uses" in step]
    assert used
    assert [use for use in used if not re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", use)] == []


def test_release_publishes_only_where_a_variable_allows_it() -> None:
    wheels, images, docs = jobs(ROOT / ".github" / "workflows" / "release.yml")
    publishing = [step for step in wheels["steps"] if re.search("publish|release create", step.get("run", ""))]
    assert [step["if"] for step in publishing] == ["vars.PUBLISH_WHEELS == 'true'"] * 2
    assert images["if"] == "vars.IMAGE_REGISTRY != ''"
    publishing = [step for step in docs["steps"] if "ghp-import" in step.get("run", "")]
    assert [step["if"] for step in publishing] == ["vars.PUBLISH_DOCS == 'true'"]


def test_release_pushes_every_image_under_the_name_that_compose_pulls() -> None:
    """`docker compose push` takes the names of compose.yaml, so the two cannot differ."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    built, pushed = (re.findall(rf"docker compose --profile sandbox {verb} (.*)", text) for verb in ("build", "push"))
    images = {path.parent.name for path in (ROOT / "services").glob("*/Dockerfile")}
    assert [set(line.split()) for line in (*built, *pushed)] == [images, images]
    named = re.search(r"IMAGE_REGISTRY=HOST/OWNER`.*`HOST/OWNER/(.+):VERSION`", (ROOT / "CONTRIBUTING.md").read_text())
    pulled = re.findall(r"image: .*/\}(gristmill/\w+):", (ROOT / "compose.yaml").read_text())
    assert named is not None
    assert {*pulled} == {named[1].replace("SERVICE", name) for name in images - {"sandbox"}}
