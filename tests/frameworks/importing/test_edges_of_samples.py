"""How samples are put into blocks."""

from __future__ import annotations

from mismatch_cli.frameworks.importing import samples as samples_module
from mismatch_cli.frameworks.importing.omissions import Tally


def test_a_block_ends_with_the_sample_that_fills_it(monkeypatch):
    """With four tokens in a block: 3 + 1, then 3 + 2, then the rest."""
    monkeypatch.setattr(samples_module, "TOKENS_PER_BLOCK", 4)
    sizes = [3, 1, 3, 2, 1]
    samples = [{"tokens": list(range(size)), "response_length": 1} for size in sizes]
    blocks = list(samples_module.tables(samples, 0, Tally(), "a file"))
    assert [block.num_rows for block in blocks] == [2, 2, 1]


def test_a_newer_trainer_has_the_version_after_the_oldest_that_sampled():
    """Without a version of the sampler, the trainer's is the first after 0."""
    sample = {"tokens": [1, 2], "response_length": 1, "newer_trainer": True}
    for versions, trainer in ((["3", "4"], 4), (None, 1)):
        (table,) = samples_module.tables(
            [sample | {"weight_versions": versions}], 0, Tally(), "a file"
        )
        assert table.column("version_trainer").to_pylist() == [trainer]
