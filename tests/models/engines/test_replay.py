"""Recorded tokens read again: decoded to the bit as sampled, and in one pass as plain torch
reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import (
    EngineSettings,
    ForcedResponse,
    Request,
    _hf_replay,
    _vllm_replay,
    create_engine,
    engine_has,
    prefill_checked,
    replay_checked,
)
from mismatch_cli.models.engines._vllm_replay import (
    prefill_recorded,
    replay_recorded,
    start_replaying,
)
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.rules.batch import Rollout
from tests.families import save_family
from tests.lora import save_adapter
from tests.models.plain_torch import at_sampled, logp_of

MODEL, K, CONTEXT = str(bundled("model")), 5, 320
HOT = SamplingSettings(temperature=0.7, max_tokens=9)
TRUNCATED = SamplingSettings(temperature=0.8, top_p=0.9, top_k=30, min_p=0.01, max_tokens=9)
SHORTER = {
    "vllm": {"max_num_seqs": 6, "max_model_len": CONTEXT},
    "hf": {"batch_size": 6, "max_model_len": CONTEXT},
}
COLUMNS = ("logp_rollout_T", "rank_rollout_T", "topk_ids_TK", "topk_logp_rollout_TK")


def random_ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 2000, length).tolist()


SHARED = random_ids(0, 300)  # longer than a block of the prefix cache; leaves 20 tokens of context
PROMPTS = [
    SHARED,
    *(random_ids(i, 3 + 13 * i) for i in range(1, 5)),
    SHARED,
    random_ids(9, CONTEXT - 10),
]
REQUESTS = [Request(PROMPTS[i % 7], seed=i) for i in range(14)]  # more than fit at once
# What no model would sample: stop tokens in the middle, one token, more than max_tokens, the full
# context.
FOREIGN = [
    ForcedResponse(PROMPTS[1], [5, 1, 1, 7, 9]),
    ForcedResponse(PROMPTS[2], [1999]),
    ForcedResponse(PROMPTS[3], random_ids(11, 30)),
    ForcedResponse(PROMPTS[4], []),
    ForcedResponse(SHARED, random_ids(12, CONTEXT - 300)),
    ForcedResponse(PROMPTS[6], random_ids(13, 10)),
]


@pytest.fixture(scope="module", params=["hf", "vllm"])
def engine(request, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "engine.log"
    settings = EngineSettings(
        MODEL, HOT, K, dtype="float32", log_file=log, extra=SHORTER[request.param]
    )
    engine = create_engine(request.param, settings)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def rollouts(engine) -> list[Rollout]:
    return sampled(engine)


@contextmanager
def sampling_as(engine: Any, sampling: SamplingSettings) -> Iterator[None]:
    before = engine.settings
    engine.settings = replace(before, sampling=sampling)
    yield
    engine.settings = before


def sampled(engine: Any) -> list[Rollout]:
    return engine.sample(REQUESTS, lambda n: None)


def of(rollouts: Sequence[Rollout]) -> list[ForcedResponse]:
    return [ForcedResponse(r.prompt_ids, r.response_ids) for r in rollouts]


def replay(
    engine: Any, responses: Sequence[ForcedResponse], on_finished: Any = lambda n: None, **how: bool
) -> list[Rollout]:
    return replay_checked(engine, responses, range(len(responses)), on_finished, **how)


def prefill(
    engine: Any, responses: Sequence[ForcedResponse], on_finished: Any = lambda n: None
) -> list[np.ndarray]:
    return prefill_checked(engine, responses, range(len(responses)), on_finished)


def hold_equal(replays: Sequence[Rollout], rollouts: Sequence[Rollout]) -> None:
    for one, other in zip(replays, rollouts, strict=True):
        assert (one.prompt_ids, one.response_ids) == (other.prompt_ids, other.response_ids)
        assert one.finish_reason == other.finish_reason
        for name in COLUMNS:
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


def hold_close(replays: Sequence[Any], expected: Sequence[Any]) -> None:
    """Compare log-probs in float32, here down to -30 nats."""
    for one, other in zip(replays, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-6)


def logps(rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    return [rollout.logp_rollout_T for rollout in rollouts]


def expected(model: Any, responses: Sequence[ForcedResponse]) -> list[Tensor]:
    return [at_sampled(logp_of(model, response, HOT), response) for response in responses]


@pytest.mark.parametrize("sampling", [HOT, TRUNCATED])
def test_a_replay_equals_sampling_to_the_bit(engine, sampling):
    """Log μ, ranks, top K and finish reason, for any sampling settings; sampling is unchanged
    before and after.
    """
    with sampling_as(engine, sampling):
        rollouts, counts = sampled(engine), []
        hold_equal(replay(engine, of(rollouts), counts.append), rollouts)
        assert sum(counts) == len(REQUESTS)
        hold_close(prefill(engine, of(rollouts), counts.append), logps(rollouts))
        assert sum(counts) == 2 * len(REQUESTS)
        hold_equal(sampled(engine), rollouts)


def test_finished_and_truncated_responses_are_distinguished(engine):
    """A stop token ends a response only if it is the last token."""
    replays = replay(
        engine, [ForcedResponse([5, 6, 7], ids) for ids in ([8, 1], [1, 8], [8, 1, 1], [9])]
    )
    assert [r.finish_reason for r in replays] == ["stop", "length", "stop", "length"]


def test_improbable_tokens_are_read_as_plain_torch_reads_them(engine, model):
    """Decoded and in one pass, from one token to the full context, alone and among others."""
    correct = expected(model, FOREIGN)
    assert min(logp_T.min() for logp_T in correct if len(logp_T)) < -15
    for replays in (replay(engine, FOREIGN), replay(engine, FOREIGN, alone=True, cached=False)):
        assert [r.response_ids for r in replays] == [r.response_ids for r in FOREIGN]
        hold_close(logps(replays), correct)
    hold_close(prefill(engine, FOREIGN), correct)


@pytest.mark.slow
def test_a_batch_of_one_and_a_cache_that_is_not_read(engine, rollouts, monkeypatch):
    """Inspects the requests to vLLM: one response at a time, and prompts that may use the cache
    or not.
    """
    batches: list[Any] = []
    on_vllm = hasattr(engine, "llm")
    if on_vllm:
        generate = engine.llm.generate
        monkeypatch.setattr(
            engine.llm, "generate", lambda *a, **k: batches.append(generate(*a, **k)) or batches[-1]
        )
    for alone, cached in ((True, True), (False, False), (True, False), (False, True))[
        : 4 if on_vllm else 1
    ]:
        batches.clear()
        replays = replay(engine, of(rollouts), alone=alone, cached=cached)
        hold_close(logps(replays), logps(rollouts))
        assert not on_vllm or [len(outputs) for outputs in batches] == ([1] * 14 if alone else [14])
        assert not on_vllm or (hits(batches) > 0) == cached
    batches.clear()
    prefill(engine, of(rollouts))
    assert hits(batches) == 0


def hits(batches: list[Any]) -> int:
    """Tokens that vLLM has read from its prefix cache."""
    return sum(output.num_cached_tokens for outputs in batches for output in outputs)


def test_a_token_outside_the_support_has_probability_0(engine):
    with sampling_as(engine, replace(HOT, top_k=2)):
        replayed = [rollout.logp_rollout_T for rollout in replay(engine, FOREIGN)]
        for logp in (np.concatenate(replayed), np.concatenate(prefill(engine, FOREIGN))):
            assert np.isneginf(logp).any() and not np.isnan(logp).any()


@pytest.mark.slow
def test_ctrl_c_leaves_the_engine_as_it_was(engine, rollouts):
    for read in (replay, prefill):

        def interrupted(_: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            read(engine, of(rollouts), interrupted)
        hold_equal(sampled(engine), rollouts)
    hold_equal(replay(engine, of(rollouts)), rollouts)


def test_a_failure_in_the_middle_leaves_nothing_queued(engine, rollouts, monkeypatch):
    """Requests left in vLLM would make the next call wait forever."""
    place, name = (
        (_vllm_replay, "_next_recorded")
        if hasattr(engine, "llm")
        else (_hf_replay.ForcingProcessor, "__call__")
    )
    chosen, steps = getattr(place, name), iter(range(99))

    def failing(*arguments: Any) -> Any:
        if next(steps) == 6:
            raise RuntimeError("out of memory")
        return chosen(*arguments)

    monkeypatch.setattr(place, name, failing)
    with pytest.raises(
        MismatchError,
        match=r"failed while replaying recorded tokens \(RuntimeError: out of memory\)",
    ):
        replay(engine, of(rollouts))
    hold_equal(sampled(engine), rollouts)
    hold_equal(replay(engine, of(rollouts)), rollouts)


def test_tokens_that_an_engine_cannot_read_are_refused_beforehand(engine):
    long = ForcedResponse(SHARED, random_ids(1, CONTEXT - 299))
    with pytest.raises(
        MismatchError,
        match=r"Prompt 0 .* 321 tokens; the engine's context is 320. Set max_model_len=321",
    ):
        replay(engine, [long])
    for read in (replay, prefill):
        with pytest.raises(
            MismatchError, match="has the token id 2048, and the engine's model has 2048 tokens"
        ):
            read(engine, [ForcedResponse([5], [7, 2048])])


@pytest.mark.slow
def test_a_cache_in_fp8_is_replayed_with_its_rounding(tmp_path):
    """In bfloat16 with an adapter too, the bits equal sampling; without fp8 the same tokens have
    another log μ.
    """
    adapter = save_adapter(MODEL, tmp_path / "adapter", size=0.01)
    foreign = {}
    for dtype in ("fp8", "auto"):
        extra = {"kv_cache_dtype": dtype, "max_num_seqs": 6, "max_model_len": CONTEXT}
        settings = EngineSettings(
            MODEL, HOT, K, dtype="bfloat16", log_file=tmp_path / "log", extra=extra, adapter=adapter
        )
        engine = create_engine("vllm", settings)
        rollouts = sampled(engine)
        hold_equal(replay(engine, of(rollouts)), rollouts)
        foreign[dtype] = np.concatenate(logps(replay(engine, FOREIGN)))
        engine.close()
    assert 0.01 < np.abs(foreign["fp8"] - foreign["auto"]).mean() < 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "olmoe"])
def test_families_are_read_with_their_parts_and_prompts_in_chunks(family, tmp_path):
    """Without seeds, vLLM may read prompts in chunks on a CPU: unfinished rows choose nothing."""
    folder = save_family(tmp_path, family)
    correct = expected(load_causal_lm(folder, dtype="float32"), FOREIGN)
    chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64} | SHORTER["vllm"]
    for name, extra in {"hf": SHORTER["hf"], "vllm": chunked}.items():
        settings = EngineSettings(
            folder, HOT, 0, dtype="float32", log_file=tmp_path / "log", extra=extra
        )
        engine = create_engine(name, settings)
        hold_close(logps(replay(engine, FOREIGN)), correct)
        hold_close(prefill(engine, FOREIGN), correct)
        if name == "hf":
            rollouts = sampled(engine)
            replays = replay(engine, of(rollouts))
            hold_equal(replays, rollouts)
            for one, other in zip(replays, rollouts, strict=True):
                assert (one.routes_FMK is None) == (family == "gemma2")
                assert np.array_equal(one.routes_FMK, other.routes_FMK)
        engine.close()


def test_which_engines_read_again():
    abilities = {
        name: [engine_has(name, what) for what in ("REPLAYS", "PREFILLS", "OPEN")]
        for name in ("hf", "vllm", "server")
    }
    assert abilities == {
        "hf": [True, True, True],
        "vllm": [True, True, True],
        "server": [False, True, False],
    }


def test_an_engine_that_returns_other_tokens_is_refused():
    """A mock that lies: no real engine does."""
    nothing = np.zeros(2, dtype=np.float32)
    lie = Rollout([5], [6, 7], nothing, nothing.astype(np.int32), None, None, "length")
    liar: Any = SimpleNamespace(
        max_model_len=9,
        replay=lambda *_, **__: [lie],
        prefill=lambda *_: [np.array([-1.0], dtype=np.float32)],
    )
    with pytest.raises(
        MismatchError, match=r"did not decode the recorded tokens of a response to prompt 42"
    ):
        replay_checked(liar, [ForcedResponse([5], [6, 8])], [42], lambda n: None)
    with pytest.raises(
        MismatchError, match=r"1 log-probs for the 2 tokens of a response to prompt 42"
    ):
        prefill_checked(liar, [ForcedResponse([5], [6, 8])], [42], lambda n: None)


class RunnerV2:
    """Mocks vLLM on a GPU, whose Model Runner V2 needs Triton: it keeps the requests."""

    def __init__(self, traced: bool = True) -> None:
        model = SimpleNamespace(enable_trace_replay=traced, get_vocab_size=lambda: 2048)
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=model, use_v2_model_runner=True)
        )
        self.asked: list[tuple[list[list[int]], list[Any]]] = []

    def ask(self, prompts: list[list[int]], parameters: list[Any]) -> list[Any]:
        """The log-prob of a token, in a prompt or replayed, is its negative id."""
        self.asked.append((prompts, parameters))
        return [self._answer(*pair) for pair in zip(prompts, parameters, strict=True)]

    def _answer(self, prompt: list[int], parameters: Any) -> Any:
        ids_of_both = (prompt[1:], self._drawn(parameters))
        flat = [SimpleNamespace(token_ids=ids, logprobs=[-i for i in ids]) for ids in ids_of_both]
        return SimpleNamespace(prompt_logprobs=flat[0], outputs=[SimpleNamespace(logprobs=flat[1])])

    def _drawn(self, parameters: Any) -> list[int]:
        return parameters.trace_decode_token_ids or [0]


def test_on_a_gpu_vllm_replays_by_itself():
    """The requests pass vLLM's own checks; a prefill takes two of them, without temperature."""
    llm, responses = RunnerV2(), [ForcedResponse([5, 6], [7, 8, 1]), ForcedResponse([9], [4])]
    plain = EngineSettings("model", SamplingSettings(), K)
    replay_recorded(llm, responses, plain, llm.ask, alone=True, cached=False)
    assert [prompts for prompts, _ in llm.asked] == [[[5, 6]], [[9]]]
    for (_, (parameters,)), response in zip(llm.asked, responses, strict=True):
        parameters._validate_trace_replay(llm.llm_engine.vllm_config.model_config, None)
        assert (
            parameters.trace_decode_token_ids == response.response_ids and parameters.logprobs == K
        )
        assert (
            parameters.max_tokens == len(response.response_ids)
            and parameters.skip_reading_prefix_cache
        )
    llm.asked.clear()
    logps = prefill_recorded(llm, responses, plain, llm.ask)
    assert [logp_T.tolist() for logp_T in logps] == [[-7, -8, -1], [-4]]
    assert [prompts for prompts, _ in llm.asked] == [[[5, 6, 7, 8], [9]]] * 2
    for parameters in llm.asked[1][1]:
        parameters._validate_trace_replay(llm.llm_engine.vllm_config.model_config, None)
    with pytest.raises(MismatchError, match="before temperature and truncation"):
        prefill_recorded(llm, responses, replace(plain, sampling=HOT), llm.ask)
    with pytest.raises(MismatchError, match="Leave out --engine-arg enable_trace_replay"):
        replay_recorded(RunnerV2(traced=False), responses, plain, llm.ask, alone=False, cached=True)


@pytest.mark.parametrize("runs_v2", [True, False])
def test_vllm_on_a_gpu_is_started_for_replay(runs_v2, monkeypatch, tmp_path):
    """A mock of its start on a GPU: for V1, where we replace the sampler's choice, it starts
    without the option.
    """
    import vllm
    from vllm.platforms import current_platform

    from mismatch_cli.models.engines import vllm as ours

    started: list[dict[str, Any]] = []

    def start(**arguments: Any) -> None:
        started.append(arguments)
        if arguments["enable_trace_replay"] and not runs_v2:
            raise ValueError("Value error, trace replay requires Model Runner V2")

    monkeypatch.setattr(vllm, "LLM", start)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(ours, "preserved_gc", nullcontext)
    ours.load_llm(EngineSettings(MODEL, HOT, K, log_file=tmp_path / "log", replays=True), {})
    assert [arguments["enable_trace_replay"] for arguments in started] == [True, False][
        : 2 - runs_v2
    ]
    with pytest.raises(ValueError, match="something else"):
        start_replaying(
            lambda **_: (_ for _ in ()).throw(ValueError("something else")),
            {"enable_trace_replay": True},
        )
