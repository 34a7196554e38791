"""The study that chooses defaults: its tasks and its tables."""

from scripts.bench import defaults

LORA = {"method": "lora", "start": "kaiming", "length": 0, "schedule": "constant"}


def test_candidates_are_ordered_by_the_median_of_their_ranks():
    """0.003 is first on two of three tasks, though far behind on the third."""
    losses = {0.001: (2.0, 2.0, 1.0), 0.003: (1.0, 1.0, 9.0), 0.01: (3.0, 3.0, 2.0)}
    lines = [
        {**LORA, "rate": rate, "task": task, "seed": seed, "loss": loss + extra}
        for rate, row in losses.items()
        for task, loss in zip("abc", row, strict=True)
        for seed, extra in enumerate((0.0, 0.5, -7.0))  # the median is the loss
    ]
    assert defaults.method_table(lines, "lora").splitlines()[2:] == [
        "| kaiming | 0 | constant | 0.003 | 1.000 | 1.000 | 9.000 | 1 |",
        "| kaiming* | 0 | constant | 0.001 | 2.000 | 2.000 | 1.000 | 2 |",
        "| kaiming | 0 | constant | 0.01 | 3.000 | 3.000 | 2.000 | 3 |",
    ]


def test_a_speech_answers_the_one_before(tmp_path):
    file = tmp_path / "play.txt"
    file.write_text("ANNA:\nWho is there?\n\nBEN:\nNobody,\nI think.\n\nANNA:\nOh.\n\n")
    pairs = list(defaults.read_speeches(file))
    assert pairs == [
        ("ANNA:\nWho is there?\n\nBEN:\n", "Nobody,\nI think."),
        ("BEN:\nNobody,\nI think.\n\nANNA:\n", "Oh."),
    ]
