"""Hashes instead of random numbers: a sample or a group depends only on a key, not on order or
sharding.
"""

import numpy as np

GROUPS = 128  # a power of two
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, uint64 to uint64: every output bit depends on every input
    bit.
    """
    x = x + _STEP
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= _MIX_1
    # The array of the first shift is used again: allocating takes as long as computing.
    x ^= np.right_shift(x, np.uint64(27), out=shifted)
    x *= _MIX_2
    x ^= np.right_shift(x, np.uint64(31), out=shifted)
    return x


def hash_keys(*keys: np.ndarray, seed: int = 0) -> np.ndarray:
    """One uint64 per row of the integer columns."""
    state = np.full(keys[0].shape, seed, dtype=np.int64).view(np.uint64)
    for key in keys:
        state = mix(state ^ key.astype(np.int64).view(np.uint64))
    return state


def prompt_groups(prompt_id_P: np.ndarray) -> np.ndarray:
    """The group of each prompt, int64, for intervals that leave out one group at a time."""
    lower_bits = np.uint64(65 - GROUPS.bit_length())
    return (hash_keys(prompt_id_P, seed=1) >> lower_bits).astype(np.int64)


def sum_by_group(group_S: np.ndarray, sums_SM: np.ndarray) -> np.ndarray:
    """Σ over the responses of each group: [S, M] → [GROUPS, M], float64; 0 for an empty group."""
    totals_GM = np.zeros((GROUPS, sums_SM.shape[1]))
    # Responses to one prompt are mostly neighbours. `add.at` is slow: it gets their R runs.
    first_R = np.flatnonzero(np.diff(group_S, prepend=-1))
    if len(first_R):
        sums_RM = np.add.reduceat(sums_SM, first_R, axis=0)
        np.add.at(totals_GM, group_S[first_R], sums_RM)
    return totals_GM
