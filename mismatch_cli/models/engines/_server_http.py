"""Requests to a server that may be busy, restarting or gone: one session, one retry policy, one
message per failure.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from mismatch_cli.base.errors import MismatchError, UsageError, first_line

API_KEY = "VLLM_API_KEY"  # the variable that vLLM's own server reads its key from
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
_FIRST_DELAY, _LONGEST_DELAY, _LONGEST_RETRY_AFTER = 0.5, 15.0, 60.0
_SAID_AFTER = 2.0  # seconds of failures before the user hears of them
_CONNECT_TIMEOUT = 10.0
_NO_REASON = "no reason given"
_LONGEST_MESSAGE = 300  # characters of a server's message
_MOST_BYTES_OF_FACTS = 2**22  # of an answer about the server itself
MOST_BYTES = 2**26  # of any answer
BODY_SECONDS = 60.0  # answers are sent in one go: one that has begun must end


@dataclass(frozen=True)
class Address:
    """Where the server is, how many requests it gets at once, and how long it may be slow or
    away (seconds).
    """

    url: str
    concurrency: int = 32
    timeout: float = 600.0
    patience: float = 300.0

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("timeout", 0.001), ("patience", 0)):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not least <= value < float("inf"):
                raise UsageError(
                    f"--engine-arg {name}={value} is invalid. Use a number of at least {least}."
                )


def base_url(url: str) -> str:
    """The root of the server, without the usual `/v1`; a `UsageError` for anything but a plain
    URL.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(
            f"--engine-url {url} is not a server's URL. Example: --engine-url http://localhost:8000"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(
            "--engine-url is saved in the manifest, so it must not contain a user name, password "
            f"or query. Put an API key into the environment variable {API_KEY}."
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Server:
    """A session with the server; at most `concurrency` requests run at once.

    The policy: a lost connection, a timeout, and statuses that mean "not now" are retried after a
    delay that doubles from half a second to fifteen, with jitter, or that the server asks for. A
    request fails for good after failing for `patience` seconds, or after `within` seconds with all
    its attempts, by default `timeout` + `patience`. Any other status is the request's fault and is
    not retried.
    """

    def __init__(
        self, address: Address, say: Callable[[str], None], within: float | None = None
    ) -> None:
        self._address = address
        self._say = say
        self._within = address.timeout + address.patience if within is None else within
        self._slots = asyncio.Semaphore(int(address.concurrency))
        self._away = False  # whether the user has heard that it does not answer
        self._last_answer = 0.0  # to any request, on the monotonic clock

    async def __aenter__(self) -> Server:
        headers = {"Accept-Encoding": "identity"}
        key = os.environ.get(API_KEY, "").strip()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),  # `_slots` is the limit
            auto_decompress=False,  # a few bytes could expand to any number
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> Any:
        """JSON from the server; None if it does not report this."""
        status, body = await self._request("GET", path)
        if status == 401:
            raise RequestRefused(self._address.url, path, status, _message(body))
        if status != 200:
            return None
        return self._json(path, body)

    async def get_text(self, path: str) -> str:
        """Text from the server; empty if it does not report this."""
        status, body = await self._request("GET", path)
        return body.decode(errors="replace") if status == 200 else ""

    async def post(self, path: str, payload: dict[str, Any], most: int) -> tuple[Any, bytes]:
        """The answer to a request that must succeed, parsed and as sent: at most `most` bytes.

        A `RequestRefused` says why the server rejects the request.
        """
        most = min(most, MOST_BYTES)
        status, body = await self._request("POST", path, orjson.dumps(payload), most)
        if status != 200:
            raise RequestRefused(self._address.url, path, status, _message(body))
        return self._json(path, body), body

    def _json(self, path: str, body: bytes) -> Any:
        try:
            return orjson.loads(body)
        except ValueError as error:
            raise MismatchError(
                f"{self._address.url}{path} did not answer in JSON. "
                "Check that --engine-url names an OpenAI-compatible server."
            ) from error

    async def _request(
        self, method: str, path: str, body: bytes | None = None, most: int = _MOST_BYTES_OF_FACTS
    ) -> tuple[int, bytes]:
        """Status and body of an answer other than "not now", from whichever attempt gets one."""
        patience = self._address.patience
        async with self._slots:
            delay = _FIRST_DELAY
            failing_since = None
            deadline = time.monotonic() + self._within
            while True:
                retry_after = 0.0
                try:
                    status, content, retry_after = await self._attempt(
                        method, path, body, most, deadline
                    )
                    if status not in _TRANSIENT:
                        self._note_answer()
                        return status, content
                    reason = f"status {status}: {_message(content)}"
                except aiohttp.ClientSSLError as error:
                    raise MismatchError(
                        f"{self._address.url} has no valid certificate ({first_line(error)}). "
                        "Check --engine-url."
                    ) from error
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    reason = _reason(error)
                now = time.monotonic()
                failing_since = failing_since or now
                left = min(failing_since + patience, deadline) - now
                if left <= 0:
                    limit = self._within if now >= deadline else patience
                    raise _gone(self._address.url, limit, reason)
                if now - failing_since >= min(_SAID_AFTER, patience / 2):
                    self._note_absence(reason, failing_since)
                # Jitter, so that requests which failed together do not all come back together.
                pause = max(delay * random.uniform(0.5, 1), retry_after)
                await asyncio.sleep(min(pause, left))
                delay = min(2 * delay, _LONGEST_DELAY)

    async def _attempt(
        self, method: str, path: str, body: bytes | None, most: int, deadline: float
    ) -> tuple[int, bytes, float]:
        """Status and body of one answer, and the delay that the server asks for, in seconds."""
        headers = {"Content-Type": "application/json"} if body else {}
        url = self._address.url + path
        seconds = max(0.001, min(self._address.timeout, deadline - time.monotonic()))
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_TIMEOUT)
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, allow_redirects=False, timeout=timeout
            ) as response:
                header = response.headers.get("Retry-After", "")
                retry_after = float(header) if header.isdecimal() else 0.0
                content = await self._read_body(path, response, most)
                return response.status, content, min(retry_after, _LONGEST_RETRY_AFTER)
        except _DrippingError:
            raise
        except TimeoutError as error:
            raise TimeoutError(f"nothing within {seconds:.3g} s") from error

    async def _read_body(self, path: str, response: aiohttp.ClientResponse, most: int) -> bytes:
        """Read the answer chunk by chunk: never more than `most` bytes, and not forever."""
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise MismatchError(
                f"{self._address.url}{path} answered in the encoding {_shorten(encoding)}, which "
                "was not requested. Check that --engine-url names a vLLM server, not a proxy that "
                "rewrites answers."
            )
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > most:
                        raise MismatchError(
                            f"{self._address.url}{path} answered with more than "
                            f"{most / 2**20:.3g} MiB, more than was requested. Check "
                            "--engine-url; very long responses need a lower top_logprobs."
                        )
        except TimeoutError as error:
            raise _DrippingError(
                f"an answer that began had not ended {BODY_SECONDS:g} s later"
            ) from error
        return bytes(body)

    def _note_answer(self) -> None:
        self._last_answer = time.monotonic()
        if self._away:
            self._away = False
            self._say(f"{self._address.url} answers again")

    def _note_absence(self, reason: str, since: float) -> None:
        """Say once that nothing has been answered since then, to this or any other request."""
        if not self._away and self._last_answer < since:
            self._away = True
            self._say(
                f"{self._address.url} does not answer ({reason}): trying for "
                f"{self._address.patience:g} s"
            )


class _DrippingError(TimeoutError):
    """An answer that has begun and does not end."""


class RequestRefused(MismatchError):
    """The server understood the request and rejects it; a retry would not help."""

    def __init__(self, url: str, path: str, status: int, reason: str) -> None:
        self.status = status
        self.reason = reason
        if status in (401, 403):
            super().__init__(
                f"{url} wants an API key (status {status}). Put it into the environment variable "
                f"{API_KEY}."
            )
        else:
            super().__init__(
                f"{url}{path} rejected a request (status {status}): {reason.rstrip('.')}."
            )


def lookup(answer: Any, *keys: str) -> Any:
    """An entry of nested JSON objects; None where there is none, or something else."""
    for key in keys:
        if not isinstance(answer, dict):
            return None
        answer = answer.get(key)
    return answer


def _gone(url: str, seconds: float, reason: str) -> MismatchError:
    return MismatchError(
        f"{url} has not answered for {seconds:g} s ({reason}). Start the server (again), check "
        "--engine-url, or wait longer with --engine-arg patience=SECONDS or timeout=SECONDS; "
        "then continue with --resume."
    )


def _reason(error: Exception) -> str:
    """Why a request had no answer."""
    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
        return str(error)
    number = getattr(error, "errno", None) or 0
    if number > 0:
        return os.strerror(number)  # not the text of the event loop
    return _shorten(first_line(error))


def _message(body: bytes) -> str:
    """The message of an error answer: vLLM's and OpenAI's `error.message`, FastAPI's `detail`,
    or its first line.
    """
    try:
        content = orjson.loads(body)
    except ValueError:
        content = body.decode(errors="replace")
    if isinstance(content, dict):
        content = content.get("error", content)
    if isinstance(content, dict):
        content = content.get("message") or content.get("detail")
    return _shorten(str(content or _NO_REASON))


def _shorten(text: str) -> str:
    """The first line of a server's text that is not empty, without blanks around it."""
    lines = text[: 10 * _LONGEST_MESSAGE].lstrip().splitlines() or [_NO_REASON]
    line = lines[0].strip()
    if len(line) > _LONGEST_MESSAGE:
        return line[:_LONGEST_MESSAGE] + "…"
    return line
