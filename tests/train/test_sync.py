"""The weight sync: whatever the engine has that it was not sent is found, and a right sync is
never accused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.models.engines import UnreadTensor, hf
from mismatch_cli.models.engines.hf import HfEngine
from mismatch_cli.train import sync
from mismatch_cli.train.run_engine import dtype_of_weights
from mismatch_cli.train.sync import WeightSync, odds_gap, prove_newer, steps_between_checks
from tests.tiers import at_night
from tests.train.learners import STILL, rollout_of
from tests.train.small_runs import numbers, run
from tests.train.test_lora import LORA

LOWER = {"rollout_dtype": "bfloat16", "trainer_dtype": "float32"}


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every step, though it costs more than it may."""
    monkeypatch.setattr(sync, "_SHARE", 10.0)


@pytest.fixture
def unreadable(every_step: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that shows no tensor, like a server: only its log-probs say what it has."""
    monkeypatch.setattr(hf, "OPEN", False)


Load = Callable[[HfEngine, Any], None]
real: Load = HfEngine.load_weights


def without(part: str) -> Load:
    """A sync that leaves out the tensors with this part in their names; it is right before the
    first step.
    """
    calls: list[Any] = []

    def load(self: HfEngine, model: Any) -> None:
        own = self.model.state_dict()
        stale = {name: own[name].clone() for name in own if part in name}
        real(self, model)
        calls.append(model)
        if len(calls) > 1:
            for name, before in stale.items():
                own[name].copy_(before)

    return load


def nan(self: HfEngine, model: Any) -> None:
    real(self, model)
    self.model.get_output_embeddings().weight.data.fill_(torch.nan)


def another(self: HfEngine, model: Any) -> None:
    real(self, model)
    with torch.no_grad():
        for weight in self.model.parameters():
            weight.mul_(1.01)


PLANTED = {
    "nothing": "",
    "all but a tensor": "layers.1.self_attn.o_proj.weight",
    "all but a layer": "layers.1.",
    "all but the head": "lm_head.weight",
}


@pytest.mark.parametrize("adapter", [{}, *at_night(LORA)], ids=["full", "lora"])
@pytest.mark.parametrize("rollout_dtype", ["bfloat16", *at_night("float32", "float16")])
def test_a_right_sync_is_proven_at_every_step(rollout_dtype, adapter, every_step, tmp_path):
    for rate in (1e-6, 1e-3):
        changes = (
            LOWER | adapter | {"rollout_dtype": rollout_dtype, "learning_rate": rate, "steps": 3}
        )
        records = run(tmp_path / f"run-{rate}", **changes)
        assert [record["sync"] for record in records] == ["proven"] * 3
        if rollout_dtype == "float32":
            assert all("rounding" not in record for record in records)
            continue
        first, *later = [record["rounding"] for record in records]
        assert first["weights_changed"] is None
        assert all(0 <= lag["weights_changed"] <= 1 for lag in later)
        # A step of 1e-6 rarely reaches the next number in low precision, one of 1e-3 nearly always
        # does.
        assert all((lag["weights_changed"] > 0.2) == (rate == 1e-3) for lag in later)
        assert later[-1]["abs_dp_mean"] < 2e-3


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("rollout_dtype", [*at_night("float32"), "bfloat16"])
def test_whatever_is_not_sent_is_found_at_once(planted, rollout_dtype, tmp_path, monkeypatch):
    """However small the step: the tensors are read back."""
    rate = 1e-6 if rollout_dtype == "float32" else 1e-5
    monkeypatch.setattr(HfEngine, "load_weights", without(PLANTED[planted]))
    with pytest.raises(
        MismatchError, match=r"weight sync failed: \d+ of \d+ tensors .* are not what it was sent"
    ):
        run(tmp_path / "run", **LOWER | {"rollout_dtype": rollout_dtype, "learning_rate": rate})
    # The first step ends with the sync that fails
    assert not (tmp_path / "run" / "metrics.jsonl").is_file()


@pytest.mark.parametrize("broken", [nan, another], ids=["nan", "another model"])
def test_wrong_weights_before_the_first_step_are_found_there(broken, tmp_path, monkeypatch):
    monkeypatch.setattr(HfEngine, "load_weights", broken)
    with pytest.raises(MismatchError, match="weight sync failed"):
        run(tmp_path / "run", **LOWER)
    assert not (tmp_path / "run" / "metrics.jsonl").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
def test_an_engine_without_readable_tensors_is_judged_by_its_log_probs(
    adapter, unreadable, tmp_path
):
    records = run(tmp_path / "run", **LOWER | {"learning_rate": 1e-3} | adapter)
    assert [record["sync"] for record in records] == ["undecidable", "newer", "newer", "newer"]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
def test_old_weights_are_found_by_log_probs(adapter, unreadable, tmp_path, monkeypatch):
    """Even if each step is too small to tell: the weights of the last decision are kept until
    the steps add up.
    """
    for rate, most in ((5e-5, 12), (5e-3, 2)):
        monkeypatch.setattr(HfEngine, "load_weights", without(PLANTED["nothing"]))
        changes = LOWER | adapter | {"learning_rate": rate * (10 if adapter else 1), "steps": 12}
        with pytest.raises(MismatchError, match="fit the weights of an earlier step better"):
            run(tmp_path / f"run-{rate}", **changes)
        lines = numbers(tmp_path / f"run-{rate}")
        assert {line["sync"] for line in lines} == {"undecidable"} and len(lines) < most


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["all but a tensor", "all but a layer", "all but the head"])
def test_a_part_that_was_not_sent_is_never_called_proven(
    planted, unreadable, tmp_path, monkeypatch
):
    """By log-probs alone an engine that has most of the new weights has newer ones, which is
    true.
    """
    monkeypatch.setattr(HfEngine, "load_weights", without(PLANTED[planted]))
    with suppress(MismatchError):
        run(tmp_path / "run", **LOWER | {"learning_rate": 1e-3, "steps": 6})
    assert "proven" not in {line["sync"] for line in numbers(tmp_path / "run")}


@pytest.mark.slow
@pytest.mark.parametrize("learning_rate", [2e-6, 1e-3])
def test_an_engine_that_lags_by_one_step_is_never_called_proven(
    learning_rate, unreadable, tmp_path, monkeypatch
):
    """With large steps it is noticed; with steps too small to tell it is "newer" than older
    weights, which is true.
    """
    states: list[dict[str, torch.Tensor]] = []

    def one_step_late(self: HfEngine, model: Any) -> None:
        states.append({name: weight.clone() for name, weight in model.state_dict().items()})
        self.model.load_state_dict(states[max(0, len(states) - 2)])

    monkeypatch.setattr(HfEngine, "load_weights", one_step_late)
    changes = LOWER | {"learning_rate": learning_rate, "steps": 8}
    if learning_rate > 1e-4:
        with pytest.raises(MismatchError, match="weight sync failed"):
            run(tmp_path / "run", **changes)
    else:
        run(tmp_path / "run", **changes)
    assert "proven" not in {line["sync"] for line in numbers(tmp_path / "run")}


@pytest.mark.slow
def test_a_tensor_that_cannot_be_read_leaves_the_proof_to_log_probs(
    every_step, tmp_path, monkeypatch
):
    shown = HfEngine.weights

    def packed(self: HfEngine, plain: Any = None) -> Any:
        for name, tensor in shown(self, plain):
            yield (
                name,
                UnreadTensor("its packing cannot be undone")
                if name.endswith("q_proj.weight")
                else tensor,
            )

    monkeypatch.setattr(HfEngine, "weights", packed)
    records = run(tmp_path / "run", **LOWER | {"learning_rate": 1e-3, "steps": 3})
    assert [record["sync"] for record in records] == ["undecidable", "newer", "newer"]


def test_a_check_scores_a_quarter_of_the_responses_but_8_at_least_and_16_at_most():
    few = {4: 8, 32: 8, 36: 9, 64: 16, 68: 16, 4096: 16}
    assert {responses: sync.checked_responses(responses) for responses in few} == few
    assert [steps_between_checks(responses, 1) for responses in (16, 32, 4096)] == [32, 16, 1]


@pytest.mark.slow
def test_checks_are_spaced_so_that_they_cost_little(tmp_path):
    # Responses of a step, epochs
    every = {(16, 1): 32, (32, 1): 16, (32, 2): 10, (512, 1): 2, (4096, 1): 1}
    assert {step: steps_between_checks(*step) for step in every} == every
    records = run(tmp_path / "run", **LOWER | {"steps": 4})
    assert [record["sync"] for record in records] == ["proven", "proven", "unchecked", "unchecked"]
    assert ["rounding" in record for record in records] == [True, True, False, False]


@pytest.mark.slow
def test_an_engine_that_hides_its_dtype_or_quantises_is_never_accused(
    unreadable, tmp_path, monkeypatch
):
    """Its gap to unrounded weights says nothing: old ones can be nearer."""
    describe = HfEngine.describe
    for fact, why in (
        ({"dtype": None}, "does not say"),
        ({"quantization": "fp8"}, "quantises its weights"),
    ):
        monkeypatch.setattr(HfEngine, "describe", lambda self, fact=fact: describe(self) | fact)
        monkeypatch.setattr(HfEngine, "load_weights", without(PLANTED["nothing"]))
        records = run(tmp_path / why, **LOWER | {"learning_rate": 5e-3, "steps": 3})
        assert [record["sync"] for record in records] == ["undecidable"] * 3
        engine: Any = type(
            "Engine", (), {"describe": lambda _, fact=fact: {"dtype": "bfloat16"} | fact}
        )()
        assert dtype_of_weights(engine)[0] is None and why in dtype_of_weights(engine)[1]


def test_a_difference_that_all_responses_share_proves_nothing():
    """Rounding of the engine's weights shifts every response alike: significant, and still no
    evidence.
    """
    rollout = [np.full(20, 0.5) for _ in range(16)]
    new = [np.full(20, 0.501) + 1e-6 * i for i in range(16)]
    old = [np.full(20, 0.5009) + 1e-6 * i for i in range(16)]
    logs = [[np.log(x) for x in side] for side in (rollout, new, old)]
    assert prove_newer(*logs) == prove_newer(logs[0], logs[2], logs[1]) == "undecidable"
    far = [np.full(20, 0.502 + 1e-6 * i) for i in range(16)]
    assert prove_newer(logs[0], logs[1], [np.log(x) for x in far]) == "newer"


def test_equal_tensors_say_how_far_two_float32_implementations_are_apart():
    """A large model sums more: a gap above 1e-5 at the first step is its own if the tensors were
    equal.
    """
    trainer: Any = SimpleNamespace(model=None, dtype=None)
    weight_sync = WeightSync(STILL, trainer, exact=True, token_budget=1)
    mu_T = np.log(np.full(20, 0.5))
    samples: Any = [SimpleNamespace(rollout=rollout_of([1] * 20, mu_T))]

    def prove(gap: float) -> str:
        return weight_sync.prove(1, samples, [np.log(np.full(20, 0.5 + gap))])["sync"]

    with pytest.raises(MismatchError, match="weight sync failed"):
        prove(3e-5)
    weight_sync.restore({"before": False, "equal": True}, lambda _: None)
    assert [prove(gap) for gap in (3e-5, 1e-4)] == ["proven"] * 2
    with pytest.raises(MismatchError, match="weight sync failed"):
        prove(2e-4)


def test_weights_are_scored_again_only_for_a_dtype_that_rounds_them():
    """In float32, or in a dtype that nobody says, there is nothing to compare with."""
    trainer: Any = SimpleNamespace(model=None, dtype=None)
    logp_T = np.array([-1.0, -2.0])
    samples: Any = [SimpleNamespace(rollout=rollout_of([1, 2], logp_T))]
    for exact, dtype, answer in ((False, None, "undecidable"), (True, torch.float32, "proven")):
        weight_sync = WeightSync(STILL, trainer, exact=exact, token_budget=1, dtype=dtype)
        for step in (1, 2):
            weight_sync.load(step)
            weight_sync.score_before_update(step, samples)
            assert weight_sync.prove(step, samples, [logp_T]) == {"sync": answer}


def test_a_gap_that_its_error_explains_accuses_nobody(make_learner, monkeypatch):
    """Ten times the gap of before, but from few tokens: three standard errors reach it."""
    trainer = make_learner().trainer
    samples: Any = [SimpleNamespace(rollout=rollout_of([1, 2], np.array([-1.0, -2.0])))]
    logp = [np.array([-1.0, -2.0])]
    monkeypatch.setattr(sync, "prove_newer", lambda *_: "newer")
    for error, is_accused in ((0.01, True), (0.02, False)):
        weight_sync = WeightSync(STILL, trainer, exact=False, token_budget=9, dtype=torch.bfloat16)
        for step, gap in ((1, (0.01, 0.0)), (2, (0.1, error))):
            weight_sync.load(step)
            weight_sync.score_before_update(step, samples)
            monkeypatch.setattr(sync, "odds_gap", lambda *_, gap=gap: gap)
            if step == 1:
                assert weight_sync.prove(step, samples, logp)["sync"] == "undecidable"
        if is_accused:
            with pytest.raises(MismatchError, match="broken or incomplete weights"):
                weight_sync.prove(2, samples, logp)
        else:
            assert weight_sync.prove(2, samples, logp)["sync"] == "newer"


def test_ranks_decide_together_and_average_over_tokens(make_learner, monkeypatch):
    """A second rank with three times as many tokens; its doubt counts unless it has no tokens."""
    second: dict[str, Any] = {}
    checks: list[Any] = []

    def gather(own: Any) -> list[Any]:
        checks[:] = [own, own._replace(**{"tokens": 3 * own.tokens} | second)]
        return checks

    world: Any = SimpleNamespace(gather=gather)
    trainer = make_learner().trainer
    samples: Any = [SimpleNamespace(rollout=rollout_of([1, 2], np.array([-1.0, -2.0])))]
    weight_sync = WeightSync(
        STILL, trainer, exact=False, token_budget=9, dtype=torch.bfloat16, world=world
    )
    monkeypatch.setattr(sync, "prove_newer", lambda *_: "newer")

    def prove(step: int, own_gap: float, **of_second: Any) -> dict[str, Any]:
        second.clear()
        second.update(of_second)
        weight_sync.load(step)
        weight_sync.score_before_update(step, samples)
        monkeypatch.setattr(sync, "odds_gap", lambda *_: (own_gap, 0.0))
        return weight_sync.prove(step, samples, [np.array([-1.0, -2.0])])

    # 2 tokens with 0.01 and 6 with 0.02; of the weights only the second rank knows a change
    first = prove(1, 0.01, gap=0.02, lag=0.3, changed=(30, 40))
    assert weight_sync.facts()["odds_gap"] == pytest.approx(0.0175)
    assert first["sync"] == "undecidable" and first["rounding"]["weights_changed"] == 0.75
    assert first["rounding"]["abs_dp_mean"] == pytest.approx((2 * checks[0].lag + 6 * 0.3) / 8)
    doubted = prove(2, 0.03, gap=0.04, answer="undecidable", changed=None)
    assert doubted["sync"] == "undecidable"
    assert weight_sync.facts()["odds_gap"] == pytest.approx(0.0175)  # that of the last decision
    differ, total = checks[0].changed
    assert doubted["rounding"]["weights_changed"] == differ / total
    assert prove(2, 0.05, gap=9.0, tokens=0, answer="undecidable")["sync"] == "newer"
    assert weight_sync.facts()["odds_gap"] == pytest.approx(0.05)


def test_gaps_of_a_few_tokens_by_hand():
    """|π − μ| of 0.1, 0.2 and 0.3, of which a response has two; without tokens both gaps are 0."""
    rollout, trainer = [[0.5, 0.5], [0.8]], [[0.4, 0.7], [0.5]]
    logs = [[np.log(probabilities) for probabilities in side] for side in (rollout, trainer)]
    assert sync.mean_gap(*logs) == pytest.approx(0.2)
    assert sync.mean_gap([np.zeros(0)], [np.zeros(0)]) == sync.mean_gap([], []) == 0
    # Σ |π − μ| is 0.3 and 0.3, Σ μ(1 − μ) is 0.5 and 0.16
    gap, error = odds_gap(*logs)
    assert gap == pytest.approx(0.6 / 0.66)
    apart = 0.3 - gap * 0.5, 0.3 - gap * 0.16
    assert error == pytest.approx(np.hypot(*apart) / 0.66)
    assert odds_gap([np.zeros(2)], [np.zeros(2)]) == odds_gap([], []) == (0.0, 0.0)


def test_the_share_that_changed_is_that_of_the_step_before_a_check(tmp_path, monkeypatch):
    """Checks are three steps apart; what the engine had just before is kept for each."""
    monkeypatch.setattr("mismatch_cli.train.run.steps_between_checks", lambda *_: 3)
    records = run(tmp_path / "run", **LOWER | {"steps": 6, "learning_rate": 1e-3})
    shares = {r["step"]: r["rounding"]["weights_changed"] for r in records if "rounding" in r}
    assert list(shares) == [1, 2, 3, 6]
    assert len({shares[step] for step in (2, 3, 6)}) == 3, "one is that of an earlier step"
    assert all(shares[step] > 0.2 for step in (2, 3, 6))


def test_the_gap_of_log_odds_does_not_know_how_certain_a_policy_is():
    """A shift of the log-odds by 0.01, of rare, common and nearly certain tokens; the error is that
    of a ratio of sums over responses.
    """
    odds_T = np.linspace(-7.0, -6.0, 50)
    for certainty in (0.0, 6.0, 12.0):
        logp, shifted = (-np.logaddexp(0, -(odds_T + certainty + by)) for by in (0.0, 0.01))
        gap, error = odds_gap([logp[:20], logp[20:]], [shifted[:20], shifted[20:]])
        assert gap == pytest.approx(0.01, rel=0.01)
        assert error < 1e-4
    rng = np.random.default_rng(0)
    once = [np.full(4, -0.7) for _ in range(400)]
    noisy = [logp_T + rng.normal(0, 0.01) for logp_T in once]
    gap, error = odds_gap(once, noisy)
    assert error == pytest.approx(0.6 * gap / np.sqrt(400) / 0.8, rel=0.15)
