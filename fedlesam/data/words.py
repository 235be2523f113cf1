"""Texts as numbers of words: the vocabulary is counted from training texts, so nothing of the test is in it."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

PADDING, UNKNOWN = "<padding>", "<unknown>"
"""The words of the numbers 0 and 1."""
WORD = re.compile(r"\w+(?:'\w+)?|[!?]")


def split_words(text: str) -> list[str]:
    """The words of a text in lower case; `!` and `?` are words, too.

    Args:
        text: Any text.
    """
    return WORD.findall(text.lower())


def count_words(texts: Iterable[str], words: int) -> tuple[str, ...]:
    """The vocabulary: padding, unknown, and the words that are in most texts; of equals the first by letter.

    Args:
        texts: The training texts.
        words: How many words it has at most.
    """
    counts = Counter(word for text in texts for word in set(split_words(text)))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return (PADDING, UNKNOWN, *ranked[: max(0, words - 2)])


def encode(texts: Sequence[str], vocabulary: Sequence[str], length: int) -> npt.NDArray[np.int32]:
    """Texts as rows of word numbers: the first `length` words, filled up with 0.

    A text without a word is one unknown word.

    Args:
        texts: The texts.
        vocabulary: As `count_words` makes it, e.g. `data.vocabulary`.
        length: Words of a row.
    """
    numbers = {word: number for number, word in enumerate(vocabulary)}
    rows = np.zeros((len(texts), length), np.int32)
    for row, text in zip(rows, texts, strict=True):
        found = [numbers.get(word, 1) for word in split_words(text)[:length]] or [1]
        row[: len(found)] = found
    return rows
