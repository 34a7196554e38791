"""Syntaxes in which models write tool calls."""

import dataclasses
import re
from collections.abc import Callable

from prompt_tuning.server.call_forms import (
    QUOTE,
    Call,
    Schemas,
    braced_calls,
    json_calls,
    keyed_calls,
    named_calls,
    parameter_calls,
    python_calls,
)
from prompt_tuning.server.call_grammars import (
    CallForm,
    HarmonyForm,
    JsonForm,
    NamedForm,
    OneJsonForm,
    ParameterForm,
)
from prompt_tuning.server.call_literals import BracedForm, PythonForm


@dataclasses.dataclass(frozen=True)
class CallSyntax:
    """A syntax of calls.

    Attributes:
      name: name of the syntax.
      opening: text before calls; None if there is none.
      closing: text after calls; None if they end with the answer.
      bare: whether an answer that starts with JSON consists of calls.
      read: parses the text in between; see `call_forms`.
      form: form of a call for grammars.
      written: additional special tokens that are part of calls.
      id_length: number of characters of call ids.
    """

    name: str
    opening: str | None = None
    closing: str | None = None
    bare: bool = False
    read: Callable[[str, Schemas], list[Call] | None] = json_calls
    form: CallForm = JsonForm(space="\n")  # noqa: RUF009
    written: tuple[str, ...] = ()
    id_length: int = 24

    @property
    def tags(self) -> tuple[str, str] | None:
        """Texts around each call, if there are both."""
        if self.opening is None or self.closing is None:
            return None
        return self.opening, self.closing


HERMES = CallSyntax("Hermes", "<tool_call>", "</tool_call>")
MISTRAL = CallSyntax(
    "Mistral",
    "[TOOL_CALLS]",
    read=named_calls,
    form=NamedForm(),
    written=("[ARGS]", "[CALL_ID]"),
    id_length=9,
)
LLAMA = CallSyntax(
    "Llama 3", "<|python_tag|>", bare=True, form=OneJsonForm("parameters")
)
HARMONY_CALLS = CallSyntax("gpt-oss", form=HarmonyForm())
QWEN_CODER = CallSyntax(
    "Qwen3-Coder",
    "<tool_call>",
    "</tool_call>",
    read=parameter_calls,
    form=ParameterForm(
        "\n<function={}>\n",
        "</function>\n",
        "<parameter={}>\n",
        "\n</parameter>\n",
        ("</parameter>", "</function>", "tool_call>"),
    ),
)
GLM = CallSyntax(
    "GLM",
    "<tool_call>",
    "</tool_call>",
    read=keyed_calls,
    form=ParameterForm(
        "{}\n",
        "",
        "<arg_key>{}</arg_key>\n<arg_value>",
        "</arg_value>\n",
        ("</arg_value>", "tool_call>"),
    ),
    written=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
LFM = CallSyntax(
    "LFM2",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    read=python_calls,
    form=PythonForm(),
)
GEMMA = CallSyntax(
    "Gemma 4",
    "<|tool_call>",
    "<tool_call|>",
    read=braced_calls,
    form=BracedForm(),
    written=(QUOTE,),
)
PLAIN = CallSyntax("plain JSON", bare=True, form=OneJsonForm())
KNOWN = (
    *(HERMES, QWEN_CODER, GLM, GEMMA, LFM),
    *(MISTRAL, LLAMA, HARMONY_CALLS, PLAIN),
)
OTHERS = re.compile(
    r"<[^\s<>]{0,3}(tool|function)[^\s<>]{0,8}call|<function=|<arg_key>"
)
"""Tags of syntaxes that are not supported."""


def syntax_of(template: str) -> CallSyntax | None:
    """Returns the syntax that a chat template asks for; None if it is unknown.

    Templates that do not mention tools have none.
    """
    if "<|channel|>" in template and "functions" in template:
        return HARMONY_CALLS
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|tool_call>call:" in template:
        return GEMMA
    if "<|tool_call_start|>[" in template:
        return LFM
    if "<tool_call>" in template:
        if "<arg_key>" in template:
            return GLM
        return QWEN_CODER if "<function=" in template else HERMES
    if "ipython" in template and '"parameters"' in template:
        return LLAMA
    describes = '"arguments"' in template or '"parameters"' in template
    if "tools" in template and describes and OTHERS.search(template) is None:
        return PLAIN
    return None
