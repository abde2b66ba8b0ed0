"""The seam to whoever measures: counts, timings, gauges and spans go through here and nowhere else.

Nobody listens until the layer above says so; until then a call costs less than a microsecond. Invariant: what listens
cannot hurt an action. The first exception that it raises is logged, and from then on this process tells it nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol

from airflow_saga.core.measures import Measure

log = logging.getLogger(__name__)


class Meter(Protocol):
    """Takes what is measured. Called from any thread, between an action and the next: it must not wait."""

    def count(self, name: str, tags: Mapping[str, str]) -> None:
        """One more of these."""

    def timing(self, name: str, seconds: float, tags: Mapping[str, str]) -> None:
        """It took so long."""

    def gauge(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        """It is this now."""


class Tracer(Protocol):
    """Takes spans. They carry names and ids; never parameters, results or the text of an error."""

    def span(self, name: str, attributes: Mapping[str, str | int]) -> AbstractContextManager[object]:
        """A child of the span that is current where it is entered."""

    def mark(self, key: str, value: str) -> None:
        """One more attribute of the span that is current here."""


_meter: Meter | None = None
_tracer: Tracer | None = None
_NO_SPAN: AbstractContextManager[object] = nullcontext()


def observe_with(meter: Meter | None, tracer: Tracer | None) -> None:
    """From now on this process tells these two; None: nobody."""
    global _meter, _tracer
    _meter, _tracer = meter, tracer


def is_measured() -> bool:
    """Whether anybody listens, for what would have to be found out first."""
    return _meter is not None


def count(measure: Measure, **tags: str) -> None:
    if (meter := _meter) is not None:
        _tell(meter.count, measure.name, tags)


def timing(measure: Measure, seconds: float, **tags: str) -> None:
    if (meter := _meter) is not None:
        _tell(meter.timing, measure.name, max(0.0, seconds), tags)


def gauge(measure: Measure, value: float, **tags: str) -> None:
    if (meter := _meter) is not None:
        _tell(meter.gauge, measure.name, value, tags)


def span(name: str, attributes: Callable[[], Mapping[str, str | int]]) -> AbstractContextManager[object]:
    """The time that the block takes. ``attributes`` is asked only where somebody listens."""
    if (tracer := _tracer) is None:
        return _NO_SPAN
    return _Span(tracer, name, attributes)


def mark(key: str, value: str) -> None:
    """Say more of the span that is under way here."""
    if (tracer := _tracer) is not None:
        _trace(tracer.mark, key, value)


class _Span:
    """A span of the tracer that changes nothing of the block, whatever the tracer does."""

    def __init__(self, tracer: Tracer, name: str, attributes: Callable[[], Mapping[str, str | int]]) -> None:
        self._open: Callable[[], AbstractContextManager[object]] = lambda: tracer.span(name, attributes())
        self._inner: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        inner = _trace(self._open)
        if inner is not None:
            _trace(inner.__enter__)
            self._inner = inner

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._inner is not None:
            _trace(self._inner.__exit__, kind, problem, trace)


def _tell(tell: Callable[..., None], *told: Any) -> None:
    global _meter
    try:
        tell(*told)
    except Exception:
        _meter = None
        log.exception("a metric could not be told; this process tells none any more, and goes on")


def _trace(trace: Callable[..., Any], *told: Any) -> Any:
    global _tracer
    try:
        return trace(*told)
    except Exception:
        _tracer = None
        log.exception("a span could not be told; this process tells none any more, and goes on")
        return None
