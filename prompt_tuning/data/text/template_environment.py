"""The jinja2 environment of Hugging Face's chat templates."""

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

DATE_FUNCTION = "strftime_now"
"""Name of the function that gives a template the current date."""

GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that every template gets."""


def template_environment(format_date: Callable[[str], str]) -> "jinja2.Environment":
    """Creates the jinja2 environment of Hugging Face's chat templates.

    It matches `transformers.PreTrainedTokenizerBase.apply_chat_template`: trimmed
    blocks, loop controls, plain JSON and a sandbox.
    """
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_extension()],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals[DATE_FUNCTION] = format_date
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Formats JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _generation_extension() -> type:
    """Returns an extension that ignores the markers of `{% generation %}` blocks.

    The markers identify answers, which are found without them here.
    """
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def variables_read(
    environment: "jinja2.Environment", sources: Iterable[str]
) -> tuple[set[str], set[str]]:
    """Returns the names that templates read, and the ones to be set from outside.

    A template may read a name that it also sets itself. It is to be set from outside if
    the template tests whether it is defined, or has a default for it.
    """
    from jinja2 import meta, nodes

    read: set[str] = set()
    meant: set[str] = set()
    for source in sources:
        parsed = environment.parse(source)
        names = meta.find_undeclared_variables(parsed)
        named = list(parsed.find_all(nodes.Name))
        stored = {x.name for x in named if x.ctx == "store"}
        read |= {x.name for x in named} & environment.globals.keys()
        tested = {
            x.node.name
            for x in parsed.find_all((nodes.Test, nodes.Filter))
            if x.name in ("defined", "default") and isinstance(x.node, nodes.Name)
        }
        read |= names
        meant |= names - (stored - tested)
    return read, meant - environment.globals.keys() - set(GIVEN)
