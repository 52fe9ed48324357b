"""`prompt_template`: the user's message as a Jinja template over a row's columns."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from decimal import Decimal
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes

from gristmill.internal.settings import did_you_mean
from gristmill_env.errors import DatasetError
from gristmill_env.values import NotTextError, half_characters, message_of, text_of


def _written(value: object) -> Any:
    """Returns the text that a template writes for a value. Raises NotTextError for None, NaN, lists and so on."""
    return value if isinstance(value, jinja2.Undefined) else text_of(value)


class _NotText:
    """A value that a template may test. Writing it, also through a filter, raises NotTextError."""

    def __str__(self) -> str:
        raise NotTextError

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        raise NotTextError


class _NotFinite(_NotText, float):
    """NaN or an infinity."""


class _Null(_NotText):
    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _Null)

    __hash__ = object.__hash__


def _for_template(value: Any) -> Any:
    """Returns a row's value as a template gets it. A whole float is an integer, which every filter writes as "72"."""
    if value is None:
        return _Null()
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            return _NotFinite(value)
        return int(value) if text_of(value).lstrip("-").isdecimal() else value
    if isinstance(value, Mapping):
        return {key: _for_template(inner) for key, inner in value.items()}
    return [_for_template(inner) for inner in value] if isinstance(value, list) else value


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, allow_nan=False, default=_of_null, **options)


def _of_null(value: Any) -> None:
    if not isinstance(value, _Null):
        raise NotTextError


def _join(values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Replaces Jinja's `join`, which writes None as "None" and NaN as "nan"."""
    if attribute is not None:
        values = map(jinja2.filters.make_attrgetter(_JINJA, attribute), values)
    return d.join(map(_written, values))


# Sandboxed: a configuration may come from a third party, and an unrestricted template reaches any attribute.
_JINJA = jinja2.sandbox.ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    finalize=_written,
)  # fmt: skip
_JINJA.filters |= {"join": _join, "string": _written}
_JINJA.tests["none"] = lambda value: value is None or isinstance(value, _Null)
_JINJA.policies["json.dumps_function"] = _to_json


class PromptTemplate:
    """The template of a run's prompts."""

    def __init__(self, source: str, columns: Collection[str]) -> None:
        """Raises DatasetError when the template is broken or names a column that is not there."""
        try:
            parsed = _JINJA.parse(source)
            names = jinja2.meta.find_undeclared_variables(parsed) - set(_JINJA.globals)
        except jinja2.TemplateSyntaxError as error:
            raise DatasetError(
                "template_syntax", f"prompt_template, line {error.lineno}: {error.message}", line=error.lineno
            ) from error
        for concat in parsed.find_all(nodes.Concat):  # `a ~ b` writes its values without `finalize`
            concat.nodes = [
                nodes.Filter(part, "string", [], [], None, None, lineno=concat.lineno) for part in concat.nodes
            ]
        self._template = _JINJA.from_string(parsed)
        self._names = sorted(names)
        for name in sorted(names - set(columns)):
            raise DatasetError(
                "field_missing",
                f"prompt_template names '{name}'; the rows have {', '.join(columns)}.{did_you_mean(name, columns)}",
                key="prompt_template",
                field=name,
                known=list(columns),
            )

    def render(self, row: Mapping[str, Any], index: int, label: str) -> str:
        """Returns the prompt. `index` and `label`: of the row and its data set, for messages.

        Raises DatasetError when the row's values do not fit the template.
        """
        where = f"row {index} of {label}"
        try:
            prompt = self._template.render(_for_template(row))
        except NotTextError as error:
            name, reason = self._without_text(row)
            text = f"prompt_template writes {reason or error} of {where}; it must be text (column {name})"
            raise DatasetError("not_text", text, row=index, field=name) from error
        except Exception as error:  # a template calls methods of any value, with any error
            text = f"prompt_template fails for {where}: {type(error).__name__}: {message_of(error)}"
            raise DatasetError("template_failed", text, row=index, field="prompt_template") from error
        if any(True for _ in half_characters(prompt)):
            text = f"prompt_template writes half a character for {where}"
            raise DatasetError("half_character", text, row=index, field="prompt_template")
        return prompt

    def _without_text(self, row: Mapping[str, Any]) -> tuple[str, NotTextError | None]:
        """Returns the template's first column whose value is not text, and its error; "prompt_template" if all are."""
        for name in self._names:
            try:
                text_of(row.get(name))
            except NotTextError as error:
                return name, error
        return "prompt_template", None
