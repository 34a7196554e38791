"""The T5X checkpoints of `scripts/make_t5x_fixtures.py` and their config."""

from prompt_tuning.core.t5_config import t5_config
from tests.support.shared_data import FIXTURES

MSGPACK = FIXTURES / "t5x/msgpack/checkpoint_0"
ZARR = FIXTURES / "t5x/zarr"
T5X_CONFIG = t5_config(
    vocabulary_size=100,
    width=8,
    feed_forward_width=16,
    layers=2,
    heads=4,
    head_width=3,
    relative_buckets=8,
    relative_maximum_distance=16,
)
