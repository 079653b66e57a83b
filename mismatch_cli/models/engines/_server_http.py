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
_LONGEST_TOLD = 300  # characters of a server's message
_MOST_TOLD = 2**22  # bytes of an answer about the server itself
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
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not least <= value < float("inf")
            ):
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
        self._away = False
        self._last_answer = 0.0

    async def __aenter__(self) -> Server:
        key = os.environ.get(API_KEY, "").strip()
        self._session = aiohttp.ClientSession(
            headers={"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {key}"} if key else {}),
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
        return self._json(path, body) if status == 200 else None

    async def get_text(self, path: str) -> str:
        status, body = await self._request("GET", path)
        return body.decode(errors="replace") if status == 200 else ""

    async def post(self, path: str, payload: dict[str, Any], most: int) -> tuple[Any, bytes]:
        """The answer to a request that must succeed, parsed and as sent: at most `most` bytes.

        A `RequestRefused` says why the server rejects the request.
        """
        status, body = await self._request(
            "POST", path, orjson.dumps(payload), min(most, MOST_BYTES)
        )
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
        self, method: str, path: str, body: bytes | None = None, most: int = _MOST_TOLD
    ) -> tuple[int, bytes]:
        async with self._slots:
            delay, failing_since = _FIRST_DELAY, None
            until = time.monotonic() + self._within
            while True:
                why, retry_after = "", 0.0
                try:
                    status, content, retry_after = await self._once(method, path, body, most, until)
                    if status not in _TRANSIENT:
                        self._last_answer = time.monotonic()
                        if self._away:
                            self._away = False
                            self._say(f"{self._address.url} answers again")
                        return status, content
                    why = f"status {status}: {_message(content)}"
                except aiohttp.ClientSSLError as error:
                    raise MismatchError(
                        f"{self._address.url} has no valid certificate ({first_line(error)}). "
                        "Check --engine-url."
                    ) from error
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    why = self._reason(error)
                now = time.monotonic()
                failing_since = failing_since or now
                left = min(failing_since + self._address.patience, until) - now
                if left <= 0:
                    raise _gone(
                        self._address.url,
                        self._within if now >= until else self._address.patience,
                        why,
                    )
                if now - failing_since >= min(_SAID_AFTER, self._address.patience / 2):
                    self._is_away(why, failing_since)
                await asyncio.sleep(min(max(delay * random.uniform(0.5, 1), retry_after), left))
                delay = min(2 * delay, _LONGEST_DELAY)

    async def _once(
        self, method: str, path: str, body: bytes | None, most: int, until: float
    ) -> tuple[int, bytes, float]:
        headers = {"Content-Type": "application/json"} if body else {}
        url = self._address.url + path
        seconds = max(0.001, min(self._address.timeout, until - time.monotonic()))
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_TIMEOUT)
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, allow_redirects=False, timeout=timeout
            ) as response:
                asked = response.headers.get("Retry-After", "")
                retry_after = min(float(asked), _LONGEST_RETRY_AFTER) if asked.isdecimal() else 0.0
                return response.status, await self._body(path, response, most), retry_after
        except _DrippingError:
            raise
        except TimeoutError as error:
            raise TimeoutError(f"nothing within {seconds:.3g} s") from error

    async def _body(self, path: str, response: aiohttp.ClientResponse, most: int) -> bytes:
        """Read the answer piece by piece: never more than `most` bytes, and not forever."""
        packed = response.headers.get("Content-Encoding", "identity")
        if packed.lower() != "identity":
            raise MismatchError(
                f"{self._address.url}{path} answered in the encoding {_told(packed)}, which was "
                "not requested. Check that --engine-url names a vLLM server, not a proxy that "
                "rewrites answers."
            )
        found = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in response.content.iter_any():
                    found += piece
                    if len(found) > most:
                        raise MismatchError(
                            f"{self._address.url}{path} answered with more than "
                            f"{most / 2**20:.3g} MiB, more than was requested. Check "
                            "--engine-url; very long responses need a lower top_logprobs."
                        )
        except TimeoutError as error:
            raise _DrippingError(
                f"an answer that began had not ended {BODY_SECONDS:g} s later"
            ) from error
        return bytes(found)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
            return str(error)
        number = getattr(error, "errno", None) or 0
        if number > 0:
            return os.strerror(number)  # not the text of the event loop
        return _told(first_line(error))

    def _is_away(self, why: str, since: float) -> None:
        if not self._away and self._last_answer < since:
            self._away = True
            self._say(
                f"{self._address.url} does not answer ({why}): trying for "
                f"{self._address.patience:g} s"
            )


class _DrippingError(TimeoutError):
    """An answer that has begun and does not end."""


class RequestRefused(MismatchError):
    """The server understood the request and rejects it; a retry would not help."""

    def __init__(self, url: str, path: str, status: int, told: str) -> None:
        self.status, self.told = status, told
        if status in (401, 403):
            super().__init__(
                f"{url} wants an API key (status {status}). Put it into the environment variable "
                f"{API_KEY}."
            )
        else:
            super().__init__(
                f"{url}{path} rejected a request (status {status}): {told.rstrip('.')}."
            )


def _gone(url: str, seconds: float, why: str) -> MismatchError:
    return MismatchError(
        f"{url} has not answered for {seconds:g} s ({why}). Start the server (again), check "
        "--engine-url, or wait longer with --engine-arg patience=SECONDS or timeout=SECONDS; "
        "then continue with --resume."
    )


def _message(body: bytes) -> str:
    """The message of an error answer: vLLM's and OpenAI's `error.message`, FastAPI's `detail`,
    or its first line.
    """
    try:
        content = orjson.loads(body)
    except ValueError:
        content = body.decode(errors="replace")
    if isinstance(content, dict):
        error = content.get("error", content)
        content = (
            (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
        )
    return _told(str(content or "no reason given"))


def _told(text: str) -> str:
    lines = text[: 10 * _LONGEST_TOLD].splitlines()
    line = next((line.strip() for line in lines if line.strip()), "no reason given")
    return line if len(line) <= _LONGEST_TOLD else line[:_LONGEST_TOLD] + "…"
