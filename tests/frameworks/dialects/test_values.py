"""Every framework's numbers: published golden values, a second implementation, and masked or
missing tokens.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.frameworks import dialects
from mismatch_cli.trace.reader import Trace
from tests.frameworks.dialects.conftest import rows

MU = [[-0.1, -2, -0.5, -6], [-0.01, -1, -3]]
PI = [[-0.12, -1.7, -0.5, -4.5], [-0.02, -1.3, -3.2]]
ADVANTAGE = [[1.0] * 4, [-1.0] * 3]
GOLDEN = {  # computed by hand from the formulas in each framework's source
    "verl": {
        "training/rollout_probs_diff_mean": 0.026874,
        "training/rollout_probs_diff_max": 0.095348,
        "training/rollout_probs_diff_std": 0.033792,
        "training/rollout_actor_probs_pearson_corr": 0.994439,
        "rollout_corr/kl": -0.181429,
        "rollout_corr/k3_kl": 0.298764,
        "rollout_corr/log_ppl_diff": -0.1375,
        "rollout_corr/log_ppl_abs_diff": 0.3075,
        "rollout_corr/ppl_ratio": 0.913065,
        "rollout_corr/chi2_token": 2.723968,
        "rollout_corr/chi2_seq": 16.761896,
        "rollout_corr/rollout_is_eff_sample_size": 0.888564,
    },
    "prime-rl": {"mismatch_kl/all/mean": 0.298764, "is_masked/mean": 0},
    "nemo-rl": {
        "train/gen_kl_error": 0.298764,
        "train/token_mult_prob_error": 1.633294,
        "train/policy_kl_error": 0.119352,
        "train/js_divergence_error": 0.040819,
        "train/sampling_importance_ratio": 1.480192,
    },
    "ms-swift": {"rollout_correction/chi2_seq": 0.573450},
    "slime": {
        "train/train_rollout_logprob_abs_diff": 0.312500,
        "train/tis_abs": (3.851349 / 4 + 0.450401 / 3) / 2,  # see test_tis_abs_by_tokens
    },
    "trl": {
        "sampling/sampling_logp_difference/mean": 0.332857,
        "sampling/sampling_logp_difference/max": 1.5,
        "sampling/importance_sampling_ratio/mean": 0.300248,
        "sampling/importance_sampling_ratio/min": 0,
        "sampling/importance_sampling_ratio/max": 0.600496,
    },
    "skyrl": {
        "policy/rollout_train_logprobs_abs_diff_mean": 0.332857,
        "policy/rollout_train_logprobs_abs_diff_max": 1.5,
    },
    "open-instruct": {"debug/vllm_local_reverse_kl": 0.014857},
    "oat": {
        "kl_sample_train_v2": 0.176464,
        "sampler_learner_prob_diff_max": 0.095348,
        "sampler_learner_prob_diff_min": -0.047348,
    },
    "areal": {"ppo_actor/update/behave_approx_kl/avg": 0.181429},
    "openrlhf": {"vllm_kl": -0.181429},
    "tinker": {"optim/kl_sample_train_v1": -0.181429, "optim/kl_sample_train_v2": 0.176464},
    "miles": {"train/train_rollout_logprob_abs_diff": 0.312500, "train/ess_ratio": 1},
    "roll": {
        "actor/train_infer_ratio_geometric_mean": (math.exp(1.78 / 4) + math.exp(-0.51 / 3)) / 2,
        "actor/train_infer_ratio_sequence_mean": (5.929856 + 0.600496) / 2,
        "actor/train_infer_diff_sequence_mean": (0.038061 - 0.114224) / 2,
    },
}


@pytest.mark.parametrize("framework", GOLDEN)
def test_golden_values(framework, write):
    trace = write(rows(MU, logp_trainer=PI, advantage=ADVANTAGE))
    readings = measure([trace], [framework])[framework]
    for name, value in GOLDEN[framework].items():
        assert readings[name] == pytest.approx(value, abs=1e-6, rel=1e-6), name


def measure(traces, frameworks):
    """Framework → metric name → value."""
    by_framework = dialects.readings(traces, frameworks).by_framework
    return {
        name: {reading.line.name: reading.value for reading in rows}
        for name, rows in by_framework.items()
    }


def check_equal(readings, expected):
    """Values equal up to rounding, or missing in both."""
    assert readings.keys() == expected.keys()
    for name, value in expected.items():
        near = value if value is None else pytest.approx(value, rel=1e-12, abs=1e-15)
        assert readings[name] == near, name


def test_tis_abs_by_tokens(write):
    """slime with --calculate-per-token-loss: the mean over tokens, here those of one response."""
    trace = write(rows([MU[0] + MU[1]], logp_trainer=[PI[0] + PI[1]]))
    value = measure([trace], ["slime"])["slime"]["train/tis_abs"]
    assert value == pytest.approx(0.614536, abs=1e-6)


def test_every_line_names_its_source():
    for framework in dialects.names():
        assert dialects.when(framework).endswith(".")
        names = [line.name for line in dialects.lines(framework)]
        assert len(set(names)) == len(names)
        for line in dialects.lines(framework):
            assert line.source.endswith(".py")
            assert line.formula
            assert [bool(line.metric), bool(line.measured), bool(line.lacks)].count(True) == 1, (
                line.name
            )


def test_masked_tokens_do_not_count(write):
    """A tool token between two of the model's: masked, it changes no number."""
    gap = {
        "logp_trainer": [[-1.2, -9.0, -0.7], [-0.3, -0.3, -0.1]],
        "loss_mask": [[True, False, True], [True] * 3],
    }
    masked = write(rows([[-1.0, 0.0, -0.5], [-0.2, -0.4, -0.1]], **gap), name="masked")
    plain = write(
        rows([[-1.0, -0.5], [-0.2, -0.4, -0.1]], logp_trainer=[[-1.2, -0.7], [-0.3, -0.3, -0.1]])
    )
    frameworks = dialects.names()
    expected = measure([plain], frameworks)
    for framework, readings in measure([masked], frameworks).items():
        check_equal(readings, expected[framework])


def test_a_fully_masked_response(write):
    """verl gives it a perplexity of 1, slime 0, TRL a ratio of 1, NeMo-RL nothing; no token
    metric changes.
    """
    mask = [[True, True], [False, False]]
    trace = write(
        rows(
            [[-1.0, -0.5], [-2.0, -2.0]], logp_trainer=[[-1.2, -0.7], [-3.0, -3.0]], loss_mask=mask
        )
    )
    readings = measure([trace], dialects.names())
    assert readings["verl"]["rollout_corr/training_ppl"] == pytest.approx(
        (math.exp(0.95) + 1) / 2, rel=1e-6
    )
    assert readings["verl"]["rollout_corr/log_ppl_diff"] == pytest.approx(0.1, rel=1e-6)
    assert readings["verl"]["rollout_corr/kl"] == pytest.approx(0.2, rel=1e-6)
    assert readings["slime"]["train/mis_training_ppl"] == pytest.approx(
        math.exp(0.95) / 2, rel=1e-6
    )
    assert readings["slime"]["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.1, rel=1e-6)
    assert readings["trl"]["sampling/importance_sampling_ratio/mean"] == pytest.approx(
        (math.exp(-0.4) + 1) / 2, rel=1e-6
    )
    assert readings["nemo-rl"]["train/min_seq_mult_prob_error"] == pytest.approx(
        math.exp(0.2), rel=1e-6
    )


def test_an_unscored_response_is_in_no_mean(write):
    trace = write(rows([[-1.0, -0.5], [-2.0]], logp_trainer=[[-1.2, -0.7], None]))
    readings = measure([trace], ["verl", "trl", "slime"])
    assert readings["verl"]["rollout_corr/log_ppl_diff"] == pytest.approx(0.2, rel=1e-6)
    assert readings["trl"]["sampling/importance_sampling_ratio/mean"] == pytest.approx(
        math.exp(-0.4), rel=1e-6
    )
    assert readings["slime"]["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.2, rel=1e-6)


def test_an_empty_response(write):
    trace = write(rows([[-1.0, -0.5], []], logp_trainer=[[-1.2, -0.7], []]))
    readings = measure([trace], dialects.names())
    assert readings["verl"]["rollout_corr/kl"] == pytest.approx(0.2, rel=1e-6)
    assert readings["verl"]["rollout_corr/log_ppl_diff"] == pytest.approx(0.1, rel=1e-6)
    assert all(
        value is None or math.isfinite(value)
        for values in readings.values()
        for value in values.values()
    )


def test_a_token_out_of_support_has_a_ratio_but_no_log(write):
    trace = write(rows([[-1.0, -0.5], [-2.0]], logp_trainer=[[-1.2, -math.inf], [-2.5]]))
    readings = dialects.readings([trace], dialects.names())
    assert readings.out_of_support == 1
    shown = readings.by_framework.items()
    values_of = {
        name: {reading.line.name: reading.value for reading in lines} for name, lines in shown
    }
    assert values_of["verl"]["rollout_corr/kl"] == pytest.approx((0.2 + 0.5) / 2, rel=1e-6)
    q = np.exp(-0.5)
    gaps = [abs(math.exp(-1.2) - math.exp(-1)), q, abs(math.exp(-2.5) - math.exp(-2))]
    assert values_of["verl"]["training/rollout_probs_diff_mean"] == pytest.approx(
        np.mean(gaps), rel=1e-6
    )
    ratios = [math.exp(-0.2), 0, math.exp(-0.5)]
    assert values_of["nemo-rl"]["train/sampling_importance_ratio"] == pytest.approx(
        np.mean(ratios), rel=1e-6
    )
    assert values_of["verl"]["rollout_corr/rollout_is_min"] == pytest.approx(
        math.exp(-20), rel=1e-6
    )
    assert values_of["trl"]["sampling/importance_sampling_ratio/min"] == 0
    expected = (math.exp(-20 * 2) + math.exp(2 * -0.5)) / 2 - 1
    assert values_of["verl"]["rollout_corr/chi2_seq"] == pytest.approx(expected, rel=1e-6)


def test_owners_clamp_at_20_nats(write):
    """verl, SkyRL and miles clamp log r, open-instruct at 10; NeMo-RL counts a float32 overflow
    as 0.
    """
    trace = write(rows([[-30.0], [-95.0]], logp_trainer=[[-0.0], [-0.0]]))
    readings = measure([trace], ["verl", "skyrl", "miles", "open-instruct", "nemo-rl"])
    assert readings["verl"]["rollout_corr/chi2_token"] == pytest.approx(math.exp(40), rel=1e-6)
    assert readings["verl"]["rollout_corr/chi2_seq"] == pytest.approx(math.exp(40), rel=1e-6)
    assert readings["verl"]["rollout_corr/kl"] == pytest.approx(-62.5)
    assert readings["verl"]["rollout_corr/rollout_rs_seq_sum_k1_mean"] == pytest.approx(-20)
    assert readings["skyrl"]["policy/is_ratio_max"] == pytest.approx(math.exp(20), rel=1e-6)
    assert readings["miles"]["train/train_rollout_kl"] == 10
    assert readings["open-instruct"]["val/rho_weight"] == 2
    assert readings["nemo-rl"]["train/sampling_importance_ratio"] == pytest.approx(
        math.exp(30) / 2, rel=1e-5
    )
    assert readings["nemo-rl"]["train/is_oob_ratio (tis)"] == 0.5
    assert readings["nemo-rl"]["train/is_oob_ratio (icepop)"] == 1
    low = measure(
        [write(rows([[-1.0]], logp_trainer=[[-40.0]]), name="low")], ["verl", "open-instruct"]
    )
    assert low["verl"]["rollout_corr/rollout_is_min"] == pytest.approx(math.exp(-20), rel=1e-6)
    assert low["open-instruct"]["val/rho_weight"] == pytest.approx(math.exp(-10), rel=1e-6)


def test_only_verl_clamps_a_large_update(write):
    columns = {"logp_trainer": [[-40.0]], "logp_recomputed": [[-0.5]], "version_trainer": [1]}
    readings = measure([write(rows([[-0.5]], **columns))], ["verl", "openrlhf"])
    assert readings["verl"]["actor/ppo_kl"] == 20
    assert readings["openrlhf"]["ppo_kl"] == pytest.approx(39.5)


def test_nemo_rl_masks_complete_responses(write):
    """Above a mean exp |d| of 2: the second, with reward 1, and the third, in which π excludes a
    token.
    """
    trainer = [[-1.1, -0.5], [-3.0, -2.5], [-math.inf, -1.0], [-1.0, -1.5]]
    trace = write(
        rows(
            [[-1.0, -0.5], [-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]],
            logp_trainer=trainer,
            reward=[1.0, 1.0, 0.0, 0.0],
        )
    )
    readings = measure([trace], ["nemo-rl"])["nemo-rl"]
    means = [(math.exp(0.1) + 1) / 2, (1 + math.exp(0.5)) / 2]
    assert readings["train/mean_seq_mult_prob_error_after_mask"] == pytest.approx(
        np.mean(means), rel=1e-6
    )
    assert readings["train/num_masked_seqs_by_logprob_error"] == 2
    assert readings["train/masked_correct_pct"] == 0.5


def test_a_response_without_a_reward_is_neither_right_nor_wrong(write):
    """NeMo-RL's share of correct responses among those with a mean exp |d| above 2."""
    policies = {"logp_trainer": [[-3.0], [-3.0], [-3.0], [-1.5]]}
    trace = write(rows([[-1.0]] * 4, **policies, reward=[1.0, None, 0.0, 0.0]))
    readings = measure([trace], ["nemo-rl"])["nemo-rl"]
    assert readings["train/masked_correct_pct"] == 0.5
    assert readings["train/num_masked_seqs_by_logprob_error"] == 3


def test_inputs_that_no_trace_has_are_named(write):
    readings = dialects.readings([write(rows(MU, logp_trainer=PI))], dialects.names()).by_framework
    missing = {
        name: [reading for reading in lines if reading.line.lacks]
        for name, lines in readings.items()
    }
    assert {name for name, lines in missing.items() if lines} == {
        "miles",
        "ms-swift",
        "open-instruct",
        "roll",
        "skyrl",
        "slime",
        "tinker",
    }
    for reading in (reading for lines in missing.values() for reading in lines):
        assert (reading.value, reading.why) == (None, f"not measured: needs {reading.line.lacks}")


def test_one_token_has_no_spread(write):
    """verl and SkyRL show NaN, open-instruct 0."""
    readings = dialects.readings(
        [write(rows([[-1.0]], logp_trainer=[[-1.2]]))], ["skyrl", "open-instruct"]
    ).by_framework
    before = {reading.line.name: reading for reading in readings["skyrl"]}[
        "policy/rollout_train_logprobs_abs_diff_std"
    ]
    assert before.value is None and before.why.startswith("not defined for these tokens")
    by_name = {reading.line.name: reading.value for reading in readings["open-instruct"]}
    assert by_name["debug/vllm_vs_local_logprob_diff_std"] == 0


def test_without_the_trainer_at_the_weights_that_sampled(write):
    """Only lines that compare the current trainer with the rollout have values; the others say
    what they need.
    """
    trace = write(rows(MU, logp_trainer=PI, version_trainer=[1, 1]))
    readings = dialects.readings([trace], ["verl", "prime-rl", "skyrl"]).by_framework
    assert all(reading.value is None for reading in readings["verl"])
    assert readings["verl"][0].why == "not measured: needs logp_recomputed and logp_rollout"
    prime = {reading.line.name: reading for reading in readings["prime-rl"]}
    assert prime["mismatch_kl/all/mean"].value == pytest.approx(0.298764, abs=1e-6)
    assert prime["is_masked/mean"].value == 0  # ipo ignores the advantage
    assert (
        prime["kl_ent_ratio/mean"].why
        == "not measured: needs logp_trainer and logp_rollout and entropy_trainer"
    )
    measured = [reading.line.name for reading in readings["skyrl"] if reading.value is not None]
    assert measured == [
        f"policy/minibatch_rollout_logprobs_abs_diff_{part}" for part in ("mean", "std", "max")
    ]


def test_prime_rl_does_not_see_groups_without_signal(write):
    trace = write(rows(MU, logp_trainer=PI, advantage=[[0.0] * 4, [-1.0] * 3]))
    readings = measure([trace], ["prime-rl"])["prime-rl"]
    d = np.array(PI[1]) - np.array(MU[1])
    assert readings["mismatch_kl/all/mean"] == pytest.approx(np.mean(np.exp(d) - 1 - d), rel=1e-5)


@pytest.mark.parametrize(
    ("trainer", "advantage", "reason"),
    [
        (-1.5, 0.0, "whose advantages are all 0, and here all are"),
        (-math.inf, 1.0, "not defined for these tokens"),
        (-1.5, 1.0, "not defined for these tokens"),
        (-1.5, None, "not defined for these tokens"),
    ],
)
def test_why_prime_rl_has_no_spread(write, trainer, advantage, reason):
    """Equal rewards are the reason only if no response has an advantage; one token has none."""
    more = {} if advantage is None else {"advantage": [[advantage]]}
    trace = write(rows([[-1.0]], logp_trainer=[[trainer]], **more))
    readings = dialects.readings([trace], ["prime-rl"]).by_framework["prime-rl"]
    spread = next(reading for reading in readings if reading.line.name == "mismatch_kl/all/std")
    assert spread.value is None and reason in spread.why


def test_a_masked_token_beyond_float32_is_not_among_the_unmasked_ones(write):
    """At the first token, r is e^94.9; prime-rl adds up the tokens of each mask."""
    trace = write(rows([[-95.0, -0.5], [-1.0, -2.0]], logp_trainer=[[-0.1, -0.7], [-1.1, -2.2]]))
    readings = measure([trace], ["prime-rl"])["prime-rl"]
    small, large = math.exp(-0.1) - 0.9, math.exp(-0.2) - 0.8
    expected = (large + (small + large) / 2) / 2
    assert readings["unmasked_mismatch_kl/mean"] == pytest.approx(expected, rel=1e-5)
    assert readings["masked_mismatch_kl/mean"] is None
    assert readings["is_masked/mean"] == 0.25


def test_shards_and_traces_are_one_measurement(write):
    columns = {
        "logp_trainer": PI,
        "advantage": ADVANTAGE,
        "entropy_trainer": [[0.5, 1, 2, 3], [0.1, 0.2, 0.3]],
    }
    whole = write(rows(MU, **columns), name="whole")
    parts = [
        {name: values[i : i + 1] for name, values in rows(MU, **columns).items()} for i in (0, 1)
    ]
    shards = write(*parts, name="shards")
    traces = [write(part, name=f"part-{i}") for i, part in enumerate(parts)]
    frameworks = dialects.names()
    expected = measure([whole], frameworks)
    for readings in (measure([shards], frameworks), measure(traces, frameworks)):
        for framework in frameworks:
            check_equal(readings[framework], expected[framework])


def test_a_float32_trace_is_measured_too():
    readings = measure([Trace.open(bundled("traces") / "float32")], ["verl", "open-instruct"])
    assert 0 < readings["verl"]["training/rollout_probs_diff_mean"] < 1e-5
    assert readings["verl"]["actor/ppo_kl"] == 0  # equal weights
    assert readings["open-instruct"]["debug/vllm_vs_local_logprob_diff_mean"] > 0


def test_far_values_keep_their_spread(write):
    """Gaps near 64 nats in seven shards, exact in float32."""
    gap = 64 + np.random.default_rng(0).integers(-9, 10, (7, 400)) * 2.0**-17
    shards = [rows([[-1.0] * 400], logp_trainer=[-1 - row], prompt_id=[row[0]]) for row in gap]
    readings = measure([write(*shards)], ["skyrl"])["skyrl"]
    name = "policy/rollout_train_logprobs_abs_diff_"
    assert readings[f"{name}std"] == pytest.approx(gap.std(ddof=1), rel=1e-9)
    assert (readings[f"{name}min"], readings[f"{name}max"]) == (gap.min(), gap.max())


def test_a_number_of_two_quantities_needs_both():
    """One of nothing: what the framework shows for nothing."""
    one, other = object(), object()
    line = SimpleNamespace(metric="", quantities=(one, other), of_nothing=7.0, reduce=None)
    group = SimpleNamespace(quantities=(one, other))
    moments = [SimpleNamespace(count=5), SimpleNamespace(count=0)]
    state = SimpleNamespace(moments=moments, tokens=5)
    assert dialects._GroupState.value(state, line, group) == 7.0
