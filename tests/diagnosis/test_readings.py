"""What undoing a hypothesis leaves of the gap, on which side, and which one is read on all."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.diagnosis import readings as module
from mismatch_cli.diagnosis.group_estimates import mean_over_prompts
from mismatch_cli.diagnosis.model import AS_RECORDED, Hypothesis, SkippedReading
from mismatch_cli.diagnosis.readings import KINDS, Reading, Readings, Survey
from mismatch_cli.diagnosis.sample import Sample
from tests.diagnosis.samples import few_responses


class Model:
    """Knows log π of the first tokens under each hypothesis: of two on few responses, of six on
    all.
    """

    def __init__(self, recorded: list[float], moved: dict[str, list[float]], budget: int = 1000):
        self.recorded = np.array([*recorded, np.nan])
        self.moved = {name: np.array([*values, np.nan]) for name, values in moved.items()}
        self.budget, self.spent, self.cost = budget, 0, 10
        self.budget_spent = "spent"
        self.reads: list[tuple[str, bool]] = []
        self.without_all = False
        self.scored: dict[tuple[str, bool], np.ndarray] = {}

    def logp_T(self, hypothesis: Hypothesis = AS_RECORDED, few: bool = False) -> np.ndarray:
        if hypothesis is AS_RECORDED:
            return self.recorded
        if self.without_all and not few:
            raise SkippedReading("no more")
        key = (hypothesis.name, few)
        if key not in self.scored:
            self.spent += self.cost
            self.reads.append(key)
            logp_T = self.recorded + self.moved[hypothesis.name]
            self.scored[key] = np.where(np.arange(7) < 2, logp_T, np.nan) if few else logp_T
        return self.scored[key]

    def cost_of_few(self, _: Hypothesis) -> int:
        return self.cost

    def tried_on(self, hypothesis: Hypothesis) -> list[int]:
        return [] if hypothesis.name == "nothing" else list(range(len(hypothesis.name)))


def sample_of(logq: list[float], logp: list[float]) -> Sample:
    """Of seven tokens, of which the model does not score the last, and the sixth does not count."""
    return few_responses(
        [2, 2, 1, 1, 1],
        logq_T=np.array(logq),
        logp_T=np.array(logp),
        counts_T=np.arange(7) != 5,
    )


RECORDED = [-1.0, -2.0, -3.0, -1.0, -2.0, -3.0]
EQUAL = [*RECORDED, -1.0]
# The other side: 1, −2, 1, 0, −1 nats, then one that does not count and one that is not scored
OTHER = [0.0, -4.0, -2.0, -1.0, -3.0, 5.0, -9.0]
GAPS = np.array([1.0, -2.0, 1.0, 0.0, -1.0])


def readings_of(rollout: list[float], trainer: list[float], **options: object) -> Readings:
    return Readings(sample_of(rollout, trainer), Model(RECORDED, **{"moved": {}} | options))


def test_distances_are_means_over_the_tokens_that_count_and_were_scored():
    readings = readings_of(EQUAL, OTHER)
    assert readings.distances == {"rollout": 0.0, "trainer": 1.0}
    assert readings.side == "trainer" and readings._sides == ("trainer",)
    np.testing.assert_array_equal(readings.off_T, [*GAPS, np.nan, np.nan])
    recorded = readings.as_recorded
    assert (recorded.name, recorded.side, recorded.left) == ("as recorded", "trainer", 0.0)
    assert (recorded.left_T[:6] == 0).all()
    turned = readings_of(OTHER, EQUAL)
    assert turned.distances == {"rollout": 1.0, "trainer": 0.0} and turned.side == "rollout"
    assert turned.as_recorded is None and turned._sides == ("rollout",)


@pytest.mark.parametrize(("near", "side", "sides"), [
    (0.099, "trainer", ("trainer",)), (0.101, "trainer", ("trainer", "rollout")),
    (0.499, "trainer", ("trainer", "rollout")), (0.501, None, ("trainer", "rollout")),
])  # fmt: skip
def test_a_side_is_at_fault_if_the_other_is_near_the_model(near, side, sides):
    """Of the gap, a tenth clears the other side, and half names one."""
    for gap in (1.0, 0.5, 3.0):
        rollout = [value - near * gap for value in EQUAL]
        trainer = [value - near * gap - gap for value in EQUAL]
        readings = readings_of(rollout, trainer)
        assert (readings.side, readings._sides) == (side, sides)


def test_as_recorded_leaves_the_distance_of_the_rollout():
    rollout = [value + 0.25 for value in EQUAL]
    reading = readings_of(rollout, [value - 1.0 for value in EQUAL]).as_recorded
    assert reading.left == pytest.approx(0.2)
    assert reading.left_T[:6] == pytest.approx([-0.25] * 6)


def survey_of(readings: Readings, names: Iterable[str], share: float = 1.0) -> Survey:
    return readings._survey((Hypothesis(name) for name in names), share)


def test_the_hypothesis_that_leaves_least_on_a_few_is_read_on_all():
    """The trainer read it: its gap of 1 and −2 nats on the first two tokens is that hypothesis's."""
    moved = {
        "half": [0.5, -1.0, 0.5, 0, -0.5, 0],
        "most": [1.0, -1.7, 1.0, 0, -0.7, 0],
        "turned": [-1.0, 2.0, -1.0, 0, 1.0, 0],
        "nothing": [0.0] * 6,
    }
    readings = readings_of(EQUAL, OTHER, moved=moved)
    survey = survey_of(readings, ["half", "most", "nothing", "turned"])
    assert (survey.hypotheses, survey.responses, survey.unread) == (3, 6, "")
    assert survey.left == pytest.approx(0.1)
    reading = survey.reading
    assert (reading.name, reading.side) == ("most", "trainer")
    assert reading.left == pytest.approx(0.6 / 5)
    np.testing.assert_allclose(reading.left_T[:5], [0, -0.3, 0, 0, -0.3], atol=1e-12)
    sample = sample_of(EQUAL, OTHER)
    expected = [0, -0.3, 0, 0, -0.3, -8.0 * reading.left]
    np.testing.assert_allclose(reading.left_N(sample), expected, atol=1e-12)
    assert readings._model.reads == [
        ("half", True),
        ("most", True),
        ("turned", True),
        ("most", False),
    ]
    larger = Reading("", "", reading.left_T, 1.5)
    assert larger.left_N(sample)[-1] == -8.0


def test_of_two_that_leave_the_same_the_first_is_named():
    moved = {name: [1.0, -2.0, 1.0, 0, -1.0, 0] for name in ("first", "second")}
    assert survey_of(readings_of(EQUAL, OTHER, moved=moved), moved).reading.name == "first"


def test_factors_that_change_nothing_are_not_searched_between():
    stub = SimpleNamespace(_left_on_few=lambda _: 1.0)
    assert list(Readings.factor_between(stub, float, [1.0, 2.0])) == []


def test_of_two_sides_the_one_with_less_left_is_named():
    """Both are away from the model; the rollout's part is what the hypothesis makes."""
    moved = {"most": [0.5, 0.5, 0.5, 0.5, 0.5, 0]}
    rollout = [value + 0.5 for value in EQUAL]
    trainer = [value - 0.4 for value in EQUAL]
    survey = survey_of(readings_of(rollout, trainer, moved=moved), ["most"])
    assert survey.left == pytest.approx(0.4 / 0.9)
    assert (survey.reading.side, survey.reading.left) == ("rollout", pytest.approx(0.4 / 0.9))
    assert survey.reading.left_T[:2] == pytest.approx([-0.4, -0.4])


@pytest.mark.parametrize(("few", "left", "fits"), [
    (0.79, 0.49, True), (0.79, 0.51, False), (0.5, 0.3, True),
])  # fmt: skip
def test_a_hypothesis_fits_if_it_leaves_less_than_half_on_all(few, left, fits):
    rest = (5 * left - 3 * few) / 2
    moved = [1 - few, -2 * (1 - few), 1 - rest, 0, -(1 - rest), 0]
    survey = survey_of(readings_of(EQUAL, OTHER, moved={"one": moved}), ["one"])
    assert survey.left == pytest.approx(few)
    assert (survey.reading is not None) == fits


@pytest.mark.parametrize(("few", "left", "z", "fits"), [
    (0.79, 0.79, 5.1, True), (0.79, 0.79, 4.9, False), (0.81, 0.81, 9.0, False),
    (0.49, 0.49, 0.0, True), (0.89, 0.6, 9.0, True), (0.91, 0.6, 9.0, False),
])  # fmt: skip
def test_four_fifths_may_be_left_if_that_is_clear_from_prompt_to_prompt(
    few, left, z, fits, monkeypatch
):
    """And nine tenths on a few."""
    rest = (5 * left - 3 * few) / 2
    moved = [1 - few, -2 * (1 - few), 1 - rest, 0, -(1 - rest), 0]
    readings = readings_of(EQUAL, OTHER, moved={"one": moved})
    monkeypatch.setattr(readings, "_z", lambda left_T: z)
    assert (survey_of(readings, ["one"]).reading is not None) == fits


def test_what_cannot_be_read_on_all_is_judged_on_the_few():
    readings = readings_of(EQUAL, OTHER, moved={"one": [1.0, -2.0, 9, 9, 9, 9]})
    readings._model.without_all = True
    survey = survey_of(readings, ["one"])
    assert survey.reading.left == 0.0 and np.isnan(survey.reading.left_T[2:]).all()


def test_a_search_without_a_hypothesis_that_helps_reads_none_on_all():
    """Nor one that was tried on nothing."""
    readings = readings_of(EQUAL, OTHER, moved={"worse": [-1.0, 2.0, 0, 0, 0, 0]})
    survey = survey_of(readings, ["worse", "nothing"])
    assert (survey.hypotheses, survey.left, survey.reading) == (1, 1.0, None)
    assert readings._model.reads == [("worse", True)]
    assert vars(Survey()) == {
        "hypotheses": 0, "responses": 0, "left": 1.0, "unread": "", "reading": None,
    }  # fmt: skip


def test_positions_are_searched_between_their_usual_factors(monkeypatch):
    """First what the model's own configuration suggests, then both kinds of factors."""
    monkeypatch.setattr(module, "positions_of", lambda config: [f"of {config}"])
    monkeypatch.setattr(module, "scaled_positions", "positions")
    monkeypatch.setattr(module, "scaled_base", "base")
    stub = SimpleNamespace(_model=SimpleNamespace(config="c"), factor_between=lambda *both: [both])
    expected = ["of c", ("positions", module.FACTORS), ("base", module.BASE_FACTORS)]
    assert list(Readings._positions(stub)) == expected


def test_every_kind_has_its_hypotheses(monkeypatch):
    """Each of the model, its configuration, or with the sample."""
    for name in ("other_prompts", "missing_tensors", "adapter_scales", "after_neighbours"):
        monkeypatch.setattr(module, name, lambda *own, name=name: (name, *own))
    stub = SimpleNamespace(
        _model=SimpleNamespace(config="c", loaded="l"),
        _sample="s",
        _positions=lambda: "p",
        _padding=lambda: "q",
        _left_on_few="left",
    )
    hypotheses = {kind: Readings._hypotheses(stub, kind) for kind in KINDS}
    assert hypotheses == {
        "prompt": ("other_prompts", "c"),
        "padding": "q",
        "tensors": ("missing_tensors", "l"),
        "adapter": ("adapter_scales", "l"),
        "neighbours": ("after_neighbours", stub._model, "s", "left"),
        "positions": "p",
    }
    with pytest.raises(KeyError):
        Readings._hypotheses(stub, "others")


@pytest.mark.parametrize(("share", "hypotheses"), [(0.02, 2), (0.019, 1), (0.01, 1), (0.005, 0)])
def test_a_search_ends_with_its_share_of_the_budget(share, hypotheses):
    """Each takes ten of a thousand tokens, after those of earlier ones."""
    moved = {name: [0.0] * 6 for name in ("a", "b", "c")}
    readings = readings_of(EQUAL, OTHER, moved=moved)
    readings._model.spent = 500
    survey = survey_of(readings, moved, share)
    assert (survey.hypotheses, survey.unread) == (hypotheses, "spent")
    assert survey.left == 1.0 and survey.reading is None
    assert survey_of(readings, ["a", "b"], 0.03).unread == ""


def test_a_gap_of_nothing_is_left_as_a_whole():
    assert readings_of(EQUAL, EQUAL)._share(np.zeros(7)) == 1.0
    nothing = readings_of(EQUAL, OTHER)
    assert nothing._mean(np.full(7, np.nan)) == np.inf


def test_the_deviate_is_over_prompts_or_responses_if_there_are_fewer_than_four():
    """|d| less what is left; tokens that were not scored do not count."""
    prompts = np.repeat([1, 5, 9, 5], 20)
    wide = few_responses([1] * 80, logp_T=-1.0 - np.arange(80.0))
    vars(wide)["group_S"] = prompts
    left_T = np.where(np.arange(80) == 50, np.nan, -(np.arange(80.0) % 7))
    scored_M = np.isfinite(left_T)
    shrunk_M = (np.arange(80.0) - np.abs(left_T))[scored_M]
    group_M = (np.arange(80) % GROUPS)[scored_M]
    z = mean_over_prompts(shrunk_M, group_M).z_from(0.0)
    assert Readings(wide, None)._z(left_T) == z != 0
    lengths = [2, 3, 4, 1, 2, 2]
    of_prompts = few_responses(lengths, logp_T=-1.0 - np.arange(14.0))
    groups = np.array([1, 5, 9, 13, 1, 5])
    vars(of_prompts)["group_S"] = groups
    z = mean_over_prompts(np.arange(14.0) / 2, np.repeat(groups, lengths)).z_from(0.0)
    assert Readings(of_prompts, None)._z(np.arange(14.0) / 2) == pytest.approx(z)


def test_a_kind_is_searched_once_with_its_share(monkeypatch):
    readings = readings_of(EQUAL, OTHER)
    calls: list[tuple[str, float]] = []

    def survey(hypotheses: str, share: float) -> Survey:
        calls.append((hypotheses, share))
        return Survey()

    monkeypatch.setattr(readings, "_hypotheses", lambda kind: kind)
    monkeypatch.setattr(readings, "_survey", survey)
    for kind in (*KINDS, *KINDS):
        assert readings.search(kind) is readings.search(kind)
    assert calls == list(KINDS.items())


def test_the_ternary_search_ends_between_its_last_bounds():
    """Seven steps, of which each leaves two thirds of the logarithm: beside an end, from it on."""
    for best, factors, bounds in (
        (3.0, [1.0, 2.0, 8.0], (1.0, 8.0)),
        (9.0, [1.0, 2.0, 8.0], (2, 8)),
    ):

        def left(hypothesis: float, best: float = best) -> float:
            return 0.1 * abs(np.log(hypothesis / best))

        stub = SimpleNamespace(_left_on_few=left)
        names = list(Readings.factor_between(stub, lambda factor: factor, factors))
        assert len(names) == 2 * module.STEPS + 1 == 15
        low, high = np.log(bounds)
        expected = []
        for _ in range(7):
            third = (high - low) / 3
            smaller, larger = np.exp(low + third), np.exp(high - third)
            expected += [smaller, larger]
            if left(smaller) < left(larger):
                high -= third
            else:
                low += third
        assert names == pytest.approx([*expected, np.exp((low + high) / 2)])


def test_paddings_to_a_length_end_with_the_first_that_makes_the_gap_larger():
    lefts = {"a": 0.5, "none": 2.0, "b": 0.99, "c": 1.0, "d": 0.1}
    stub = SimpleNamespace(
        _model=SimpleNamespace(tried_on=lambda name: [] if name == "none" else [0]),
        _left_on_few=lefts.get,
    )
    assert list(Readings._while_helping(stub, lefts)) == ["a", "none", "b", "c"]
