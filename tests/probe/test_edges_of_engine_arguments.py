"""An engine setting that is text, under a name typed with hyphens."""

from __future__ import annotations

from mismatch_cli.probe.engine_arguments import parsed_arguments


def test_hyphens_of_a_name_become_underscores_whatever_the_value_is():
    arguments = parsed_arguments(["load-format=dummy", "max-num-seqs=64"])
    assert arguments == {"load_format": "dummy", "max_num_seqs": 64}
