"""A laboratory, a world and a scripted model for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.runtime.conftest import lab, shared_database_url, travel_world, world
from tests.support.model import ModelView, running_model

__all__ = ["lab", "shared_database_url", "travel_world", "world"]


@pytest.fixture(scope="session")
def model_url() -> Iterator[str]:
    with running_model() as url:
        yield url


@pytest.fixture
def model(model_url: str) -> ModelView:
    return ModelView(model_url, f"m-{uuid.uuid4().hex[:8]}")
