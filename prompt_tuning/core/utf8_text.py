"""UTF-8 text from files that anybody may have written."""

from prompt_tuning.core.errors import InputError


def decode_text(content: bytes, location: str) -> str:
    """Decodes UTF-8.

    Raises:
      InputError: if the bytes are not UTF-8, with the first byte that is not.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{location} is not UTF-8 text: byte {error.start + 1} is "
            f"0x{content[error.start]:02x}; convert the file, for example with "
            "iconv -f WINDOWS-1252 -t UTF-8"
        ) from error
