import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.core.errors import InputError
from tests.support.shared_data import FIXTURES, SHARED

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
PEFT = FIXTURES / "peft"
RELEASED = SHARED / "data" / "prompts" / "released"


def write_run(folder, losses, keep_best=("loss", "min")):
    """Writes a run whose prompt at step `s` is `ROWS + s`."""
    store = CheckpointStore(folder, keep_last=9, keep_best=keep_best)
    for step, loss in enumerate(losses):
        trained = {"decoder/prompt/prompt": ROWS + step}
        store.save(step, trained, (), {}, metrics={"loss": loss})
    return store.folder


def write_adapter(folder, rows=ROWS, **settings):
    folder.mkdir()
    config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"prompt_embeddings": rows}, folder / "adapter_model.safetensors")
    return folder


def test_a_numpy_file_is_read_with_and_without_its_extension(tmp_path):
    np.save(tmp_path / "prompt.npy", ROWS)
    shutil.copy(tmp_path / "prompt.npy", tmp_path / "encoder.prompt.prompt.prompt")
    for name in ("prompt.npy", "encoder.prompt.prompt.prompt"):
        prompt = read_prompt(tmp_path / name)
        assert prompt.dtype == np.float32
        np.testing.assert_array_equal(prompt, ROWS)
    np.testing.assert_array_equal(read_prompt(str(tmp_path / "prompt.npy")), ROWS)


def test_double_precision_is_cast(tmp_path):
    np.save(tmp_path / "prompt.npy", ROWS.astype(np.float64) / 3)
    np.testing.assert_array_equal(read_prompt(tmp_path / "prompt.npy"), ROWS / 3)


# Mean norms of the published files' vectors, computed independently of this code.
@pytest.mark.released
@pytest.mark.parametrize(
    ("task", "norm"), [("sst2", 1384.8), ("mrpc", 867.7), ("rte", 903.3)]
)
def test_released_prompts(task, norm, tmp_path):
    [path] = [p for p in RELEASED.glob("*.npy") if task in p.name.lower()]
    shutil.copy(path, tmp_path / "encoder.prompt.prompt.prompt")
    prompt = read_prompt(tmp_path / "encoder.prompt.prompt.prompt")
    assert prompt.shape == (100, 768)
    assert np.linalg.norm(prompt, axis=1).mean() == pytest.approx(norm, abs=0.05)


def test_a_run_directory_provides_its_best_prompt(tmp_path):
    folder = write_run(tmp_path / "run", (3.0, 1.0, 2.0))
    for path in (tmp_path / "run", folder, folder / "checkpoint_1"):
        np.testing.assert_array_equal(read_prompt(path), ROWS + 1)
    np.testing.assert_array_equal(read_prompt(folder / "checkpoint_2"), ROWS + 2)


def test_a_run_without_a_best_checkpoint_provides_its_latest(tmp_path):
    write_run(tmp_path, (3.0, 1.0, 2.0), keep_best=None)
    np.testing.assert_array_equal(read_prompt(tmp_path), ROWS + 2)


def test_reading_a_run_changes_nothing_in_it(tmp_path):
    folder = write_run(tmp_path, (1.0,))
    (folder / "checkpoint_1.tmp-123").mkdir()
    read_prompt(tmp_path)
    assert (folder / "checkpoint_1.tmp-123").is_dir()


def test_a_damaged_checkpoint_is_reported_once(tmp_path):
    folder = write_run(tmp_path, (2.0, 1.0))
    (folder / "checkpoint_1" / "decoder.prompt.prompt.npy").write_bytes(b"")
    messages = []
    np.testing.assert_array_equal(read_prompt(tmp_path, messages.append), ROWS)
    assert len(messages) == 1
    assert "decoder.prompt.prompt.npy is damaged: found 0 bytes" in messages[0]
    with pytest.raises(InputError, match="is damaged"):
        read_prompt(folder / "checkpoint_1")


def test_several_trained_leaves_are_not_one_prompt(tmp_path):
    trained = {"encoder/prompt/prompt": ROWS, "decoder/prompt/prompt": ROWS}
    directory = CheckpointStore(tmp_path).save(1, trained, (), {})
    with pytest.raises(InputError, match=r"2 trained leaves.*encoder\.prompt\.prompt"):
        read_prompt(tmp_path)
    assert read_prompt(directory / "encoder.prompt.prompt.npy").shape == (4, 3)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("llama_gqa_untied", "prompt_tuning"),
        ("llama_gqa_untied", "p_tuning"),
        ("gpt2_tied", "prompt_tuning"),
        ("gpt2_tied", "p_tuning"),
        ("t5v11_untied_gated", "prompt_tuning"),
        ("t5_orig_tied_relu", "prompt_tuning"),
    ],
)
def test_peft_adapters(case, kind):
    folder = PEFT / case / kind
    settings = json.loads((folder / "adapter_config.json").read_text())
    stored = load_file(folder / "adapter_model.safetensors")["prompt_embeddings"]
    length = settings["num_virtual_tokens"]
    assert len(stored) == length * (2 if case.startswith("t5") else 1)
    np.testing.assert_array_equal(read_prompt(folder), stored[:length])


def test_only_the_first_half_of_a_seq2seq_adapter_is_the_prompt(tmp_path):
    folder = write_adapter(
        tmp_path / "adapter",
        np.concatenate([ROWS, -ROWS]),
        task_type="SEQ_2_SEQ_LM",
        num_transformer_submodules=2,
    )
    np.testing.assert_array_equal(read_prompt(folder), ROWS)


def test_a_bfloat16_adapter_is_read(tmp_path):
    half = np.asarray(jnp.asarray(ROWS, jnp.bfloat16))
    np.testing.assert_array_equal(
        read_prompt(write_adapter(tmp_path / "a", half)), ROWS
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "LORA"}, "peft_type 'LORA'; only PROMPT_TUNING, P_TUNING, CPT"),
        ({"peft_type": "a" * 999}, r"'a{199}\.\.\. \(999 characters\); only"),
        ({"num_virtual_tokens": 3}, r"shape \(4, 3\), expected 3 rows"),
        ({"num_virtual_tokens": None}, "num_virtual_tokens None, expected a positive"),
    ],
)
def test_adapters_without_prompt_vectors_are_refused(settings, message, tmp_path):
    with pytest.raises(InputError, match=message):
        read_prompt(write_adapter(tmp_path / "adapter", **settings))


def test_a_single_tensor_of_a_safetensors_file(tmp_path):
    path = tmp_path / "prompt.safetensors"
    save_file({"any name": ROWS}, path)
    np.testing.assert_array_equal(read_prompt(path), ROWS)
    save_file({"one": ROWS, "two": ROWS}, path)
    with pytest.raises(InputError, match=r"has 2 tensors, expected one: \['one'"):
        read_prompt(path)
    adapter = write_adapter(tmp_path / "adapter")
    with pytest.raises(InputError, match="part of an adapter; name its folder"):
        read_prompt(adapter / "adapter_model.safetensors")


def test_a_named_adapter_is_in_a_subfolder(tmp_path):
    write_adapter(tmp_path / "named")
    np.testing.assert_array_equal(read_prompt(tmp_path), ROWS)


def test_a_pickled_adapter_is_refused(tmp_path):
    folder = write_adapter(tmp_path / "adapter")
    tensors = folder / "adapter_model.safetensors"
    tensors.rename(folder / "adapter_model.bin")
    with pytest.raises(InputError, match="not an archive of tensors"):
        read_prompt(folder)
    with pytest.raises(InputError, match="pickles are never read"):
        read_prompt(folder / "adapter_model.bin")


def test_a_truncated_adapter_is_refused(tmp_path):
    tensors = write_adapter(tmp_path / "adapter") / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"adapter_model\.safetensors has 135 bytes"):
        read_prompt(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (ROWS[0], r"shape \(3,\), expected prompt vectors \[P, D\]"),
        (np.stack([ROWS, ROWS]), r"shape \(2, 4, 3\), expected prompt vectors"),
        (ROWS[:0], r"shape \(0, 3\), expected prompt vectors"),
        (ROWS.astype(int), "int64, expected floating numbers"),
        (np.where(ROWS == 5, np.nan, ROWS), "1 of 12 numbers are not finite"),
        (ROWS.astype(object), "contains Python objects"),
    ],
    ids=["one row", "three axes", "no row", "integers", "not finite", "objects"],
)
def test_arrays_with_other_shapes_or_types_are_refused(array, message, tmp_path):
    np.save(tmp_path / "prompt.npy", array, allow_pickle=True)
    with pytest.raises(InputError, match=message):
        read_prompt(tmp_path / "prompt.npy")


def test_a_truncated_numpy_file_is_refused(tmp_path):
    path = tmp_path / "prompt.npy"
    np.save(path, ROWS)
    content = path.read_bytes()
    for length in (0, 5, 7, 40, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match=str(path)):
            read_prompt(path)


def test_a_missing_path(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_prompt(tmp_path / "none.npy")
    with pytest.raises(
        InputError, match=r"not contain a prompt: expected .*checkpoint_\*"
    ):
        read_prompt(tmp_path)
