"""Arrays in pickles that hold their columns one after another."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.frameworks.importing import pickled_numpy as _pickled_numpy
from mismatch_cli.frameworks.importing.pickled_numpy import Dtype


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_keeps_its_order_whichever_way_its_pickle_says_it(order):
    """In a buffer of its own, or in its state."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    data = values.tobytes(order)
    numbers = _pickled_numpy.frombuffer(data, Dtype("f4"), (2, 3), order).values
    assert (numbers == values).all()
    array = _pickled_numpy.Array()
    array.__setstate__((1, (2, 3), Dtype("f4"), order == "F", data))
    assert (array.values == values).all()
