"""Limits as files: what they mean, what is refused with file and key, and the published numbers
to the digit.
"""

from __future__ import annotations

import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.limits.limit_sets import VALUE, WHOLE_INTERVAL, Limit, load_limits, presets

MISMATCH, TOTAL = "mismatch", "total"
ESS = "verl:rollout_corr/rollout_is_eff_sample_size"
OF_VERL = {
    ("k1", "max_size", MISMATCH): 0.1,
    ("chi2_token", "max", MISMATCH): 1.0,
    ("ratio_mean", "min", MISMATCH): 0.5,
    ("ratio_mean", "max", MISMATCH): 2.0,
}
PUBLISHED = {
    "miles": {("k3", "max", MISMATCH): 1e-3},
    "miles-moe": {("k3", "max", MISMATCH): 1e-1},
    "nemo-rl": {("mult_prob_error", "max", MISMATCH): 1.05, ("k3", "max", MISMATCH): 1e-3},
    "prime-rl": {("k3", "max", TOTAL): 0.015},
    "skyrl": {("abs_d_mean", "max", MISMATCH): 0.05},
    "slime": {("abs_d_response_mean", "max", MISMATCH): 0.1},
    "tinker": {("k1", "max_size", TOTAL): 0.01, ("k2", "max", TOTAL): 0.01},
    "verl": OF_VERL | {("tv_binary_mean", "max", MISMATCH): 0.01, (ESS, "min", ""): 0.3},
    "verl-healthy": OF_VERL | {("tv_binary_mean", "max", MISMATCH): 0.005, (ESS, "min", ""): 0.5},
}


def test_the_presets_are_the_published_numbers_with_their_sources():
    assert set(presets()) == PUBLISHED.keys()
    for name, expected in PUBLISHED.items():
        limits = load_limits(name)
        bounds = {
            (limit.metric, limit.bound, limit.pair): limit.threshold for limit in limits.limits
        }
        assert bounds == expected
        assert all(limit.source and limit.decide == VALUE for limit in limits.limits)
        assert limits.about


def test_every_field_of_a_file_is_read(tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text(
        'about = "ours"\ndecide = "surely"\n'
        '[limits.k3]\nmin = 0\nmax = 0.01\npair = "total"\nsource = "us"\nwhy = "so"\ndecide = "value"\n'
        '[[limits.pearson]]\nmax_times_floor = 5\n[[limits.pearson]]\nmax_below_baseline = 0.1\npair = "staleness"\n'
        '[limits."verl:rollout_corr/kl"]\nmax_times_baseline = 2\n'
    )
    limit_sets = load_limits(str(path))
    assert (limit_sets.name, limit_sets.about) == (str(path), "ours")
    assert limit_sets.limits == (
        Limit("k3", "min", 0.0, "total", VALUE, "us", "so"),
        Limit("k3", "max", 0.01, "total", VALUE, "us", "so"),
        Limit("pearson", "max_times_floor", 5.0, "", WHOLE_INTERVAL),
        Limit("pearson", "max_below_baseline", 0.1, "staleness", WHOLE_INTERVAL),
        Limit("verl:rollout_corr/kl", "max_times_baseline", 2.0, "", WHOLE_INTERVAL),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no limits"),
        ("[limits]", "has no limits"),
        ("[limit.k3]\nmax = 1", "Unknown key 'limit'. Did you mean limits?"),
        ("[limits]\nk3 = 1", "limits.k3 is not a table"),
        ("[limits.k4]\nmax = 1", "Unknown metric 'k4'. Did you mean k"),
        ("[limits.tv_binary]\nmax = 1", "Did you mean tv_binary_sd"),
        ("[limits.k3]\nmaximum = 1", "limits.k3: Unknown key 'maximum'"),
        ("[limits.k3]\nwhy = 'x'", "limits.k3 sets no bound"),
        ("[limits]\nk3 = []", "limits.k3 sets no bound"),
        ("[limits.k3]\nmax = '1'", "limits.k3.max is '1', but must be a number"),
        ("[limits.k3]\nmax = true", "limits.k3.max is True, but must be a number"),
        ("[limits.k3]\nmax = nan", "limits.k3.max is nan"),
        ("[limits.k3]\nmax = inf", "limits.k3.max is inf"),
        (
            "[limits.tv_binary_mean]\nmax = 5",
            "limits.tv_binary_mean.max is 5, but tv_binary_mean is at most 1. For 5 %, write 0.05",
        ),
        ("[limits.ess_token]\nmax_below_baseline = 10", "ess_token is at most 1"),
        (
            "[limits.k3]\nmax_times_floor = -1",
            "limits.k3.max_times_floor is -1, but cannot be negative",
        ),
        (
            "[limits.k3]\nmax = 1\npair = 'floor'",
            "limits.k3.pair is 'floor'. Use one of: mismatch, total, staleness",
        ),
        (
            "[limits.k3]\nmax = 1\ndecide = 'maybe'",
            "limits.k3.decide is 'maybe'. Use one of: value, surely",
        ),
        ("[limits.k3]\nmax = 1\nsource = 3", "limits.k3.source is 3, but must be text"),
        ("[limits.k1]\nmax_times_floor = 2", "limits.k1.max_times_floor: k1 is signed"),
        ("[limits.k1]\nmax_times_baseline = 2", "limits.k1.max_times_baseline: k1 is signed"),
        ("[limits.reward_mean]\nmax_times_floor = 2", "reward_mean does not measure a gap"),
        ('[limits."vrl:x"]\nmax = 1', "Unknown framework 'vrl'. Did you mean verl"),
        (
            '[limits."verl:rollout_corr/kll"]\nmax = 1',
            "Unknown metric of verl 'rollout_corr/kll'. Did you mean rollout_",
        ),
        (
            '[limits."verl:rollout_corr/kl"]\nmax_times_floor = 1',
            "a framework's metric has no noise",
        ),
        (
            '[limits."verl:rollout_corr/kl"]\nmax = 1\npair = "total"',
            "a framework's metric has a fixed pair",
        ),
        ("decide = 1\n[limits.k3]\nmax = 1", "decide is 1"),
    ],
)
def test_invalid_content_is_refused_with_file_and_key(text, message, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_limits(str(path))
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "broken.toml").write_text("[limits.k3\nmax = 1")
    with pytest.raises(MismatchError, match="is not a readable TOML file"):
        load_limits(str(tmp_path / "broken.toml"))
    with pytest.raises(MismatchError, match="There is no file"):
        load_limits(str(tmp_path / "gone.toml"))
    with pytest.raises(UsageError, match="Did you mean prime-rl"):
        load_limits("prime")
