"""Small chat templates of our own, each with a trait of public ones."""

TURN = "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}"
EACH = "{% for m in messages %}" + TURN + "{% endfor %}"
NEXT = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"

_REST = (
    "{% set c = m.content.split('</think>') | last %}"
    "{% set t = (m.content.split('</think>') | first).replace('<think>', '') %}"
)
_ANSWER = "{{ '<|assistant|>' + c + '<|end|>' }}"
_EARLIER = "{% if m.role == 'assistant' and not loop.last %}"
APPENDS = EACH + NEXT
DROPS_THOUGHTS = (
    "{% for m in messages %}"
    + _EARLIER
    + _REST
    + _ANSWER
    + "{% else %}"
    + TURN
    + "{% endif %}{% endfor %}"
    + NEXT
)
"""As Qwen3: the thoughts of earlier answers are left out."""
EXCHANGES_END = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<|return|>' }}"
    "{% else %}{{ '<|end|>' }}{% endif %}{% endfor %}" + NEXT
)
"""As gpt-oss: the token that ends an answer is another one once a turn follows."""
EOS_LAST = EACH + (
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% else %}{{ eos_token }}{% endif %}"
)
"""As Phi-3: EOS is only at the end, after the token that ends a turn."""
OPENS_THOUGHT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    + _REST
    + "{{ '<|assistant|>' + "
    "c + '<|end|>' }}{% else %}" + TURN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"
)
"""As DeepSeek R1: the prompt opens a thought, and answers are written without."""
CLOSES_THOUGHT = (
    EACH + "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
"""The prompt has an empty thought if a variable says so."""
NO_END = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}" + NEXT
)
"""As GLM-4.5: no token ends an answer."""
WANTS_PARTS = APPENDS.replace("m.content", "m.content[0].text")
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}\n"
    "{{ raise_exception('no system message') }}{% endif %}" + APPENDS
)
DATED = "{{ strftime_now('%Y') }}" + APPENDS
CALLS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content %}{{ m.content }}"
    "{% endif %}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name ~ '(' ~ call.function.arguments.values() | join ~ ')' }}"
    "{% endfor %}"
    "{{ '<|call|>' if m.tool_calls else '<|end|>' }}{% endfor %}" + NEXT
)
"""Arguments are objects, and a token of its own ends a call."""
LINES = APPENDS.replace("|>'", "|>\\n'").replace("<|end|>\\n", "<|end|>")
"""A line feed begins each text."""
NOTHING_NEXT = "{% for m in messages %}{{ m.content + '<|end|>' }}{% endfor %}"
"""Nothing begins an answer."""
