"""Prompts and positions under each hypothesis, to the id and the frequency."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mismatch_cli.diagnosis.hypotheses import (
    BASE_FACTORS,
    FACTORS,
    other_prompts,
    padded,
    padded_lengths,
    padded_to,
    padding_tokens,
    positions_of,
    scaled_base,
    scaled_positions,
)
from mismatch_cli.diagnosis.model import Hypothesis

CONFIG = SimpleNamespace(
    bos_token_id=1, eos_token_id=[2, 3], pad_token_id=None, image_token_id=7, video_token_id=8
)
IDS = [11, 12, 12, 12, 13, 13, 13, 13, 14]


def test_prompts_lack_repeat_or_begin_with_tokens():
    prompts = {h.name: h.prompt(IDS) for h in other_prompts(CONFIG)}
    expected = {
        "the bos token before the prompt": [1, *IDS],
        "the eos token before the prompt": [2, *IDS],
        "the first token twice": [11, *IDS],
        "the last token twice": [*IDS, 14],
    }
    for place in range(4):
        expected[f"without token {place} of the prompt"] = IDS[:place] + IDS[place + 1 :]
    for place in range(-4, 0):
        start = 9 + place
        expected[f"without token {place} of the prompt"] = IDS[:start] + IDS[start + 1 :]
    for count in (2, 3, 4):
        expected[f"without the first {count} tokens"] = IDS[count:]
        expected[f"without the last {count} tokens"] = IDS[:-count]
    expected["each run of one token as one"] = [11, 12, 12, 12, 13, 14]
    expected["without its runs of one token"] = [11, 12, 12, 12, 14]
    for token in (7, 8):
        for count in (4, 16, 64, 256):
            expected[f"each placeholder {token} {count} times"] = IDS
    assert prompts == expected
    of_name = {h.name: h.prompt for h in other_prompts(CONFIG)}
    assert of_name["without the first 3 tokens"]([5, 6]) == [5, 6], "none would be left"
    assert of_name["each placeholder 8 4 times"]([8, 5]) == [8, 8, 8, 8, 5]
    without = other_prompts(SimpleNamespace())
    assert len(without) == len(expected) - 2 - 8


def test_prompts_are_padded_on_the_left():
    assert (padded(3, 9).name, padded(3, 9).prompt([1])) == (
        "3 tokens 9 before the prompt",
        [9, 9, 9, 1],
    )
    to_four = padded_to(4, 9)
    assert to_four.name == "prompts padded to 4 with token 9"
    assert to_four.prompt([1]) == [9, 9, 9, 1] and to_four.prompt([1] * 5) == [1] * 5
    assert padding_tokens(CONFIG) == [2, 0]
    assert padding_tokens(SimpleNamespace(pad_token_id=0, eos_token_id=5)) == [0, 5]
    assert padded_lengths(65) == [65, 72, 128, 256, 512, 1024, 2048]
    assert padded_lengths(64) == [64, 128, 256, 512, 1024, 2048]


class Rotary(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.5, 0.25, 0.125]))
        self.register_buffer("local_inv_freq", torch.tensor([0.5, 0.1]))
        self.register_buffer("other", torch.ones(2))


@pytest.mark.parametrize(("hypothesis", "name", "first", "local"), [
    (scaled_positions(4.0), "RoPE scaled linearly by 4", [1 / 4, 1 / 8, 1 / 16, 1 / 32], [1 / 8, 0.025]),
    (scaled_base(16.0), "RoPE base times 16", [1.0, 0.25, 1 / 16, 1 / 64], [0.5, 0.025]),
])  # fmt: skip
def test_frequencies_are_scaled_in_every_rotary_embedding(hypothesis, name, first, local):
    model = torch.nn.ModuleList([Rotary(), torch.nn.Linear(1, 1), Rotary()])
    assert hypothesis.name == name
    with hypothesis.changed(model):
        for rotary in (model[0], model[2]):
            assert rotary.inv_freq.tolist() == pytest.approx(first)
            assert rotary.local_inv_freq.tolist() == pytest.approx(local)
            assert rotary.other.tolist() == [1, 1]
    for rotary in (model[0], model[2]):
        assert rotary.inv_freq.tolist() == [1.0, 0.5, 0.25, 0.125]
        assert rotary.local_inv_freq.tolist() == pytest.approx([0.5, 0.1])


def names(hypotheses: list[Hypothesis]) -> list[str]:
    return [hypothesis.name for hypothesis in hypotheses]


def test_yarn_is_tried_from_the_context_lengths_of_the_model():
    usual = names([*map(scaled_positions, FACTORS), *map(scaled_base, BASE_FACTORS)])
    assert names(positions_of(SimpleNamespace())) == usual
    config = SimpleNamespace(rope_parameters={"rope_theta": 1e4}, max_position_embeddings=4096)
    yarn = []
    for factor, lengths in (
        (2, (2048, 4096)),
        (4, (1024, 4096)),
        (8, (512, 4096)),
        (32, (128, 4096)),
    ):
        yarn += [f"YaRN with factor {factor} from {length} positions" for length in lengths]
    assert names(positions_of(config)) == usual + yarn
    config.rope_parameters |= {"original_max_position_embeddings": 1024, "rope_type": "llama3"}
    *others, last = names(positions_of(config))
    assert last == "RoPE without its scaling"
    assert others[-2:] == [
        f"YaRN with factor 32 from {length} positions" for length in (1024, 4096)
    ]
    assert len(others) == len(usual) + 3 + 2 + 3 + 3
