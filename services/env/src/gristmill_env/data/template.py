"""`prompt_template`: the user's message as a Jinja template over a row's columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox

from gristmill.settings.nearest import did_you_mean
from gristmill_env.errors import DatasetError

# Sandboxed: a configuration may come from a third party, and an unrestricted template reaches any attribute.
_JINJA = jinja2.sandbox.ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
)


class PromptTemplate:
    """Renders a row's prompt."""

    def __init__(self, source: str, columns: Collection[str]) -> None:
        """Raises DatasetError when the template is broken or names a column that is not there."""
        try:
            names = jinja2.meta.find_undeclared_variables(_JINJA.parse(source)) - set(_JINJA.globals)
            self._template = _JINJA.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DatasetError(
                "template_syntax", f"prompt_template, line {error.lineno}: {error.message}", line=error.lineno
            ) from error
        for name in sorted(names - set(columns)):
            raise DatasetError(
                "field_missing",
                f"prompt_template names '{name}'; the rows have {', '.join(columns)}.{did_you_mean(name, columns)}",
                key="prompt_template",
                field=name,
                known=list(columns),
            )

    def render(self, row: Mapping[str, Any]) -> str:
        """Returns the prompt. Raises DatasetError when the row's values do not fit the template."""
        try:
            return self._template.render(row)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise DatasetError("template_failed", f"prompt_template fails: {error}") from error
