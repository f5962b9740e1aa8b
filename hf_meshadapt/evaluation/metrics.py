"""Metrics of written answers, each from 0 to 1 and higher where better. Pure functions."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def rouge1(prediction: str, reference: str) -> float:
    """F1 of the words that a summary and its reference share, each as often as in the one that has it less.

    Words are runs of a-z and 0-9 in lower case, not stemmed: what `rouge_score` calls rouge1 (Lin 2004).
    """
    return _overlap(re.findall(r"[a-z0-9]+", prediction.lower()), re.findall(r"[a-z0-9]+", reference.lower()))


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """F1 of the words that an answer shares with the reference that it fits best, as SQuAD's evaluation counts them.

    Case, punctuation and articles do not count. Where either of the two has no word left, it is 1 if neither has.
    """
    return max((_overlap(_words(prediction), _words(reference), empty=1.0) for reference in references), default=0.0)


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """1 where an answer has the words of a reference in their order, as SQuAD's evaluation compares them, else 0."""
    return float(any(_words(prediction) == _words(reference) for reference in references))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _overlap(predicted: list[str], expected: list[str], empty: float = 0.0) -> float:
    """F1 of two bags of words; `empty` where neither has any."""
    if not predicted or not expected:
        return empty if predicted == expected else 0.0
    shared = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * shared / (len(predicted) + len(expected))
