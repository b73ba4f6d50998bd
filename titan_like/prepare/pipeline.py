"""The preparation as a whole: its stages as datatrove pipelines, run by one of datatrove's executors.

Everything happens in the hidden folder `.{name}.work` beside the output; a stage is a number of tasks that can be done
on any machine that sees the folder, and what is done is not done again after a kill. The last task renames the
finished folder.
"""

import fcntl
import io
import json
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupFilter, MinhashDedupSignature
from loguru import logger
from pydantic import JsonValue

from titan_like.config.errors import ConfigError, TitanError
from titan_like.data.manifest import Manifest, file_sha256
from titan_like.data.tokenizer import Tokenizer
from titan_like.prepare import report
from titan_like.prepare.config import STDLIB, PrepareConfig
from titan_like.prepare.dedup import DropExact, FindExact, KeepFirst, WriteDigests, minhash_config
from titan_like.prepare.filters import WORDS, filter_steps
from titan_like.prepare.read import Reader, Unit, plan_tasks
from titan_like.prepare.report import Ledger
from titan_like.prepare.shards import Vocabulary, write_shard
from titan_like.prepare.storage import find_files
from titan_like.prepare.texts import TRAIN, VALIDATION, ChooseSide, ReadTexts, WriteTexts, iter_texts
from titan_like.prepare.vocabulary import train_tokenizer

Say = Callable[[str], None]
TOKENIZER = "tokenizer.model"
REPORT = "report.json"
LEDGERS = ("read and clean", "deduplicate and split")
VERSION = 1  # of the work folder; tick if a stage changes its files


@dataclass(frozen=True)
class Stage:
    """A pipeline that `tasks` ranks run."""

    name: str
    tasks: int
    steps: Sequence[Any]


def prepare(config: PrepareConfig, say: Say = print) -> None:
    """Make config.output.folder: shards with manifests, the tokenizer, report.json.

    Nothing is done when it is there, whole and made with these settings. A killed run leaves no folder under that name,
    and goes on where it was when it is started again. With Slurm the jobs are submitted and go on alone.

    Raises:
        ConfigError: input without text, bad input, settings that cannot work, or an output that is something else.
    """
    output = Path(config.output.folder)
    try:
        work = output.absolute().parent / f".{output.name}.work"
        with _only_one(work):
            if is_ready(output, config):
                say(f"{output} is there and valid; nothing to do (remove it to prepare it again)")
                return
            tasks = _begin(work, config, say)
            run_stages(stages(work, output.absolute(), config, tasks), work, config, say)
            if config.executor.kind == "slurm":
                say(f"submitted to Slurm; {output} appears when the last job is done, logs are in {work}/logs")
                return
            for line in _summary(output):
                say(line)
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"preparing {output} failed: {error}; nothing was written") from error
    say(f"wrote {output}")


def stages(work: Path, output: Path, config: PrepareConfig, tasks: list[list[Unit]]) -> list[Stage]:
    """All stages in their order; a stage reads what earlier ones have written under `work`."""
    count = len(tasks)
    digests, minhash = work / "digests", work / "minhash"
    cleaning, splitting = Ledger(work / "ledgers" / LEDGERS[0]), Ledger(work / "ledgers" / LEDGERS[1])
    reader = Reader(tasks, config.input, config.clean, cleaning)
    found = [
        Stage(
            "clean",
            count,
            [
                reader,
                *filter_steps(config, cleaning),
                WriteTexts(work / "clean"),
                cleaning.leave,
                WriteDigests(digests),
            ],
        )
    ]
    clean: list[Any] = [ReadTexts(work / "clean")]
    kept: list[Any] = [*clean, splitting.enter]
    if config.dedup.exact:
        found.append(Stage("exact", 1, [FindExact(digests, count)]))
        clean.append(DropExact(digests))
        kept.append(DropExact(digests, splitting))
    if config.dedup.near:
        found += _near_stages(minhash, config, count, clean)
        kept.append(MinhashDedupFilter(str(minhash / "remove"), exclusion_writer=splitting.excluding("near-duplicate")))
    sides = WriteTexts(work / "sides", (TRAIN, VALIDATION))
    found.append(Stage("split", count, [*kept, ChooseSide(config.output.validation_fraction), sides, splitting.leave]))
    finish = Finish(work, output, config, count)
    found.append(Stage("tokenizer", 1, [finish.tokenizer]))
    found.append(Stage("tokenise", count, [finish.tokenise]))
    found.append(Stage("publish", 1, [finish.publish]))
    return found


def _near_stages(folder: Path, config: PrepareConfig, tasks: int, clean: Sequence[Any]) -> list[Stage]:
    settings = minhash_config(config.dedup)
    signatures, pairs = str(folder / "signatures"), folder / "pairs"
    return [
        Stage("signatures", tasks, [*clean, MinhashDedupSignature(signatures, config=settings, language=WORDS)]),
        Stage("pairs", config.dedup.buckets, [MinhashDedupBuckets(signatures, str(pairs), config=settings)]),
        Stage("groups", 1, [KeepFirst(pairs, folder / "remove")]),
    ]


class Finish:
    """The stages after the split: tokenizer, shards, publication."""

    def __init__(self, work: Path, output: Path, config: PrepareConfig, tasks: int) -> None:
        self.work, self.output, self.config, self.tasks = work, output, config, tasks
        self.made = work / "made"

    def tokenizer(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Copy the given tokenizer or train one on the training side."""
        counts = self._counts(TRAIN)
        self._check_sides()
        self.made.mkdir(parents=True, exist_ok=True)
        if path := self.config.tokenizer.path:
            for file in Tokenizer(path).files:
                shutil.copyfile(file, self.made / Path(file).name)
            return
        texts = (text for _, text in iter_texts(self.work / "sides" / TRAIN, counts, 0, sum(counts)))
        model = train_tokenizer(texts, self.config.tokenizer.vocab_size)
        (self.made / f"{TOKENIZER}.tmp").write_bytes(model)
        os.replace(self.made / f"{TOKENIZER}.tmp", self.made / TOKENIZER)

    def tokenise(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write every world_size-th shard of both sides, from number `rank` on."""
        vocabulary = Vocabulary(self.made / (Path(self.config.tokenizer.path).name or TOKENIZER), self.config)
        source = ", ".join(map(describe_source, self.config.input.paths))
        for side, shard, shards in self.shards()[rank::world_size]:
            counts = self._counts(side)
            total = sum(counts)
            prefix = self.made / (side if shards == 1 else f"{side}_{shard:05d}")
            known = Manifest.load(prefix)
            if known and not known.problems(prefix):
                continue  # by an earlier run that was killed
            texts = iter_texts(
                self.work / "sides" / side, counts, shard * total // shards, (shard + 1) * total // shards
            )
            settings: dict[str, JsonValue] = {"prepare": self.config.identity()}
            write_shard(prefix, texts, vocabulary, source, settings, (shard, shards), _threads(self.config, world_size))

    def publish(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the report and give the finished folder its name."""
        total = {name: report.add_up(self.work / "ledgers" / name) for name in LEDGERS}
        report.write_atomically(self.made / REPORT, json.dumps(total, indent=2, ensure_ascii=False) + "\n")
        with suppress(OSError):  # an empty folder is free
            self.output.rmdir()
        os.rename(self.made, self.output)

    def shards(self) -> list[tuple[str, int, int]]:
        """(side, shard, shards) of all shards; a shard holds documents within one of equally many."""
        found = []
        for side in (TRAIN, VALIDATION):
            ledgers = self._ledgers()
            documents = sum(self._counts(side))
            size = sum(ledger["sides"].get(side, {}).get("bytes", 0) for ledger in ledgers)
            asked = self.config.output.shards if side == TRAIN else 1
            shards = min(asked or -(-size // self.config.output.shard_bytes), documents)
            found += [(side, shard, shards) for shard in range(shards)]
        return found

    def _ledgers(self) -> list[dict[str, Any]]:
        return [report.load(self.work / "ledgers" / LEDGERS[1], task) for task in range(self.tasks)]

    def _counts(self, side: str) -> list[int]:
        return [ledger["sides"].get(side, {}).get("documents", 0) for ledger in self._ledgers()]

    def _check_sides(self) -> None:
        train, validation = sum(self._counts(TRAIN)), sum(self._counts(VALIDATION))
        fraction = self.config.output.validation_fraction
        if train and (validation or not fraction):
            return
        totals = {name: report.add_up(self.work / "ledgers" / name) for name in LEDGERS}
        lines = " ".join(line.strip() for name, total in totals.items() for line in report.as_lines(name, total))
        if not train + validation:
            remedy = "give other files or looser settings"
            if set(totals[LEDGERS[0]]["dropped"]) == {"no text"}:
                remedy = f"set input.text_key to the field that holds the text (it is {self.config.input.text_key!r})"
            raise ConfigError(f"no document is left of the input; {remedy}. {lines}")
        raise ConfigError(
            f"of {train + validation} documents {train} fell to training and {validation} to validation, but each "
            f"needs one; give more files or change output.validation_fraction ({fraction}; 0 makes no validation "
            f"shard). {lines}"
        )


def describe_source(source: str) -> str:
    """What a source is, for the manifest."""
    return f"standard library of Python {sys.version.split()[0]}" if source == STDLIB else source


class LocalExecutor(LocalPipelineExecutor):
    """datatrove's local executor without its log on the terminal (it is in the work folder).

    Its own `run` waits for ever for a worker that the system has killed, and leaves a process behind when it is killed.
    """

    def run(self) -> None:
        ranks = self.get_incomplete_ranks()
        if self.workers == 1:
            for rank in ranks:
                deepcopy(self)._run_for_rank(rank)
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imported once, not by every worker
        with ProcessPoolExecutor(min(self.workers, len(ranks) or 1), context, _end_with_parent) as pool:
            try:
                for _ in pool.map(self._run_for_rank, ranks):
                    pass
            except BrokenProcessPool as error:
                raise TitanError(
                    "a worker process was killed, likely for its memory; lower executor.workers and run again"
                ) from error
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in multiprocessing.active_children():
                    child.terminate()
                raise

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> Any:
        # A task of a killed run may still be in its last second: never two at a time.
        with open(self.logging_dir.resolve_paths(f"{rank:05d}.lock"), "w") as lock, redirect_stderr(_NOWHERE):
            fcntl.lockf(lock, fcntl.LOCK_EX)
            return super()._run_for_rank(rank, local_rank, node_rank)


def _end_with_parent() -> None:
    """A worker process ends when the one that started it is gone."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


_NOWHERE = _Nowhere()


def run_stages(found: Sequence[Stage], work: Path, config: PrepareConfig, say: Say) -> None:
    """Run them one after the other; with Slurm, submit them as a chain of jobs."""
    executor: PipelineExecutor | None = None
    for i, stage in enumerate(found):
        start = time.monotonic()
        logs = work / "logs" / f"{i}-{stage.name}"
        logs.mkdir(parents=True, exist_ok=True)
        executor = make_executor(stage, str(logs), config, executor)
        if config.executor.kind == "slurm":
            executor.run()
            continue
        logger.remove()
        with _progress(f"[{i + 1}/{len(found)}] {stage.name}", logs, stage.tasks, work, say):
            executor.run()
        if missing := executor.get_incomplete_ranks():  # Ray only logs failed tasks
            raise TitanError(f"stage {stage.name}: {len(missing)} of {stage.tasks} tasks failed; see {logs}, run again")
        say(f"[{i + 1}/{len(found)}] {stage.name}: {stage.tasks} task(s), {time.monotonic() - start:.1f} s")


def make_executor(stage: Stage, logs: str, config: PrepareConfig, before: PipelineExecutor | None) -> PipelineExecutor:
    """datatrove's executor of the configured kind for one stage."""
    settings = config.executor
    if settings.kind == "local":
        workers = min(stage.tasks, settings.workers or os.cpu_count() or 1)
        return LocalExecutor(list(stage.steps), tasks=stage.tasks, workers=workers, logging_dir=logs)
    common: dict[str, Any] = {
        "pipeline": list(stage.steps),
        "tasks": stage.tasks,
        "workers": settings.workers or -1,
        "logging_dir": logs,
        "cpus_per_task": settings.cpus_per_task,
        "mem_per_cpu_gb": settings.memory_gb_per_cpu,
    }
    if settings.kind == "ray":
        from datatrove.executor.ray import RayPipelineExecutor

        return RayPipelineExecutor(**common)
    from datatrove.executor.slurm import SlurmPipelineExecutor

    return SlurmPipelineExecutor(
        **common,
        time=settings.slurm_time,
        partition=settings.slurm_partition,
        job_name=f"prepare-{stage.name}",
        qos="",
        sbatch_args=dict(settings.slurm_options),
        depends=before,
    )


def _threads(config: PrepareConfig, tasks: int) -> int:
    """Threads of the tokenizer in one of `tasks` tasks."""
    if config.executor.kind != "local":
        return config.executor.cpus_per_task
    cores = os.cpu_count() or 1
    return max(1, cores // min(tasks, config.executor.workers or cores))


def _begin(work: Path, config: PrepareConfig, say: Say) -> list[list[Unit]]:
    """The plan of the work: the one that was begun if the settings and the input are the same, else a new one."""
    files = find_files(config.input.paths, config.input.text_suffixes)
    tasks = plan_tasks(files, config.input, config.executor.task_bytes)
    units = [[[unit.path, unit.start, unit.stop] for unit in task] for task in tasks]
    state = {"version": VERSION, "settings": config.identity(), "tasks": units, "files": _fingerprint(files)}
    state_file = work / "state.json"
    text = json.dumps(state)
    if state_file.exists() and state_file.read_text() == text:
        say(f"going on with the work in {work}")
        return tasks
    for path in (path for path in work.iterdir() if path.name != "lock"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    report.write_atomically(state_file, text)
    say(f"preparing {', '.join(map(describe_source, config.input.paths))}: {len(files):,} files, {len(tasks)} task(s)")
    return tasks


def _fingerprint(files: Sequence[str]) -> list[list[Any]]:
    """Size and time of change of local files: other files need other work."""
    local = (os.stat(path) for path in files if "://" not in path)
    return [[stat.st_size, stat.st_mtime_ns] for stat in local]


@contextmanager
def _only_one(work: Path) -> Iterator[None]:
    """Wait until no other process works in this folder."""
    path = work / "lock"
    while True:
        work.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # not flock: processes that are started here must not keep it
            if not path.exists() or not os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                continue  # the other one has finished and removed the folder
            try:
                yield
            finally:
                if work.exists() and [entry.name for entry in work.iterdir()] == ["lock"]:
                    shutil.rmtree(work)  # nothing was begun
            return


@contextmanager
def _progress(label: str, logs: Path, tasks: int, work: Path, say: Say) -> Iterator[None]:
    """Say now and then how far a stage is: on a terminal in place, elsewhere as a line every 30 s."""
    done = threading.Event()
    on_terminal = sys.stderr.isatty()

    def watch() -> None:
        while not done.wait(1 if on_terminal else 30):
            finished = len(list((logs / "completions").glob("*")))
            beats = [json.loads(path.read_text()) for path in (work / "ledgers").glob("*/*.progress")]
            size = sum(beat["bytes_in"] for beat in beats) / 1e6
            line = f"{label}: {finished} of {tasks} tasks done, {size:,.0f} MB read"
            if on_terminal:
                print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
            else:
                say(line)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if on_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _summary(output: Path) -> Iterator[str]:
    total = json.loads((output / REPORT).read_text(encoding="utf-8"))
    for name, counts in total.items():
        yield from report.as_lines(name, counts)
    for path in sorted(output.glob("*.manifest.json")):
        prefix = str(path).removesuffix(".manifest.json")
        manifest = Manifest.load(prefix)
        assert manifest is not None
        yield (
            f"{Path(prefix).name}: {manifest.documents:,} documents, {manifest.tokens:,} tokens, "
            f"unigram entropy {manifest.unigram_entropy_nats:.3f} nats"
        )


def is_ready(output: Path, config: PrepareConfig) -> bool:
    """True if the output is whole and made with these settings, False if there is none.

    Raises:
        ConfigError: something else is there.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    remedy = "remove it or choose another output.folder"
    prefixes = [str(path).removesuffix(".manifest.json") for path in sorted(output.glob("*.manifest.json"))]
    manifests = [(prefix, manifest) for prefix in prefixes if (manifest := Manifest.load(prefix))]
    problems: list[str] = []
    for prefix, manifest in manifests:
        asked = config.identity()
        if (made := manifest.settings.get("prepare")) != asked:
            raise ConfigError(f"{output} was prepared with {_difference(made, asked)}; {remedy}")
        problems += manifest.problems(prefix)
        path = manifest.tokenizer_path(prefix)
        if not path.is_file() or file_sha256(path) != manifest.tokenizer_sha256:
            problems.append(f"{path} is missing or not the tokenizer of {prefix}")
    present = {(Path(prefix).name.split("_")[0], manifest.shard) for prefix, manifest in manifests}
    wanted = {(Path(prefix).name.split("_")[0], i) for prefix, manifest in manifests for i in range(manifest.shards)}
    wanted |= {(TRAIN, 0)} | ({(VALIDATION, 0)} if config.output.validation_fraction else set())
    if missing := sorted(wanted - present):
        raise ConfigError(f"{output} is there but is no whole preparation ({missing[0][0]} is missing); {remedy}")
    if problems:
        raise ConfigError(*(f"{problem} ({remedy})" for problem in problems))
    return True


def _difference(made: Any, asked: dict[str, Any]) -> str:
    """The settings that differ, as "a.b = 1 (asked for: 2)"."""
    if not isinstance(made, dict):
        return "other settings"
    lines = [
        f"{section}.{key} = {made.get(section, {}).get(key)!r} (asked for: {value!r})"
        for section, table in asked.items()
        for key, value in table.items()
        if made.get(section, {}).get(key) != value
    ]
    return ", ".join(lines) or "other settings"
