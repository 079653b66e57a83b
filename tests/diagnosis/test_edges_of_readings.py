"""The padded lengths that are tried."""

from __future__ import annotations

from types import SimpleNamespace

from mismatch_cli.diagnosis import readings


def test_prompts_are_padded_to_their_longest_and_to_the_usual_multiples():
    model = SimpleNamespace(config=SimpleNamespace(pad_token_id=7), longest_prompt=100)
    lengths = (100, 104, 128, 256, 512, 1024, 2048)
    expected = [
        f"prompts padded to {length} with token {token}" for token in (7, 0) for length in lengths
    ]
    expected += [f"{count} tokens 7 before the prompt" for count in range(1, 65)]
    assert [hypothesis.name for hypothesis in readings.paddings(model)] == expected
