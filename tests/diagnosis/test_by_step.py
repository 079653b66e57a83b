"""The gap by step, its windows and what is said of one, by hand and by plain loops."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from mismatch_cli.diagnosis import by_step
from mismatch_cli.diagnosis.by_step import StepChange, StepGaps, Windows, find_step_change
from mismatch_cli.diagnosis.group_estimates import as_normal
from mismatch_cli.diagnosis.sample import Sample
from tests.diagnosis.samples import few_responses

# Step, prompt, tokens and Σ|d| in typical gaps of each response; one step has nothing that counts
UNEVEN = [
    (2, 0, 3, 2.0), (2, 1, 5, 6.5), (2, 2, 2, 1.0),
    (3, 0, 4, 5.0), (3, 0, 2, 1.5), (3, 7, 6, 4.0), (3, 8, 1, 1.5),
    (5, 3, 7, 9.0),
    (6, 3, 4, 3.0),
    (8, 4, 3, 12.0), (8, 5, 2, 3.0), (8, 6, 4, 14.0), (8, 9, 5, 9.0),
    (9, 4, 2, 2.0), (9, 5, 6, 5.0), (9, 1, 3, 7.0),
]  # fmt: skip
EMPTY_STEP = 6


def uneven_sample(rows: list[tuple[int, int, int, float]] = UNEVEN) -> Sample:
    """Before the tokens that count, each response has one that does not."""
    steps, prompts, tokens, sums = map(np.array, zip(*rows, strict=True))
    counts_T = np.ones(int((tokens + 1).sum()), dtype=bool)
    starts = np.cumsum(tokens + 1) - tokens - 1
    counts_T[starts] = False
    sample = few_responses(
        (tokens + 1).tolist(), step_S=steps, prompt_id_S=prompts, counts_T=counts_T
    )
    counts_T &= steps[sample.response_T] != EMPTY_STEP
    sample = replace(sample, counts_T=counts_T)
    # Of typical gaps, which are computed once
    vars(sample)["u_N"] = (sums / tokens)[sample.response_N]
    return sample


def test_the_gap_of_a_step_and_its_variance_are_those_of_its_prompts():
    """Two responses of a prompt in one step are one of its prompts; in another step, another."""
    sample = uneven_sample()
    gaps = StepGaps.of(sample)
    assert gaps.first_K.tolist() == gaps.last_K.tolist() == [2, 3, 5, 8, 9]
    assert gaps.index_S.tolist() == [0] * 3 + [1] * 4 + [2] + [-1] + [3] * 4 + [4] * 3
    of_prompts = {
        2: [(3, 2.0), (5, 6.5), (2, 1.0)],
        3: [(6, 6.5), (6, 4.0), (1, 1.5)],
        5: [(7, 9.0)],
        8: [(3, 12.0), (2, 3.0), (4, 14.0), (5, 9.0)],
        9: [(2, 2.0), (6, 5.0), (3, 7.0)],
    }
    means, squares, left, weight = [], [], 0.0, 0.0
    for rows in of_prompts.values():
        tokens, sums = np.array(rows).T
        mean = sums.sum() / tokens.sum()
        means.append(mean)
        squares.append((tokens**2).sum() / tokens.sum() ** 2)
        if len(rows) > 1:
            left += ((sums / mean - tokens) ** 2).sum() * len(rows) / (len(rows) - 1)
            weight += (tokens**2).sum()
    assert gaps.log_K == pytest.approx(np.log(means))
    assert gaps.variance_K == pytest.approx(left / weight * np.array(squares) + 0.1**2)
    assert gaps.prompts == 2 + 2 + 0 + 3 + 2
    windows = gaps.windows
    expected_K = np.log(means) - np.average(np.log(means), weights=1 / gaps.variance_K)
    assert windows.y_K == pytest.approx(expected_K)
    assert windows.weight_K == pytest.approx(1 / gaps.variance_K)


def regular(steps: int, prompts: int) -> Sample:
    rows = []
    for step in range(steps):
        for prompt in range(prompts):
            rows.append((10 + 2 * step, prompt, 4, 3.0 + (prompt + step) % 3))
    return uneven_sample(rows)


def test_a_variance_takes_four_steps_and_eight_prompts_beside_the_first():
    assert StepGaps.of(regular(4, 3)) is not None and StepGaps.of(regular(3, 9)) is None
    few = UNEVEN[:7] + UNEVEN[7:8] + UNEVEN[9:]
    assert StepGaps.of(uneven_sample(few[:-1])).prompts == 8
    assert StepGaps.of(uneven_sample(few[:-2])) is None
    sample = regular(4, 3)
    assert StepGaps.of(replace(sample, counts_T=np.zeros_like(sample.counts_T))) is None


def test_many_steps_are_put_together_in_their_order(monkeypatch):
    monkeypatch.setattr(by_step, "MOST_STEPS", 4)
    gaps = StepGaps.of(regular(10, 3))
    assert gaps.first_K.tolist() == [10, 16, 20, 26] and gaps.last_K.tolist() == [14, 18, 24, 28]
    assert gaps.index_S.tolist() == np.repeat([0, 1, 2, 3], [9, 6, 9, 6]).tolist()


@pytest.mark.parametrize(("start", "stop", "words", "others"), [
    (0, 1, "up to step 3", "afterwards"), (0, 2, "up to step 5", "afterwards"),
    (1, 2, "in step 5", "in the other steps"), (2, 3, "in steps 6 to 8", "in the other steps"),
    (1, 3, "in steps 5 to 8", "in the other steps"), (1, 4, "from step 5 on", "before"),
    (3, 4, "in the last step, 9", "before"), (2, 4, "from step 6 on", "before"),
])  # fmt: skip
def test_a_window_is_named_by_its_first_and_last_step(start, stop, words, others):
    """Steps 6 and 8 are put together."""
    nothing = np.zeros(4)
    first_K, last_K = np.array([2, 5, 6, 9]), np.array([3, 5, 8, 9])
    index_S = np.array([-1, 0, 1, 1, 2, 3])
    gaps = StepGaps(first_K, last_K, index_S, nothing, nothing, 0)
    change = change_of(gaps=gaps, start=start, stop=stop)
    assert (change.where, change.others, change.middle) == (words, others, 6)
    assert change.inside_S.tolist() == [start <= index < stop for index in index_S]


def test_the_step_from_which_on_a_jump_would_be_found_is_the_middle_one():
    numbers_K, nothing = np.array([2, 5, 6, 9, 11]), np.zeros(5)
    gaps = StepGaps(numbers_K, numbers_K, numbers_K, nothing, nothing, 0)
    assert change_of(gaps=gaps).middle == 6


def change_of(**values: object) -> StepChange:
    usual = {"gaps": None, "start": 0, "stop": 1, "times": 2.0, "between": (1.0, 3.0), "z": 4.1}
    usual |= {"z_needed": 4.0, "is_sudden": True, "smallest": 1.5, "smallest_once": 1.8}
    return StepChange(**usual | values)


def test_a_change_counts_if_it_is_certain_sudden_and_large():
    assert change_of().is_certain and change_of().is_found
    for value in ({"z": 4.0}, {"is_sudden": False}):
        assert not change_of(**value).is_certain and not change_of(**value).is_found
    small = change_of(times=1.3)
    assert small.is_certain and not small.is_found


def with_window(windows: Windows, w: int) -> tuple[float, float]:
    """The coefficient of a window beside a straight line, by weighted least squares; its error."""
    step_K = np.arange(windows.steps)
    inside_K = (step_K >= windows.start_W[w]) & (step_K < windows.stop_W[w])
    columns = np.stack([np.ones(windows.steps), step_K, inside_K], axis=1)
    information = columns.T @ (windows.weight_K[:, None] * columns)
    if np.linalg.matrix_rank(columns) < 3:
        return 0.0, np.inf
    covariance = np.linalg.inv(information)
    coefficients = covariance @ (columns.T @ (windows.weight_K * windows.y_K))
    return coefficients[2], covariance[2, 2] ** 0.5


def test_a_window_is_sudden_if_it_fits_better_than_a_line_and_most_is_left_beside_one(rng):
    verdicts = []
    for trial in range(60):
        steps = 5 + trial % 4
        y_K = rng.uniform(-4, 4) * np.arange(steps) / steps
        y_K[steps // 2 :] += rng.uniform(0, 3)
        y_K += 0.1 * rng.normal(size=steps)
        windows = Windows.of(y_K, rng.uniform(5, 80, steps))
        for w in range(len(windows.start_W)):
            beside, error = with_window(windows, w)
            chi2 = max(windows.chi2_W[w], 0.0)
            scale = max(1.0, (8 + chi2) / (8 + steps - 3)) ** 0.5
            assert windows.scale(w) == pytest.approx(scale)
            better = windows.chi2_W[w] < windows.chi2_of_line
            most = beside > 0.6 * windows.log_W[w]
            certain = beside > 2.5 * error * scale
            assert windows.is_sudden(w) == (better and most and certain)
            verdicts.append((better, most, certain))
    # Each of the three decides
    no, yes = False, True
    assert {(yes, yes, yes), (no, yes, yes), (yes, no, yes), (yes, yes, no)} <= set(verdicts)


def test_the_least_factor_takes_the_errors_of_the_level_in_all_windows(rng):
    windows = Windows.of(rng.normal(size=6), rng.uniform(20, 40, 6))
    assert windows.steps == 6 and windows.degrees == 8 + 6 - 3
    z_needed = NormalDist().inv_cdf(1 - 0.01 / 20)
    assert windows.z_needed == pytest.approx(z_needed)
    assert as_normal(windows.t_needed, windows.degrees + 1) == pytest.approx(z_needed)
    assert as_normal(np.nextafter(windows.t_needed, 0), 12) == pytest.approx(z_needed)
    for start, stop in ((3, 6), (3, 4), (0, 2)):
        w = windows.index(start, stop)
        assert (windows.start_W[w], windows.stop_W[w]) == (start, stop)
        _, beside = with_window(windows, w)
        least = 1.2 * max(windows.t_needed * windows.error_W[w], 2.5 * beside)
        assert windows.smallest_factor(w, 1.2) == pytest.approx(np.exp(least))
    exact = Windows.of(rng.normal(size=6), np.full(6, 1e6))
    assert exact.smallest_factor(exact.index(3, 6), 1.0) == 1.3


@pytest.mark.parametrize(("start", "stop"), [(3, 7), (0, 2), (4, 5)])
def test_the_window_with_the_most_errors_is_reported(start, stop, rng):
    """Its factor, interval and deviate are those of the other steps' scatter: every second one has
    half more. A single step may differ by more, with a larger error.
    """
    rows = []
    for step in range(7):
        for prompt in range(3):
            u = (5.0 if start <= step < stop else 1.0) * (1.5 if step % 2 else 1.0)
            u *= rng.uniform(0.9, 1.1)
            tokens = 3 + (step + prompt) % 3
            rows.append((step + 20, prompt, tokens, tokens * u))
    sample = uneven_sample(rows)
    change = find_step_change(sample)
    windows = StepGaps.of(sample).windows
    w = windows.index(start, stop)
    assert (change.start, change.stop) == (start, stop)
    log, scale = windows.log_W[w], windows.scale(w)
    error = windows.error_W[w] * scale
    assert scale > 1 and change.times == pytest.approx(np.exp(log))
    assert change.between == pytest.approx((np.exp(log - 1.96 * error), np.exp(log + 1.96 * error)))
    assert change.z == pytest.approx(as_normal(log / error, 8 + 7 - 3 + 1))
    assert change.z_needed == windows.z_needed and change.is_sudden == windows.is_sudden(w)
    least = windows.smallest_factor(windows.index(3, 7), scale)
    least_once = windows.smallest_factor(windows.index(3, 4), scale)
    assert (change.smallest, change.smallest_once) == (least, least_once)
    assert least_once != least


def test_a_larger_difference_with_a_larger_error_is_not_the_one_that_is_named():
    """Step 1 has one prompt, with seven times the gap; steps 3 to 5 have ten, with three times."""
    rows = []
    for step in range(6):
        for prompt in range(10 if step != 1 else 1):
            times = {1: 9.0}.get(step, 3.0 if step > 2 else 1.0)
            rows.append((step, prompt, 4, times * (3.0 + 2 * (prompt % 2))))
    sample = uneven_sample(rows)
    windows = StepGaps.of(sample).windows
    first = windows.index(1, 2)
    assert windows.log_W[first] == windows.log_W.max() > windows.log_W[windows.index(3, 6)]
    assert find_step_change(sample).where == "from step 3 on"
