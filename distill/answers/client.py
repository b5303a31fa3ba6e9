"""A client of an OpenAI-compatible server: JSON requests that are repeated while that can help.

Threads may share one client; each request has its own connection.
"""

import contextlib
import http.client
import json
import os
import random
import socket
import threading
import urllib.parse
from typing import Any

from distill.answers.config import ServerConfig

_FIRST_DELAY_S = 0.5  # before the first repetition; doubles with each
_LONGEST_DELAY_S = 60.0
# Too early, too many, or a server that is starting, restarting or has crashed.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


class _PassingError(Exception):
    """A failure that may not happen again."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class ApiClient:
    """Talks to one server.

    Args:
        config: where it is, and how patient to be.

    Raises:
        ValueError: for a URL that is none.
    """

    def __init__(self, config: ServerConfig) -> None:
        parts = urllib.parse.urlsplit(config.url or "")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"answers.server.url={config.url} is no URL: expected http://HOST:PORT/v1"
            )
        self._parts, self._config = parts, config
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get(config.api_key_variable):
            self._headers["Authorization"] = f"Bearer {key}"
        self._stopped = threading.Event()
        self._open: set[http.client.HTTPConnection] = set()

    def get(self, path: str) -> Any:
        """The JSON answer to a GET; errors as `post`."""
        return self._repeated("GET", path, None)

    def post(self, path: str, content: dict[str, Any]) -> Any:
        """The JSON answer to a POST; safe to repeat, as completions change nothing on a server.

        Raises:
            ValueError: if the server refuses the request, or fails after all repetitions.
        """
        return self._repeated("POST", path, json.dumps(content).encode())

    def stop(self) -> None:
        """Breaks off all requests under way; they raise, and no further one is made."""
        self._stopped.set()
        for connection in list(self._open):
            if connection.sock is not None:
                with contextlib.suppress(OSError):  # the server was faster
                    # Closing it would wake nobody up who waits for an answer, for minutes.
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _repeated(self, method: str, path: str, body: bytes | None) -> Any:
        attempts = self._config.max_retries + 1
        reason = ""
        for attempt in range(attempts):
            try:
                return self._once(method, path, body)
            except _PassingError as error:
                reason = str(error)
                delay = min(_FIRST_DELAY_S * 2**attempt, _LONGEST_DELAY_S)
                # Many requests fail together; spread, they do not come back together.
                delay = max(delay * random.uniform(0.5, 1.0), error.wait_s)
            if attempt + 1 < attempts and self._stopped.wait(delay):
                raise ValueError(f"stopped before {self._config.url}{path} was repeated")
        raise ValueError(
            f"{self._config.url}{path} failed {attempts} times, the last time with: {reason}; "
            "what is answered is kept, and the same command continues"
        )

    def _once(self, method: str, path: str, body: bytes | None) -> Any:
        connection = self._connection()
        self._open.add(connection)
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, body, self._headers)
            if self._stopped.is_set():
                raise _PassingError("stopped")
            response = connection.getresponse()
            text = response.read()
            wait_s = _seconds(response.getheader("Retry-After"))
        except (OSError, http.client.HTTPException) as error:
            raise _PassingError(f"{type(error).__name__} {error}".strip()) from None
        finally:
            self._open.discard(connection)
            connection.close()
        if response.status in _PASSING:
            raise _PassingError(f"{response.status} {_message(text)}", wait_s)
        if not 200 <= response.status < 300:
            raise ValueError(
                f"{self._config.url}{path} answers {response.status}: {_message(text)}"
            )
        try:
            return json.loads(text)
        except ValueError:
            raise _PassingError(f"no JSON: {_message(text)}") from None

    def _connection(self) -> http.client.HTTPConnection:
        kind = (
            http.client.HTTPSConnection
            if self._parts.scheme == "https"
            else http.client.HTTPConnection
        )
        assert self._parts.hostname is not None
        return kind(self._parts.hostname, self._parts.port, timeout=self._config.timeout_s)


def _seconds(header: str | None) -> float:
    """Of a Retry-After header; a date in it is not waited for."""
    try:
        return min(float(header or 0), _LONGEST_DELAY_S)
    except ValueError:
        return 0.0


def _message(text: bytes) -> str:
    """What a server says about an error, in one line."""
    said = text.decode("utf-8", "replace")
    try:
        content = json.loads(said)
        error = content.get("error", content)
        said = error.get("message", said) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return " ".join(str(said).split())[:300] or "(nothing)"
