"""Seeds that depend on what is sampled, not on when: so that a resumed run samples what the unbroken one would have."""

from __future__ import annotations

import hashlib


def sample_seed(seed: int, prompt_id: int, sample_index: int, step: int = 0) -> int:
    """A 31-bit seed from hash(seed, prompt, sample, step)."""
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{sample_index}/{step}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
