"""For an unknown layout, the error suggests a command that maps its columns; logs of text are
refused.
"""

from __future__ import annotations

import re
import shlex

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing.guess import columns_in, guess_columns, side_by_side
from mismatch_cli.frameworks.importing.no_dump import text_only
from tests.frameworks.importing.layouts import (
    column,
    imported,
    real_rows,
    same_bits,
    write_lines,
    write_records,
)

ROW = real_rows(1)[0]
THREE = real_rows(3)
P, R = column(THREE, "prompt_ids"), column(THREE, "response_ids")
MU, PI = column(THREE, "logp_rollout"), column(THREE, "logp_trainer")


def rows(**columns):
    """Lines with these columns, from three values for each of prompts, responses, log μ and log
    π.
    """
    lines: list[dict] = [{}, {}, {}]
    for name, value in columns.items():
        for i, line in enumerate(lines):
            line[name] = value[i] if isinstance(value, list) else value
    return lines


KNOWN = {  # names that people use, and whose they are
    "TRL, by hand": (
        {
            "query_ids": P,
            "completion_token_ids": R,
            "sampling_logps": MU,
            "old_per_token_logps": PI,
            "adv": 0.5,
        },
        "prompt_ids=query_ids,response_ids=completion_token_ids,logp_rollout=sampling_logps,"
        "logp_trainer=old_per_token_logps,advantage=adv",
    ),
    "verl": (
        {
            "prompts": P,
            "responses": R,
            "rollout_log_probs": MU,
            "old_log_probs": PI,
            "uid": "a",
            "ref_log_prob": PI,
        },
        "prompt_ids=prompts,response_ids=responses,logp_rollout=rollout_log_probs,"
        "logp_trainer=old_log_probs,prompt_id=uid",
    ),
    "OpenRLHF": (
        {
            "promptTokenIds": P,
            "outputTokenIds": R,
            "rolloutLogProbs": MU,
            "actionLogProbs": PI,
            "globalStep": 1,
        },
        "prompt_ids=promptTokenIds,response_ids=outputTokenIds,logp_rollout=rolloutLogProbs,"
        "logp_trainer=actionLogProbs,step=globalStep",
    ),
    "AReaL": (
        {
            "prompt_tokens": P,
            "output_tokens": R,
            "behav_logprobs": MU,
            "prox_logp": PI,
            "logprobs": PI,
            "score": 1,
        },
        "prompt_ids=prompt_tokens,response_ids=output_tokens,logp_rollout=behav_logprobs,"
        "logp_trainer=?,reward=score",
    ),
    "old beside proximal": (
        {"prompt_ids": P, "response_ids": R, "old_logp": MU, "proximal_logp": PI},
        "logp_rollout=?,logp_trainer=?",
    ),
    "only the engine's": (
        {"prompt": P, "completion": R, "output_token_logprobs": MU, "entropy": PI},
        "prompt_ids=prompt,response_ids=completion,logp_rollout=output_token_logprobs,entropy_trainer=entropy",
    ),
    "short names": (
        {"ctx": P, "out_tok": R, "behaviour_lp": MU, "learner_lp": PI, "it": 3},
        "prompt_ids=ctx,response_ids=out_tok,logp_rollout=behaviour_lp,logp_trainer=learner_lp,step=it",
    ),
    "the only other list that is as long": (
        {"prompt_ids": P, "chosen": R, "logps": MU},
        "response_ids=chosen,logp_rollout=logps",
    ),
    "a mask is as long too": (
        {"prompt_ids": P, "chosen": R, "learned": [[1] * len(r) for r in R], "logps": MU},
        "response_ids=chosen,logp_rollout=logps",
    ),
    "two lists that are as long": (
        {"prompt_ids": P, "chosen": R, "other": [[t + 1 for t in r] for r in R], "logps": MU},
        "response_ids=?,logp_rollout=logps",
    ),
    "twice the same": (
        {"prompt_ids": P, "chosen": R, "again": R, "logps": MU},
        "response_ids=chosen,logp_rollout=logps",
    ),
    "two candidates": (
        {"prompt_ids": P, "response_ids": R, "logprobs": MU, "old_logprobs": PI},
        "logp_rollout=?,logp_trainer=?",
    ),
    "two engines": (
        {"prompt_ids": P, "response_ids": R, "vllm_logps": MU, "sglang_logps": PI},
        "logp_rollout=?",
    ),
    "nothing of the kind": ({"a": 1, "b": "x"}, ""),
    "right names, wrong values": (
        {
            "prompts": "text",
            "responses": R,
            "rollout_logprobs": [value[1:] for value in MU],
            "rewards": "good",
        },
        "",
    ),
    "whole sequences are not prompts": (
        {"input_ids": [p + r for p, r in zip(P, R, strict=True)], "output_ids": R, "logps": MU},
        "response_ids=output_ids,logp_rollout=logps",
    ),
    "names that cannot be typed": (
        {"prompt, ids": P, "response=ids": R, "logp\nrollout": MU},
        "",
    ),
}


@pytest.mark.parametrize("layout", KNOWN)
def test_names_types_and_lengths_identify_columns(layout):
    columns, expected = KNOWN[layout]
    guess = guess_columns(columns_in(rows(**columns)), {})
    assert ",".join(f"{ours}={its}" for ours, its in guess.items()) == expected


def test_matrices_identify_a_batch():
    batch = {
        "prompts": P,
        "responses": R,
        "rollout_log_probs": MU,
        "scores": [1.0, 0.0, 1.0],
        "step": 4,
    }
    names = {
        "prompt_ids": "prompts",
        "response_ids": "responses",
        "logp_rollout": "rollout_log_probs",
    }
    assert guess_columns(columns_in([batch]), {}) == names | {"reward": "scores"}


def test_given_columns_stay(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    columns = {"prompt_ids": P, "response_ids": R, "vllm_logps": MU, "sglang_logps": PI}
    write_lines(tmp_path / "d.jsonl", rows(**columns))
    assert guess_columns(columns_in(rows(**columns)), {"logp_rollout": "vllm_logps"}) == {
        "logp_rollout": "vllm_logps"
    }
    assert run(["import", "d.jsonl", "--columns", "response_ids=response_ids", "-q"]) == 1
    assert capsys.readouterr().err.endswith(
        "mismatch-cli import d.jsonl --columns 'logp_rollout=?'\n"
    )


def test_unknown_columns_come_with_the_flag_that_includes_them(tmp_path):
    records = rows(prompt_ids=P, response_ids=R, logp_rollout=MU, it=3, note="x")
    path = write_lines(tmp_path / "d.jsonl", records)
    left_out = imported(path, into=tmp_path / "trace")[1]["left_out"]
    assert left_out == {"unknown columns (it, note); to include: --columns step=it": 2}
    table, about = imported(path, into=tmp_path / "with", columns={"step": "it"})
    assert about["left_out"] == {"unknown columns (note)": 1} and set(
        table["step"].to_pylist()
    ) == {3}


@pytest.mark.parametrize("way", ["jsonl", "parquet"])
def test_the_line_can_be_pasted(tmp_path, monkeypatch, capsys, way):
    monkeypatch.chdir(tmp_path)
    records = rows(**{"the prompt's tokens": P, "completion tokens": R, "engine $logprobs": MU})
    path = tmp_path / f"my dump.{way}"
    write_records(path, records)
    assert run(["import", path.name, "-q"]) == 1
    line = re.search(r"lengths, try: mismatch-cli (.*)", capsys.readouterr().err)[1]
    assert run([*shlex.split(line), "-q"]) == 0
    assert "3 responses" in capsys.readouterr().out


TEXTS = {
    "TRL's table of completions": (
        {"step": 3, "prompt": "1 + 1?", "completion": "2", "accuracy_reward": 1.0,
         "advantage": 0.5},
    ),
    "TRL's table of completions, in chat": (
        {"step": 3, "prompt": [{"role": "user", "content": "1 + 1?"}], "advantage": 0.5,
         "completion": [{"role": "assistant", "content": "2"}]},
    ),
    "verl's rollout data": (
        {"input": "1 + 1?", "output": "2", "gts": "2", "score": 1.0, "step": 3, "acc": True},
    ),
    "AReaL's rollout dump": (
        {"task_id": 1, "sample_idx": 0, "seqlen": 9, "prompt_len": 4, "head_version": 1,
         "tail_version": 1,
         "reward": 1.0, "prompt": "1 + 1?", "completion": "2"},
    ),
    "ms-swift's log of completions": (
        {"step": [3, 3], "prompt": ["1 + 1?"] * 2, "completion": ["2", "3"],
         "advantages": [0.5, -0.5]},
    ),
    "a log of prompts and responses": ({"question": "1 + 1?", "answer": "2", "tokens": 5},),
}  # fmt: skip


@pytest.mark.parametrize("way", ["jsonl", "parquet"])
@pytest.mark.parametrize("log", TEXTS)
def test_texts_are_refused_with_what_to_record(tmp_path, log, way):
    (record,) = TEXTS[log]
    path = tmp_path / f"log.{way}"
    write_records(path, [record])
    message = "text without token ids.*Retokenized text is not what.*see mismatch-cli guide record"
    for format in (None, "plain"):
        with pytest.raises(MismatchError, match=message):
            imported(path, into=tmp_path / "trace", format=format)


def test_texts_beside_token_ids_are_not_a_log_of_texts(tmp_path):
    chat = [{"role": "user", "content": "1 + 1?"}]
    records = [
        {
            "prompt": chat,
            "completion": "2",
            "prompt_ids": p,
            "response_ids": r,
            "logp_rollout": mu,
            "step": 1,
        }
        for p, r, mu in zip(P, R, MU, strict=True)
    ]
    assert text_only(records) == text_only([]) == ""
    table, about = imported(write_lines(tmp_path / "d.jsonl", records), into=tmp_path / "trace")
    assert same_bits(table, "prompt_ids", P)
    assert about["left_out"] == {"unknown columns (completion, prompt)": 2}


def test_a_line_is_printed_only_for_what_can_be_measured(tmp_path, capsys):
    """Token ids or log-probabilities that are nowhere, inside of objects neither."""
    nested, text = {"output_token_logprobs": [-0.1]}, {"text": "so", "tokens": ["s", "o"]}
    for record, lacks in (
        ({"output_ids": R[0], "meta_info": nested}, "none as long as its log-probabilities"),
        ({"turns": [{"ids": R[0]}], "note": "x"}, "(turns.0.ids), but no log-probabilities"),
        ({"prompt_ids": P[0], "output_ids": R[0], "meta": text}, "but no log-probabilities"),
    ):
        assert run(["import", str(write_lines(tmp_path / "d.jsonl", [record])), "-q"]) == 1
        said = capsys.readouterr().err
        assert lacks in said and "import --schema" in said and "--columns" not in said
    record = {"prompt_ids": P[0], "response_ids": R[0], "vllm_logps": MU[0], "sglang_logps": MU[0]}
    assert run(["import", str(write_lines(tmp_path / "d.jsonl", [record])), "-q"]) == 1
    assert "Replace each ?" in capsys.readouterr().err


def test_the_two_lists_have_kind_and_length(tmp_path):
    records = [{"out": R[0], "engine_logps": MU[0], "more": {"logps": [MU[0], MU[1]]}, "n": "x"}]
    columns = columns_in(records)
    lines = side_by_side(columns, guess_columns(columns, {}), "d.jsonl").splitlines()
    assert lines[0].split() == ["wanted", "in", "d.jsonl"]
    shown = "\n".join(lines)
    assert f"out: {len(R[0])} whole numbers" in shown and "n: text" in shown
    assert f"engine_logps: {len(R[0])} numbers" in shown
    assert f"more.logps: 2 lists of {min(map(len, MU[:2]))}" in shown
    assert "response_ids = out " in shown and "logp_rollout = engine_logps " in shown
