"""The line below every figure."""

from __future__ import annotations

import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.metrics.pair_summary import TokenTotals
from mismatch_cli.report.preamble import subject_lines
from mismatch_cli.studies.study import subject_of
from mismatch_cli.trace.origin import About
from mismatch_cli.trace.reader import Trace


def test_a_figure_names_both_sides_as_the_screen_does() -> None:
    """In the same order, with the KV cache, but without versions, which a narrow figure has no
    room for.
    """
    trace = Trace.open(bundled("traces/fp8-kv"))
    sides = "vllm bfloat16 with KV cache fp8 against transformers bfloat16"
    assert subject_of(trace.manifest, 9393) == f"sample_data/model · {sides} · 9,393 tokens"
    counts = TokenTotals(9393, 0, 0, 0, responses=184, prompts=23, prompts_exact=True)
    screen, _ = subject_lines(About.of([trace]), counts)
    assert " ".join(word for word in screen.split() if not word[0].isdigit()) == sides


@pytest.mark.parametrize(
    ("manifest", "subject"),
    [
        ({}, "14,397 tokens"),
        ({"rollout": {"engine": None}, "trainer": {"model": None}}, "14,397 tokens"),
        (
            {"trainer": {"name": "my trainer", "dtype": "bfloat16"}},
            "my trainer bfloat16 · 14,397 tokens",
        ),
        (
            {
                "rollout": {"engine": "vllm", "model": "a"},
                "trainer": {"transformers": "5.19.0", "model": "b"},
            },
            "a against b · vllm against transformers · 14,397 tokens",
        ),
    ],
)
def test_what_a_trace_does_not_record_leaves_no_separator(
    manifest: dict[str, dict[str, str]], subject: str
) -> None:
    assert subject_of(manifest, 14_397) == subject
