"""Index documents for retrieval: paragraphs, real embeddings, pgvector; then ask the index a question.

Each batch of paragraphs is an action whose effect are its rows. Kill the task in the middle and clear it: it goes on at
the batch behind the last checkpoint, and no batch is written twice. Mark the run failed, and the generated DAG
`rag_index__compensation` removes the rows of this run, newest batch first, and no others.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from airflow.sdk import task
from support import documents, embeddings, vector_index

from airflow_saga import ActionRecord, Applied, NotApplied, Saga, SagaDAG, Unavailable, action

PATIENCE = timedelta(seconds=5)
BATCH_CHUNKS = 4


def remove_batch(record: ActionRecord) -> None:
    """Remove the rows that this very call wrote, if it wrote any."""
    try:
        vector_index.remove_batch(record.params["collection"], key=record.key)
    except vector_index.Unreachable as problem:
        raise Unavailable("the vector index", after=2) from problem


def find_batch(record: ActionRecord) -> Applied | NotApplied:
    """Ask the index what became of a batch whose answer was lost."""
    found = vector_index.find_batch(record.key)
    return Applied(found) if found else NotApplied()


# All or nothing of a batch stands under its key: so it may be called again, and removed without knowing if it is there.
@action(
    compensate=remove_batch, verify=find_batch, idempotent=True, compensate_in_doubt=True, timeout=PATIENCE
)
def index_batch(
    collection: str, first: int, chunks: list[documents.Chunk], *, key: str
) -> vector_index.Batch:
    vectors = embeddings.embed([chunk["text"] for chunk in chunks])
    try:
        return vector_index.add_batch(collection, first, chunks, vectors, key=key)
    except vector_index.Unreachable as problem:
        raise NotApplied(str(problem)) from problem


with SagaDAG(
    "rag_index",
    schedule=None,
    params={
        "folder": "handbook",
        "question": "The airline lost my suitcase. What do I have to do?",
        "pause_seconds": 1,
    },
    tags=["demo"],
) as dag:

    @task
    def read(params: dict) -> list[documents.Chunk]:
        """A task of its own: what is indexed stays the same, however often the next one is cleared."""
        return documents.read_chunks(params["folder"])

    @task.saga(retries=2)
    def index(chunks: list[documents.Chunk], saga: Saga, params: dict) -> dict[str, Any]:
        # What is missing is said before anything is written, and loading does not count as part of a call.
        embeddings.load()
        vector_index.prepare()
        begin = saga.resume_from(0)
        for first in range(begin, len(chunks), BATCH_CHUNKS):
            index_batch(saga.run_id, first, chunks[first : first + BATCH_CHUNKS])
            saga.checkpoint(first + BATCH_CHUNKS)
            time.sleep(params["pause_seconds"])  # only so that somebody has time to press a button
        return {"collection": saga.run_id, "chunks": len(chunks), "began_at": begin}

    @task
    def ask(indexed: dict[str, Any], params: dict) -> list[dict[str, Any]]:
        [vector] = embeddings.embed([params["question"]])
        return vector_index.nearest(indexed["collection"], vector, limit=3)

    ask(index(read()))
