"""Pictures of memories."""

from prompt_tuning.texts.memory_plot import plot_memories


def test_memories_of_several_sizes_become_a_picture(tmp_path):
    memories = [
        {
            "nothing": {"compression": 0.0, "closed": 0.0},
            "retrieved": {"compression": ratio},
            "memory": {"compression": ratio, "closed": 1 - ratio / 20},
            "whole text": {"compression": 1.0, "closed": 1.0},
        }
        for ratio in (4.0, 8.0)
    ]
    file = tmp_path / "memories.png"
    plot_memories(memories, file)
    assert file.read_bytes().startswith(b"\x89PNG")
