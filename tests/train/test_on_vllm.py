"""Float32 on both sides with real vLLM: every sync is proven, and interruptions change no
number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_cli.base.errors import MismatchError
from tests.train.small_runs import numbers, run


@pytest.fixture(scope="module")
def control(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("train") / "control"
    torch.set_num_threads(1)
    run(folder, engine="vllm", steps=20)
    return folder


def test_the_policies_stay_equal(control):
    """Every weight update inside vLLM is proven by the tokens that it sampled with it."""
    lines = numbers(control)
    assert len(lines) == 20 and {line["sync"] for line in lines} == {"proven"}
    assert max(line["mismatch"]["abs_dp_mean"] for line in lines) <= 1e-6
    assert max(line["current"]["abs_dp_mean"] for line in lines) > 1e-4


@pytest.mark.slow
def test_vllm_dies_in_a_step_and_the_run_resumes_in_the_same_process(
    control, tmp_path, monkeypatch
):
    """A failure in vLLM's own executor with requests in flight, in the step after the
    checkpoint.
    """
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    execute, in_flight, metrics = (
        UniProcExecutor.execute_model,
        [],
        tmp_path / "run" / "metrics.jsonl",
    )

    def dying(self: Any, *arguments: Any, **named: Any) -> Any:
        if metrics.is_file() and metrics.read_text(encoding="utf-8").count("\n") == 2:
            in_flight.append(True)
        if len(in_flight) == 20:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        return execute(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(UniProcExecutor, "execute_model", dying)
        with pytest.raises(
            MismatchError, match=r"engine failed while sampling \(RuntimeError: Default.*--resume"
        ):
            run(tmp_path / "run", engine="vllm")
    assert [line["step"] for line in numbers(tmp_path / "run")] == [1, 2]
    run(tmp_path / "run", engine="vllm", resume=True)
    assert numbers(tmp_path / "run")[:3] == numbers(control)[:3]
