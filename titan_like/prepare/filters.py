"""What is dropped for its quality or because an evaluation knows it: datatrove's filters and two of our own."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from datatrove.pipeline.filters.fineweb_quality_filter import FineWebQualityFilter
from datatrove.pipeline.filters.gopher_quality_filter import GopherQualityFilter
from datatrove.pipeline.filters.gopher_repetition_filter import GopherRepetitionFilter
from datatrove.utils.text import simplify_text
from datatrove.utils.word_tokenizers import WordTokenizer

from titan_like.config.errors import ConfigError
from titan_like.prepare.config import PrepareConfig
from titan_like.prepare.read import Reader, plan_tasks
from titan_like.prepare.report import Ledger
from titan_like.prepare.storage import find_files

# A word, or one character of a script that is written without spaces, or one mark.
_WORD = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W\u0e00-\u0eff\u1000-\u109f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+|[^\w\s]"
)
_SENTENCE = re.compile(r"[^.!?\n]+[.!?\n]*")


class Words(WordTokenizer):
    """Words of any language by one rule; datatrove's own need spaCy and a model per language."""

    def word_tokenize(self, text: str) -> list[str]:
        return _WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        return [sentence.strip() for sentence in _SENTENCE.findall(text) if sentence.strip()]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in _SENTENCE.finditer(text)]


WORDS = Words()
_FILTERS: dict[str, Any] = {
    "gopher_quality": GopherQualityFilter,
    "gopher_repetition": GopherRepetitionFilter,
    "fineweb_quality": FineWebQualityFilter,
}


def filter_steps(config: PrepareConfig, ledger: Ledger) -> list[Any]:
    """The pipeline steps that drop documents by their text alone."""
    steps: list[Any] = []
    if config.clean.min_characters or config.clean.max_characters:
        steps.append(partial(_by_length, config.clean.min_characters, config.clean.max_characters, ledger))
    for name in config.clean.filters:
        steps.append(_FILTERS[name](language=WORDS, exclusion_writer=ledger.excluding(name)))
    if config.decontaminate.paths:
        steps.append(Decontaminate(config, ledger))
    return steps


def _by_length(low: int, high: int, ledger: Ledger, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
    for document in data:
        if len(document.text) < low:
            ledger.drop("too short", document.id, document.text)
        elif high and len(document.text) > high:
            ledger.drop("too long", document.id, document.text)
        else:
            yield document


class Decontaminate:
    """Drops documents that share `ngram` consecutive words with an evaluation text, after datatrove's simplification
    (case, punctuation, digits, accents). Evaluation texts with fewer words cannot be looked for.

    datatrove's own block needs lighteval and its tasks; this one reads files.
    """

    def __init__(self, config: PrepareConfig, ledger: Ledger) -> None:
        self.config, self.ledger, self.ngram = config, ledger, config.decontaminate.ngram

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        known = self._known()
        for document in data:
            shared = next((gram for gram in self._grams(document.text) if gram in known), None)
            if shared is None:
                yield document
            else:
                self.ledger.drop("evaluation data", document.id, f"{shared} [{known[shared]}]")

    def _known(self) -> dict[str, str]:
        """Each n-gram of the evaluation texts and where it is.

        Raises:
            ConfigError: none is long enough.
        """
        settings = self.config.input
        files = find_files(self.config.decontaminate.paths, settings.text_suffixes)
        tasks = plan_tasks(files, settings, 1 << 62)
        reader = Reader(tasks, settings, self.config.clean, Ledger(None))
        known = {gram: text.id for text in reader() for gram in self._grams(text.text)}
        if not known:
            raise ConfigError(
                f"no text of {', '.join(self.config.decontaminate.paths)} has {self.ngram} words; "
                "lower decontaminate.ngram or give other files"
            )
        return known

    def _grams(self, text: str) -> Iterator[str]:
        words: Sequence[str] = WORDS.word_tokenize(simplify_text(text))
        return (" ".join(words[i : i + self.ngram]) for i in range(len(words) - self.ngram + 1))
