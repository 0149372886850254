"""What formats of a KV cache give back of keys and values, as the reference defines it."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backend.kv_formats import GROUP, KV_FORMATS, KvFormats, hadamard, rounded

F32_VALUES = np.random.default_rng(0).normal(size=(40, 96)).astype(np.float32)


def test_a_value_is_off_by_half_a_step_at_most_but_for_what_is_as_large_as_the_largest() -> None:
    groups = F32_VALUES.reshape(40, -1, GROUP)
    step = np.abs(groups).max(-1, keepdims=True) / 8
    off = np.abs(rounded(F32_VALUES, "int4").reshape(groups.shape) - groups)
    assert (off <= step * 1.001).all()  # the largest code is 7
    assert (off <= step * 0.501).mean() > 0.98
    largest = np.take_along_axis(off, np.abs(groups).argmax(-1)[..., None], -1)
    assert (largest <= step * 0.005).all()  # it has the code -8, and a scale of 16 bits
    assert (np.abs(rounded(F32_VALUES, "int8") - F32_VALUES) <= np.abs(F32_VALUES).max(-1, keepdims=True) / 253).all()


def test_nothing_and_far_too_much_have_a_place() -> None:
    values = np.zeros((2, GROUP), np.float32)
    values[1, 3] = 1e9
    got = rounded(values, "int4")
    assert (got[0] == 0).all()
    assert got[1].tolist() == [8 * 65504.0 if d == 3 else 0 for d in range(GROUP)]
    assert (rounded(values[:1], "int8") == 0).all()


@pytest.mark.parametrize("dims", [32, 64, 96, 128])
def test_the_transform_changes_no_product_and_takes_itself_back(dims: int) -> None:
    matrix = hadamard(dims)
    assert np.allclose(matrix @ matrix, np.eye(dims), atol=1e-6)
    assert np.array_equal(matrix, matrix.T)
    assert np.count_nonzero(matrix[0]) == (dims & -dims)


def test_a_few_large_dimensions_of_keys_do_not_cost_the_others() -> None:
    keys = F32_VALUES[:, :64].copy()
    keys[:, 5] += 40
    formats = KvFormats("int4", "int4")
    others = np.arange(64) != 5
    plain = np.abs(formats.stored_values(keys) - keys)[:, others].mean()
    spread = np.abs(formats.stored_keys(keys) - keys)[:, others].mean()
    assert spread < 0.8 * plain


def test_names_and_bytes_of_two_formats() -> None:
    assert (KvFormats("int8", "int4").name, KvFormats("int4", "int4").name) == ("int8:int4", "int4")
    assert [KV_FORMATS[name].bytes(128) for name in ("f32", "f16", "int8", "int4")] == [512, 256, 132, 72]
