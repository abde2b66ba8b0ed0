"""The outside world of the demo DAGs: a small travel agency reached over HTTP, and the client the DAGs call it with."""

from __future__ import annotations
