"""The limits that the security page names are the constants of the code."""

import importlib
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / ".github/SECURITY.md"
LIMITS = {
    "core.typed_json": {
        "MAXIMUM_BYTES": (128 * 2**20, "128 MiB, 100 levels of nesting"),
        "MAXIMUM_DEPTH": (100, "100 levels of nesting"),
        "MAXIMUM_INTEGER": (2**31 - 1, "integers of settings below 2^31"),
    },
    "config.gin_sources": {
        "MAXIMUM_BYTES": (2**20, "1 MiB in all; 100 includes, 10 levels deep"),
        "MAXIMUM_INCLUDES": (100, "100 includes"),
        "MAXIMUM_INCLUDE_DEPTH": (10, "10 levels deep"),
    },
    "config.data_parser": {
        "MAXIMUM_VALUE_DEPTH": (50, "values 50 levels deep"),
    },
    "config.gin_values": {
        "MAXIMUM_VALUES": (500_000, "500,000 values"),
        "MAXIMUM_REFERENCES": (10_000, "10,000 references"),
        "MAXIMUM_REFERENCE_DEPTH": (40, "references, 40 levels deep"),
    },
    "core.number_ranges": {
        "MAXIMUM_LENGTH": (100_000, "prompts and adapters up to 100,000"),
        "MAXIMUM_ROWS": (1_000_000, "batches of 1,000,000 rows"),
        "MAXIMUM_LAYERS": (10_000, "rows; 10,000 layers"),
    },
    "decoding.text_constraints": {
        "MAXIMUM_REGEX": (10_000, "match | 10,000 and 2^17 characters"),
        "MAXIMUM_SCHEMA": (2**17, "10,000 and 2^17 characters"),
        "MAXIMUM_GRAMMAR": (2**17, "grammars 2^17"),
        "COMPILE_SECONDS": (1, "at most 1 s of computing and 1 GiB; 30,000"),
        "MAXIMUM_STATES": (30_000, "30,000 states"),
    },
    "families.hf_settings": {"MAXIMUM_CONFIG": (2**24, "16 MiB; axes up to 2^24")},
    "families.hf_folder": {"MAXIMUM_END_IDS": (64, "64 end tokens")},
    "core.model_sizes": {
        "MAXIMUM_SIZE": (2**24, "axes up to 2^24"),
        "MAXIMUM_LAYERS": (10_000, "2^24, 10,000 layers"),
        "MAXIMUM_EXPERTS": (10_000, "10,000 experts"),
        "MAXIMUM_PARAMETERS": (2**44, "2^44 parameters"),
    },
    "checkpoints.formats.safetensors": {
        "MAXIMUM_HEADER": (10**8, "header of 100 MB"),
        "MAXIMUM_ARRAYS": (100_000, "100,000 arrays"),
        "MAXIMUM_NAME": (1000, "names of 1,000 characters"),
    },
    "core.gguf_files": {
        "MAXIMUM_HEADER": (2**28, "header of 256 MiB"),
        "MAXIMUM_TENSORS": (100_000, "100,000 tensors of up to"),
        "MAXIMUM_ELEMENTS": (2**48, "up to 2^48 elements"),
        "MAXIMUM_FIELDS": (10_000, "10,000 fields"),
        "MAXIMUM_NAME": (1000, "names of 1,000 bytes"),
        "MAXIMUM_ITEMS": (2**21, "lists of 2^21 values"),
    },
    "core.numpy_files": {
        "MAXIMUM_HEADER": (10_000, "header of 10,000 bytes"),
        "MAXIMUM_AXES": (32, "32 axes of up to 2^48"),
        "MAXIMUM_SIZE": (2**48, "axes of up to 2^48"),
    },
    "checkpoints.formats.zarr": {
        "MAXIMUM_METADATA": (2**20, "1 MiB of metadata"),
        "MAXIMUM_CHUNK": (2**32, "chunks of 4 GiB"),
    },
    "checkpoints.formats.msgpack_index": {
        "MAXIMUM_VALUES": (200_000, "200,000 values, 100 levels"),
        "MAXIMUM_DEPTH": (100, "100 levels, texts of 1 MiB"),
        "MAXIMUM_TEXT": (2**20, "texts of 1 MiB"),
    },
    "data.rows.hdf5_files": {
        "MAXIMUM_ROW": (2**26, "rows of 64 MiB"),
        "MAXIMUM_CHUNK": (2**28, "chunks of 256 MiB"),
        "MAXIMUM_EXPANSION": (1032, "1,032 times the size of their file"),
    },
    "server.server_limits": {
        "MAXIMUM_BODY": (2**22, "bodies of 4 MiB"),
        "BODY_SECONDS": (30, "bodies of 4 MiB within 30 s"),
        "MAXIMUM_ROWS": (128, "128 rows (prompts times `n`)"),
        "MAXIMUM_STOPS": (16, "16 stop texts"),
        "MAXIMUM_INPUTS": (2048, "2,048 texts for embeddings"),
        "MAXIMUM_TOOLS": (128, "128 tools"),
        "MAXIMUM_BIASES": (1024, "1,024 biases"),
        "MAXIMUM_CONNECTIONS": (2048, "2,048 connections"),
        "MAXIMUM_ADAPTERS": (256, "256 adapters loaded by clients"),
    },
    "data.rows.jsonl": {"MAXIMUM_LINE": (2**22, "lines of 4 MiB")},
    "data.rows.parquet_files": {
        "MAXIMUM_ROWS": (2**31, "2^31 rows"),
        "MAXIMUM_COLUMNS": (4096, "4,096 columns"),
        "MAXIMUM_GROUP": (2**31, "row groups of 2 GiB"),
        "MAXIMUM_BATCH": (2**28, "256 MiB for each 256 rows"),
        "ROWS": (256, "each 256 rows"),
    },
    "data.rows.record_spans": {"MAXIMUM_RECORD": (2**26, "records of 64 MiB")},
    "data.preparation.preparation_settings": {
        "MAXIMUM_FILES": (10_000, "10,000 output files for each split"),
        "MAXIMUM_WORKERS": (1000, "1,000 workers"),
    },
    "training.metrics_log": {"MAXIMUM_LOG": (2**30, "`metrics.jsonl` of 1 GiB")},
    "data.text.chat_templates": {"MAXIMUM_TEMPLATE": (2**20, "templates | 1 MiB")},
    "data.text.template_renderer": {
        "MAXIMUM_SECONDS": (1.5, "1.5 s of computing"),
        "MAXIMUM_MEMORY": (2**30, "computing and 1 GiB"),
        "MAXIMUM_GROWTH": (16, "16 characters for each character"),
        "MAXIMUM_MESSAGES": (1000, "conversations of 1,000 messages"),
        "FREE_TEXT": (2**20, "beyond 2^20"),
    },
    "core.limited_process": {"MAXIMUM_MEMORY": (2**30, "1 s of computing and 1 GiB;")},
    "data.text.tokenizer_building": {"MAXIMUM_VOCABULARY": (2**24, "2^24 tokens")},
    "data.text.encoding_limits": {
        "MAXIMUM_FILE": (2**27, "files of 128 MiB"),
        "MAXIMUM_TEXT": (2**22, "texts of 2^22 characters"),
        "MAXIMUM_GROWTH": (1024, "1,024 characters for one"),
        "MAXIMUM_GROWN": (2**26, "2^26 for a text"),
        "MAXIMUM_SECONDS": (10, "10 s for a short text"),
        "CHARACTERS_PER_SECOND": (2**16, "each 2^16 characters"),
    },
    "core.patterns": {
        "MAXIMUM_PATTERN": (2000, "2,000 characters; matched by RE2 in linear time"),
    },
    "core.file_names": {
        "MAXIMUM_NAME": (255, "255 bytes for each part"),
        "MAXIMUM_PATH": (4095, "4,095 in all"),
    },
    "core.errors": {"MAXIMUM_SHOWN": (200, "at most 200 characters")},
}


@pytest.mark.parametrize("module", LIMITS)
def test_the_page_states_the_limits_of_the_code(module):
    page = PAGE.read_text()
    constants = vars(importlib.import_module(f"prompt_tuning.{module}"))
    for name, (value, statement) in LIMITS[module].items():
        assert constants[name] == value, name
        assert statement in page
