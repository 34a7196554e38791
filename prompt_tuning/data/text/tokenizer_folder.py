"""The file of a tokenizer in the folder of a checkpoint."""

from pathlib import Path

from prompt_tuning.core import file_names, gguf_files
from prompt_tuning.core.errors import InputError

FILES = (
    *("tokenizer*", "vocab.*", "merges.txt", "*.model", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template*"),
)
"""Files of a tokenizer and its settings."""


def find_tokenizer(path: Path) -> Path:
    """Returns the only file that can be read for the path of a file or folder.

    Links out of the folder are refused.
    """
    if path.is_dir():
        file_names.check_links(path, *FILES)
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(
            f"tokenizer {path}: no such file or folder; expected tokenizer.json, a "
            "sentencepiece .model file, or a folder that contains one"
        )
    for name in ("tokenizer.json", "tokenizer.model", "spiece.model"):
        if (path / name).is_file():
            return path / name
    models = sorted(path.glob("*.model"))
    if len(models) == 1:
        return models[0]
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return path / "vocab.json"
    if not models and (path / "vocab.txt").is_file():
        return path / "vocab.txt"
    files = sorted(path.glob(f"*{gguf_files.SUFFIX}"))
    if not models and len(files) == 1:
        file_names.check_links(path, f"*{gguf_files.SUFFIX}")
        return files[0]
    raise InputError(
        f"tokenizer {path}: the folder has {len(models)} .model files; expected "
        "tokenizer.json, tokenizer.model, spiece.model, one *.model, vocab.json with "
        "merges.txt, vocab.txt, or one *.gguf"
    )
