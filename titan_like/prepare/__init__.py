"""From raw text to token shards."""

from titan_like.prepare.corpus import ensure_default, prepare_corpus

__all__ = ["ensure_default", "prepare_corpus"]
