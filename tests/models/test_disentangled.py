"""Buckets of relative positions are those of transformers."""

# transformers and torch are only in the `bench` extra.
# pyright: reportMissingImports=false

import numpy as np
import pytest

from prompt_tuning.models.disentangled import logarithmic_bucket


@pytest.mark.torch
@pytest.mark.parametrize(("buckets", "maximum"), [(256, 512), (8, 20), (5, 4)])
def test_buckets_are_those_of_transformers(buckets, maximum):
    import torch
    from transformers.models.deberta_v2 import modeling_deberta_v2 as theirs

    distances = np.arange(-1500, 1501)
    given = torch.tensor(distances), buckets, maximum
    expected = theirs.make_log_bucket_position(*given).long().numpy()
    ours = logarithmic_bucket(distances, buckets, maximum)
    np.testing.assert_array_equal(ours, expected)
