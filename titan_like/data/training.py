"""The data of a run: which shards, in which batches, and how far they have been read."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from titan_like.config import Config
from titan_like.data.dataset import TokenDataset, open_training_data
from titan_like.data.loader import Batch, BatchSource, evaluation_batches
from titan_like.data.manifest import file_sha256

logger = logging.getLogger(__name__)


class TrainingData:
    """Training batches of one rank, and validation batches where validation is asked for.

    Args:
        rank, readers: this rank's place among the data-parallel ranks, and their number.
        vocab_size: of the model; an id outside it is refused when it is read.
    """

    def __init__(
        self, config: Config, rank: int, readers: int, device: torch.device, vocab_size: int | None = None
    ) -> None:
        data, training = config.data, config.training
        self._config, self._rank, self._readers, self._device = config, rank, readers, device
        self._vocab_size = vocab_size
        self._resets = {
            "reset_attention_mask": data.reset_attention_mask,
            "reset_position_ids": data.reset_position_ids,
            "eod_mask_loss": data.eod_mask_loss,
        }
        documents, stop = any(self._resets.values()), data.on_exhausted == "stop"
        self.dataset = open_training_data(
            data.train_entries, data.train_weights, training.seq_len, data.seed, documents=documents, repeat=not stop
        )
        self.global_batch_size = training.global_batch_size
        if self.global_batch_size == -1:
            self.global_batch_size = training.local_batch_size * readers
        self.batches = BatchSource(
            self.dataset,
            local_batch_size=training.local_batch_size,
            global_batch_size=self.global_batch_size,
            dp_rank=rank,
            dp_size=readers,
            stop=stop,
            num_workers=data.num_workers,
            device=device,
            vocab_size=vocab_size,
            **self._resets,
        )
        self._validation_set: TokenDataset | None = None
        if config.validation.interval and data.validation:
            self._validation_set = TokenDataset(
                data.validation, training.seq_len, data.seed, shuffle=False, documents=documents
            )
        logger.info("training data: %s", self.dataset.summary)
        for prefix, manifest in zip(self.dataset.prefixes, self.dataset.manifests, strict=True):
            if manifest is not None:
                logger.info(
                    "data %s: %s documents, %s tokens; a model that only counts tokens would reach a loss of %.2f",
                    prefix, f"{manifest.documents:,}", f"{manifest.tokens:,}", manifest.unigram_entropy_nats,
                )  # fmt: skip

        if not config.model.tokenizer_path:
            self._check_tokenizers()

    def _check_tokenizers(self) -> None:
        """Warn of tokenizers that are not those the manifests name: training does without, generation does not."""
        found: dict[tuple[Path, str], str] = {}  # a shard per tokenizer
        for dataset in (self.dataset, self._validation_set) if self._validation_set else (self.dataset,):
            for prefix, manifest in zip(dataset.prefixes, dataset.manifests, strict=True):
                if manifest:
                    found.setdefault((manifest.tokenizer_path(prefix).absolute(), manifest.tokenizer_sha256), prefix)
        for (path, sha256), prefix in found.items():
            if not path.is_file():
                wrong = "is missing"
            elif file_sha256(path) != sha256:
                wrong = "has another sha256 than the manifest says"
            else:
                continue
            logger.warning(
                "the tokenizer %s of %s %s; training goes on, but put the right one there or set model.tokenizer_path "
                "before you generate text", path, prefix, wrong,
            )  # fmt: skip

    @property
    def validates(self) -> bool:
        return self._validation_set is not None

    def validation_batches(self) -> Iterator[Batch]:
        """This rank's part of the first validation.samples samples, the same each time."""
        assert self._validation_set is not None
        samples, size = self._config.validation.samples, self._config.training.local_batch_size
        return evaluation_batches(
            self._validation_set, samples, size, self._rank, self._readers,
            device=self._device, vocab_size=self._vocab_size, **self._resets,
        )  # fmt: skip

    def identity(self) -> dict[str, Any]:
        """All that decides which tokens a position in the data stands for."""
        return {
            "data.train": self.dataset.fingerprint,
            "data.seed": self._config.data.seed,
            "training.seq_len": self._config.training.seq_len,
        }

    def record(self) -> dict[str, Any]:
        """What a checkpoint says of the data: position, identity, shards, tokenizer, and its special ids."""
        tokenizer, manifest = self.tokenizer_path(), self.dataset.manifests[0]
        shards = zip(self.dataset.prefixes, self.dataset.manifests, strict=True)
        return {
            "data": {
                **self.batches.state_dict(),
                "step_samples": self.global_batch_size,
                "identity": self.identity(),
            },
            "shards": {
                str(prefix): each and {"bin_sha256": each.bin_sha256, "idx_sha256": each.idx_sha256}
                for prefix, each in shards
            },
            "tokenizer": tokenizer,
            "tokenizer_sha256": file_sha256(tokenizer) if tokenizer and Path(tokenizer).is_file() else None,
            # What documents begin and end with, which the tokenizer's own file need not say.
            "begins_with": manifest.bos_id if manifest and manifest.add_bos else None,
            "ends_with": manifest.eod_id if manifest and manifest.append_eod else None,
        }

    def tokenizer_path(self) -> str | None:
        if self._config.model.tokenizer_path:
            return str(Path(self._config.model.tokenizer_path).absolute())
        manifest = self.dataset.manifests[0]
        return str(manifest.tokenizer_path(self.dataset.prefixes[0]).absolute()) if manifest else None

    def log_read(self) -> None:
        """How far the data were read, set by set, and what the end of the data has left unused."""
        for name, epochs in self.dataset.epochs(self.batches.consumed).items():
            logger.info("data %s: read %.2f times", name, epochs)
        left = self.batches.samples_left
        if left is not None and left < self.global_batch_size:
            logger.info(
                "the data are exhausted (data.on_exhausted stop): %d of %d samples unused, fewer than one step's %d",
                left, self.batches.samples, self.global_batch_size,
            )  # fmt: skip
