"""The compared pair, and the tokens on which it differs."""

from __future__ import annotations

from typing import Any

import pytest

from mismatch_cli.base.errors import UsageError
from mismatch_cli.report.pages.clipping import example_excerpts
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.studies.clipping import analyse_clipping
from tests.metrics.clipping.world import ALL, world
from tests.studies.written import write_trace

PAPER = ["grpo-clip-higher", "dppo-binary-tv"]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("runs")
    return [write_trace(folder / str(n) / "trace", world(n, 24), seed=n) for n in (0, 1)]


def names(pair: Any) -> list[str]:
    return [algorithm.name for algorithm in pair]


def algorithms(*specs: str) -> tuple[Any, ...]:
    return tuple(parse_algorithm(spec) for spec in specs)


@pytest.mark.parametrize(
    ("judged", "expected"),
    [
        (names(ALL), PAPER),
        (["dppo-binary-tv", "ipo", "grpo-clip-higher"], PAPER),
        (["pg-is", "ipo", "dppo-binary-tv", "relax-both"], ["dppo-binary-tv", "ipo"]),
        (["pg-is", "relax-both", "ipo"], ["relax-both", "ipo"]),
        (["pg-is", "ipo", "reinforce"], ["ipo", "pg-is"]),
        (["pg-is"], ["pg-is"]),
        (["mask-0.5:max_drop=0.999", "ipo", "relax-both"], ["ipo", "relax-both"]),
        (["ipo:max_tv=0.2", "ipo:max_tv=0.1"], ["ipo:max_tv=0.2", "ipo:max_tv=0.1"]),
    ],
)
def test_the_default_pair(traces, judged, expected):
    analysis = analyse_clipping(traces[:1], algorithms(*judged))
    assert names(analysis.compared) == expected


def test_the_pair_asked_for(traces):
    pair = algorithms("ipo", "minirl")
    assert analyse_clipping(traces[:1], ALL, pair).compared == pair


def test_an_algorithm_that_cannot_be_judged_cannot_be_compared(tmp_path):
    trace = write_trace(
        tmp_path / "trace", world(0, 12), without=("logp_recomputed", "topk_logp_recomputed")
    )
    with pytest.raises(UsageError, match=r"minirl cannot be compared: .*logp_recomputed"):
        analyse_clipping([trace], ALL, algorithms("ipo", "minirl"))


def test_examples_have_their_context(traces):
    """At most three each way, from either trace, each at its place and with its numbers in the
    trace.
    """
    analysis = analyse_clipping(traces, ALL)
    excerpts = example_excerpts(analysis)
    examples = analysis.result.overlap.examples
    chosen = [token for token in examples if {token.only, token.not_} == set(PAPER)]
    assert len(excerpts) == len(chosen) and {token.only for token in chosen} == set(PAPER)
    assert {token.trace for token in chosen} == {0, 1} and len(chosen) <= 6
    for token, excerpt in zip(chosen, excerpts, strict=True):
        sign = ">" if token.advantage == "+" else "<"
        assert excerpt.title.startswith(f"{token.only} blocks, {token.not_} keeps (A {sign} 0): ")
        facts = dict(excerpt.facts)
        assert facts["prompt"] == str(token.prompt_id) and facts["sample"] == str(
            token.sample_index
        )
        assert facts["position"].startswith(f"{token.position} of ")
        batch = world(token.trace, 24)
        (response,) = [
            s
            for s in range(batch.num_responses)
            if batch.prompt_id_S[s] == token.prompt_id
            and batch.sample_index_S[s] == token.sample_index
        ]
        place = int(batch.offset_S1[response]) + token.position
        assert (
            batch.response_ids_T[place] == token.token_id
            and batch.logp_rollout_T[place] == token.logp_reference
        )
        assert (batch.advantage_T[place] > 0) == (sign == ">")


def test_a_screen_has_the_first_token_that_only_one_of_the_pair_blocks_each_way(traces):
    excerpts = example_excerpts(analyse_clipping(traces, ALL))
    short = [excerpt.short for excerpt in excerpts if excerpt.short]
    assert len(short) == 2 < len(excerpts)
    for name, first in zip(PAPER, short, strict=True):
        excerpt = next(each for each in excerpts if each.title.startswith(f"{name} blocks"))
        assert excerpt.short == first and first.startswith(f"Only {name} blocks (A ")


def test_a_pair_of_one_has_no_examples(traces):
    judged = algorithms("grpo-clip-higher", "ipo")
    assert example_excerpts(analyse_clipping(traces[:1], judged, judged[:1])) == []
    assert len(example_excerpts(analyse_clipping(traces[:1], judged, judged))) > 0


def test_an_example_that_the_trainer_excludes(tmp_path):
    """log π = −inf is null in the JSON; its excerpt says π = 0."""
    batch = world(0, 24)
    batch.logp_trainer_T[:] = float("-inf")
    trace = write_trace(tmp_path / "trace", batch)
    analysis = analyse_clipping([trace], algorithms("grpo-clip-higher", "mask-0.8"))
    assert None in {token.logp_current for token in analysis.result.overlap.examples}
    excerpts = example_excerpts(analysis)
    assert {dict(excerpt.facts)["π"] for excerpt in excerpts} == {"0"}
