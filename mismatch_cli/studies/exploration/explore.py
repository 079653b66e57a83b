"""Explores traces in two passes: one over all tokens, one over the passages that it chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from mismatch_cli.base.places import shorten_paths
from mismatch_cli.metrics.clipping.masked_slice import Needs
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.masks_and_factors import Rule
from mismatch_cli.rules.joint_batches import BatchValues
from mismatch_cli.studies.exploration.explored import BlockedLevels, Exploration, TokenList
from mismatch_cli.studies.exploration.explored_rows import ExploredRows
from mismatch_cli.studies.exploration.page_tokens import PageTokens
from mismatch_cli.studies.exploration.passages import MOST_RESPONSES, passages, tokens_at
from mismatch_cli.studies.exploration.slider_levels import SliderAlgorithms, SliderKey
from mismatch_cli.studies.exploration.token_survey import TokenSurvey
from mismatch_cli.studies.study import name_of
from mismatch_cli.trace.reader import Trace


def explore(
    traces: Sequence[Trace],
    pair: Pair,
    algorithms: Sequence[Algorithm],
    needs: Needs,
    first_pass: Mapping[Rule, BatchValues],
    compared: Sequence[Algorithm] = (),
    rows: Sequence[ExploredRows] | None = None,
    pair_b: Pair | None = None,
    moved: Sequence[Algorithm] | None = None,
    on_responses: Callable[[int], None] = lambda _: None,
) -> Exploration | None:
    """All scored responses, and as many of their tokens as a page can have; None if there are no
    responses.

    `first_pass` is the result of `clipping.first_pass`, `compared` has at most two algorithms.
    Thresholds move of the `moved` algorithms, by default of all. `rows` has the responses of each
    trace to explore, `pair_b` the columns of a second run on the same tokens, which their batches
    also hold. `on_responses` hears of each response twice.
    """
    every = rows or [ExploredRows() for _ in traces]
    judging = SliderAlgorithms(
        algorithms, needs, first_pass, compared, algorithms if moved is None else moved
    )
    survey = TokenSurvey(pair, judging, every, pair_b)
    for number, trace in enumerate(traces):
        survey.read(trace, number, on_responses)
    if not survey.responses:
        return None
    leaders, length_S = survey.leaders.lists(), survey.row_S["length"].tolist()
    passage_P = passages(list(leaders.values()), length_S, survey.tokens)
    lists = [
        TokenList(name, token_U, survey.leaders.population[name])
        for name, leading in leaders.items()
        if len(token_U := tokens_at(passage_P, leading))
    ]
    page = PageTokens(survey, passage_P, lists)
    for number, trace in enumerate(traces):
        groups = [group for group in survey.groups if group.trace == number]
        page.read(trace, groups, on_responses)
    return _explored(traces, survey, page, lists)


def _explored(
    traces: Sequence[Trace], survey: TokenSurvey, page: PageTokens, lists: Sequence[TokenList]
) -> Exploration:
    passage_P = page.passage_P.copy()
    number_S, row_S = _entries(survey.row_S, np.unique(passage_P["response"]), page.row_C)
    passage_P["response"] = np.searchsorted(number_S, passage_P["response"])
    response_C = np.unique(passage_P["response"])
    return Exploration(
        traces=tuple(shorten_paths(str(name_of(trace))) for trace in traces),
        pair=survey.pair,
        judged_alike=survey.judged_alike,
        compared=tuple(algorithm.name for algorithm in survey.judging.compared),
        total_responses=survey.responses,
        total_tokens=survey.tokens,
        response_S=row_S.view(np.recarray),
        one_advantage=survey.one_advantage,
        prompts=dict(zip(response_C.tolist(), page.prompt_C, strict=True)),
        passage_P=passage_P.view(np.recarray),
        tokens=page.result(),
        judged=tuple(_judged(survey, page)),
        lists=tuple(lists),
        profile_response_R=response_C[page.is_partial_C],
        profile_RB=page.profile_CB[page.is_partial_C],
    )


def _judged(survey: TokenSurvey, page: PageTokens) -> Iterator[BlockedLevels]:
    for algorithm, sign in product(survey.judging.algorithms, survey.judging.signs):
        key = SliderKey(algorithm.masks, sign)
        if key in survey.sliders:
            yield survey.sliders[key].result(algorithm, sign, page.levels[key])


def _entries(
    row_S: np.ndarray, number_C: np.ndarray, row_C: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers and rows of at most as many responses as a page can have: all with a passage, and
    the first of the others.
    """
    others = np.setdiff1d(np.arange(len(row_S)), number_C)[: MOST_RESPONSES - len(number_C)]
    number_S = np.concatenate([others, number_C])
    order = np.argsort(number_S)
    return number_S[order], np.concatenate([row_S[others], row_C])[order]
