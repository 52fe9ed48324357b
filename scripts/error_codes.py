"""Reads the codes of errors from the source of the packages, for docs/errors.md and for a test.

An error is a call of a subclass of GristmillError, or of PydanticCustomError for a setting. The script imports none of
the packages and reads their files as text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "gristmill": ROOT / "sdk" / "src",
    "gristmill_view": ROOT / "view" / "src",
    "gristmill_cli": ROOT / "cli" / "src",
    "gristmill_api": ROOT / "services" / "api" / "src",
    "gristmill_env": ROOT / "services" / "env" / "src",
    "gristmill_model": ROOT / "services" / "model" / "src",
    "gristmill_trainer": ROOT / "services" / "trainer" / "src",
}
OF_THE_API = {"ApiError", "ApiProblem"}
"""These classes carry the codes of the trajectory API's answers, which docs/api.md lists."""
SETTING = "PydanticCustomError"
_CODE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True, order=True)
class Raised:
    """One place that makes an error."""

    package: str
    code: str
    """Empty if the place passes no literal code in snake_case."""
    kind: str
    message: str
    place: str
    """File and line."""


@cache
def collect() -> list[Raised]:
    """Returns all places in the packages that make an error, sorted by package and code."""
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for folder in PACKAGES.values()
        for path in sorted(folder.rglob("*.py"))
    }
    kinds = _kinds(trees.values())
    found = (
        raised
        for package, folder in PACKAGES.items()
        for path, tree in trees.items()
        if path.is_relative_to(folder)
        for raised in _raised(tree, package, path, kinds)
    )
    return sorted(found)


def table_rows() -> list[list[str]]:
    """Returns the rows for docs/errors.md: package, code, class and message. Equal rows become one row."""
    rows = {(raised.package, raised.code, raised.kind, raised.message): None for raised in collect() if raised.code}
    return [
        [package, f"`{code}`", "(a setting)" if kind == SETTING else f"`{kind}`", message]
        for package, code, kind, message in rows
    ]


def _kinds(trees: Iterable[ast.Module]) -> dict[str, bool]:
    """Maps the name of each GristmillError subclass to whether the class passes the code to its base class."""
    classes: dict[str, ast.ClassDef] = {}
    for tree in trees:
        classes |= {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    kinds = {"GristmillError"}
    while new := {name for name, node in classes.items() if name not in kinds and _bases(node) & kinds}:
        kinds |= new
    return {name: any(True for _ in _codes_of_class(classes[name])) for name in kinds if name in classes}


def _bases(node: ast.ClassDef) -> set[str]:
    return {base.id for base in node.bases if isinstance(base, ast.Name)}


def _codes_of_class(node: ast.ClassDef) -> Iterator[ast.Call]:
    """Yields calls such as super().__init__("inflated_too_large", ...)."""
    for call in ast.walk(node):
        if (
            isinstance(call, ast.Call)
            and ast.unparse(call.func) == "super().__init__"
            and call.args
            and isinstance(call.args[0], ast.Constant)
        ):
            yield call


def _raised(tree: ast.Module, package: str, path: Path, kinds: dict[str, bool]) -> Iterator[Raised]:
    def entry(call: ast.Call, kind: str) -> Raised:
        message = _template(call.args[1], texts) if len(call.args) > 1 else ""
        return Raised(package, _code(call), kind, message, f"{path.relative_to(ROOT)}:{call.lineno}")

    texts = _texts(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in kinds:
            yield from (entry(call, node.name) for call in _codes_of_class(node))
        for call, kind in _calls(node, kinds):
            if kind not in OF_THE_API and not _passes_on(call):
                yield entry(call, kind)


def _texts(tree: ast.Module) -> dict[str, str]:
    """Returns the module's string constants by name."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _calls(node: ast.AST, kinds: dict[str, bool]) -> Iterator[tuple[ast.Call, str]]:
    """Yields the calls that make an error, each with the name of the error's class.

    A function may take the class as an argument, `kind: type[TrainerError]`. A call `kind(...)` in it counts, too.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
        if name == SETTING or (name in kinds and not kinds[name]):
            yield node, name
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            match = re.fullmatch(r"type\[(\w+)\]", ast.unparse(argument.annotation)) if argument.annotation else None
            if match and match[1] in kinds:
                for call in ast.walk(node):
                    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == argument.arg:
                        yield call, match[1]


def _passes_on(call: ast.Call) -> bool:
    """Returns whether the call passes another error's code on: `PublishError(error.code, ...)`."""
    return bool(call.args) and isinstance(call.args[0], ast.Attribute) and call.args[0].attr == "code"


def _code(call: ast.Call) -> str:
    """Returns the literal code, or the default in `report.code or "job_failed"`. For anything else, returns ""."""
    first = call.args[0] if len(call.args) > 1 else None
    if isinstance(first, ast.BoolOp) and isinstance(first.op, ast.Or):
        first = first.values[-1]
    literal = first.value if isinstance(first, ast.Constant) else None
    return literal if isinstance(literal, str) and _CODE.fullmatch(literal) else ""


def _template(node: ast.expr, texts: Mapping[str, str]) -> str:
    """Returns the message with the name of each value in braces and an ellipsis for each longer expression."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part, texts) for part in node.values)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "strip":
        return _template(node.func.value, texts).strip()
    value = ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node)
    if value in texts:
        return texts[value]
    return f"{{{value.removeprefix('self.').lstrip('_')}}}" if re.fullmatch(r"[\w.]+", value) else "…"
