"""UTF-8 text from untrusted files."""

from prompt_tuning.core.errors import InputError


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
