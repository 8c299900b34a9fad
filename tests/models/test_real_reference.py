"""The stored transformers logits of the real models: consistent in themselves, and equal to the float64 truth."""

import numpy as np
import pytest

from nn.check import reference
from nn.io import registry
from nn.models.config import parameters_by_part
from tests.fixtures import real


def noisy_copy(expected):
    """Logits (T, vocab) that hold everything stored; the rest is filled with the row's mean."""
    logits = np.repeat(expected.mean[:, None], expected.whole.shape[1], axis=1)
    logits[:, expected.columns] = expected.at_columns
    np.put_along_axis(logits, expected.top_ids.astype(np.int64), expected.top.astype(np.float64), axis=1)
    logits[expected.rows] = expected.whole
    return logits


@pytest.mark.parametrize("name", real.NAMES)
def test_fixture_is_consistent(name):
    expected = real.expected(name)
    assert expected.ids.shape == (200,) and expected.top.shape == (200, 8)
    assert (np.diff(expected.top, axis=1) <= 0).all()
    for row, whole in zip(expected.rows, expected.whole):
        np.testing.assert_array_equal(whole[expected.columns], expected.at_columns[row])
        np.testing.assert_array_equal(whole[expected.top_ids[row]], expected.top[row])
        assert whole.argmax() == expected.top_ids[row, 0]
        assert real.row_statistics(whole[None])[2][0] == pytest.approx(expected.logsumexp[row], rel=1e-12)
    # The model reads the text: its own next token is usual among the eight best (chance: 8 in 49,152 or fewer).
    known = (expected.top_ids[:-1] == expected.ids[1:, None]).any(axis=1)
    assert known.mean() > 0.4


def test_compare_notices_errors():
    expected = real.expected("smollm2")
    logits = noisy_copy(expected)
    assert expected.compare(logits).error == 0.0
    for column in (expected.top_ids[3, 7], expected.columns[100]):
        wrong = logits.copy()
        wrong[3, column] += 0.01 * expected.deviation
        report = expected.compare(wrong)
        assert report.error == pytest.approx(0.01, rel=1e-3) and report.worst > real.TOLERANCE
    swapped = logits.copy()  # a logit that is not stored rises over the largest one
    column = np.setdiff1d(np.arange(1000), [*expected.columns, *expected.top_ids[3]])[0]
    swapped[3, column] = expected.top[3, 0] + 1.0
    assert expected.compare(swapped).wrong_top == [3]
    with pytest.raises(ValueError, match=r"expected \(200, 49152\)"):
        expected.compare(logits[:5])


@pytest.mark.weights
@pytest.mark.parametrize("name", ["smollm2"])  # make_real_fixtures.py refuses to write any of them otherwise
def test_truth_equals_transformers_on_real_weights(name):
    pytest.importorskip("gguf")
    path = registry.resolve(name)
    if path is None:
        pytest.skip(f"{name} is not in the cache; `anygpu pull {name}` fetches it")
    config, weights = real.load_gguf(path)
    assert parameters_by_part(config)["total"] == sum(w.size for w in weights.values())
    expected = real.expected(name)
    report = expected.compare(reference.forward(config, weights, expected.ids))
    assert report.worst < 1e-4, report  # transformers' own f32 error
    assert not report.wrong_top
