import dataclasses

import numpy as np
import pytest

from prompt_tuning.core.model_config import RotaryScaling
from prompt_tuning.models.rotary import rotary_frequencies
from tests.support.dummies import LLAMA

CONFIG = dataclasses.replace(LLAMA, head_width=32)

# Every third inv_freq of transformers 5.23 LlamaRotaryEmbedding for these settings.
LLAMA3 = [1.0, 8.539710193872452e-2, 7.29266507551074e-3]
LLAMA3 += [7.784655463183299e-5, 6.647869668086059e-6, 5.677088097399974e-7]
LINEAR = [2.5e-1, 4.445698484778404e-2, 7.905694656074047e-3]
LINEAR += [1.4058533124625683e-3, 2.500000118743628e-4, 4.4456985051510856e-5]


@pytest.mark.parametrize(
    ("base", "scaling", "expected"),
    [
        (
            5e5,
            RotaryScaling(
                factor=8.0,
                low_frequency_factor=1.0,
                high_frequency_factor=4.0,
                original_positions=8192,
            ),
            LLAMA3,
        ),
        (1e4, RotaryScaling(factor=4.0), LINEAR),
    ],
)
def test_scaled_frequencies_equal_those_from_transformers(base, scaling, expected):
    config = dataclasses.replace(CONFIG, rotary_base=base, rotary_scaling=scaling)
    np.testing.assert_allclose(rotary_frequencies(config)[::3], expected, rtol=1e-6)
