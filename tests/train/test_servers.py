"""Training with real vLLM servers, which load the weights of every step from a folder, die and
come back.
"""

from __future__ import annotations

from typing import Any

import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.models.engines import server
from mismatch_cli.models.engines._server_rollout import Completions
from mismatch_cli.models.engines._server_weights import check_same_weights
from mismatch_cli.train.loop import train
from mismatch_cli.train.train_config import load_config
from tests.models.engines.vllm_servers import VllmServers, free_port
from tests.train.small_runs import SMALL, run

pytestmark = pytest.mark.slow

# On a float32 server, old weights would be noticed at once.
SERVED = {
    "engine": "server",
    "served_model": "tiny",
    "steps": 3,
    "learning_rate": 2e-3,
    "trainer_dtype": "float32",
}
SAME_WEIGHTS = 1e-5  # mean |π − μ|


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    servers = VllmServers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return [free_port(), free_port()]


@pytest.fixture(scope="module")
def urls(servers, ports) -> list[str]:
    addresses = [servers.start(port, "processed_logprobs", tells_all=True) for port in ports]
    for url in addresses:
        servers.wait(url)
    return addresses


def gaps(records: list[dict[str, Any]]) -> list[float]:
    return [record["mismatch"]["abs_dp_mean"] for record in records]


def test_two_servers_load_the_weights_of_every_step(urls, tmp_path):
    records = run(tmp_path / "run", engine_url=",".join(urls), **SERVED)
    assert len(records) == 3 and max(gaps(records)) < SAME_WEIGHTS
    assert "newer" in {record["sync"] for record in records}
    assert not (tmp_path / "run" / "weights").exists()


def test_a_server_that_dies_between_steps_comes_back_with_the_right_weights(
    servers, ports, urls, tmp_path
):
    records: list[dict[str, Any]] = []
    said: list[str] = []

    def on_step(record: dict[str, Any]) -> None:
        records.append(record)
        if record["step"] == 1:
            servers.kill(ports[0])
            servers.start(ports[0], "processed_logprobs", tells_all=True)

    config = load_config("miniature", SMALL | SERVED | {"engine_url": urls[0]})
    train(config, tmp_path / "run", on_step, say=said.append)
    assert len(records) == 3 and max(gaps(records)) < SAME_WEIGHTS
    assert any("lost this step's weights: sending them again" in line for line in said)


def test_requests_to_a_server_that_dies_while_sampling_are_repeated(
    servers, ports, urls, tmp_path, monkeypatch
):
    """Responses from the old weights are discarded."""
    real, calls = Completions.sample, []

    async def dies_once(self: Completions, requests: Any, *more: Any, **named: Any) -> Any:
        rollouts = await real(self, requests, *more, **named)
        calls.append(len(requests))
        if calls.count(16) == 2:  # the second step
            calls.append(16)
            servers.kill(ports[0])
            servers.start(ports[0], "processed_logprobs", tells_all=True)
        return rollouts

    monkeypatch.setattr(Completions, "sample", dies_once)
    records = run(tmp_path / "run", engine_url=urls[0], **SERVED)
    assert calls.count(16) > 4
    assert len(records) == 3 and max(gaps(records)) < SAME_WEIGHTS


def test_a_server_that_cannot_load_weights_gives_one_sentence(servers, tmp_path):
    url = servers.start(free_port(), "processed_logprobs")
    servers.wait(url)
    with pytest.raises(
        MismatchError, match=r"cannot load weights \(status 404.*VLLM_SERVER_DEV_MODE=1"
    ):
        run(tmp_path / "run", engine_url=url, **SERVED)


def test_a_server_with_other_weights_is_noticed_by_its_checksums():
    before = {"model.norm": "a", "model.embed": "b"}
    check_same_weights("one", "two", before, {"model.norm": "a"})
    with pytest.raises(
        MismatchError, match=r"two does not have the weights of one \(model.embed\)"
    ):
        check_same_weights("one", "two", before, {"model.norm": "a", "model.embed": "c"})


def test_a_servers_checksums_change_with_its_weights(urls, tmp_path, monkeypatch):
    answers: list[dict[str, str]] = []
    monkeypatch.setattr(
        server, "check_same_weights", lambda first, other, one, two: answers.extend([one, two])
    )
    run(tmp_path / "run", engine_url=",".join(urls), **SERVED)
    pairs = list(zip(answers[::2], answers[1::2], strict=True))
    assert len(pairs) >= 3 and all(one == two and one for one, two in pairs)
    assert pairs[0][0] != pairs[-1][0]


def test_an_engine_and_a_url_belong_together():
    from mismatch_cli.train.task import check_runs

    for changes in ({"engine": "server"}, {"engine": "hf", "engine_url": "http://localhost:1"}):
        with pytest.raises(UsageError, match="--engine server and --engine-url belong together"):
            check_runs([load_config("miniature", SMALL | changes)])
