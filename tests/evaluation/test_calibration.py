"""Compares contextual calibration with the paper's formula."""

import numpy as np

from prompt_tuning.evaluation.results import calibrate_nats


def test_each_probability_is_divided_by_its_value_without_content():
    p = np.array([[0.7, 0.2, 0.1]])
    without = np.array([[[0.8, 0.1, 0.1]]])
    calibrated = calibrate_nats(-np.log(p), -np.log(without))
    np.testing.assert_allclose(calibrated, -np.log(p / without[:, 0]), rtol=1e-12)
    # The model's preferred label no longer wins.
    assert calibrated.argmin() == 1


def test_probabilities_are_normalized_over_the_labels_and_averaged():
    p, q = np.array([[0.3, 0.1]]), np.array([[[0.02, 0.02], [0.3, 0.1]]])
    calibrated = calibrate_nats(-np.log(p), -np.log(q))
    mean = (np.array([0.5, 0.5]) + np.array([0.75, 0.25])) / 2
    np.testing.assert_allclose(calibrated, -np.log(np.array([[0.75, 0.25]]) / mean))


def test_uninformative_evidence_favors_no_label():
    nats = np.array([[1000.0, 1001.0, 1007.0]])
    calibrated = calibrate_nats(nats, nats[:, None])
    np.testing.assert_allclose(calibrated, np.zeros((1, 3)), atol=1e-9)
