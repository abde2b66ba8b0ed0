"""Documents cut into chunks: the paragraphs of text files, always in the same order."""

from __future__ import annotations

from pathlib import Path

SUFFIXES = (".md", ".txt")

Chunk = dict[str, str]
"""``document``, the name of the file, and ``text``, one paragraph of it."""


def read_chunks(folder: str) -> list[Chunk]:
    """Read the paragraphs of all text files of a folder, file by file, by name.

    :param folder: a relative one lies beside this module, as ``handbook`` does.
    :raises FileNotFoundError: there is no such folder, or no text in it; an index of nothing helps nobody.
    """
    place = Path(__file__).parent / folder
    files = sorted(path for path in place.iterdir() if path.suffix in SUFFIXES)
    chunks = [{"document": path.name, "text": text} for path in files for text in _paragraphs(path)]
    if not chunks:
        raise FileNotFoundError(f"{place} has no text in files that end with {' or '.join(SUFFIXES)}")
    return chunks


def _paragraphs(path: Path) -> list[str]:
    blocks = path.read_text(encoding="utf-8").split("\n\n")
    return [" ".join(block.split()) for block in blocks if block.strip()]
