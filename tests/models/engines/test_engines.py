"""Both engines on the bundled model: μ as sampled, reproducible by seed, nothing on the
terminal, torch as it was.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.places import bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import EngineSettings, Request, create_engine
from mismatch_cli.models.loading import load_tokenizer
from tests.models.plain_torch import at_sampled, logp_of

MODEL = str(bundled("model"))
TRUNCATED = SamplingSettings(temperature=0.8, top_p=0.9, top_k=30, min_p=0.01, max_tokens=24)
K = 40


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(MODEL)
    questions = [
        "Tom has 3 apples and buys 4 more. How many apples does he have?",
        "What is 5 times 6?",
    ]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False
        )
        for q in questions
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


@pytest.fixture(scope="module", params=["hf", "vllm"])
def engine(request, tmp_path_factory):
    settings = EngineSettings(
        MODEL,
        TRUNCATED,
        K,
        dtype="float32",
        log_file=tmp_path_factory.mktemp("log") / "engine.log",
        full=True,
    )
    engine = create_engine(request.param, settings)
    yield engine
    before = torch.get_num_threads()
    engine.close()
    torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before + 1, "the engine left torch.set_num_threads as a no-op"
    torch.set_num_threads(before)


def test_mu_is_the_distribution_that_was_sampled(engine, prompts, model):
    """With temperature, min-p, top-k and top-p together: log μ, ranks, top-K ids and log-probs
    against plain torch.
    """
    requests = [Request(prompts[i % 2], seed=i) for i in range(8)]
    for rollout in engine.sample(requests, lambda n: None):
        logp_TV = logp_of(model, rollout, TRUNCATED)
        expected_T = at_sampled(logp_TV, rollout)
        np.testing.assert_allclose(rollout.logp_rollout_T, expected_T, atol=2e-5)
        supported = torch.isfinite(logp_TV).sum(1).clamp(max=K)
        for position, count in enumerate(supported.tolist()):
            topk = torch.from_numpy(rollout.topk_logp_rollout_TK[position])
            np.testing.assert_allclose(
                topk[:count], logp_TV[position].topk(count).values, atol=2e-5
            )
            assert torch.isinf(topk[count:]).all()
            assert (rollout.rank_rollout_T[position] == 1) == (
                expected_T[position] >= logp_TV[position].max() - 1e-6
            )


def test_a_request_may_have_its_own_sampling_settings(engine, prompts, model):
    """Next to others in one call: its nucleus, temperature and limit; log μ is that of what they
    leave.
    """
    own = SamplingSettings(temperature=0.5, top_p=0.6, max_tokens=7)
    requests = [Request(prompts[i % 2], seed=i, sampling=own if i % 3 else None) for i in range(12)]
    rollouts = engine.sample(requests, lambda n: None)
    assert {
        len(r.response_ids) for r, q in zip(rollouts, requests, strict=True) if q.sampling
    } <= set(range(1, 8))
    assert (
        max(len(r.response_ids) for r, q in zip(rollouts, requests, strict=True) if not q.sampling)
        > 7
    )
    for request, rollout in zip(requests, rollouts, strict=True):
        logp_TV = logp_of(model, rollout, request.sampling or TRUNCATED)
        expected_T = at_sampled(logp_TV, rollout)
        np.testing.assert_allclose(rollout.logp_rollout_T, expected_T, atol=2e-5)


def test_a_request_may_be_shorter_than_the_settings_allow(engine, prompts):
    """Next to others that are not; its tokens are the first ones of the long response."""
    whole = engine.sample(
        [Request(prompts[0], seed=1), Request(prompts[1], seed=2)], lambda n: None
    )
    cut = engine.sample(
        [Request(prompts[0], 1, max_tokens=3), Request(prompts[1], 2, max_tokens=99)],
        lambda n: None,
    )
    assert cut[0].response_ids == whole[0].response_ids[:3] and cut[0].finish_reason == "length"
    assert len(cut[0].logp_rollout_T) == len(cut[0].rank_rollout_T) == len(cut[0].topk_ids_TK) == 3
    assert (
        cut[1].response_ids == whole[1].response_ids
        and cut[1].finish_reason == whole[1].finish_reason
    )


def test_the_full_distributions_of_the_first_responses_reach_the_sinks(engine, prompts, model):
    """Against plain torch over the vocabulary; the responses are those of `sample`, and the
    others to the bit.
    """
    requests = [Request(prompts[i % 2], seed=i) for i in range(8)]
    plain, counts, taken = engine.sample(requests, lambda n: None), [], ([], [], [])
    rollouts = engine.sample_full(requests, [rows.append for rows in taken], counts.append)
    assert sum(counts) == 8
    for rollout, rows in zip(rollouts, taken, strict=False):
        mu_TV, expected_TV = torch.from_numpy(np.stack(rows)), logp_of(model, rollout, TRUNCATED)
        assert mu_TV.shape == expected_TV.shape == (len(rollout.response_ids), 2048)
        np.testing.assert_allclose(mu_TV.double().exp().sum(1), 1, atol=1e-5)
        # A token at the edge of the support may be on either side of it.
        assert ((mu_TV - expected_TV).nan_to_num(0).abs() > 2e-5).sum() <= 1
        own_T1 = torch.tensor(rollout.response_ids)[:, None]
        assert np.array_equal(mu_TV.gather(1, own_T1)[:, 0], rollout.logp_rollout_T)
        at_topk_TK = mu_TV.gather(1, torch.from_numpy(rollout.topk_ids_TK).long())
        assert np.array_equal(at_topk_TK, rollout.topk_logp_rollout_TK)
    # vLLM samples them in another batch: last bits
    for whole, other in zip(rollouts[:3], plain[:3], strict=True):
        assert (
            whole.response_ids == other.response_ids and whole.finish_reason == other.finish_reason
        )
        np.testing.assert_allclose(whole.logp_rollout_T, other.logp_rollout_T, atol=2e-5)
        np.testing.assert_array_equal(whole.rank_rollout_T, other.rank_rollout_T)
        np.testing.assert_allclose(
            whole.topk_logp_rollout_TK, other.topk_logp_rollout_TK, atol=2e-5
        )
    for same, other in zip(rollouts[3:], plain[3:], strict=True):
        assert same.response_ids == other.response_ids
        assert np.array_equal(same.logp_rollout_T, other.logp_rollout_T)


def test_the_memory_of_vllms_full_distributions_is_as_stated():
    """The objects of three positions, as Python's own allocator counts them."""
    import tracemalloc

    from vllm.logprobs import FlatLogprobs, append_logprobs_for_next_position

    from mismatch_cli.models.engines import full_bytes

    vocabulary, tokens, flat = 30_000, 3, FlatLogprobs()
    tracemalloc.start()
    try:
        for _ in range(tokens):
            ids_V, logp_V = np.arange(-1, vocabulary), np.linspace(-9, 0, vocabulary + 1)
            nothing = (None for _ in ids_V)
            append_logprobs_for_next_position(flat, ids_V.tolist(), logp_V.tolist(), nothing, 7, -1)
        del ids_V, logp_V
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert (
        0.8 * full_bytes("vllm", vocabulary, tokens)
        < taken
        < full_bytes("vllm", vocabulary, tokens)
    )
    assert full_bytes("hf", vocabulary, tokens) == 4 * vocabulary  # one token at a time


def test_an_engine_without_full_distributions_names_those_that_have_them(monkeypatch):
    from types import ModuleType

    from mismatch_cli.base import registry
    from mismatch_cli.models.engines import full_bytes

    monkeypatch.setattr(registry, "load", lambda *_: ModuleType("plain"))
    with pytest.raises(
        UsageError, match=r"--engine plain does not return full .* Use --engine vllm or --engine hf"
    ):
        full_bytes("plain", 2048, 100)


def test_a_seed_gives_the_same_response_and_another_seed_another(engine, prompts):
    requests = [Request(prompts[0], seed=i) for i in (1, 2, 3, 4)]
    once, again = (engine.sample(requests, lambda n: None) for _ in range(2))
    assert [r.response_ids for r in once] == [r.response_ids for r in again]
    assert all(
        np.array_equal(a.logp_rollout_T, b.logp_rollout_T) for a, b in zip(once, again, strict=True)
    )
    assert len({tuple(r.response_ids) for r in once}) > 1


def test_responses_end_with_their_stop_token_or_at_the_limit(engine, prompts):
    tokenizer = load_tokenizer(MODEL)
    rollouts = engine.sample([Request(prompts[0], seed=i) for i in range(16)], lambda n: None)
    for rollout in rollouts:
        stopped = rollout.response_ids[-1] == tokenizer.eos_token_id
        assert (rollout.finish_reason == "stop") == stopped
        assert tokenizer.eos_token_id not in rollout.response_ids[:-1]
        if not stopped:
            assert len(rollout.response_ids) == TRUNCATED.max_tokens


def test_progress_counts_every_response(engine, prompts):
    counts = []
    engine.sample([Request(prompts[0], seed=i) for i in range(5)], counts.append)
    assert sum(counts) == 5


def test_nothing_is_printed(engine, prompts, capfd):
    engine.sample([Request(prompts[0], seed=0)], lambda n: None)
    assert capfd.readouterr() == ("", "")


def test_settings_are_described_as_resolved(engine):
    described = engine.describe()
    assert described["dtype"] == described["kv_cache_dtype"] == "float32"
    assert described["max_model_len"] == engine.max_model_len == 512


@pytest.mark.parametrize("name", ["hf", "vllm"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": {"no_such_setting": 1}}, "no_such_setting"),
        ({"model": "/no/such/folder"}, "no model folder"),
    ],
)
def test_a_model_that_cannot_be_loaded_fails_with_one_sentence(name, changes, message, tmp_path):
    settings = {
        "model": MODEL,
        "sampling": SamplingSettings(),
        "top_logprobs": 0,
        "log_file": tmp_path / "log",
    } | changes
    with pytest.raises((MismatchError, UsageError), match=message) as caught:
        create_engine(name, EngineSettings(**settings))
    assert "\n" not in str(caught.value)


def test_an_unknown_engine_suggests_the_nearest():
    with pytest.raises(UsageError, match=r"Unknown engine 'vlm'. Did you mean vllm\?"):
        create_engine("vlm", EngineSettings(MODEL, SamplingSettings(), 0))


def test_a_missing_vllm_says_how_to_get_it(monkeypatch):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "vllm" else find_spec(name, *a),
    )
    with pytest.raises(MismatchError, match=r"pip install 'mismatch-cli\[cpu\]'.*--engine hf"):
        create_engine("vllm", EngineSettings(MODEL, SamplingSettings(), 0))


def test_new_weights_replace_all_old_ones(tmp_path, prompts, model):
    """After other weights and back, log μ is that of the current weights, including the tied
    head and the cache.
    """
    import copy

    moved = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.add_(0.02 * weight.std() * torch.randn_like(weight))
    requests = [Request(prompts[i % 2], seed=i) for i in range(6)]
    for name in ("hf", "vllm"):
        engine = create_engine(
            name, EngineSettings(MODEL, TRUNCATED, 1, dtype="float32", log_file=tmp_path / "log")
        )
        first = engine.sample(requests, lambda n: None)
        for weights in (moved, model):
            engine.load_weights(weights)
            rollouts = engine.sample(requests, lambda n: None)
            for rollout in rollouts:
                expected_T = at_sampled(logp_of(weights, rollout, TRUNCATED), rollout)
                np.testing.assert_allclose(rollout.logp_rollout_T, expected_T, atol=2e-5)
        # With the first weights again: the same responses
        for before, after in zip(first, rollouts, strict=True):
            assert before.response_ids == after.response_ids
            assert np.array_equal(before.logp_rollout_T, after.logp_rollout_T)
        before = resident_mb()
        engine.close()
        if name == "vllm":
            assert before - resident_mb() > 900, (
                "1,024 MB of keys and values should be free for the trainer"
            )


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
