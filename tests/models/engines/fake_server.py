"""A server of completions from one known distribution, without a model: honest until a test makes
it lie.

`reply` replaces an honest answer, `talk` takes over the connection itself, `tamper` changes a
completion.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

VOCABULARY = 2048  # of the bundled model
COMPLETIONS = "/v1/completions"
Reply = tuple[int, dict[str, str], bytes]
_CLIPPED = -9999.0


class FakeServer:
    """Serves `model` as "tiny" on its own port; `sent` counts the bytes that `talk` has sent."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.restore()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fake.asked.append(self.path)
                try:
                    if fake.talk is not None and fake.talk(self.path, self.say):
                        self.close_connection = True
                        return
                    status, headers, content = fake.answered(self.path, self.headers, body)
                    self.send_response(status)
                    for name, value in ({"Content-Length": str(len(content))} | headers).items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:
                    # The client has hung up
                    self.close_connection = True

            do_GET = do_POST

            def say(self, content: bytes) -> None:
                self.connection.sendall(content)
                fake.sent += len(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign] # a client that leaves
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def restore(self) -> None:
        """Be honest again."""
        self.reply: Callable[[str, Mapping[str, str]], Reply | None] = lambda path, headers: None
        self.talk: Callable[[str, Callable[[bytes], None]], bool] | None = None
        self.tamper: Callable[[dict[str, Any]], Any] = lambda answer: None
        self.card: dict[str, Any] = {}
        self.sent = 0
        self.asked: list[str] = []

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answered(self, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        reply = self.reply(path, headers)
        if reply:
            return reply
        status, content = self.honest(path, body)
        if path == COMPLETIONS and status == 200:
            answer = json.loads(content)
            changed = self.tamper(answer)
            content = changed if isinstance(changed, bytes) else json.dumps(answer).encode()
        return status, {}, content

    def honest(self, path: str, body: bytes) -> tuple[int, bytes]:
        card = {"id": "tiny", "root": self.model, "max_model_len": 512} | self.card
        if path == COMPLETIONS:
            request = json.loads(body)
            if "prompt_logprobs" in request:
                return 200, json.dumps(reading(request["prompt"])).encode()
            return 200, json.dumps(completion(request)).encode()
        pages = {
            "/v1/models": json.dumps({"data": [card]}).encode(),
            "/version": b'{"version": "0.99"}',
            "/metrics": (
                b'vllm:cache_config_info{cache_dtype="auto",enable_prefix_caching="True"} 1.0\n'
            ),
        }
        return (200, pages[path]) if path in pages else (404, b"{}")


def completion(request: dict[str, Any]) -> dict[str, Any]:
    """As vLLM answers: the sampled token first, then ranks 1…K; processed log-probs, with −inf
    clipped.
    """
    logits_V = -0.05 * np.arange(VOCABULARY) / request["temperature"]
    if request["top_k"] > 0:
        logits_V[request["top_k"] :] = -np.inf
    logp_V = logits_V - np.logaddexp.reduce(logits_V)
    rng = np.random.default_rng(request["seed"])
    ids = rng.choice(VOCABULARY, request["max_tokens"], p=np.exp(logp_V)).tolist()
    value_V = np.maximum(logp_V.astype(np.float32), _CLIPPED).tolist()
    logprobs: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    for sampled in ids:
        ranks = (sampled, *range(request["logprobs"]))
        logprobs["tokens"].append(f"token_id:{sampled}")
        logprobs["token_logprobs"].append(value_V[sampled])
        logprobs["top_logprobs"].append({f"token_id:{i}": value_V[i] for i in ranks})
    # A text that JSON escapes, and that looks like a token
    text = 'a \\ and "token_id:7": of its own'
    return _answer(text=text, token_ids=ids, prompt_token_ids=request["prompt"], logprobs=logprobs)


def reading(prompt: list[int]) -> dict[str, Any]:
    """As vLLM answers a request for prompt log-probs: none for the first token, the others by
    their id.
    """
    logits_V = -0.05 * np.arange(VOCABULARY)
    logp_V = (logits_V - np.logaddexp.reduce(logits_V)).tolist()
    entries = [
        {str(i): {"logprob": logp_V[i], "rank": i + 1, "decoded_token": '"1": '}}
        for i in prompt[1:]
    ]
    read = {"prompt_token_ids": prompt, "prompt_logprobs": [None, *entries]}
    return _answer(text="x", token_ids=[0], logprobs=None, **read)


def _answer(**choice: Any) -> dict[str, Any]:
    choice |= {"index": 0, "finish_reason": "length"}
    return {"id": f"cmpl-{uuid.uuid4().hex}", "model": "tiny", "choices": [choice]}
