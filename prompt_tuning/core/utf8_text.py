"""UTF-8 text from untrusted files, and common beginnings of texts."""

from prompt_tuning.core.errors import InputError


def common_beginning(first: str, second: str) -> str:
    """Returns the longest text that both begin with."""
    length = min(len(first), len(second))
    pairs = enumerate(zip(first[:length], second[:length], strict=True))
    return first[: next((i for i, (a, b) in pairs if a != b), length)]


def decode_text(content: bytes, location: str) -> str:
    """Decodes UTF-8.

    Raises:
      InputError: names the first byte that is not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{location} is not UTF-8 text: byte {error.start + 1} is "
            f"0x{content[error.start]:02x}; convert the file, for example with "
            "iconv -f WINDOWS-1252 -t UTF-8"
        ) from error
