"""Training of the SentencePiece tokenizer."""

import io
import os
from collections.abc import Iterable, Iterator

import sentencepiece

from titan_like.config.errors import ConfigError

BLOCK_CHARACTERS = 4000  # SentencePiece trains on "sentences" and skips long ones: documents are cut at line ends
SAMPLE_CHARACTERS = 30_000_000  # enough for a few thousand pieces; BPE training time grows with the text
INDENTS = (4, 8, 12, 16, 20)
# A line end and the indentation after it become one piece: every line of code saves a token.
INDENT_PIECES = ["\n" + "\u2581" * width for width in INDENTS]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """A BPE model as the bytes of a .model file: unk 0, BOS 1, EOS 2, all 256 bytes, then pieces.

    Nothing is normalised, so every text comes back as it was. Only the first SAMPLE_CHARACTERS are looked at.

    Raises:
        ConfigError: vocab_size is too small for the fixed pieces, or larger than the text can fill.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_blocks(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=INDENT_PIECES,
            max_sentence_length=1 << 24,
            num_threads=os.cpu_count() or 1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot train a tokenizer with vocab_size {vocab_size} on this text: {reason}") from error
    return model.getvalue()


def _blocks(texts: Iterable[str]) -> Iterator[str]:
    seen = 0
    for text in texts:
        block: list[str] = []
        size = 0
        for line in text.splitlines(keepends=True):
            if block and size + len(line) > BLOCK_CHARACTERS:
                yield "".join(block)
                block, size = [], 0
            block.append(line)
            size += len(line)
        yield "".join(block)
        seen += len(text)
        if seen >= SAMPLE_CHARACTERS:
            return
