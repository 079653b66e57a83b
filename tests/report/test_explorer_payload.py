"""What the explorer's script gets: what was recorded, to half precision, and a sentence about the
rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.text import for_html
from mismatch_cli.metrics.clipping.masked_slice import Needs, apply_masks
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.report.explorer import explorer_view
from mismatch_cli.rules.algorithms.algorithm import keep_T
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.algorithms.sliders import slider_positions
from mismatch_cli.studies.clipping import analyse_clipping
from mismatch_cli.studies.exploration import passages as passages_module
from mismatch_cli.studies.exploration.explore import explore
from mismatch_cli.studies.exploration.explored import NOT_JUDGED, Exploration
from mismatch_cli.studies.exploration.passages import MOST_TOKENS
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace.reader import Trace
from tests.metrics.clipping.world import PLAIN, VOCABULARY, without, world
from tests.report.payload import Payload
from tests.studies.compared import rows_of
from tests.studies.written import long_batch, write_trace

HALF = 2.0**-11  # the largest relative error of half precision
GAP, ENTROPY = 2.0**-9, 2.0**-5  # of the binary digits that are kept of a gap and of an entropy
PAIR = tuple(map(parse_algorithm, ("grpo-clip-higher", "dppo-binary-tv")))
NO_MASKS = Needs(advantages=False, recomputed=False, top_k=0)
HOSTILE = (
    b"<script>pwned = 1</script>",
    b"<!--",
    b"\x1b[2J",
    "\u202eevil\u202c".encode(),
    b"\xff\xfe",
    b"\x00",
    b"\n\n",
    b"x" * 1_000_000,
    "é".encode()[:1],
    "é".encode()[1:],
)


def recorded(traces: Sequence[Trace], current: str) -> Iterator[SimpleNamespace]:
    """Scored responses; NaN where nothing was measured."""
    for trace in traces:
        for row in (row for row in rows_of(trace.folder) if f"logp_{current}" in row):
            nothing_T = [np.nan] * len(row["response_ids"])
            names = ("logp_rollout", f"logp_{current}", "entropy_trainer", "advantage")
            logq_T, logp_T, entropy_T, advantage_T = (
                np.array(row.get(name) or nothing_T, dtype=np.float32) for name in names
            )
            with np.errstate(invalid="ignore"):
                d_T = logp_T - logq_T
            yield SimpleNamespace(
                keys=(row["step"], row["prompt_id"], row["sample_index"]),
                text_of=trace.vocabulary.texts,
                ids_T=np.array(row["response_ids"]),
                logq_T=logq_T,
                d_T=d_T,
                d_N=d_T[row["loss_mask"] & np.isfinite(d_T)].astype(np.float64),
                entropy_T=entropy_T,
                advantage_T=advantage_T,
            )


def assert_as_recorded(payload: Payload, traces: Sequence[Trace], current: str = "trainer") -> None:
    """Every response is an entry, and the tokens of each passage are those of its response."""
    responses = list(recorded(traces, current))
    entries = payload.head["responses"]
    keys = zip(entries["step"], entries["prompt"], entries["sample"], strict=True)
    assert [response.keys for response in responses] == list(keys)
    assert [len(response.ids_T) for response in responses] == entries["length"]
    texts, columns = payload.texts, payload.columns
    for number, start, on_page in payload.passages:
        response, part = responses[number], slice(start, start + on_page.stop - on_page.start)
        for shown, text in zip(texts[on_page], response.text_of(response.ids_T[part]), strict=True):
            assert shown == for_html(text if len(text) <= 120 else f"{text[:120]}…")
        assert_close(columns["logq"][on_page], response.logq_T[part])
        assert_close(columns["d"][on_page], response.d_T[part], GAP)
        if "entropy" in payload:
            assert_close(columns["entropy"][on_page], response.entropy_T[part], ENTROPY)
        if "advantage" in payload:
            advantage_T = response.advantage_T[part]
            np.testing.assert_array_equal(columns["advantage"][on_page], advantage_T)
    # Of complete responses, over the tokens that count
    sums = {
        "absolute": [np.abs(each.d_N).sum() for each in responses],
        "signed": [each.d_N.sum() for each in responses],
        "largest": [np.abs(each.d_N).max(initial=0) for each in responses],
    }
    for name, expected in sums.items():
        np.testing.assert_allclose(columns[f"response_{name}"], expected, rtol=HALF, atol=1e-5)
    if "response_advantage" in payload:
        for response, advantage in zip(responses, columns["response_advantage"], strict=True):
            np.testing.assert_array_equal(
                response.advantage_T, np.full_like(response.logq_T, advantage)
            )


def assert_close(half_T: np.ndarray, recorded_T: np.ndarray, rtol: float = HALF) -> None:
    """To a precision; infinities and what was not measured exactly."""
    np.testing.assert_allclose(half_T.astype(np.float64), recorded_T, rtol=rtol, atol=2.0**-24)


def payload_of(explored: Exploration | None) -> Payload:
    assert explored is not None
    return Payload(explorer_view(explored).data)


def sentence_of(explored: Exploration | None) -> str:
    assert explored is not None
    return explorer_view(explored).text.partition(" π is ")[0]


def test_a_small_trace_is_there_as_recorded(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", world(0, 3), world(1, 2))
    explored = analyse_clipping([trace], PAIR).exploration()
    payload = payload_of(explored)
    assert_as_recorded(payload, [trace])
    assert "response_advantage" in payload and "advantage" not in payload
    assert "profile" in payload and not payload.column("profile").size
    assert sentence_of(explored) == f"All {len(payload.texts)} tokens of 5 responses."
    assert len(payload.head["prompts"]) == 1
    assert payload.head["responses"]["words"] == [0] * 5


def test_levels_are_those_of_the_masks(tmp_path: Path) -> None:
    """At every position of the slider; algorithms with equal masks share a column."""
    algorithms = (
        *PAIR,
        parse_algorithm("ppo-rollout"),
        parse_algorithm("ppo"),
        parse_algorithm("gspo"),
    )
    batch = world(0, 12)
    trace = write_trace(tmp_path / "trace", batch)
    analysis = analyse_clipping([trace], algorithms)
    payload = payload_of(analysis.exploration())
    needs = analysis.support.needs
    (masked,) = (cases[0] for cases in apply_masks(batch, needs, (), {}))
    for place, algorithm in enumerate(algorithms):
        blocked_N = sum(
            (~keep_T(moved, masked.policies, masked.advantage_N)).astype(int)
            for moved, _ in slider_positions(algorithm)
        )
        level_T = np.full(batch.num_tokens, NOT_JUDGED)
        judged_N = masked.judged_N
        level_T[masked.gaps.index_N[judged_N]] = blocked_N[judged_N]
        assert np.array_equal(payload.level(place), level_T), algorithm.name
    columns, names = payload.head["columns"], [each.name for each in algorithms]
    alike = analysis.to_json()["same_mask"]
    for group in alike:
        assert len({columns[f"level{names.index(name)}"][1] for name in group}) == 1


def test_long_responses_are_there_in_windows(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", long_batch([8192] * 26))
    explored = analyse_clipping([trace], PAIR).exploration()
    payload = payload_of(explored)
    assert_as_recorded(payload, [trace])
    whole = sum(
        start == 0 and on_page.stop - on_page.start == 8192
        for _, start, on_page in payload.passages
    )
    windows = len({response for response, *_ in payload.passages}) - whole
    tokens = len(payload.texts)
    assert whole + windows == 26 and whole >= 12 and windows
    assert MOST_TOKENS - 8192 < tokens <= MOST_TOKENS
    assert sentence_of(explored) == (
        f"{tokens:,} of 212,992 tokens: {whole} responses whole, {windows} in windows of 64 tokens "
        "around those in the lists."
    )
    assert payload.column("profile_response").size == windows
    assert payload.column("profile").reshape(windows, 48).max() > 0


def test_many_responses_are_all_listed(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", long_batch([22] * 10_000))
    explored = analyse_clipping([trace], PAIR).exploration()
    payload = payload_of(explored)
    assert_as_recorded(payload, [trace])
    shown = {response for response, *_ in payload.passages}
    assert [place in shown for place in range(10_000)] == [
        words >= 0 for words in payload.head["responses"]["words"]
    ]
    assert MOST_TOKENS - 22 < len(payload.texts) <= MOST_TOKENS
    assert sentence_of(explored) == (
        f"{len(payload.texts):,} of 220,000 tokens: {len(shown):,} responses whole, "
        f"{10_000 - len(shown):,} without a token here."
    )


def test_one_response_longer_than_a_page(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", long_batch([230_000]))
    explored = analyse_clipping([trace], PAIR).exploration()
    payload = payload_of(explored)
    assert_as_recorded(payload, [trace])
    assert sentence_of(explored) == (
        f"{len(payload.texts):,} of 230,000 tokens: 1 response in windows of 64 tokens around "
        "those in the lists."
    )
    for each in payload.head["lists"]:
        size = payload.column(f"list_{each['name']}").size
        assert 300 < size <= 500 and f"{size} " in each["note"]


def test_several_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages_module, "MOST_TOKENS", 900)
    traces = [
        write_trace(tmp_path / str(seed) / "trace", world(seed, 24), seed=seed) for seed in range(3)
    ]
    explored = explore(traces, PAIRS["total"], PAIR, PLAIN, {}, PAIR)
    payload = payload_of(explored)
    assert_as_recorded(payload, traces)
    assert payload.head["responses"]["trace"] == [0] * 24 + [1] * 24 + [2] * 24
    assert [Path(name).name for name in payload.head["traces"]] == ["0", "1", "2"]
    assert " tokens in 3 traces: " in sentence_of(explored)


def test_without_advantages(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", world(0, 24), without=("advantage",))
    payload = payload_of(analyse_clipping([trace], PAIR).exploration())
    assert_as_recorded(payload, [trace])
    assert "advantage" not in payload and "response_advantage" not in payload
    names = [f"{each.name}, if A {sign} 0" for each in PAIR for sign in "><"]
    assert [each["name"] for each in payload.head["algorithms"]] == names
    assert [[n > 0 for n in each["judged"]] for each in payload.head["algorithms"]] == [
        [True, False],
        [False, True],
    ] * 2


def test_advantages_per_token(tmp_path: Path) -> None:
    batches = (world(0, 24), world(1, 24, per_token=True), without(world(2, 24), "advantage_T"))
    trace = write_trace(tmp_path / "trace", *batches)
    payload = payload_of(explore([trace], PAIRS["total"], (), NO_MASKS, {}))
    assert_as_recorded(payload, [trace])
    assert "advantage" in payload and "response_advantage" not in payload


def test_without_a_trainer_at_the_weights_that_sampled(tmp_path: Path) -> None:
    """Shards that lack π have no entry; a gap at equal weights is that of the recomputed π."""
    batches = (world(0, 24), without(world(1, 24), "logp_trainer_T"))
    trace = write_trace(tmp_path / "trace", *batches)
    assert_as_recorded(
        payload_of(analyse_mismatch([trace], worst=3).exploration()), [trace], "recomputed"
    )
    assert_as_recorded(payload_of(analyse_clipping([trace], PAIR).exploration()), [trace])


def test_hostile_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Escaped, cut, and decoded as they read within their passage."""
    words = (f" word{n}".encode() for n in range(VOCABULARY - len(HOSTILE)))
    trace = write_trace(tmp_path / "trace", world(0, 24), texts=(*HOSTILE, *words))
    for most in (MOST_TOKENS, 100):
        monkeypatch.setattr(passages_module, "MOST_TOKENS", most)
        payload = payload_of(analyse_clipping([trace], PAIR).exploration())
        assert_as_recorded(payload, [trace])
        assert max(map(len, payload.head["texts"])) <= 121
        assert all(text.replace("\n", "").isprintable() for text in payload.head["texts"])


def test_prompts_stay_small_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = write_trace(tmp_path / "trace", world(0, 24))
    explored = analyse_clipping([trace], PAIR).exploration()
    assert explored is not None
    prompts = {place: f"{place} {'words ' * 1000}" for place in explored.prompts}
    head = payload_of(replace(explored, prompts=prompts)).head
    assert [head["prompts"][number][:3] for number in head["responses"]["words"]] == [
        f"{place} words "[:3] for place in range(24)
    ]
    assert {len(prompt) for prompt in head["prompts"]} == {2001}
    monkeypatch.setattr("mismatch_cli.report.explorer.MOST_OF_PROMPTS", 2400)
    head = payload_of(replace(explored, prompts=prompts)).head
    assert {len(prompt) for prompt in head["prompts"]} == {101}


def test_extreme_values_stay_finite_and_identifiers_exact(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", world(0, 6))
    explored = analyse_clipping([trace], PAIR).exploration()
    assert explored is not None
    logp_T = explored.tokens.logp_T.copy()
    logp_T[:5] = [-3e38, -65_519.0, -np.inf, np.nan, -65_000.0]
    logq_T = np.zeros_like(logp_T)
    response_S = explored.response_S.copy()
    large = 1705501428369022389
    response_S.prompt_id[:2], response_S.step[0], response_S.sample_index[0] = -large, large, 2**53
    response_S.reward[:3] = [np.inf, -np.inf, np.nan]
    tokens = replace(explored.tokens, logp_T=logp_T, logq_T=logq_T)
    payload = payload_of(replace(explored, tokens=tokens, response_S=response_S))
    expected = [-65_504, -65_504, -np.inf, np.nan, -65_024]
    np.testing.assert_array_equal(payload.column("d")[:5], expected)
    entries = payload.head["responses"]
    assert (entries["step"][0], entries["prompt"][0], entries["sample"][0]) == (
        str(large),
        str(-large),
        2**53,
    )
    assert entries["reward"][:3] == ["Infinity", "-Infinity", None]


def test_lists_say_of_what_they_were_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = write_trace(tmp_path / "trace", world(0, 60))
    explored = analyse_clipping([trace], PAIR).exploration()
    assert explored is not None
    population = {each.name: each.population for each in explored.lists}
    head = payload_of(explored).head
    either = "grpo-clip-higher or dppo-binary-tv"
    one = "only one of grpo-clip-higher and dppo-binary-tv"
    assert head["lists"] == [
        {
            "name": "gap",
            "title": "largest |log π − log μ|",
            "note": f"the 500 largest of {population['gap']:,} tokens",
        },
        {
            "name": "probability",
            "title": "largest |π − μ|",
            "note": f"the 500 largest of {population['probability']:,} tokens",
        },
        {
            "name": "only",
            "title": f"blocked by {one}",
            "note": f"all {population['only']} tokens that {one} blocks",
        },
        {
            "name": "blocked",
            "title": f"blocked by {either}",
            "note": f"all {population['blocked']} tokens that {either} blocks",
        },
    ]
    monkeypatch.setattr("mismatch_cli.studies.exploration.leaders.LEADERS", 20)
    head = payload_of(analyse_clipping([trace], PAIR).exploration()).head
    assert head["lists"][3]["note"] == (
        f"20 of {population['blocked']} tokens that {either} blocks, drawn at random"
    )
    (*_, blocked) = payload_of(analyse_clipping([trace], PAIR[:1]).exploration()).head["lists"]
    assert blocked["title"] == "blocked by grpo-clip-higher"


def test_responses_that_are_not_listed_are_counted(tmp_path: Path) -> None:
    explored = analyse_clipping(
        [write_trace(tmp_path / "trace", long_batch([3] * 5))], PAIR
    ).exploration()
    assert explored is not None
    more = replace(explored, total_responses=5 + 1234, total_tokens=9_000)
    assert sentence_of(more) == (
        "15 of 9,000 tokens: 5 responses whole. 1,234 more responses not listed."
    )


def test_a_report_has_the_payload_on_its_page(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", "fp8-kv", "--no-plots", "-o", str(tmp_path / "run")]) == 0
    assert "Exploring\n" in capfd.readouterr().err
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "All 9,720 tokens of 192 responses." in page
    data = page.partition('id="explorer-data">')[2].partition("<")[0]
    payload = Payload(data)
    assert (len(payload.texts), len(payload.head["responses"]["length"])) == (9720, 192)
