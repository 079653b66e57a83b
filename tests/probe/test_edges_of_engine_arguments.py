"""An engine setting that is text, under a name typed with hyphens."""

from __future__ import annotations

from mismatch_cli.probe.engine_arguments import is_name_on_server, parsed_arguments


def test_hyphens_of_a_name_become_underscores_whatever_the_value_is():
    arguments = parsed_arguments(["load-format=dummy", "max-num-seqs=64"])
    assert arguments == {"load_format": "dummy", "max_num_seqs": 64}


def test_a_name_on_a_server_is_text_without_an_address():
    assert is_name_on_server("org/model:7b v2") and is_name_on_server("a" * 200)
    for value in (7, None, "", "a" * 201, "http://elsewhere/model", "a\nb"):
        assert not is_name_on_server(value)
