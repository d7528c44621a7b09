"""Chat templates of Hugging Face models: Jinja in the dialect that model makers write for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from agentflow.errors import BadRequest

__all__ = ["CHATML", "ChatTemplate"]

#: Used for models that bring no template.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class ChatTemplate:
    """A model's chat template. ``source`` is Jinja text, or a list of ``{"name", "template"}``.

    Of several templates, ``tool_use`` serves calls with tools and ``default`` the rest. ``variables`` are
    the special tokens that templates name, such as ``bos_token``.
    """

    def __init__(self, source: Any, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)
        if isinstance(source, Mapping):
            named = {str(k): str(v) for k, v in source.items()}
        elif isinstance(source, list):
            named = {str(t["name"]): str(t["template"]) for t in source}
        else:
            named = {"default": source if isinstance(source, str) and source else CHATML}
        default = named.get("default") or next(iter(named.values()))
        self._default = _compile(default)
        self._with_tools = _compile(named["tool_use"]) if "tool_use" in named else self._default

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The messages as text. Raises :class:`~agentflow.errors.BadRequest` when the template refuses them."""
        from jinja2 import TemplateError

        template = self._with_tools if tools else self._default
        try:
            return str(
                template.render(
                    messages=messages,
                    tools=tools or None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._variables,
                )
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}") from error


def _compile(source: str) -> Any:
    """A compiled template, in a sandbox: templates come with model files and are not to be trusted."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what a model writes, for training; rendering ignores it."""

        tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
