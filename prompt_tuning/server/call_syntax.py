"""Syntaxes in which models write tool calls."""

import dataclasses
import re
from collections.abc import Callable

from prompt_tuning.server import call_forms, call_grammars
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
    read: Callable[[str, call_forms.Schemas], list[call_forms.Call] | None] = (
        call_forms.json_calls
    )
    form: call_grammars.CallForm = call_grammars.JsonForm(space="\n")  # noqa: RUF009
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
    read=call_forms.named_calls,
    form=call_grammars.NamedForm(),
    written=("[ARGS]", "[CALL_ID]"),
    id_length=9,
)
LLAMA = CallSyntax(
    "Llama 3", "<|python_tag|>", bare=True, form=call_grammars.OneJsonForm("parameters")
)
HARMONY_CALLS = CallSyntax("gpt-oss", form=call_grammars.HarmonyForm())
QWEN_CODER = CallSyntax(
    "Qwen3-Coder",
    "<tool_call>",
    "</tool_call>",
    read=call_forms.parameter_calls,
    form=call_grammars.ParameterForm(
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
    read=call_forms.keyed_calls,
    form=call_grammars.ParameterForm(
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
    read=call_forms.python_calls,
    form=PythonForm(),
)
GEMMA = CallSyntax(
    "Gemma 4",
    "<|tool_call>",
    "<tool_call|>",
    read=call_forms.braced_calls,
    form=BracedForm(),
    written=(call_forms.QUOTE,),
)
PLAIN = CallSyntax("plain JSON", bare=True, form=call_grammars.OneJsonForm())
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
