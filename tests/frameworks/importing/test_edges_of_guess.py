"""A guess of columns where two names are possible, or a list could be ids or a mask."""

from __future__ import annotations

from mismatch_cli.frameworks.importing.guess import columns_in, guess_columns
from mismatch_cli.frameworks.importing.no_dump import lacking, text_only
from tests.frameworks.importing.layouts import real_rows

IDS, LOG_PROBABILITIES = [[7, 8, 9], [1, 0]], [[-0.5, -0.25, -1.0], [-2.0, -0.125]]


def rows(**columns):
    """Two lines with these columns."""
    return [{name: values[i] for name, values in columns.items()} for i in range(2)]


def test_a_column_with_our_name_is_preferred_to_one_that_resembles_it():
    records = [
        row | {"prompt_tokens": row["prompt_ids"], "response_tokens": row["response_ids"]}
        for row in real_rows(2)
    ]
    assert guess_columns(columns_in(records), {}) == {}


def test_token_ids_that_are_0_and_1_in_one_response_are_not_a_mask():
    """A mask is 0 and 1 in every response."""
    records = rows(prompt_ids=[[3], [4]], chosen=IDS, logp_rollout=LOG_PROBABILITIES)
    assert guess_columns(columns_in(records), {}) == {"response_ids": "chosen"}
    masks = [[1, 1, 0], [1, 0]]
    records = rows(prompt_ids=[[3], [4]], chosen=masks, logp_rollout=LOG_PROBABILITIES)
    assert guess_columns(columns_in(records), {}) == {}


def test_a_log_of_texts_has_both_prompts_and_responses():
    assert text_only([{"prompt": "1 + 1?", "answer": "2"}])
    assert not text_only([{"prompt": "1 + 1?", "note": "easy"}])
    assert not text_only([{"note": "easy", "answer": "2"}])


def test_a_column_is_taken_only_if_every_row_of_it_fits():
    """The second response has two tokens."""
    columns = {"prompt_ids": [[3], [4]], "response_ids": IDS, "logp_rollout": LOG_PROBABILITIES}
    whole = rows(**columns, entropy=[[0.1, 0.2, 0.3], [0.4, 0.5]])
    assert guess_columns(columns_in(whole), {}) == {"entropy_trainer": "entropy"}
    assert guess_columns(columns_in(rows(**columns, entropy=[[0.1, 0.2, 0.3], [0.4]])), {}) == {}


def test_log_probabilities_of_nobody_in_particular_are_those_of_the_side_that_is_missing():
    for present, missing in (("rollout", "trainer"), ("trainer", "rollout")):
        columns = {"prompt_ids": [[3], [4]], "response_ids": IDS}
        columns[f"logp_{present}"] = LOG_PROBABILITIES
        records = rows(**columns, logprobs=LOG_PROBABILITIES)
        assert guess_columns(columns_in(records), {}) == {f"logp_{missing}": "logprobs"}


def test_the_average_policy_is_not_taken_for_the_trainer():
    columns = {"prompt_ids": [[3], [4]], "response_ids": IDS, "logp_average": LOG_PROBABILITIES}
    records = rows(**columns, vllm_logprobs=LOG_PROBABILITIES)
    assert guess_columns(columns_in(records), {}) == {"logp_rollout": "vllm_logprobs"}


def test_ids_that_end_with_a_response_of_one_token_hold_both_prompt_and_response():
    columns = {"response_tokens": [[7], [1]], "logp_rollout": [[-0.5], [-2.0]]}
    both = guess_columns(columns_in(rows(prompt_tokens=[[3, 7], [4, 1]], **columns)), {})
    assert both == {"response_ids": "response_tokens"}
    prompt = guess_columns(columns_in(rows(prompt_tokens=[[7, 3], [1, 4]], **columns)), {})
    assert prompt == {"prompt_ids": "prompt_tokens", "response_ids": "response_tokens"}


def test_ids_that_some_rows_lack_are_ids():
    columns = {"tokens": [[1, 2], None], "words": ["a", "b"], "shares": [[0.5], [0.25]]}
    assert lacking(columns, []).startswith("has lists of whole numbers (tokens), but no log-prob")
