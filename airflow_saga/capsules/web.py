"""One request to a service, as capsules make it: once, with a limit, and with a proof where nothing was done.

No redirect is followed and nothing is sent twice: how often the world is asked is what the action's ``retry`` says.
Secrets of the connection go into the request alone, never into a message.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from airflow_saga.capsules.declare import connection_named
from airflow_saga.core.errors import CompensationRejected, NotApplied, SagaError, Unavailable

PROOFS = frozenset(
    {400, 401, 402, 403, 404, 405, 406, 410, 411, 412, 413, 414, 415, 421, 422, 426, 428, 429, 431}
)
"""Answers that prove that nothing was done. Not 409: with a key it can mean that the first attempt is still at it."""
GONE = frozenset({404, 410})
BUSY = frozenset({429, 503})
REFUSALS = frozenset({403, 405, 409, 412, 422, 423})
"""Answers to an undo that another try does not change."""
MOST_BYTES = 8 * 1024 * 1024
AWAY_SECONDS = 30.0
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
_NOT_HEADERS = frozenset(
    {
        "timeout",
        "verify",
        "verify_ssl",
        "cert",
        "stream",
        "proxy",
        "proxies",
        "allow_redirects",
        "max_redirects",
    }
    | {"trust_env", "check_response", "srv_lookup", "headers"}
)
"""What Airflow's HTTP hook reads from the extra of a connection for itself; all else there are headers."""


class NotSentError(SagaError):
    """A request did not leave this machine. That is a proof only where it was the first of a call."""


class AnswerError(SagaError):
    """A service gave an answer that leaves open what it did."""


class Answer(NamedTuple):
    """A service's answer, whole."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def well(self) -> bool:
        return 200 <= self.status < 300

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def retry_after_seconds(self) -> float:
        told = self.headers.get("retry-after", "")
        return float(told) if told.isdigit() else AWAY_SECONDS


class Service:
    """A service behind an Airflow HTTP connection, for one try of an action."""

    def __init__(self, conn_id: str, client: httpx.Client, ends_at: float) -> None:
        self.conn_id = conn_id
        self.client = client
        self.ends_at = ends_at

    def act(self, method: str, path: str, **request: Any) -> Answer:
        """The request that changes something: :meth:`ask`, and a proof where it was not sent.

        :raises NotApplied: it was not sent.
        """
        try:
            return self.ask(method, path, **request)
        except NotSentError as problem:
            raise NotApplied(str(problem)) from problem

    def ask(self, method: str, path: str, **request: Any) -> Answer:
        """Send one request and read its answer, both before the end of the try.

        :raises NotSentError: it was not sent.
        :raises httpx.TransportError: nobody knows what became of it.
        """
        made = self.client.build_request(method, path, timeout=self._left(), **request)
        try:
            response = self.client.send(made, stream=True)
        except _NOT_SENT as problem:
            raise NotSentError(
                f"nothing was sent to {self.conn_id!r}: {type(problem).__name__}: {problem}"
            ) from problem
        content = b""
        try:
            for part in response.iter_bytes():
                content += part
                self._left()
                if len(content) > MOST_BYTES:
                    raise AnswerError(f"the answer of {self.conn_id!r} is longer than {MOST_BYTES} bytes")
        finally:
            response.close()
        return Answer(response.status_code, response.headers, content)

    def _left(self) -> float:
        left = self.ends_at - time.monotonic()
        if left <= 0:
            raise httpx.ReadTimeout(f"{self.conn_id!r} did not answer in time")
        return left

    def own_path(self, location: str, asked: str) -> str | None:
        """The path of a ``Location``, where it leads to this very service: our secrets are for no other."""
        url = self.client.base_url.join(asked).join(location)
        base = self.client.base_url
        if (url.scheme, url.host, url.port) != (base.scheme, base.host, base.port):
            return None
        return url.raw_path.decode("ascii")


@contextmanager
def opened(conn_id: str, timeout_seconds: float, *, token_login: bool = False) -> Iterator[Service]:
    """The service of a connection: base URL, login and headers as Airflow's HTTP hook reads them.

    A password without a login is sent as a bearer token.

    :param token_login: it is sent as the user name of basic authentication instead, as payment services take it.
    :raises NotApplied: there is no such connection.
    """
    found = connection_named(conn_id)
    extra = found.extra_dejson
    headers = {name: str(value) for name, value in extra.items() if name not in _NOT_HEADERS}
    headers.update(extra.get("headers") or {})
    auth: httpx.Auth | None = None
    if found.login:
        auth = httpx.BasicAuth(found.login, found.password or "")
    elif found.password and token_login:
        auth = httpx.BasicAuth(found.password, "")
    elif found.password:
        headers["Authorization"] = f"Bearer {found.password}"
    with httpx.Client(
        base_url=base_url(found),
        auth=auth,
        headers=headers,
        follow_redirects=False,
        transport=httpx.HTTPTransport(retries=0, verify=_trust(extra.get("verify", extra.get("verify_ssl")))),
    ) as client:
        yield Service(conn_id, client, time.monotonic() + timeout_seconds)


def _trust(verify: Any) -> ssl.SSLContext | bool:
    """As Airflow's HTTP hook means it: a file of authorities, or whether certificates are looked at."""
    return ssl.create_default_context(cafile=verify) if isinstance(verify, str) else verify is not False


def base_url(connection: Any) -> str:
    host = connection.host or ""
    url = host if "://" in host else f"{connection.schema or 'http'}://{host}"
    return f"{url}:{connection.port}" if connection.port else url


def refuse_or_doubt(answer: Answer, what: str, proofs: frozenset[int] = PROOFS) -> None:
    """What an answer that is no success says of a call that was to change something.

    :raises NotApplied: it proves that nothing was done.
    :raises AnswerError: it leaves it open.
    """
    if answer.well:
        return
    if answer.status in proofs:
        raise NotApplied(f"{what} was refused with {answer.status}: {excerpt(answer)}")
    raise AnswerError(f"{what} was answered with {answer.status}: {excerpt(answer)}")


def reject_or_retry(answer: Answer, what: str, service: str) -> None:
    """What an answer that is no success says of an undo.

    :raises Unavailable: the service is busy; it costs no try.
    :raises CompensationRejected: it will never do it.
    :raises AnswerError: another try may help.
    """
    if answer.well:
        return
    if answer.status in BUSY:
        raise Unavailable(service, answer.retry_after_seconds)
    if answer.status in REFUSALS:
        raise CompensationRejected(f"{what} was refused with {answer.status}: {excerpt(answer)}")
    raise AnswerError(f"{what} was answered with {answer.status}: {excerpt(answer)}")


@contextmanager
def waiting_for(service: str) -> Iterator[None]:
    """Around an undo: a service that cannot be reached is waited for, and costs no try."""
    try:
        yield
    except (NotSentError, NotApplied) as away:
        raise Unavailable(service, AWAY_SECONDS) from away


def excerpt(answer: Answer) -> str:
    return answer.content[:200].decode("utf-8", "replace")
