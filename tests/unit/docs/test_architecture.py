"""A package imports only the packages below it, by a statement or by name, as docs/concepts.md shows."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
(LAYERS,) = ([line.split(" | ") for line in one["layers"]] for one in CONTRACTS if one["type"] == "layers")
"""The packages of each layer, from the top. `make lint` checks the import statements too."""
FOLDERS = {
    path.name: path
    for pattern in ("*/src/gristmill*", "services/*/src/gristmill*")
    for path in ROOT.glob(pattern)
    if path.name.isidentifier()
}
PROGRAMS = {
    "services/trainer/src/gristmill_trainer/replay/fork.py": {"gristmill_env"},
    "services/env/src/gristmill_env/sandbox.py": {"gristmill_sandbox"},
}
"""Files that start another package as a process. `gristmill fork` starts the environment of the new run. An environment
without a sandbox service starts a sandbox."""
_NAME = re.compile(r"(gristmill\w*)(?:[.:]\S*)?")
"""A package, one of its modules, or an object in a module (`package.module:name`)."""


def below(package: str) -> set[str]:
    """Returns the package and those in the layers below."""
    (at,) = (number for number, layer in enumerate(LAYERS) if package in layer)
    return {package, *(name for layer in LAYERS[at + 1 :] for name in layer)}


def named(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each package of Gristmill that a module imports or names in a string."""
    nodes = list(ast.walk(tree))
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    in_texts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values[1:]}
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose | in_texts:
            names = [node.value]
        else:
            continue
        for match in filter(None, map(_NAME.fullmatch, names)):
            # "gristmill_" begins a name that is put together: it may become the name of any package.
            yield from ((node.lineno, name) for name in FOLDERS if name == match[1] or match[1] == "gristmill_")


def upward(path: Path, package: str) -> list[str]:
    """Returns the places of a file that name a package which is not below."""
    place = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    allowed = below(package) | PROGRAMS.get(place, set())
    return [f"{place}:{line} {name}" for line, name in named(ast.parse(path.read_text())) if name not in allowed]


def test_every_package_is_in_a_layer() -> None:
    assert sorted(name for layer in LAYERS for name in layer) == sorted(FOLDERS)


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted(FOLDERS))
def test_package_imports_only_what_is_below(package: str) -> None:
    files = sorted(FOLDERS[package].rglob("*.py"))
    assert files
    assert [place for path in files for place in upward(path, package)] == []


@pytest.mark.parametrize(
    "source",
    [
        "import gristmill_api.app",
        "from gristmill_cli import main",
        "def f():\n    from gristmill_env.serve import ServeLoop",
        "importlib.import_module('gristmill_trainer.doctor')",
        "importlib.import_module(f'gristmill_env.{name}')",
        "importlib.import_module(f'gristmill_{name}.doctor')",
        "PACKAGES = ('gristmill', 'gristmill_model')",
        "CodeProcess(target='gristmill_env.answers:checker')",
    ],
)
def test_upward_import_is_found(tmp_path: Path, source: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert upward(path, "gristmill_view")


@pytest.mark.parametrize(
    "source",
    [
        "from gristmill.folders import RunFolder",
        "from . import facts",
        "files('gristmill_view') / 'static'",
        "f'{__name__}:handler'",
        "Counter('gristmill_api_requests')",
        "'''gristmill_cli: the program'''",
        "f'{name} gristmill_env'",
        "raise ValueError('gristmill_env is not installed')",
    ],
)
def test_other_names_are_no_imports(tmp_path: Path, source: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert upward(path, "gristmill_view") == []


def test_picture_of_the_packages_has_the_layers_of_the_code() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text()
    (picture,) = re.findall(r"^## Packages\n.*?^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    rows = [line.split() for line in picture.splitlines() if "gristmill" in line]
    assert [row[1:] for row in rows] == LAYERS
    for folder, *packages in rows:
        assert {FOLDERS[name].relative_to(ROOT).parts[0] for name in packages} == {folder.rstrip("/")}


def test_examples_import_no_internals() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").rglob("*.py")]
    assert len(files) > 25
    uses = re.compile(r"^\s*(from|import) gristmill\.internal", re.MULTILINE)
    assert [str(path.relative_to(ROOT)) for path in files if uses.search(path.read_text())] == []
