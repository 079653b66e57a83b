"""Other bases of the logarithm, on a few tokens whose answer is computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import log_base
from tests.diagnosis.samples import sample_of

LN = {"2": np.log(2.0), "e": 1.0, "10": np.log(10.0)}
PAIRS = [("2", "e"), ("e", "2"), ("10", "e"), ("e", "10"), ("2", "10"), ("10", "2")]


def natural(tokens: int) -> np.ndarray:
    return -np.random.default_rng(0).uniform(0.5, 4.0, tokens)


@pytest.mark.parametrize("bases", PAIRS)
def test_the_bases_of_both_sides_are_those_that_leave_nothing(bases):
    logp_N = natural(12)
    base_q, base_p = bases
    assert log_base.pair_of_bases(logp_N / LN[base_q], logp_N / LN[base_p]) == bases
    assert log_base.pair_of_bases(logp_N, logp_N) is None


@pytest.mark.parametrize(
    ("probable", "telling", "pair"),
    [(94, 6, ("2", "e")), (95, 5, None), (200, 6, None)],
)
def test_six_tokens_tell_and_the_gap_is_two_hundredths_of_a_nat(probable, telling, pair):
    """Of 100 tokens, or of 206, six have a gap of 0.44 nats each; the others have none."""
    logp_N = np.concatenate([np.full(probable, -1e-9), np.full(telling, -1.0)])
    assert log_base.pair_of_bases(logp_N / np.log(2), logp_N) == pair


@pytest.mark.parametrize(("near", "pair"), [(7, ("e", "2")), (6, None)])
def test_seven_of_ten_tokens_fit_another_base(near, pair):
    """Beside ten nearly certain ones, which do not count; the others are 0.2 nats off."""
    logq_N = np.concatenate([np.full(10, -1.0), np.full(10, -0.001)])
    natural_p_N = logq_N.copy()
    natural_p_N[near:10] -= 0.2
    natural_p_N[10:] -= 0.033
    assert log_base.pair_of_bases(logq_N, natural_p_N / np.log(2)) == pair


def test_another_base_leaves_less_than_half_of_the_gap():
    """A third of the tokens has a gap of its own, of 1 nat or of 2."""
    logq_N = np.full(12, -1.0)
    for far, pair in ((1.0, ("e", "2")), (2.0, None)):
        natural_p_N = logq_N.copy()
        natural_p_N[:3] += far
        assert log_base.pair_of_bases(logq_N, natural_p_N / np.log(2)) == pair, far


def ranks_of(logp_K: list[float], tokens: int, others: int = 0) -> np.ndarray:
    """So many equal tokens, and others that are certain."""
    return np.array([logp_K] * tokens + [[-0.01, *[-9.0] * (len(logp_K) - 1)]] * others)


NATURAL = np.log([0.5, 0.3, 0.1])


@pytest.mark.parametrize(
    ("ranks_TK", "base"),
    [
        (None, None),
        (ranks_of(NATURAL, 100), "e"),
        (ranks_of(NATURAL, 99, others=50), None),
        (ranks_of(NATURAL / LN["2"], 100), "2"),
        (ranks_of(NATURAL / LN["10"], 100), "10"),
        (ranks_of(np.log([0.5, 0.26]) / LN["2"], 100), "2"),
        (ranks_of(np.log([0.5, 0.24]) / LN["2"], 100), None),
        (ranks_of([*NATURAL, np.nan, -np.inf], 100), "e"),
        (ranks_of([np.nan] * 3, 100), None),
        (ranks_of(np.log([0.9, 0.101]) - 0.0, 100), "e"),
        (ranks_of(np.log([0.91, 0.5]) / LN["10"] * 0.9, 100), None),
    ],
)
def test_the_base_of_ranks_is_the_smallest_that_keeps_their_sum_at_1(ranks_TK, base):
    """In base 2 it is most of 1, too; a hundred uncertain tokens are needed."""
    assert log_base._base_of_topk(ranks_TK) == base


@pytest.mark.parametrize(("broken", "base"), [(1, "e"), (2, "10")])
def test_one_token_in_a_hundred_may_have_more_than_1(broken, base):
    ranks_TK = ranks_of(np.log([0.6, 0.39]), 101 + broken)
    ranks_TK[:broken] = np.log([0.6, 0.41])
    ranks_TK[:, 1] += 1e-9
    assert log_base._base_of_topk(ranks_TK) == base


def test_a_single_rank_has_no_base():
    """Of a confident policy its natural logarithm is a probability to base 2, too."""
    first_rank = np.log(np.random.default_rng(0).uniform(0.5, 0.99, (5000, 1)))
    assert log_base._base_of_topk(first_rank) is None
    without_others = np.pad(first_rank, ((0, 0), (0, 2)), constant_values=np.nan)
    assert log_base._base_of_topk(without_others) is None


def test_a_token_is_uncertain_below_a_tenth_of_a_nat():
    first_rank = ranks_of([-0.09, -2.6], 200)
    assert log_base._base_of_topk(first_rank) is None
    assert log_base._base_of_topk(ranks_of([-0.11, -2.6], 200)) == "e"


@pytest.mark.parametrize("base", ["2", "e", "10"])
def test_the_base_of_a_side_is_the_one_with_which_the_model_agrees(base):
    """On seven of ten tokens that count, are scored, and are uncertain by the model."""
    model_T = natural(130)
    model_T[:10], model_T[10:20] = np.nan, -0.04
    own_T = model_T / LN[base]
    own_T[10:20] = -7.0
    far_T = np.zeros(130, dtype=bool)
    far_T[30:60] = True
    counts_T = np.arange(130) < 120
    own_T[far_T] -= 5.0
    sample = sample_of(own_T, own_T, [130], counts_T)
    model = SimpleNamespace(logp_T=lambda: model_T)
    assert log_base._base_by_model(own_T, model, sample) == base
    own_T[60] -= 5.0
    assert log_base._base_by_model(own_T, model, sample) is None
    own_T[60] += 5.0
    counts_T[20] = False
    assert log_base._base_by_model(own_T, model, sample) is None


def test_a_models_token_is_near_to_six_per_cent_and_three_hundredths():
    model = SimpleNamespace(logp_T=lambda: np.full(120, -2.0))
    for off, base in ((0.149, "e"), (0.151, None)):
        own_T = np.full(120, -2.0 - off)
        sample = sample_of(own_T, own_T, [120])
        assert log_base._base_by_model(own_T, model, sample) == base


def test_the_base_of_a_side_is_by_its_ranks_or_else_by_the_model(monkeypatch):
    calls = []
    monkeypatch.setattr(log_base, "_base_of_topk", lambda ranks: ranks)
    monkeypatch.setattr(log_base, "_base_by_model", lambda *about: calls.append(about) or "10")
    sample = SimpleNamespace(topk_logq_TK="2", topk_logp_TK="e", logq_T="q", logp_T="p")
    evidence = SimpleNamespace(sample=sample, model="model")
    assert log_base._base_of(evidence, "rollout") == "2"
    assert log_base._base_of(evidence, "trainer") == "e" and not calls
    sample.topk_logq_TK = sample.topk_logp_TK = None
    assert log_base._base_of(evidence, "rollout") == log_base._base_of(evidence, "trainer") == "10"
    assert calls == [("q", "model", sample), ("p", "model", sample)]
    evidence.model = None
    assert log_base._base_of(evidence, "rollout") is None


def two_bases():
    """Ten responses of eight tokens: the rollout of the first three, and the trainer of the
    fourth, are in base 2; the last has tokens that do not count.
    """
    natural_T = natural(80)
    logq_T, logp_T = natural_T.copy(), natural_T + 0.01
    logq_T[:24] /= LN["2"]
    logp_T[24:32] /= LN["2"]
    counts_T = np.arange(80) < 77
    return sample_of(logq_T, logp_T, [8] * 10, counts_T), natural_T


def test_responses_in_another_base_are_named_and_made_natural():
    sample, natural_T = two_bases()
    finding = log_base.check(SimpleNamespace(sample=sample, model=None))
    assert (finding.check, finding.status, finding.effect) == ("log-base", "found", 0.4)
    assert finding.sentence == (
        "In 4 of 10 responses the logarithms are not natural: the rollout's are to base 2."
    )
    assert finding.evidence == (
        ("rollout: base, by its own numbers", "not known"),
        ("trainer: base, by its own numbers", "not known"),
    )
    assert finding.left_N == pytest.approx(np.full(77, 0.01))
    assert finding.part.inside_S.tolist() == [True] * 4 + [False] * 6
    assert finding.part.among_S.tolist() == [True] * 9 + [False]
    assert sample.logp_T[30] == pytest.approx((natural_T[30] + 0.01) / LN["2"])


def test_one_response_is_chance():
    sample, natural_T = two_bases()
    sample.logq_T[8:24] = natural_T[8:24]
    sample.logp_T[24:32] = natural_T[24:32]
    finding = log_base.check(SimpleNamespace(sample=sample, model=None))
    assert (finding.status, finding.effect, finding.measure) == ("clear", 0.1, "share of responses")
    assert "of the 9 responses that can show it" in finding.reason


def test_a_base_on_both_sides_is_of_all_responses(monkeypatch):
    """The quotient of both columns is as it should be."""
    bases = {"rollout": "2", "trainer": "10"}
    monkeypatch.setattr(log_base, "_base_of", lambda _, side: bases[side])
    natural_T = natural(16)
    sample = sample_of(natural_T / LN["2"], natural_T / LN["10"], [8, 8])
    finding = log_base.check(SimpleNamespace(sample=sample, model=None))
    assert finding.effect == 1.0 and finding.left_N == pytest.approx(0.0)
    assert finding.sentence.endswith(
        "natural: the rollout's are to base 2 and the trainer's are to base 10."
    )
    assert [value for _, value in finding.evidence] == ["2", "10"]
    one = sample_of(natural_T, natural_T, [8, 8])
    for rollout, trainer in (("2", "e"), ("e", "2"), (None, "10")):
        bases |= {"rollout": rollout, "trainer": trainer}
        assert log_base.check(SimpleNamespace(sample=one, model=None)).status == "clear"


def test_a_hundredth_of_the_responses_is_in_another_base():
    """Two of three hundred are chance, three are not; so is a single response."""
    natural_T = natural(1800)
    for broken, status in ((2, "clear"), (3, "found")):
        logq_T = natural_T.copy()
        logq_T[: 6 * broken] /= LN["2"]
        sample = sample_of(logq_T, natural_T, [6] * 300)
        assert log_base.check(SimpleNamespace(sample=sample, model=None)).status == status
    single = sample_of(natural_T[:8] / LN["2"], natural_T[:8], [8])
    finding = log_base.check(SimpleNamespace(sample=single, model=None))
    assert finding.status == "untested" and finding.reason.startswith("no power")


def test_six_tokens_of_a_response_can_tell_a_base():
    """Below a twentieth of a nat, in the rollout."""
    logq_T = np.array([-0.051] * 6 + [-0.049] + [-0.051] * 5 + [-0.049] * 2)
    sample = sample_of(logq_T, logq_T, [7, 7])
    assert log_base._telling_S(sample).tolist() == [True, False]


def test_a_token_tells_if_either_side_is_uncertain():
    logp_N = np.full(6, -0.069)
    assert log_base.pair_of_bases(logp_N / LN["10"], logp_N) == ("10", "e")
