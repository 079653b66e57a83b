"""The trainer against the model's own logits: families of heads, dtypes, padding, order, and
error messages.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring import trainer as trainer_module
from mismatch_cli.models.scoring.head import Head
from mismatch_cli.models.scoring.layout import micro_batches, other_shape, pad_right
from mismatch_cli.models.scoring.proven_head import _equals, candidates
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import ResponseScores, Trainer
from tests.models.plain_torch import at_sampled, logits_of

PLAIN = SamplingSettings()
SaveModel = Callable[..., str]


def requests_for(
    rng: np.random.Generator,
    vocabulary: int,
    lengths: tuple[int, ...],
    k: int = 4,
    prompts: tuple[int, ...] = (3, 4, 5, 6),
) -> list[ScoreRequest]:
    return [
        ScoreRequest(
            rng.integers(0, vocabulary, prompts[i % len(prompts)]).tolist(),
            rng.integers(0, vocabulary, length).tolist(),
            rng.integers(0, vocabulary, (length, k)).astype(np.int32),
        )
        for i, length in enumerate(lengths)
    ]


def assert_scores(
    got: ResponseScores, logits_TV: torch.Tensor, request: ScoreRequest, atol: float
) -> None:
    logp_TV = logits_TV.double().log_softmax(-1)
    np.testing.assert_allclose(got.logp_T, at_sampled(logp_TV, request), atol=atol)
    np.testing.assert_allclose(got.entropy_T, -(logp_TV.exp() * logp_TV).sum(1), atol=atol)
    assert (
        got.rank_T.tolist()
        == ((logits_TV > at_sampled(logits_TV, request)[:, None]).sum(1) + 1).tolist()
    )
    if request.topk_ids_TK is not None:
        expected_TK = logp_TV.gather(1, torch.from_numpy(request.topk_ids_TK).long())
        np.testing.assert_allclose(got.logp_at_topk_TK, expected_TK, atol=atol)


@pytest.mark.parametrize(
    ("family", "settings", "transform"),
    [
        ("Qwen3", {"vocab_size": 1003}, (1, 1, None)),
        ("Qwen3", {"tie_word_embeddings": True}, (1, 1, None)),
        ("Gemma2", {"final_logit_softcapping": 3.0}, (1, 1, 3.0)),
        ("Granite", {"logits_scaling": 6.0}, (6.0, 1, None)),
        ("Cohere", {"logit_scale": 0.3}, (1, 0.3, None)),
        ("Phi", {}, (1, 1, None)),  # a head with a bias
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_are_those_of_the_models_own_logits(
    save_model: SaveModel,
    rng: np.random.Generator,
    family: str,
    settings: dict[str, Any],
    transform: object,
    dtype: str,
) -> None:
    trainer = Trainer.load(save_model(family, **settings), sampling=PLAIN, dtype=dtype)
    assert (trainer.head.divisor, trainer.head.multiplier, trainer.head.softcap) == transform
    requests = requests_for(rng, trainer.head.vocabulary, (30, 7, 21), prompts=(3, 40, 17))
    for request in requests:
        [got] = trainer.score([request], token_budget=1)
        assert_scores(got, logits_of(trainer.model, request), request, atol=1e-5)


def test_one_key_that_divides_or_multiplies_is_settled_by_the_proof(save_model: SaveModel) -> None:
    """HyperCLOVA X multiplies by the `logits_scaling` by which Granite divides."""
    trainer = Trainer.load(save_model("HyperCLOVAX", logits_scaling=0.3), sampling=PLAIN)
    assert (trainer.head.divisor, trainer.head.multiplier) == (1, 0.3)


def test_batches_results_in_order_and_padding_within_rounding(
    save_model: SaveModel, rng: np.random.Generator
) -> None:
    trainer = Trainer.load(save_model("Qwen3"), sampling=PLAIN)
    requests = requests_for(rng, 512, (5, 0, 40, 12, 1, 33, 8))
    progress: list[int] = []
    got = trainer.score(requests, token_budget=100, on_scored=progress.extend)
    assert sorted(progress) == list(range(len(requests)))
    progress.clear()
    trainer.score_again(requests, token_budget=100, rows=[0, 2, 3], on_scored=progress.extend)
    assert sorted(progress) == [0, 2, 3]
    for scores, request in zip(got, requests, strict=True):
        assert scores.logp_T.dtype == scores.entropy_T.dtype == np.float32
        assert scores.rank_T.dtype == np.int32
        if request.response_ids:
            assert_scores(scores, logits_of(trainer.model, request), request, atol=2e-5)
    assert got[1].logp_T.shape == (0,)
    assert got[1].logp_at_topk_TK is not None
    assert got[1].logp_at_topk_TK.shape == (0, 4)


def test_a_response_without_tokens_has_empty_columns(save_model: SaveModel) -> None:
    trainer = Trainer.load(save_model("Qwen3"), sampling=PLAIN)
    (scores,) = trainer.score([ScoreRequest([1, 2], [])], token_budget=100)
    for column_T in (scores.logp_T, scores.entropy_T, scores.rank_T):
        assert column_T.shape == (0,)


def test_the_same_set_gives_the_same_bits_in_any_order(
    save_model: SaveModel, rng: np.random.Generator
) -> None:
    trainer = Trainer.load(save_model("Qwen3"), sampling=PLAIN, dtype="bfloat16")
    requests = requests_for(rng, 512, (5, 9, 40, 12, 9, 33, 8))
    order = rng.permutation(len(requests))
    first = trainer.score(requests, token_budget=120)
    second = trainer.score([requests[i] for i in order], token_budget=120)
    for position, i in enumerate(order):
        for name in ("logp_T", "entropy_T", "rank_T", "logp_at_topk_TK"):
            assert getattr(first[i], name).tobytes() == getattr(second[position], name).tobytes()


def test_scoring_again_uses_a_different_shape_and_comes_close(
    save_model: SaveModel, rng: np.random.Generator
) -> None:
    trainer = Trainer.load(save_model("Qwen3"), sampling=PLAIN)
    shapes: list[tuple[int, ...]] = []
    masks: list[int] = []

    def note(_: Any, __: Any, kwargs: Any) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))
        masks.append(int(kwargs["attention_mask"].sum()))

    trainer.model.model.register_forward_pre_hook(note, with_kwargs=True)
    requests = requests_for(rng, 512, (100, 30, 31, 90, 33, 0))
    first = trainer.score(requests, token_budget=100)
    assert shapes == [(1, 102), (1, 95), (2, 35), (1, 33)]
    assert masks == [102, 95, 70, 33]
    shapes.clear()
    again = trainer.score_again(requests, token_budget=100)
    assert shapes == [(1, 35), (1, 35), (2, 102), (2, 33)]
    for one, other in zip(first, again, strict=True):
        np.testing.assert_allclose(one.logp_T, other.logp_T, atol=2e-5)
    shapes.clear()
    picked = trainer.score_again(requests, token_budget=100, rows=[3, 5, 4])
    assert shapes == [(1, 35), (2, 102)]
    assert [s.logp_T.tobytes() for s in picked] == [again[i].logp_T.tobytes() for i in (3, 5, 4)]


def test_requests_with_different_numbers_of_top_ids(
    save_model: SaveModel, rng: np.random.Generator
) -> None:
    trainer = Trainer.load(save_model("Qwen3"), sampling=PLAIN)
    requests = [
        ScoreRequest([1, 2], [3, 4]),
        *requests_for(rng, 512, (5,), k=2),
        *requests_for(rng, 512, (6,), k=7),
    ]
    got = trainer.score(requests, token_budget=1000)
    assert got[0].logp_at_topk_TK is None
    for scores, request in zip(got, requests, strict=True):
        assert_scores(scores, logits_of(trainer.model, request), request, atol=2e-5)


def test_temperature_and_truncated_support(save_model: SaveModel, rng: np.random.Generator) -> None:
    sampling = SamplingSettings(temperature=0.7, top_k=40, top_p=0.95)
    trainer = Trainer.load(save_model("Qwen3"), sampling=sampling)
    [request] = requests_for(rng, 512, (60,))
    [got] = trainer.score([request], token_budget=1000)
    processed_TV = sampling.process(logits_of(trainer.model, request))
    expected_T = (
        processed_TV.log_softmax(-1)
        .gather(1, torch.tensor(request.response_ids)[:, None])[:, 0]
        .numpy()
    )
    assert (got.logp_T == -np.inf).any()
    np.testing.assert_allclose(got.logp_T, expected_T, atol=1e-5)


def with_head_for_a_pass(model: Any) -> Any:
    """The model as if it were spread: a pass has the head's weights in the dtype that computes."""

    def pass_through(inputs: Any, at_head: Any) -> Any:
        decoded = model.get_decoder()(**inputs, use_cache=False)
        return at_head(decoded.last_hidden_state, model.lm_head.weight, None)

    model.pass_through = pass_through
    return model


@pytest.mark.parametrize("spread", [False, True])
def test_float32_head_of_a_bfloat16_model(
    spread: bool, save_model: SaveModel, rng: np.random.Generator
) -> None:
    folder = save_model("Qwen3", dtype=torch.bfloat16)
    trainer = Trainer.load(folder, sampling=PLAIN, float32_head=True)
    if spread:
        trainer = Trainer(with_head_for_a_pass(trainer.model), PLAIN, float32_head=True)
    assert (trainer.describe()["dtype"], trainer.describe()["head_dtype"]) == (
        "bfloat16",
        "float32",
    )
    [request] = requests_for(rng, 512, (30,))
    [got] = trainer.score([request], token_budget=1)
    ids = torch.tensor(
        [(request.prompt_ids + request.response_ids)[:-1]], device=trainer.model.device
    )
    with torch.inference_mode():
        hidden = trainer.model.model(ids).last_hidden_state[0, len(request.prompt_ids) - 1 :]
        logits_TV = hidden.float() @ trainer.model.lm_head.weight.float().T
    assert_scores(got, logits_TV.cpu(), request, atol=1e-5)


def test_describe_says_what_was_resolved(save_model: SaveModel) -> None:
    folder = save_model("Qwen3", dtype=torch.bfloat16, vocab_size=1003)
    described = Trainer.load(folder, sampling=PLAIN, attn_implementation="eager").describe()
    assert described["model"] == folder
    assert described["architecture"] == "Qwen3ForCausalLM"
    assert described["dtype"] == described["head_dtype"] == "bfloat16"
    assert described["attn_implementation"] == "eager"
    assert described["device"] == ("cuda:0" if torch.cuda.is_available() else "cpu")
    assert described["vocab_size"] == 1003
    assert (
        described["parameters"]
        == 1003 * 64 * 2 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 32 + 128) + 64
    )
    assert described["torch"] == torch.__version__


def test_a_head_that_does_more_is_refused(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3ForCausalLM

    plain = Qwen3ForCausalLM.forward

    def softplus(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        output.logits = torch.nn.functional.softplus(output.logits)
        return output

    folder = save_model("Qwen3")
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", softplus)
    with pytest.raises(MismatchError, match="does more than a matrix product"):
        Trainer.load(folder, sampling=PLAIN)


def test_a_model_that_looks_ahead_is_refused(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3Model

    plain = Qwen3Model.forward

    def looks_ahead(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(
            1, keepdim=True
        )
        return output

    folder = save_model("Qwen3")
    monkeypatch.setattr(Qwen3Model, "forward", looks_ahead)
    with pytest.raises(MismatchError, match="not causal"):
        Trainer.load(folder, sampling=PLAIN)


def test_nan_names_the_response_and_the_remedy(save_model: SaveModel) -> None:
    trainer = Trainer.load(save_model("Qwen3"), sampling=PLAIN)

    def overflow(_: Any, __: Any, kwargs: Any, output: Any) -> None:
        output.last_hidden_state[kwargs["input_ids"] == 77] = torch.nan

    trainer.model.model.register_forward_hook(overflow, with_kwargs=True)
    requests = [ScoreRequest([1, 2], [3, 4, 5]), ScoreRequest([1, 2], [3, 77, 5])]
    with pytest.raises(
        MismatchError, match=r"token 2 of response 1 is NaN.*--trainer-dtype float32"
    ):
        trainer.score(requests, token_budget=1)


@pytest.mark.parametrize(("logp", "entropy"), [(np.nan, 1.0), (-1.0, np.nan)])
def test_nan_in_either_score_of_a_token_is_an_overflow(
    monkeypatch: pytest.MonkeyPatch, logp: float, entropy: float
) -> None:
    part = SimpleNamespace(logp_T=np.array([-1.0, logp]), entropy_T=np.array([1.0, entropy]))
    monkeypatch.setattr(trainer_module, "split_requests", lambda *_: [part])
    trainer = SimpleNamespace(
        packed=False,
        routing=SimpleNamespace(compare=lambda *_: [None]),
        _score_batch=lambda _: None,
    )
    with pytest.raises(MismatchError, match="token 1 of response 0 is NaN"):
        Trainer.score_into(trainer, [part], [ScoreRequest([1], [2, 3])], [0])


@pytest.mark.parametrize(("scale", "heads"), [
    (0, [(1, 1)]), (1, [(1, 1)]), (None, [(1, 1)]), (2, [(2, 1), (1, 2), (1, 1)]),
])  # fmt: skip
def test_a_scale_of_0_or_1_in_a_config_scales_nothing(
    scale: int | None, heads: list[tuple[int, int]]
) -> None:
    text = SimpleNamespace(logit_scale=scale)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    heads_read = list(candidates(model, torch.zeros(3, 2), None))
    assert [(head.multiplier, head.divisor) for head in heads_read] == heads


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1.0), (torch.float32, 1e-4)])
def test_a_head_may_differ_from_its_model_by_two_roundings_of_the_largest_logit(
    dtype: torch.dtype, most: float
) -> None:
    """Token 0 is certain, the others have a logit of −64, which bfloat16 rounds to half a nat."""
    weight_VH = torch.full((97, 1), -64.0, dtype=dtype)
    weight_VH[0] = 0.0
    hidden_LH = torch.ones(24, 1, dtype=dtype)
    for share, equal in ((0.9, True), (1.1, False)):
        full_LV = weight_VH.float().T.repeat(24, 1)
        full_LV[5, 1:] += share * most
        assert _equals(Head(weight_VH, None), hidden_LH, full_LV) == equal


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ScoreRequest([1], [2, 512]), "token id 512.*ends at 511"),
        (ScoreRequest([600], [2]), "token id 600"),
        (ScoreRequest([1], [2], np.array([[-1]])), "token id -1"),
        (ScoreRequest([], [2, 3]), "empty prompt"),
    ],
)
def test_requests_that_cannot_be_scored(
    save_model: SaveModel, request_: ScoreRequest, message: str
) -> None:
    trainer = Trainer.load(save_model("Qwen3"), sampling=PLAIN)
    with pytest.raises(MismatchError, match=f"Response 1 .*{message}"):
        trainer.score([ScoreRequest([1], [2]), request_], token_budget=10)


def test_out_of_memory_says_what_to_lower(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer.load(save_model("Qwen3"), sampling=PLAIN)

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(trainer.model.model), "forward", full)
    with pytest.raises(MismatchError, match="--token-budget"):
        trainer.score([ScoreRequest([1], [2])], token_budget=10)


REQUESTS = st.lists(
    st.builds(
        ScoreRequest,
        st.lists(st.integers(0, 9), min_size=1, max_size=5),
        st.lists(st.integers(0, 9), max_size=12),
    ),
    max_size=20,
)


def request_of(length: int) -> ScoreRequest:
    return ScoreRequest([1], [2] * length)


def test_longest_first_and_padded_size_within_the_budget() -> None:
    batches = micro_batches([request_of(n) for n in (3, 9, 2, 8, 0, 3)], token_budget=10)
    assert batches == [[1], [3], [0, 5, 2]]
    assert micro_batches([request_of(5), request_of(5)], token_budget=10) == [[0, 1]]


@given(REQUESTS, st.integers(1, 40))
def test_every_response_once_and_none_over_the_budget(
    requests: list[ScoreRequest], budget: int
) -> None:
    batches = micro_batches(requests, budget)
    assert sorted(i for batch in batches for i in batch) == [
        i for i, r in enumerate(requests) if r.response_ids
    ]
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(requests[i].num_fed for i in batch) <= budget


@given(REQUESTS, st.integers(1, 40), st.randoms())
def test_composition_does_not_depend_on_the_order(
    requests: list[ScoreRequest], budget: int, random: object
) -> None:
    shuffled = list(requests)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    def content(of: list[ScoreRequest]) -> list[list[tuple[list[int], list[int]]]]:
        return [
            [(of[i].prompt_ids, of[i].response_ids) for i in batch]
            for batch in micro_batches(of, budget)
        ]

    assert content(requests) == content(shuffled)


@given(REQUESTS, st.integers(1, 40))
def test_no_response_keeps_its_shape(requests: list[ScoreRequest], budget: int) -> None:
    batches = micro_batches(requests, budget)
    others = other_shape(batches)
    size = {i: len(batch) for batch in batches for i in batch}
    assert {i for batch in others for i in batch} == set(size)
    for batch in others:
        for i in batch:
            assert (len(batch) == 1) == (size[i] > 1)


def test_single_responses_are_paired_and_the_last_with_itself() -> None:
    assert other_shape([[4], [2, 3], [1], [0]]) == [[2], [3], [4, 1], [0, 0]]


def test_the_last_token_is_not_fed() -> None:
    requests = [ScoreRequest([5, 6], [7, 8]), ScoreRequest([9], [1])]
    ids_BL, mask_BL = pad_right(requests, torch.device("cpu"))
    assert ids_BL.tolist() == [[5, 6, 7], [9, 0, 0]]
    assert mask_BL.tolist() == [[1, 1, 1], [1, 0, 0]]
