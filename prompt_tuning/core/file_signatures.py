"""File formats that begin with known bytes, for messages about wrong files."""

SIGNATURES = {
    b"\x93NUMPY": "a NumPy file",
    b"PK": "a ZIP archive (.npz, or a checkpoint of PyTorch)",
    b"\x80": "a pickle",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"PAR1": "a parquet file",
    b"\x1f\x8b": "a gzip file",
    b"\x28\xb5\x2f\xfd": "a Zstandard file",
    b"GGUF": "a GGUF file",
    b"version ": "a pointer of Git LFS, whose file was not fetched",
    b"<!DOCTYPE": "a page of HTML",
    b"<html": "a page of HTML",
}


def format_of(start: bytes) -> str:
    """Returns the format that a file's first bytes reveal, with its article.

    The bytes themselves must not go into messages: the file may be private.
    """
    for signature, name in SIGNATURES.items():
        if start and start[: len(signature)] == signature[: len(start)]:
            return name
    return "of an unknown format"
