"""Fields of requests that the text of an answer must match."""

import json
import re
from typing import Any

from prompt_tuning.core.errors import InputError, did_you_mean, shown
from prompt_tuning.core.typed_json import JsonObject

FIELDS = ("response_format", "structured_outputs")
"""OpenAI's field, and vLLM's, which it has instead of `guided_json` since 0.12."""
FORMATS = ("text", "json_object", "json_schema")
SCHEMA = ("name", "description", "schema", "strict")
STRUCTURED = ("json", "regex", "choice", "json_object")
ANY_OBJECT = '{"type": "object"}'


def has_constraint(body: JsonObject) -> bool:
    """Returns whether a body may have a constraint, which takes time to compile."""
    return any(name in body for name in FIELDS)


def read_constraint(body: JsonObject) -> dict[str, Any]:
    """Returns `regex` or `json_schema` of `Sampling`; neither if any text matches.

    Raises:
      InputError: if a field cannot be used, or two name a constraint.
    """
    found = {**_response_format(body), **_structured_outputs(body)}
    if all(name in body for name in FIELDS) and found:
        raise InputError(f"give one of {' and '.join(FIELDS)}")
    return found


def _response_format(body: JsonObject) -> dict[str, str]:
    """Reads `response_format`, in which a schema is always strict."""
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
        return {"json_schema": ANY_OBJECT}
    described = form.nested("json_schema")
    _check_names(described, SCHEMA)
    described.flag("strict", True)
    return {"json_schema": json.dumps(described.value("schema"))}


def _structured_outputs(body: JsonObject) -> dict[str, str]:
    """Reads `structured_outputs`, which names one constraint."""
    outputs = body.nested("structured_outputs", {})
    _check_names(outputs, STRUCTURED)
    given = [name for name in STRUCTURED if name in outputs]
    if not given and "structured_outputs" not in body:
        return {}
    if len(given) != 1:
        raise InputError(
            f"structured_outputs has {len(given)} constraints, expected one of "
            f"{', '.join(STRUCTURED)}"
        )
    (name,) = given
    if name == "regex":
        return {"regex": outputs.text("regex")}
    if name == "choice":
        return {"regex": _choice(outputs)}
    if name == "json_object":
        return {"json_schema": ANY_OBJECT} if outputs.flag("json_object") else {}
    schema: Any = outputs.value("json")
    # vLLM takes the text of a schema, too.
    return {"json_schema": schema if isinstance(schema, str) else json.dumps(schema)}


def _choice(outputs: JsonObject) -> str:
    """Returns the expression of some texts."""
    texts = outputs.sequence("choice")
    if not texts or not all(isinstance(text, str) and text for text in texts):
        outputs.refuse("choice", "a list of texts that are not empty")
    return "|".join(map(re.escape, texts))


def _check_names(part: JsonObject, known: tuple[str, ...]) -> None:
    """Refuses fields that have no effect."""
    for name, value in part.values.items():
        if value is not None and name not in known:
            raise InputError(
                f"{part.source} has an unknown field {shown(name)}"
                f"{did_you_mean(name, known)}"
            )
