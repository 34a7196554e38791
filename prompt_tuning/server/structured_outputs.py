"""Request fields that constrain the text of an answer."""

import json
import re
from typing import Any

from prompt_tuning.core.errors import InputError, did_you_mean, shown
from prompt_tuning.core.typed_json import JsonObject, parse_json

FORMATS = ("text", "json_object", "json_schema")
SCHEMA = ("name", "description", "schema", "strict")
KINDS = ("json", "regex", "choice", "grammar", "json_object")
SPACE = ("whitespace_pattern", "disable_any_whitespace")
STRUCTURED = (*KINDS, *SPACE, "disable_fallback")
GUIDED = tuple(f"guided_{name}" for name in (*KINDS, "whitespace_pattern"))
"""vLLM's names before 0.12."""
FIELDS = ("response_format", "structured_outputs", *GUIDED)
"""OpenAI's field, and vLLM's."""
ANY_OBJECT = {"type": "object"}


def has_constraint(body: JsonObject) -> bool:
    """Whether a body may have a constraint, which takes time to compile."""
    return any(name in body for name in FIELDS)


def read_constraint(body: JsonObject) -> dict[str, Any]:
    """Returns `regex`, `json_schema` or `grammar` for `Sampling`, or nothing.

    Raises:
      InputError: if a field cannot be used, or more than one sets a constraint.
    """
    forms = {
        "response_format": _response_format(body),
        "structured_outputs": _structured_outputs(_outputs(body)),
    }
    found = [form for form in forms.values() if form]
    if len(found) > 1:
        raise InputError(f"give one of {' and '.join(forms)}")
    return found[0] if found else {}


def _response_format(body: JsonObject) -> dict[str, str]:
    """Reads `response_format`; a schema is always strict."""
    form = body.nested("response_format", {})
    if not form.values:
        return {}
    kind = form.text("type")
    if kind not in FORMATS:
        form.refuse("type", f"one of {', '.join(FORMATS)}")
    _check_names(form, ("type", *(["json_schema"] if kind == "json_schema" else [])))
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": json.dumps(ANY_OBJECT)}
    described = form.nested("json_schema")
    _check_names(described, SCHEMA)
    described.flag("strict", True)
    return {"json_schema": json.dumps(described.value("schema", ANY_OBJECT))}


def _outputs(body: JsonObject) -> JsonObject:
    """Returns `structured_outputs`, or the older fields under their newer names."""
    outputs = body.nested("structured_outputs", {})
    older = {name[7:]: body.value(name) for name in GUIDED if name in body}
    if not outputs.values:
        return JsonObject(body.source, older)
    # Clients that do not know the server's version send both.
    other = [name for name in older if outputs.values.get(name) != older[name]]
    if other:
        raise InputError(f"give one of structured_outputs and guided_{other[0]}")
    return outputs


def _structured_outputs(outputs: JsonObject) -> dict[str, str]:
    """Reads the field that sets the constraint."""
    _check_names(outputs, STRUCTURED)
    kinds = [name for name in KINDS if name in outputs]
    if not outputs.values:
        return {}
    if len(kinds) != 1:
        raise InputError(
            f"structured_outputs has {len(kinds)} constraints, expected one of "
            f"{', '.join(KINDS)}"
        )
    (name,) = kinds
    spaced = [field for field in SPACE if field in outputs]
    if spaced and not name.startswith("json"):
        raise InputError(f"{spaced[0]} is for json: leave it out next to {name}")
    if name in ("regex", "grammar"):
        return {name: outputs.text(name)}
    if name == "choice":
        return {"regex": _choice(outputs)}
    schema: Any = ANY_OBJECT
    if name == "json":
        # vLLM takes the text of a schema, too.
        schema = outputs.value("json")
        if isinstance(schema, str):
            schema = parse_json(schema, "json")
    elif not outputs.flag("json_object"):
        return {}
    return {"json_schema": json.dumps(_spaced(schema, outputs))}


def _spaced(schema: Any, outputs: JsonObject) -> Any:
    """Returns a schema that allows space between the parts of its JSON."""
    pattern = outputs.text("whitespace_pattern", None)
    if outputs.flag("disable_any_whitespace", False):
        pattern = ""
    if pattern is None or not isinstance(schema, dict):
        return schema
    return schema | {"x-guidance": {"whitespace_pattern": pattern}}


def _choice(outputs: JsonObject) -> str:
    texts = outputs.sequence("choice")
    if not texts or not all(isinstance(text, str) and text for text in texts):
        outputs.refuse("choice", "a list of texts that are not empty")
    return "|".join(map(re.escape, texts))


def _check_names(part: JsonObject, known: tuple[str, ...]) -> None:
    """Checks that there are no fields without effect."""
    for name, value in part.values.items():
        if value is not None and name not in known:
            raise InputError(
                f"{part.source} has an unknown field {shown(name)}"
                f"{did_you_mean(name, known)}"
            )
