"""Records of the formats of conversations that public tools write.

Each is given with the conversation that it stands for: the messages, the numbers of the
learned ones, and the further arguments of `apply_chat_template` in transformers.
"""

import json
from typing import Any, NamedTuple

from tests.support.small_tokenizer import EOS

_BODY = (
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments "
    "| tojson }}{% endfor %}" + EOS
)
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ style if style is defined }}"
    "{% for m in messages %}<|{{ m.role }}|>\n" + _BODY + "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""A chat template without a default system message."""

MARKED_TEMPLATE = TEMPLATE.replace(
    _BODY,
    "{% if m.learned %}{% generation %}" + _BODY + "{% endgeneration %}"
    "{% else %}" + _BODY + "{% endif %}",
)
"""The same, which marks the messages with `learned` for transformers, up to EOS."""


def system(text: str) -> dict[str, Any]:
    """Returns a system message."""
    return {"role": "system", "content": text}


def user(text: Any) -> dict[str, Any]:
    """Returns a message of the user."""
    return {"role": "user", "content": text}


def answer(text: Any, **fields: Any) -> dict[str, Any]:
    """Returns an answer."""
    return {"role": "assistant", "content": text, **fields}


def human(text: str) -> dict[str, Any]:
    """Returns a message of the user in ShareGPT's form."""
    return {"from": "human", "value": text}


def gpt(text: str, **fields: Any) -> dict[str, Any]:
    """Returns an answer in ShareGPT's form."""
    return {"from": "gpt", "value": text, **fields}


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": None}}}]
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"a": None}}}]
RESULT = {"role": "tool", "content": "3"}
TALK = [user("a"), answer("b"), user("c"), answer("d")]
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


class Conversed(NamedTuple):
    """A record, and the conversation that it stands for."""

    record: dict[str, Any]
    messages: list[dict[str, Any]]
    learned: tuple[int, ...]
    arguments: dict[str, Any] = {}  # noqa: RUF012


READ = {
    "openai": Conversed({"messages": TALK}, TALK, (1, 3)),
    "openai weights": Conversed(
        {"messages": [user("a"), answer("b", weight=0), user("c"), answer("d")]},
        TALK,
        (3,),
    ),
    "weights of pandas": Conversed(
        {"messages": [user("a") | {"weight": None}, answer("b", weight=1.0)]},
        TALK[:2],
        (1,),
    ),
    "an unlearned end": Conversed(
        {"messages": [*TALK[:3], answer("d", weight=0)]}, TALK[:2], (1,)
    ),
    "axolotl": Conversed(
        {"messages": [user("a"), answer("b", train=False), user("c"), answer("d")]},
        TALK,
        (3,),
    ),
    "ms-swift": Conversed(
        {"messages": [user("a"), answer("b", loss=True), user("c"), answer("d")]},
        TALK,
        (1, 3),
    ),
    "tools": Conversed(
        {"messages": TALK[:2], "tools": TOOLS}, TALK[:2], (1,), {"tools": TOOLS}
    ),
    "tools as json": Conversed(
        {"messages": TALK[:2], "tools": json.dumps(TOOLS)},
        TALK[:2],
        (1,),
        {"tools": TOOLS},
    ),
    "mistral": Conversed(
        {
            "messages": [
                user("a"),
                {"role": "assistant", "tool_calls": CALLS},
                RESULT,
                answer("b", weight=1),
            ],
            "tools": TOOLS,
        },
        [user("a"), answer("", tool_calls=CALLS), RESULT, answer("b")],
        (1, 3),
        {"tools": TOOLS},
    ),
    "null": Conversed(
        {"messages": [user("a"), answer(None, tool_calls=CALLS), RESULT, answer("b")]},
        [user("a"), answer("", tool_calls=CALLS), RESULT, answer("b")],
        (1, 3),
    ),
    "parts": Conversed(
        {"messages": [user(PARTS), answer([{"type": "text", "text": "b"}])]},
        [user("ab"), answer("b")],
        (1,),
    ),
    "variables": Conversed(
        {"messages": TALK[:2], "chat_template_kwargs": {"style": "S"}},
        TALK[:2],
        (1,),
        {"style": "S"},
    ),
    "top-level system": Conversed(
        {"messages": TALK[:2], "system": "s"}, [system("s"), *TALK[:2]], (2,)
    ),
    "trl": Conversed({"prompt": TALK[:3], "completion": TALK[3:]}, TALK, (3,)),
    "trl with tools": Conversed(
        {"prompt": TALK[:1], "completion": TALK[1:2], "tools": TOOLS},
        TALK[:2],
        (1,),
        {"tools": TOOLS},
    ),
    "sharegpt": Conversed(
        {"conversations": [human("a"), gpt("b"), human("c"), gpt("d")], "system": "s"},
        [system("s"), *TALK],
        (2, 4),
    ),
    "sharegpt weights": Conversed(
        {"conversations": [human("a"), gpt("b", weight=0), human("c"), gpt("d")]},
        TALK,
        (3,),
    ),
    "sharegpt tools": Conversed(
        {"conversations": [human("a"), gpt("b")], "tools": json.dumps(TOOLS)},
        TALK[:2],
        (1,),
        {"tools": TOOLS},
    ),
    "sharegpt of messages": Conversed({"conversations": TALK}, TALK, (1, 3)),
    "messages of sharegpt": Conversed(
        {"messages": [human("a"), gpt("b")]}, TALK[:2], (1,)
    ),
    "lmsys": Conversed(
        {"conversation": TALK, "conversation_id": "0", "turn": 2}, TALK, (1, 3)
    ),
    "a conversation of sharegpt": Conversed(
        {"conversation": [human("a"), gpt("b")]}, TALK[:2], (1,)
    ),
    "messages as json": Conversed({"messages": json.dumps(TALK)}, TALK, (1, 3)),
    "sharegpt as json": Conversed(
        {"conversations": json.dumps([human("a"), gpt("b")])}, TALK[:2], (1,)
    ),
    "a call of llama-factory": Conversed(
        {
            "conversations": [
                human("a"),
                {"from": "function_call", "value": json.dumps(CALLS[0]["function"])},
                {"from": "observation", "value": "3"},
                gpt("b"),
            ]
        },
        [user("a"), answer("", tool_calls=CALLS), RESULT, answer("b")],
        (1, 3),
    ),
    "calls of llama-factory": Conversed(
        {
            "conversations": [
                human("a"),
                {
                    "from": "function_call",
                    "value": json.dumps([CALLS[0]["function"]] * 2),
                },
            ]
        },
        [user("a"), answer("", tool_calls=CALLS * 2)],
        (1,),
    ),
    "functions of openai": Conversed(
        {
            "messages": [
                user("a"),
                answer(None, function_call=CALLS[0]["function"]),
                {"role": "function", "name": "f", "content": "3"},
                answer("b"),
            ]
        },
        [user("a"), answer("", tool_calls=CALLS), RESULT, answer("b")],
        (1, 3),
    ),
    "dolly": Conversed(
        {"instruction": "c", "context": "e", "response": "d", "category": "qa"},
        [user("c\ne"), answer("d")],
        (1,),
    ),
    "alpaca": Conversed(
        {
            "instruction": "c",
            "input": "e",
            "output": "d",
            "system": "s",
            "history": [["a", "b"]],
        },
        [system("s"), *TALK[:2], user("c\ne"), answer("d")],
        (2, 4),
    ),
}
"""Records that are read."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "weight": ({"messages": [user("a"), answer("b", weight=0.5)]}, "'weight'.* 0.5"),
    "train": (
        {"messages": [user("a") | {"train": True}]},
        "'train' .*'user'",
    ),
    "flags": ({"messages": [answer("b", weight=0, train=True)]}, "equal values"),
    "detail": ({"messages": [answer("b", train_detail=[1])]}, "'train_detail'"),
    "mask": ({"messages": TALK, "mask": "User"}, "'mask' is 'User', which is not read"),
    "record weight": ({"messages": TALK, "weight": 0.5}, "example_weight_key"),
    "both": ({"messages": TALK, "conversations": TALK}, "'conversations'"),
    "functions": ({"messages": TALK, "functions": TOOLS}, "under 'tools'"),
    "documents": ({"messages": TALK, "documents": [{}]}, "'documents'"),
    "history": ({"messages": TALK, "history": [["a", "b"]]}, "'history'"),
    "system": ({"messages": [system("a"), *TALK], "system": "b"}, "leave one out"),
    "prompt": ({"messages": TALK, "system_prompt": "b"}, "'system_prompt'.*'system'"),
    "image": (
        {"messages": [user([{"type": "image_url", "image_url": {}}])]},
        "part .*image_url.* expected parts of text",
    ),
    "images": ({"messages": TALK, "images": ["a.png"]}, "'images'.*only text"),
    "a text": ({"messages": "a"}, "'messages' is 'a', expected a list"),
    "sender": ({"messages": [{"from": "Bob", "value": "a"}]}, "'from'.*found .*Bob"),
    "null": ({"messages": [user(None), *TALK]}, "'role' .* and 'content'; found"),
    "role": (
        {"messages": [user("a"), {"role": "Assistant", "content": "b"}]},
        "rename",
    ),
    "model": ({"messages": [user("a"), {"role": "model", "content": "b"}]}, "'model'"),
    "tools": ({"messages": TALK, "tools": ["f"]}, "'tools' is .*list of objects"),
    "variables": (
        {"messages": TALK, "chat_template_kwargs": {"tools": 1}},
        "other th",
    ),
    "trl": ({"prompt": TALK[:1], "completion": TALK[1:4]}, "one message of the assist"),
    "kto": ({"prompt": TALK[:1], "completion": TALK[1:2], "label": False}, "'label'"),
    "trl image": (
        {"prompt": [user("a")], "completion": [answer("b")], "image": "a"},
        "'image",
    ),
    "call": (
        {"conversations": [human("a"), {"from": "function_call", "value": "{}"}]},
        "'function_call' .*'arguments'",
    ),
    "sharegpt mask": ({"conversations": [gpt("b", mask=1)]}, "'mask' of a message"),
    "history of texts": (
        {"instruction": "a", "output": "b", "history": ["a"]},
        "'history' is .*pairs",
    ),
    "nothing": ({"messages": [user("a"), answer("b", weight=0)]}, "nothing is learned"),
}
"""Records that are refused, and a part of the message."""
