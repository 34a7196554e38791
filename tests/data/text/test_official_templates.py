"""Chat templates as their makers ship them, against transformers."""

# transformers and trl are only in the `bench` extra.
# pyright: reportMissingImports=false

import ast
import importlib.util
from pathlib import Path

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import PROMPT
from prompt_tuning.data.chat_encoder import ChatEncoder
from prompt_tuning.data.text.chat_templates import chat_template_of
from prompt_tuning.data.text.conversations import answers_of
from prompt_tuning.data.text.learned_conversations import LearnedConversations
from prompt_tuning.data.text.tokenizers import load_tokenizer
from tests.support.chat_tokenizer import write_chat_tokenizer

pytestmark = pytest.mark.torch


def user(content):
    return {"role": "user", "content": content}


def answer(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def parts(text):
    return [{"type": "text", "text": text}]


FUNCTION = {"name": "f", "arguments": {"a": 1}}
CALL = {"id": "call00001", "type": "function", "function": FUNCTION}
RESULT = {"role": "tool", "content": "4", "name": "f", "tool_call_id": "call00001"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "f", "description": "adds", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": TOOL}]

KINDS = {
    "one": [user("2+2?"), answer("4")],
    "two": [user("2+2?"), answer("4"), user("3+3?"), answer("6")],
    "system": [{"role": "system", "content": "be brief"}, user("2+2?"), answer("4")],
    "thoughts": [
        *(user("2+2?"), answer("<think>\neasy\n</think>\n\n4")),
        *(user("3+3?"), answer("<think>\nhm\n</think>\n\n6")),
    ],
    "reasoning": [
        *(user("2+2?"), answer("4", reasoning_content="easy")),
        *(user("3+3?"), answer("6", reasoning_content="hm")),
    ],
    "tools": [user("2+2?"), answer(None, tool_calls=[CALL]), RESULT, answer("four")],
    "parts": [user(parts("2+2?")), answer(parts("4"))],
}
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "gptoss": "<|return|>",
    "muse": "<|eot|>",
    "glm": "<|endoftext|>",
}
"""EOS of families that have another one than most."""
PARTS_ONLY = ("idefics3", "llava_next", "smolvlm")
"""Templates that write no content that is a text; transformers gives it to them."""
TEXT_ONLY = (
    *("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gptoss"),
    *("lfm2", "lfm2_v2", "llama3", "llama3_1", "llama3_2", "nemotron_3_nano"),
    *("nemotron_3_5_lightning", "nemotron_3_super", "nemotron_3_ultra", "phi3"),
    *("phi3_5", "qwen2_5", "qwen3", "qwen3_instruct_2507"),
)
"""Templates that do not read parts: transformers writes them in Python's form."""
NO_CALLS = ("llama3", "qwen2_5_vl", "gemma", "gemma3", "qwen2_audio of transformers")
"""Templates that write nothing of a call, so that nothing could be learned."""
TESTS_FOR_NONE = ("deepseek_r1_distill", "deepseekv3")
"""Templates that want a content of None, which transformers drops, beside calls."""


def folder_of(package):
    """Returns the folder of a package that may be missing, without importing it."""
    found = importlib.util.find_spec(package)
    return None if found is None or found.origin is None else Path(found.origin).parent


def templates():
    """Returns the sources of the templates that packages have, by name."""
    sources = {}
    if (folder := folder_of("trl")) is not None:
        files = sorted((folder / "chat_templates").glob("*.jinja"))
        # TRL changes these for its own trainer.
        files = [file for file in files if not file.stem.endswith("_training")]
        sources = {file.stem: file.read_text() for file in files}
    if (folder := folder_of("transformers")) is not None:
        # In transformers, templates are texts in modules.
        for file in sorted((folder / "models").glob("*/processing_*.py")):
            if "{%" in (module := file.read_text()):
                texts = [
                    node.value
                    for node in ast.walk(ast.parse(module))
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)
                ]
                (source,) = [x for x in texts if "{%" in x and "messages" in x]
                sources[f"{file.parent.name} of transformers"] = source
    return sources


SOURCES = templates()


def eos_of(name, source):
    for begin, end in ENDS.items():
        if name.startswith(begin):
            return end
    known = "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>"
    ends = [end for end in known if end in source]
    return ends[0] if ends else "</s>"


def as_read(name, messages):
    """Returns messages as a template reads them, for transformers."""
    read = []
    for message in messages:
        content = message["content"]
        if name in PARTS_ONLY and isinstance(content, str):
            content = parts(content)
        if name in TEXT_ONLY and isinstance(content, list):
            content = content[0]["text"]
        read.append(message | {"content": content})
    return read


class Opened:
    """A template, as both read it."""

    def __init__(self, name, folder):
        from transformers import AutoTokenizer

        self.name, source = name, SOURCES[name]
        write_chat_tokenizer(folder, source, eos_of(name, source))
        self.theirs = AutoTokenizer.from_pretrained(folder)
        self.ours = load_tokenizer(folder)
        self.template = chat_template_of(self.ours)
        self.encoder = ChatEncoder(self.ours, self.template)

    def expected(self, kind, count, answer_next=True):
        """Returns the ids of the first messages in transformers; None if refused."""
        messages = as_read(self.name, KINDS[kind][:count])
        tools = TOOLS if kind == "tools" else None
        try:
            encoded = self.theirs.apply_chat_template(
                messages, tools=tools, add_generation_prompt=answer_next
            )
        except Exception:  # a template is a program that can raise anything
            return None
        return encoded["input_ids"]

    def record(self, kind, count=None):
        tools = TOOLS if kind == "tools" else None
        return answers_of(KINDS[kind][:count])._replace(tools=tools)

    def text(self, ids):
        return self.theirs.decode(ids)


@pytest.fixture(scope="module", params=SOURCES)
def opened(request, tmp_path_factory):
    return Opened(request.param, tmp_path_factory.mktemp("official") / "folder")


def answers(kind):
    """Yields the number of messages before each answer."""
    messages = KINDS[kind]
    return [i for i, x in enumerate(messages) if x["role"] == "assistant"]


def test_the_templates_are_installed():
    if folder_of("trl") is None:
        pytest.skip("trl, which has official templates, is not installed")
    assert len(SOURCES) >= 44


@pytest.mark.parametrize("kind", KINDS)
def test_ids_before_an_answer_are_those_of_transformers(opened, kind):
    for count in answers(kind):
        expected = opened.expected(kind, count)
        if expected is None and opened.name in TESTS_FOR_NONE:
            ids = opened.encoder(opened.record(kind, count), "here")
            assert '{"a": 1}' in opened.text(ids)
        elif expected is None:
            with pytest.raises(InputError, match="does not accept these messages: mes"):
                opened.encoder(opened.record(kind, count), "here")
        else:
            assert opened.encoder(opened.record(kind, count), "here") == expected


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_learned_is_what_answering_writes(opened, kind):
    encode = LearnedConversations(opened.ours, opened.template, "auto")
    (examples,) = encode([opened.record(kind)])
    if isinstance(examples, str):
        counts = range(1, len(KINDS[kind]) + 1)
        refused = any(opened.expected(kind, n, False) is None for n in counts)
        nothing = "writes nothing of message 2" in examples
        assert refused or (kind == "tools" and opened.name in NO_CALLS), examples
        assert nothing or "does not accept these messages: message" in examples
        return
    runs = [run for each in examples for run in learned_runs(each)]
    assert len(runs) == len(answers(kind))
    ends = {opened.ours.eos_id, *opened.encoder.turn_ends()}
    for count, (before, ids) in zip(answers(kind), runs, strict=True):
        # The context of the answer, which is also the second test's.
        assert before == opened.encoder(opened.record(kind, count), "here")
        assert ids[-1] in ends and not ends & set(ids[:-1])
        check_text(opened, kind, count, opened.text(before), opened.text(ids[:-1]))


def learned_runs(tokens):
    """Yields the ids before each run of learned tokens, and those of the run."""
    ids, types = tokens.input_ids, tokens.token_types
    starts = [i for i, x in enumerate(types) if x != PROMPT and types[i - 1] == PROMPT]
    for start in starts:
        after = [i for i in range(start, len(ids)) if types[i] == PROMPT]
        yield ids[:start], ids[start : after[0] if after else len(ids)]


def check_text(opened, kind, count, before, learned):
    """Checks that a learned text is what the template writes after its context."""
    message = KINDS[kind][count]
    whole = opened.expected(kind, count + 1, False)
    if whole is None:
        assert opened.name in TESTS_FOR_NONE
        return
    whole = opened.text(whole)
    if whole.startswith(before):
        assert whole.startswith(before + learned)
    elif before.endswith("</think>\n\n"):
        # The prompt has an empty thought: the answer has none.
        assert learned == "46"[count // 2]
    else:
        assert before.endswith("<think>\n")
        thoughts, _, rest = learned.partition("</think>")
        assert rest and rest.strip() in whole
        expected = {"thoughts": ("easy", "hm"), "reasoning": ("easy", "hm")}
        both = expected.get(kind, ("", ""))
        assert thoughts.strip() == both[count // 2]
        assert message["content"] is None or rest.strip() in ("4", "6", "four")
