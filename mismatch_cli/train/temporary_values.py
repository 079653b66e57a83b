"""A model that has other values of its weights for a while."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def temporary_values(weights: Sequence[Tensor], values: Iterable[Tensor]) -> Iterator[None]:
    """Give the weights other values inside the block, and then their own again, to the bit."""
    with torch.no_grad():
        own = [weight.detach().clone() for weight in weights]
        try:
            copy_values(weights, values)
            yield
        finally:
            copy_values(weights, own)


@torch.no_grad()
def copy_values(weights: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copy values into weights, one after the other."""
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)
