"""Which algorithms a trace supports, and the reasons for leaving others out."""

from __future__ import annotations

import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.metrics.clipping.masked_slice import Needs
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.studies.algorithm_support import Support
from tests.metrics.clipping.world import ALL, without, world
from tests.studies.written import write_trace

RECOMPUTED = ("logp_recomputed", "topk_logp_recomputed")
TOP_K = ("topk_ids", "topk_logp_rollout", "topk_logp_trainer", "topk_logp_recomputed")
ON_RECOMPUTED = {
    "minirl", "minirl-tis", "dppo-binary-tv-recompute", "dppo-binary-kl-recompute",
    "dppo-topk-tv-recompute",
    "dppo-topk-kl-recompute", "mask-0.5-recompute", "ppo", "ppo-tis", "ppo-dual-clip", "gspo",
    "ppo-opsm",
    "sapo", "ppo-seq-tis", "gmpo", "gbpo", "clip-cov", "kl-cov",
}  # fmt: skip
ON_BOTH = {"ppo-icepop", "ppo-mis", "ppo-mis-geometric", "vaco"}
ON_BATCHES = {"m2po", "clip-cov"}
TOP_K_NAMES = {"dppo-topk-tv", "dppo-topk-kl", "dppo-topk-tv-recompute", "dppo-topk-kl-recompute"}


def support_of(folder, *batches, algorithms=ALL, **written) -> Support:
    return Support.of(
        [write_trace(folder / "trace", *(batches or (world(0, 6),)), **written)], algorithms
    )


def test_a_trace_with_everything(tmp_path):
    support = support_of(tmp_path)
    assert support.judged == ALL and support.skipped == {}
    assert support.needs == Needs(
        advantages=True, recomputed=True, top_k=20, full=True, topk_recomputed=True
    )
    assert support.has.recomputed == "measured" and support.has.top_k == 20


def test_equal_weights_make_the_recomputed_anchor_the_trainer_itself(tmp_path):
    support = support_of(tmp_path, without=RECOMPUTED, equal_weights=True)
    assert support.has.recomputed == "equal weights"
    # Which drops tokens wherever they moved
    assert set(support.skipped) == ON_RECOMPUTED - {"clip-cov"}
    for name, reason in support.skipped.items():
        assert "not applicable" in reason and "--trainer-model" in reason, name
    assert {a.name for a in support.judged} == {a.name for a in ALL} - ON_RECOMPUTED | {"clip-cov"}
    assert {a.name for a in support.judged} >= ON_BOTH


def test_a_recomputed_policy_of_few_responses_does_not_leave_the_others_with_these(tmp_path):
    """As in a training trace: π is π′ in the first of four updates only."""
    later = [without(world(seed, 6), "logp_recomputed_T") for seed in (1, 2, 3)]
    support = support_of(tmp_path / "in-part", world(0, 6), *later)
    assert support.has.recomputed == "measured" and support.needs.recomputed is False
    assert set(support.skipped) == ON_RECOMPUTED | ON_BOTH
    assert all("6 of 24 responses" in reason for reason in support.skipped.values())
    most = [world(seed, 6) for seed in (0, 1)]
    assert support_of(tmp_path / "most", *most, later[0]).judged == ALL
    # Alone it is judged on what there is
    alone = support_of(
        tmp_path / "alone", world(0, 6), *later, algorithms=(parse_algorithm("ppo"),)
    )
    assert alone.needs.recomputed and not alone.skipped


def test_without_recomputed(tmp_path):
    support = support_of(tmp_path, without=RECOMPUTED)
    assert support.has.recomputed == "absent"
    assert set(support.skipped) == ON_RECOMPUTED | ON_BOTH
    for reason in support.skipped.values():
        assert "no logp_recomputed" in reason and "mismatch-cli rescore" in reason
    assert support.needs.recomputed is False


def test_without_top_k(tmp_path):
    support = support_of(tmp_path, without=TOP_K)
    assert support.has.top_k == 0 and support.needs.top_k == 0
    assert set(support.skipped) == TOP_K_NAMES
    for reason in support.skipped.values():
        assert "needs the top 20 log-probs" in reason and "the trace has none" in reason
        assert "MISMATCH_TOP_LOGPROBS=20 mismatch-cli probe" in reason
        assert "or ask for" not in reason


def test_fewer_ranks_than_requested(tmp_path):
    support = support_of(tmp_path, world(0, 6, top_k=5))
    assert support.has.top_k == 5
    assert set(support.skipped) == TOP_K_NAMES
    reason = support.skipped["dppo-topk-tv"]
    assert "needs the top 20 log-probs" in reason and "the trace has the top 5" in reason
    assert "dppo-topk-tv:k=5" in reason
    algorithm = parse_algorithm("dppo-topk-tv:k=5")
    judged = support_of(tmp_path / "again", world(0, 6, top_k=5), algorithms=(algorithm,))
    assert judged.judged == (algorithm,) and judged.needs.top_k == 5


@pytest.mark.parametrize("order", [1, -1])
def test_pooled_traces_have_their_smallest_top_k(tmp_path, order):
    traces = [
        write_trace(tmp_path / str(k) / "trace", world(k, 6, top_k=k), seed=k) for k in (20, 5)
    ][::order]
    support = Support.of(traces, ALL)
    assert support.has.top_k == 5 and set(support.skipped) == TOP_K_NAMES
    assert "the top 5" in support.skipped["dppo-topk-tv"]
    judged = Support.of(
        traces, (parse_algorithm("dppo-topk-tv:k=5"), parse_algorithm("dppo-topk-tv:k=6"))
    )
    assert [a.name for a in judged.judged] == ["dppo-topk-tv:k=5"] and judged.needs.top_k == 5


def test_pooled_traces_with_one_without_top_k(tmp_path):
    traces = [write_trace(tmp_path / "0" / "trace", world(0, 6), seed=0)]
    traces.append(write_trace(tmp_path / "1" / "trace", world(1, 6), seed=1, without=TOP_K))
    support = Support.of(traces, ALL)
    assert support.has.top_k == 0 and set(support.skipped) == TOP_K_NAMES


def test_an_own_mask_with_a_threshold_k_needs_no_top_k(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from mismatch_cli import Decision\n"
        "def trust_region(compared, advantage_T, *, k: int = 50):\n"
        "    return Decision(compared.ratio_T < k, compared.log_ratio_T)\n",
        encoding="utf-8",
    )
    support = support_of(tmp_path, algorithms=(parse_algorithm(str(path)),), without=TOP_K)
    assert len(support.judged) == 1 and support.needs.top_k == 0


def test_the_advice_about_k_works_for_an_algorithm_with_parameters(tmp_path):
    support = support_of(
        tmp_path,
        world(0, 6, top_k=5),
        algorithms=(parse_algorithm("dppo-topk-kl:max_kl=0.1"), parse_algorithm("pg-is")),
    )
    assert "dppo-topk-kl:k=5" in support.skipped["dppo-topk-kl:max_kl=0.1"]


def test_top_k_without_the_recomputed_ranks(tmp_path):
    support = support_of(tmp_path, without=("topk_logp_recomputed",))
    assert set(support.skipped) == {"dppo-topk-tv-recompute", "dppo-topk-kl-recompute"}
    assert all("topk_logp_recomputed" in reason for reason in support.skipped.values())
    assert support.needs.topk_recomputed is False and support.needs.recomputed is True


def test_only_judged_algorithms_need_columns(tmp_path):
    """An algorithm on the rollout only must not lose tokens because of columns it never reads."""
    support = support_of(tmp_path, algorithms=(parse_algorithm("grpo-clip-higher"),))
    assert support.needs == Needs(
        advantages=True, recomputed=False, top_k=0, full=True, topk_recomputed=False
    )


def test_recomputed_in_some_shards_only(tmp_path):
    support = support_of(
        tmp_path, world(0, 7), without(world(1, 6), "logp_recomputed_T", "topk_logp_recomputed_TK")
    )
    assert support.has.recomputed == "measured" and support.skipped == {}


def test_half_of_the_full_divergence_counts_as_none(tmp_path):
    assert support_of(tmp_path, without=("kl_full",)).has.full is False


@pytest.mark.parametrize(
    ("lacking", "key"),
    [("advantage", "advantages"), ("reward", "rewards"), ("entropy_trainer", "entropy")],
)
def test_available_columns(tmp_path, lacking, key):
    assert getattr(support_of(tmp_path, without=(lacking,)).has, key) is False
    assert getattr(support_of(tmp_path / "again").has, key) is True


def test_nothing_to_judge(tmp_path):
    trace = write_trace(tmp_path / "trace", world(0, 6), without=RECOMPUTED, equal_weights=True)
    with pytest.raises(MismatchError) as error:
        Support.of([trace], (parse_algorithm("ppo"), parse_algorithm("gspo")))
    assert "ppo: not applicable" in str(error.value) and "--trainer-model" in str(error.value)


def test_an_import_that_does_not_name_optimiser_steps(tmp_path):
    """One row without a step is enough; if nothing was counted, by this version or an earlier
    one, it is unknown.
    """
    for imported in ({"rows_without_minibatch": 1}, {}):
        support = support_of(tmp_path / str(len(imported)), imported=imported)
        assert set(support.skipped) == ON_BATCHES and support.has.batches is False
        assert all("a column minibatch" in reason for reason in support.skipped.values())
    with_steps = support_of(tmp_path / "known", imported={"rows_without_minibatch": 0})
    assert with_steps.skipped == {} and with_steps.has.batches is True


def test_whole_batches_need_advantages(tmp_path):
    support = support_of(tmp_path, without=("advantage",))
    assert set(support.skipped) == ON_BATCHES
    assert all(
        "whole batches with their advantages" in reason for reason in support.skipped.values()
    )


def test_algorithms_that_need_entropy_or_averages(tmp_path):
    algorithms = (
        parse_algorithm("top-entropy"),
        parse_algorithm("ppo-ewma"),
        parse_algorithm("pg-is"),
    )
    support = support_of(tmp_path, algorithms=algorithms)
    assert [a.name for a in support.judged] == ["top-entropy", "pg-is"] and support.needs.entropy
    assert "with average_decay" in support.skipped["ppo-ewma"]
    without_it = support_of(tmp_path / "again", algorithms=algorithms, without=("entropy_trainer",))
    assert "rescore" in without_it.skipped["top-entropy"] and not without_it.needs.entropy


def test_a_trace_that_was_never_scored(tmp_path):
    trace = write_trace(tmp_path / "trace", world(0, 6), without=("logp_trainer",))
    with pytest.raises(MismatchError, match=r"rescore .* --trainer-model MODEL"):
        Support.of([trace], ALL)
