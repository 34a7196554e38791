"""Make foreign text safe to show: nothing in it runs, hides or reorders other text."""

import re

HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""Control characters except tab and line feed, direction marks, lone surrogates."""


def visible(text: str) -> str:
    r"""Replaces invisible characters by their number, e.g. `[U+202E]`.

    Examples:
      >>> visible("a\u202eb")
      'a[U+202E]b'
    """
    return HIDDEN.sub(lambda found: f"[U+{ord(found[0]):04X}]", text)
