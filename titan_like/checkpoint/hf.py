"""Weights from and to Hugging Face folders (safetensors), piece by piece: memory stays at about one shard.

<folder>/config.json                     the shape, see models/hf_format.py
         model.safetensors               all weights, or
         model-00001-of-00002.safetensors ...   with model.safetensors.index.json
"""

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from titan_like.checkpoint.commit import CheckpointError
from titan_like.checkpoint.dcp_files import reader
from titan_like.checkpoint.storage import Folder
from titan_like.config.errors import ConfigError
from titan_like.models.decoder import Decoder
from titan_like.models.flavors import ModelConfig
from titan_like.models.hf_format import TABLES, hf_name, made_here, read_hf_config, to_hf_config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEADER = {"format": "pt"}  # transformers asks for it
MAX_SHARD_BYTES = 5_000_000_000
Ranges = list[tuple[int, int]]


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters in the model's order; a tied table once, as tok_embeddings.weight."""
    with torch.device("meta"):
        model = Decoder(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


class Weights:
    """The tensors of a Hugging Face folder under our names. Opens one file at a time.

    Attributes:
        config: the shape in the folder's config.json.
    Raises:
        ConfigError: something is missing, left over, of another shape, or damaged; all of it at once.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = read_hf_config(self.folder)
        self._file_of = self._find()
        self._open: tuple[str, Any] = ("", None)
        self._check()

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """The part of a parameter within global [start, stop) per dim, in its stored dtype, on the CPU."""
        hf = hf_name(name)
        part: Tensor = self._handle(self._file_of[hf]).get_slice(hf)[tuple(slice(*r) for r in ranges)]
        return part

    def _find(self) -> dict[str, str]:
        """Which file holds which tensor, as the files themselves say."""
        index = self.folder / INDEX
        try:
            files = sorted({*json.loads(index.read_text())["weight_map"].values()}) if index.exists() else [SINGLE]
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index} is damaged ({error!r}); copy it again") from error
        if missing := [file for file in files if not (self.folder / file).is_file()]:
            raise ConfigError(
                f"{self.folder} lacks {', '.join(missing)}; copy the whole folder again (weights must be safetensors)"
            )
        found: dict[str, str] = {}
        for file in files:
            try:
                with safe_open(self.folder / file, framework="pt") as handle:
                    found |= dict.fromkeys(handle.keys(), file)
            except SafetensorError as error:
                raise ConfigError(f"{self.folder / file} is damaged ({error}); copy it again") from error
        return found

    def _check(self) -> None:
        expected = {hf_name(name): shape for name, shape in parameter_shapes(self.config).items()}
        ignored = {TABLES["output.weight"]} if self.config.tie_embeddings else set()
        left_over = [n for n in self._file_of if n not in expected and n not in ignored and "rotary_emb" not in n]
        missing = [name for name in expected if name not in self._file_of]
        problems = [f"{self.folder} lacks the weights {_some(missing)}; copy the whole folder again"] if missing else []
        if left_over:
            problems.append(f"{self.folder} has the weights {_some(left_over)}, which config.json's model has not")
        for name, shape in expected.items():
            if name not in missing:
                found = tuple(self._handle(self._file_of[name]).get_slice(name).get_shape())
                if found != shape:
                    problems.append(f"{self.folder}: {name} has the shape {found}, but config.json says {shape}")
        if problems:
            raise ConfigError(*problems)

    def _handle(self, file: str) -> Any:
        if self._open[0] != file:
            self._open = (file, safe_open(self.folder / file, framework="pt"))
        return self._open[1]


@torch.no_grad()
def load_weights(
    weights: Weights,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    local_ranges: Callable[[Tensor], Ranges],
) -> None:
    """Fill parameters in place, plain or DTensors: each rank reads the rows and columns that it holds, converted to the
    parameter's dtype. Rows beyond the folder's vocabulary are left as they are.
    """
    for name, parameter in named_parameters:
        ranges = local_ranges(parameter)
        if name in TABLES:
            start, stop = ranges[0]
            ranges[0] = (start, max(start, min(stop, weights.config.vocab_size)))
        if all(start < stop for start, stop in ranges):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local[: ranges[0][1] - ranges[0][0]] = weights.read(name, ranges).to(local.device, local.dtype)


class ReadingPlanner(dcp.DefaultSavePlanner):
    """Lets DCP save tensors on meta named "model.<parameter>": each is read when its turn comes, as fp32.

    Rows beyond the folder's vocabulary are zero.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self._weights = weights

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        wanted = super().lookup_object(index)
        tensor = torch.zeros(wanted.shape)
        name = index.fqn.removeprefix("model.")
        load_weights(self._weights, [(name, nn.Parameter(tensor))], lambda whole: [(0, n) for n in whole.shape])
        return tensor


def tensors_to_import(config: ModelConfig) -> dict[str, Tensor]:
    """What ReadingPlanner saves: fp32 tensors on meta by the names of a checkpoint."""
    return {f"model.{name}": torch.empty(shape, device="meta") for name, shape in parameter_shapes(config).items()}


@dataclass(frozen=True)
class Export:
    """A checkpoint's weights on their way to a Hugging Face folder.

    Every rank calls `write`, which reads its share of the shards from the checkpoint (no communication, so any mesh
    will do and memory is one shard), and after that one rank calls `finish`. Until then the folder's old export stays.

    Attributes:
        config: the checkpoint's model.
        vocab_size: rows of the tables that are exported; None: all.
        max_shard_bytes: of a file; a larger tensor gets a file of its own.
    Raises:
        ConfigError: no family has this shape, or the folder holds weights that were not exported by this program.
    """

    folder: Path
    config: ModelConfig
    vocab_size: int | None = None
    dtype: torch.dtype = torch.float32
    max_shard_bytes: int = MAX_SHARD_BYTES

    def __post_init__(self) -> None:
        to_hf_config(self.config, "", {})
        if self.vocab_size is not None and not 0 < self.vocab_size <= self.config.vocab_size:
            raise ConfigError(f"vocab_size {self.vocab_size} is not within the model's {self.config.vocab_size} rows")
        if (there := self._weight_files()) and not made_here(self.folder):
            raise ConfigError(f"{there[0]} is there and was not exported by titan_like; choose another folder")

    @cached_property
    def shards(self) -> dict[str, list[str]]:
        """File -> our names of what it holds, filled in the model's order."""
        groups: list[list[str]] = [[]]
        room = self.max_shard_bytes
        for name, size in self._bytes.items():
            if groups[-1] and size > room:
                groups.append([])
                room = self.max_shard_bytes
            groups[-1].append(name)
            room -= size
        if len(groups) == 1:
            return {SINGLE: groups[0]}
        return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}

    def write(self, checkpoint: Folder, rank: int = 0, world_size: int = 1) -> None:
        """This rank's share of the files, under temporary names.

        Args:
            checkpoint: a step-N folder that all ranks can read.
        Raises:
            CheckpointError: the checkpoint could not be read or the folder not be written.
        """
        for file, names in list(self.shards.items())[rank::world_size]:
            stored = read_weights(checkpoint, self.config, names, self.dtype)
            tensors = {hf_name(name): stored[name][: self._shapes[name][0]] for name in names}
            with _writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                save_file(tensors, self.folder / f"{file}.tmp", metadata=HEADER)

    def finish(self, token_ids: Mapping[str, Any]) -> None:
        """Put the files of all ranks in the place of an old export's; write config.json and the index.

        Args:
            token_ids: bos_token_id, eos_token_id and pad_token_id, as far as they are known.
        Raises:
            CheckpointError: the folder could not be written.
        """
        settings = to_hf_config(self._exported, str(self.dtype).removeprefix("torch."), token_ids)
        with _writing(self.folder):
            for path in (*self._weight_files(), self.folder / INDEX):
                if path.name not in self.shards:
                    path.unlink(missing_ok=True)
            for file in self.shards:
                os.replace(self.folder / f"{file}.tmp", self.folder / file)
            _write_json(self.folder / "config.json", settings)
            if len(self.shards) > 1:
                weight_map = {hf_name(name): file for file, names in self.shards.items() for name in names}
                total = sum(self._bytes.values())
                _write_json(self.folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})

    @property
    def _exported(self) -> ModelConfig:
        return self.config.model_copy(update={"vocab_size": self.vocab_size or self.config.vocab_size})

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return parameter_shapes(self._exported)

    @cached_property
    def _bytes(self) -> dict[str, int]:
        return {name: torch.Size(shape).numel() * self.dtype.itemsize for name, shape in self._shapes.items()}

    def _weight_files(self) -> list[Path]:
        return [p for p in self.folder.glob("model*.safetensors") if re.fullmatch(r"model(-\d+-of-\d+)?", p.stem)]


def read_weights(
    checkpoint: Folder, config: ModelConfig, names: Iterable[str], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Whole parameters of a step-N folder, converted to `dtype`, on this process alone.

    Raises:
        CheckpointError: one is missing, of another shape, or unreadable.
    """
    shapes = parameter_shapes(config)
    tensors = {f"model.{name}": torch.empty(shapes[name], dtype=dtype) for name in names}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(tensors, storage_reader=reader(checkpoint), no_dist=True)
    except dcp.api.CheckpointException as error:  # as a text, a page of traceback
        reason = error.failures[min(error.failures)][0] if error.failures else error
        raise CheckpointError(f"{checkpoint} could not be loaded: {reason}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} could not be loaded: {error}") from error
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def export_torch(checkpoint: Folder, file: Path, config: ModelConfig, dtype: torch.dtype) -> None:
    """One torch file with a state_dict that Decoder loads strictly; memory is the whole model.

    Raises:
        CheckpointError: the checkpoint could not be read or the file not be written.
    """
    state = read_weights(checkpoint, config, parameter_shapes(config), dtype)
    if config.tie_embeddings:
        state["output.weight"] = state["tok_embeddings.weight"]
    with _writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.tmp")
        torch.save(state, partial)
        os.replace(partial, file)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        raise CheckpointError(f"{path} could not be written: {error}; free space or choose another folder") from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
