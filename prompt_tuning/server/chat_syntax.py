"""How the answers to a conversation are written, by its chat template."""

import dataclasses
from collections.abc import Sequence

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.text.tokenizers import HuggingFaceTokenizer, Tokenizer
from prompt_tuning.server.answer_parts import (
    HARMONY,
    AnswerReader,
    HarmonyReader,
    TaggedReader,
)
from prompt_tuning.server.call_forms import Schemas
from prompt_tuning.server.call_syntax import (
    HARMONY_CALLS,
    KNOWN,
    PLAIN,
    CallSyntax,
    syntax_of,
)
from prompt_tuning.server.tool_choice import ToolChoice, calls_grammar

THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Tags around reasoning, of which a chat template with thinking writes one pair."""
TAIL = 8
"""Number of tokens at the end of a conversation that may open the reasoning."""


@dataclasses.dataclass(frozen=True)
class ChatSyntax:
    """How an answer is written.

    Attributes:
      thinking: tags around its reasoning; None if it has none.
      opened: whether the conversation ends with the tag that opens the reasoning.
      calls: syntax of its calls; None if it may call nothing.
      schemas: schemas of the arguments of the functions that it may call.
      harmony: whether it consists of gpt-oss's messages.
    """

    thinking: tuple[str, str] | None = None
    opened: bool = False
    calls: CallSyntax | None = None
    schemas: Schemas = dataclasses.field(default_factory=dict)
    harmony: bool = False

    @property
    def plain(self) -> bool:
        """Whether all of the text is content."""
        return self.thinking is None and self.calls is None and not self.harmony

    def reader(self) -> AnswerReader:
        """Returns a reader of one answer."""
        if self.harmony:
            return HarmonyReader(calls=self.calls is not None)
        return TaggedReader(
            self.thinking, opened=self.opened, syntax=self.calls, schemas=self.schemas
        )

    def written(self, tokenizer: Tokenizer) -> dict[int, str]:
        """Returns the special tokens that structure the answer, with their texts."""
        texts = [*(self.thinking or ()), *(HARMONY if self.harmony else ())]
        if self.calls is not None:
            tags = (self.calls.opening, self.calls.closing, *self.calls.written)
            texts += filter(None, tags)
        return special_tokens(tokenizer, texts)


def special_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[int, str]:
    """Returns the special tokens among some texts, which decoding leaves out."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return {}
    ids = {text: tokenizer.tokenizer.token_to_id(text) for text in texts}
    return {
        id: text
        for text, id in ids.items()
        if id is not None and not tokenizer.decode([id])
    }


def find_syntax(
    template: str, tokenizer: Tokenizer, ids: Sequence[int], choice: ToolChoice | None
) -> ChatSyntax:
    """Returns the syntax of the next answer.

    Args:
      template: text of the chat template.
      tokenizer: tokenizer of the model.
      ids: the conversation.
      choice: the tools that the answer may call; None for none.

    Raises:
      InputError: if it may call tools, and the template asks for calls in a syntax that
        is not read.
    """
    calls = None if choice is None else syntax_of(template)
    harmony = "<|channel|>" in template and "<|message|>" in template
    if choice is not None and choice.required:
        # Calls that a grammar enforces need no special token.
        if calls is None or not calls.is_json or (not calls.tags and not calls.bare):
            calls = PLAIN
        harmony = False
    elif choice is not None and calls is None:
        names = ", ".join(each.name for each in KNOWN)
        raise InputError(
            "tools need a chat template that asks for calls in a known syntax "
            f"({names}), and this one does not: require a call by tool_choice, which "
            "is then written as JSON, or leave out tools"
        )
    schemas = {} if choice is None else choice.functions
    thinking = next((x for x in THINKING if x[0] in template), None)
    if thinking is None or harmony or calls is HARMONY_CALLS:
        return ChatSyntax(calls=calls, schemas=schemas, harmony=harmony)
    return ChatSyntax(thinking, _opens(tokenizer, ids, thinking[0]), calls, schemas)


def _opens(tokenizer: Tokenizer, ids: Sequence[int], tag: str) -> bool:
    """Returns whether a conversation ends with a tag, and space after it."""
    special = special_tokens(tokenizer, [tag])
    tail = list(ids[-TAIL:])
    if tokenizer.decode(tail).rstrip().endswith(tag):
        return True
    last = [id for id in tail if id in special or tokenizer.decode([id]).strip()]
    return bool(last) and last[-1] in special


def required_calls(syntax: ChatSyntax, choice: ToolChoice) -> str:
    """Returns the grammar of an answer that must call a tool."""
    assert syntax.calls is not None
    return calls_grammar(choice, syntax.calls, syntax.thinking, opened=syntax.opened)
