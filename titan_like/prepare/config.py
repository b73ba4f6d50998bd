"""The settings of a preparation: TOML and command line to one frozen, checked model, without torch and datatrove.

Types are strict, unknown keys and refused values are reported together. Relative paths are relative to the current
directory.
"""

import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import tomli
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from titan_like.config.errors import ConfigError

STDLIB = "stdlib"
DEFAULT_VOCAB_SIZE = 4096
REMOTE = ("gs://", "az://", "https://ACCOUNT.blob.core.windows.net/")  # what blobfile opens


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_list_to_tuple)]
Filter = Literal["gopher_quality", "gopher_repetition", "fineweb_quality"]
Filters = Annotated[tuple[Filter, ...], BeforeValidator(_list_to_tuple)]


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Input(Section):
    """What is read."""

    paths: Texts = Field(
        (STDLIB,),
        min_length=1,
        description="files and folders, local, gs://, az:// or https://ACCOUNT.blob.core.windows.net/; "
        "'stdlib': the source of the running Python's library",
    )
    format: Literal["auto", "jsonl", "parquet", "text"] = Field("auto", description="auto: by the ending of each file")
    text_key: Text = Field("text", description="field (JSONL) or column (Parquet) of the text")
    text_unit: Literal["file", "line"] = Field("file", description="what is a document in text files")
    text_suffixes: Texts = Field((".txt", ".md", ".py"), description="endings of text files in folders")
    bad_input: Literal["error", "skip", "replace"] = Field(
        "error",
        description="invalid UTF-8, lone surrogates, lines that are not JSON, damaged files: stop with file and line, "
        "or skip and count; replace: put U+FFFD for what is no UTF-8, skip the rest",
    )
    empty: Literal["skip", "error"] = Field("skip", description="documents without text, null, missing: skip, count")


class Clean(Section):
    """What is repaired and filtered. BOM, NUL and carriage returns always go."""

    repair: bool = Field(False, description="ftfy's repair of wrongly decoded text")
    filters: Filters = Field((), description="datatrove's quality filters, made for web pages in English")
    min_characters: Natural = Field(0, description="shorter documents are dropped")
    max_characters: Natural = Field(0, description="longer documents are dropped; 0: no limit")


class Dedup(Section):
    """Which copies are dropped; the first one stays."""

    exact: bool = Field(True, description="drop documents equal to an earlier one")
    near: bool = Field(False, description="drop documents similar to an earlier one (MinHash); needs exact")
    ngram: Positive = Field(5, description="words per shingle; texts with fewer are only compared exactly")
    buckets: Positive = Field(14, description="LSH bands; one equal band makes a pair")
    hashes_per_bucket: Positive = Field(
        8, description="rows per band; pairs above (1/buckets)^(1/rows) are likely found"
    )


class Decontaminate(Section):
    """Evaluation texts that must not be trained on."""

    paths: Texts = Field((), description="files and folders of evaluation texts, read like the input")
    ngram: Positive = Field(13, description="a document that shares so many consecutive words with one is dropped")


class Tokenizer(Section):
    """How text becomes ids."""

    path: str = Field("", description="SentencePiece .model, tokenizer.json or .tiktoken; empty: train one on the text")
    vocab_size: Positive = Field(DEFAULT_VOCAB_SIZE, description="pieces of a trained tokenizer")
    eod: int | str = Field("auto", description="id or token after each document; auto: the tokenizer's EOS")
    bos: int | str = Field(
        "auto", description="id or token before each document if output.bos; auto: the tokenizer's own"
    )
    pad: int | str = Field(
        "auto", description="id or token of padding, recorded only; auto: the tokenizer's own, or none"
    )


class Output(Section):
    """What is written."""

    folder: Text = Field("data/stdlib", description="folder to make; it appears when all is done")
    validation_fraction: float = Field(0.02, ge=0, lt=1, description="share of the documents for validation")
    shards: Natural = Field(0, description="number of training shards; 0: by shard_bytes")
    shard_bytes: Positive = Field(4 << 30, description="text per training shard, about 4 bytes per token")
    append_eod: bool = Field(True, description="end each document with EOD")
    bos: bool = Field(False, description="begin each document with BOS")
    dtype: Literal["auto", "uint16", "int32"] = Field("auto", description="auto: uint16 below 65,500 ids, else int32")


class Executor(Section):
    """Where the stages run: datatrove's executors."""

    kind: Literal["local", "slurm", "ray"] = Field("local", description="ray and slurm need a shared file system")
    workers: Natural = Field(0, description="tasks at a time; 0: one per core (local), no limit (slurm, ray)")
    task_bytes: Positive = Field(64 << 20, description="input per task; it does not change the result")
    cpus_per_task: Positive = Field(1, description="cores of a task (slurm, ray)")
    memory_gb_per_cpu: Positive = Field(4, description="memory per core (slurm, ray)")
    slurm_partition: str = Field("", description="partition to submit to")
    slurm_time: Text = Field("24:00:00", description="time limit of each task")
    slurm_options: dict[str, str] = Field({}, description="more options of sbatch")


class PrepareConfig(Section):
    """All sections."""

    input: Input = Input()
    clean: Clean = Clean()
    dedup: Dedup = Dedup()
    decontaminate: Decontaminate = Decontaminate()
    tokenizer: Tokenizer = Tokenizer()
    output: Output = Output()
    executor: Executor = Executor()

    def identity(self) -> dict[str, Any]:
        """What the result depends on: all but where it is put and who computes it."""
        settings = self.model_dump(mode="json", exclude={"executor"})
        del settings["output"]["folder"]
        return settings


SECTIONS: dict[str, type[Section]] = {name: info.annotation for name, info in PrepareConfig.model_fields.items()}  # type: ignore[misc]
KEYS = [f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields]


def load_prepare_config(arguments: Sequence[str]) -> PrepareConfig:
    """The config of `--config FILE --section.key VALUE ...`; the command line wins.

    Raises:
        ConfigError: all problems together.
    """
    problems: list[str] = []
    tree: dict[str, dict[str, Any]] = {}
    overrides = list(_pairs(arguments, problems))
    for name, text in overrides:
        if name == "config":
            _read_toml(text, tree, problems)
    for name, text in overrides:
        section, _, key = name.partition(".")
        if name in KEYS:
            tree.setdefault(section, {})[key] = _parse(text, SECTIONS[section].model_fields[key].annotation)
        elif name != "config":
            problems.append(f"unknown key {name} on the command line{_nearest(name)}")
    try:
        config = PrepareConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(*problems, *(_sentence(entry) for entry in error.errors())) from None
    if problems := problems + list(_conflicts(config)):
        raise ConfigError(*problems)
    return config


def help_text() -> str:
    """Every key with its default and its documentation."""
    lines = ['--config FILE.toml, then --section.key VALUE to override it. Lists: a,b or \'["a", "b"]\'.']
    for name, model in SECTIONS.items():
        lines.append(f"\n[{name}] {model.__doc__}")
        for key, info in model.model_fields.items():
            lines.append(f"  --{name}.{key} (default: {info.default!r})\n      {info.description}")
    return "\n".join(lines)


def _pairs(arguments: Sequence[str], problems: list[str]) -> Iterator[tuple[str, str]]:
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        name, equals, text = token.removeprefix("--").partition("=")
        if not token.startswith("--"):
            problems.append(f"unexpected argument {token!r}; settings look like --section.key VALUE")
        elif equals or rest:
            yield name, text if equals else rest.pop(0)
        else:
            problems.append(f"--{name} needs a value on the command line")


def _read_toml(path: str, tree: dict[str, dict[str, Any]], problems: list[str]) -> None:
    try:
        tables = tomli.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        problems.append(f"config file {path} cannot be read ({error.strerror}; current directory {os.getcwd()})")
    except ValueError as error:
        problems.append(f"config file {path} is not valid TOML: {error}")
    else:
        for section, table in tables.items():
            if not isinstance(table, dict) or section not in SECTIONS:
                problems.append(f"unknown section {section} in {path}; known are {', '.join(SECTIONS)}")
            for key, value in table.items() if isinstance(table, dict) and section in SECTIONS else ():
                if f"{section}.{key}" in KEYS:
                    tree.setdefault(section, {})[key] = value
                else:
                    problems.append(f"unknown key {section}.{key} in {path}{_nearest(f'{section}.{key}')}")


def _parse(text: str, annotation: Any) -> Any:
    """What `text` stands for: TOML where it is TOML of another type than text, else itself; a,b is a list."""
    if annotation is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        value = tomli.loads(f"value = {text}")["value"]
    except (ValueError, KeyError):
        value = text
    if get_origin(annotation) is tuple and isinstance(value, str):
        return tuple(part.strip() for part in text.split(","))
    return text if annotation is str and not isinstance(value, str) else value


def _sentence(entry: Any) -> str:
    key = ".".join(str(part) for part in entry["loc"][:2])
    return f"{key} is {entry['input']!r}, which is not allowed: {entry['msg']}"


def _nearest(name: str) -> str:
    by_key = [known for known in KEYS if get_close_matches(name.rpartition(".")[2], [known.rpartition(".")[2]])]
    near = get_close_matches(name, KEYS, 1) or by_key
    return f"; did you mean {near[0]}?" if near else "; titan-prepare run --help lists all keys"


def source_problem(name: str, source: str) -> str | None:
    """What stands against reading files and folders there."""
    scheme, separator, rest = source.partition("://")
    azure = scheme == "https" and rest.partition("/")[0].endswith(".blob.core.windows.net")
    if not separator or scheme in ("gs", "az") or azure:
        return None
    return f"{name} has {source}, which cannot be read; give local files and folders or {', '.join(REMOTE)}"


def local_problem(name: str, path: str, what: str) -> str | None:
    """What stands against a path that must be local."""
    return f"{name} must be a local {what}, not {path}; copy to or from there yourself" if "://" in path else None


def _places(config: PrepareConfig) -> Iterator[str]:
    """Paths that nothing here can read or write."""
    for name, sources in (("input.paths", config.input.paths), ("decontaminate.paths", config.decontaminate.paths)):
        yield from filter(None, (source_problem(name, source) for source in sources))
    yield from filter(None, [
        local_problem("output.folder", config.output.folder, "folder"),
        local_problem("tokenizer.path", config.tokenizer.path, "file"),
    ])  # fmt: skip


def _conflicts(config: PrepareConfig) -> Iterator[str]:
    """Settings that would be ignored or cannot be met, alone or together."""
    yield from _places(config)
    if config.tokenizer.path and "vocab_size" in config.tokenizer.model_fields_set:
        yield f"tokenizer.vocab_size is for training one, but tokenizer.path is {config.tokenizer.path}; remove one"
    if config.dedup.near and not config.dedup.exact:
        yield "dedup.near needs dedup.exact: short texts are only compared exactly; set dedup.exact = true"
    if 0 < config.clean.max_characters < config.clean.min_characters:
        yield f"clean.max_characters ({config.clean.max_characters}) is below clean.min_characters; raise or remove it"
    given = config.executor.model_fields_set
    for key in ("slurm_partition", "slurm_time", "slurm_options"):
        if key in given and config.executor.kind != "slurm":
            yield f"executor.{key} is for Slurm, but executor.kind is {config.executor.kind}; remove one"
    if config.executor.kind == "local" and {"cpus_per_task", "memory_gb_per_cpu"} & given:
        yield "executor.cpus_per_task and memory_gb_per_cpu are for slurm and ray, not for local; remove them"
    if config.executor.kind == "slurm" and not config.executor.slurm_partition:
        yield "executor.slurm_partition is empty; name the partition that executor.kind slurm submits to"
