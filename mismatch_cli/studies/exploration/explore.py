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

    `first_pass` is the result of `clipping.collect_first_pass`, `compared` has at most two
    algorithms. Thresholds move of the `moved` algorithms, by default of all. `rows` has the
    responses of each trace to explore, `pair_b` the columns of a second run on the same tokens,
    which their batches also hold. `on_responses` hears of each response twice.
    """
    if moved is None:
        moved = algorithms
    judging = SliderAlgorithms(algorithms, needs, first_pass, compared, moved)
    survey = TokenSurvey(pair, judging, rows or [ExploredRows()] * len(traces), pair_b)
    for number, trace in enumerate(traces):
        survey.read(trace, number, on_responses)
    if not survey.responses:
        return None
    page = _plan_page(survey)
    for number, trace in enumerate(traces):
        page.read(trace, number, on_responses)
    return _assemble(traces, survey, page)


def _plan_page(survey: TokenSurvey) -> PageTokens:
    """A page, still empty, with the passages that fit it and the lists of tokens in these."""
    leaders = survey.leaders.lists()
    passage_P = passages(list(leaders.values()), survey.row_S["length"].tolist(), survey.tokens)
    lists = []
    for name, leading in leaders.items():
        token_U = tokens_at(passage_P, leading)
        if len(token_U):
            lists.append(TokenList(name, token_U, survey.leaders.population[name]))
    return PageTokens(survey, passage_P, lists)


def _assemble(traces: Sequence[Trace], survey: TokenSurvey, page: PageTokens) -> Exploration:
    passage_P = page.passage_P.copy()
    number_S, row_S = _listed_responses(survey.row_S, np.unique(passage_P["response"]), page.row_C)
    # From here on a passage names its response by index among those that are listed.
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
        judged=tuple(_blocked_levels(survey, page)),
        lists=tuple(page.lists),
        profile_response_R=response_C[page.is_partial_C],
        profile_RB=page.profile_CB[page.is_partial_C],
    )


def _blocked_levels(survey: TokenSurvey, page: PageTokens) -> Iterator[BlockedLevels]:
    """What each algorithm blocks under each sign; nothing if no response was judged."""
    for algorithm, sign in product(survey.judging.algorithms, survey.judging.signs):
        key = SliderKey(algorithm.masks, sign)
        if key in survey.sliders:
            yield survey.sliders[key].result(algorithm, sign, page.levels[key])


def _listed_responses(
    row_S: np.ndarray, number_C: np.ndarray, row_C: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers and rows of at most as many responses as a page can have: all with a passage, and
    the first of the others.
    """
    others = np.setdiff1d(np.arange(len(row_S)), number_C)[: MOST_RESPONSES - len(number_C)]
    number_S = np.concatenate([others, number_C])
    order = np.argsort(number_S)
    return number_S[order], np.concatenate([row_S[others], row_C])[order]
