"""Scores the formula against published runs: `python -m estimation.validate --csv FILE --output FOLDER`.

Each row is estimated by the profile of its trainer and version; nothing is fitted. Rows that no profile covers are
listed with the reason, not dropped in silence.
"""

import argparse
import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from estimation.devices import GIB
from estimation.float8 import Float8
from estimation.formula import RankMemory, memory_of
from estimation.job import Job
from estimation.megatron import NAME as MEGATRON
from estimation.megatron_rows import covers, measured_rank, run_of
from estimation.profiles import (
    TITAN_2024_03,
    TITAN_2024_06,
    TITAN_2024_08,
    TITAN_2024_12,
    TITAN_2025_06,
    TITAN_2025_11,
    TITAN_2025_12,
    TORCHTUNE,
    TORCHTUNE_FSDP2,
    NotCovered,
    Profile,
)
from estimation.reserve import replayed
from estimation.schedules import Action, Schedule, single_stage, torch_tables
from titan_like.config.errors import ConfigError
from titan_like.config.schema import SINGLE_STAGE
from titan_like.models.flavors import ModelConfig, block_parameters

Row = Mapping[str, str]
USABLE = 0.97  # of the capacity: a run that came this far ran


@dataclass(frozen=True)
class Score:
    """One measured number and its prediction, GiB.

    Attributes:
        kind: resident, allocated or reserved.
        measured: None for a run that ended out of memory.
        fits: predicted to fit the row's device; None where its memory is unknown.
    """

    line: int
    kind: str
    profile: str
    measured: float | None
    predicted: float
    fits: bool | None

    @property
    def error(self) -> float | None:
        """Signed, in percent of the measured value."""
        return None if self.measured is None else 100 * (self.predicted / self.measured - 1)


def profile_of(row: Row) -> Profile:
    """The profile of a row's trainer at its time.

    Raises:
        NotCovered: a trainer without a profile.
    """
    framework, version = row["framework"].lower(), f"{row['framework_version']} {row['notes']}"
    if framework.startswith("torchtune"):
        return TORCHTUNE if int(row["dp_shard"] or 1) == 1 else TORCHTUNE_FSDP2
    if not framework.startswith(("torchtitan", "prime-rl")):
        raise NotCovered(f"no profile for {row['framework']}")
    year, month = _date(version)
    if (year, month) < (2024, 5):
        return TITAN_2024_03
    if (year, month) < (2024, 9):
        return TITAN_2024_06 if month < 8 else TITAN_2024_08
    if (year, month) < (2025, 11):
        return _as_launched(row, TITAN_2024_12 if (year, month) < (2025, 5) else TITAN_2025_06, (year, month))
    return _as_launched(row, TITAN_2025_11 if (year, month) < (2025, 12) else TITAN_2025_12, (year, month))


def _as_launched(row: Row, profile: Profile, date: tuple[int, int]) -> Profile:
    """What depends on the device and on the script.

    Expandable segments are there on ROCm since March 2026 (pytorch pull request 177974), and are set by run_train.sh,
    which one published table did not use (its page has the command). On Blackwell torchtitan chose cuDNN's attention
    before it did so everywhere (models/attention.py: has_cuda_capability(10, 0)).
    """
    has_none = (row["gpu"].startswith("MI") and date < (2026, 4)) or "trainy" in row["source_url"]
    is_expandable = profile.expandable and not has_none
    keeps_attention = profile.keeps_attention and not (profile is TITAN_2025_06 and "B200" in row["gpu"])
    return replace(profile, expandable=is_expandable, keeps_attention=keeps_attention)


# Commits of torchtitan that published rows name without a date.
COMMITS = {
    "83c879f18": (2024, 3), "40f8fd007": (2024, 6), "6a6f755d2": (2024, 11), "9dec370": (2024, 12),
    "5940ddeb5": (2025, 2), "069bae286": (2025, 2), "88247277c": (2025, 2), "473674acf": (2025, 2),
    "e23bb707d": (2025, 3), "9a2f578": (2025, 3), "e7c0cae": (2025, 6), "2c8b594": (2025, 8),
    "6fc499f": (2025, 8), "d9bdfbb20": (2025, 11),
}  # fmt: skip


def _date(text: str) -> tuple[int, int]:
    for commit, date in COMMITS.items():
        if commit in text:
            return date
    if found := re.search(r"(20\d\d)-(\d\d)(?:/(\d\d))?", text):
        return int(found[1]), int(found[3] or found[2])
    raise NotCovered(f"no date in the version {text.strip()!r}")


def job_of_row(row: Row) -> Job:
    """The job that a row describes.

    Raises:
        NotCovered: the row asks for what no profile describes.
    """
    flags = row["other_flags"]
    is_one_graph = "SimpleFSDP" in flags
    compiled = is_one_graph or not row["compile"].startswith("no")
    model = _model(row)
    profile = _with_flags(row, profile_of(row), compiled)
    number = {name: _whole(row, name) for name in ("micro_bs", "seq_len")}
    number |= {name: int(row[name] or 1) for name in ("dp_shard", "dp_replicate", "tp", "pp", "cp")}
    fsdp, is_fp32 = number["dp_shard"] * number["cp"], profile.weights == "fp32"
    job = Job(
        model=model, rows=number["micro_bs"], batch_rows=number["micro_bs"], seq_len=number["seq_len"],
        accumulation=int(row["grad_accum"] or 1), replicate=number["dp_replicate"], fsdp=fsdp, cp=number["cp"],
        tp=number["tp"], stages=(range(model.n_layers),), actions=((Action("F", 0, 0), Action("B", 0, 0)),),
        recompute=_recompute(row["ac"]), number=2, reduce_number=4 if is_fp32 else 2, reshard="never" not in flags,
        wrapped=is_fp32 or fsdp > 1, compiled=compiled, float8=_float8(row, model.n_layers),
        only_first_step="step 1" in row["notes"].split(";")[0], profile=profile,
    )  # fmt: skip
    return _pipelined(job, number["pp"], row["pp_schedule"]) if number["pp"] > 1 else job


def _with_flags(row: Row, profile: Profile, compiled: bool) -> Profile:
    """What a row's flags change.

    Raises:
        NotCovered: to what no profile describes.
    """
    flags, changes = row["other_flags"], dict[str, Any]()
    loss = "chunked" if "chunked" in flags + row["compile"] else "whole"
    if compiled and profile.compiles_loss and "SimpleFSDP" not in flags:
        loss = profile.compiles_loss[loss]
    changes.update(loss=loss, loss_chunks=8 if "chunked" in loss else 1)
    if "FSDP1" in flags:
        changes.update(flat=True, last_block_stays=False)
    if "LoRA" in flags:
        raise NotCovered("adapters have no profile")
    if profile.name.startswith("torchtune") and "packed" not in flags:
        raise NotCovered("batches that are not packed have no fixed length")
    if "SimpleFSDP" in flags:
        changes.update(own_streams=False)
    if "8bit" in row["optimizer"]:
        changes.update(adam="8bit")
    if "abs() in SAC" in flags and "rowwise" in row["float8"]:  # of other recipes nobody reads what is kept
        raise NotCovered("a defect of that commit, which kept absolute values of weights")
    if "RS copy-in in RS stream" in flags:  # pytorch pull request 129721, before and after
        changes.update(flat_pool="reduce")
    if "always" in flags:
        changes.update(last_block_stays=False)
    if "activation offloading" in flags and row["ac"].startswith("full"):
        changes.update(stash=5)  # torchtune/training/_activation_offloading.py: max_fwd_stash_size
    elif "offload" in flags:
        raise NotCovered("offloading of anything but the inputs of blocks has no profile")
    if "optimizer_in_bwd" in flags:
        changes.update(updates_in_backward=True)
    return replace(profile, **changes)


def _pipelined(job: Job, degree: int, schedule: str) -> Job:
    """A batch is split into as many micro-batches as ranks, torchtitan's default; weights stay gathered."""
    from titan_like.parallel.pipeline import balanced_ranges  # imports torch

    virtual = 1 if schedule in SINGLE_STAGE else 2
    model, table = job.model, float(job.model.vocab_size * job.model.dim)
    count, block = degree * virtual, float(block_parameters(model))
    cuts = balanced_ranges(model.n_layers, count, first=table, last=table, block=block)
    if virtual == 1:
        actions = tuple(single_stage(schedule, degree, rank, degree) for rank in range(degree))
    else:
        actions = torch_tables(schedule, degree, virtual, degree)
    rows = max(1, job.batch_rows // degree)
    kind: Schedule = schedule if schedule in ("GPipe", "1F1B") else "looped"  # type: ignore[assignment]
    return replace(job, rows=rows, stages=tuple(cuts), actions=actions, schedule=kind, reshard=False)


PRODUCTS = frozenset({"wq", "wk", "wv", "wo", "w1", "w2", "w3"})  # of a block; torchtitan's files filter out the head


def _float8(row: Row, layers: int) -> Float8 | None:
    """None for micro-scaled formats too, whose products are like those in bf16 for memory."""
    recipe = re.match(r"float8 (tensorwise|rowwise_with_gw_hp|rowwise)", row["float8"])
    if recipe is None:
        return None
    return Float8(recipe[1], (PRODUCTS,) * layers, gathered="fp8 all-gather" in row["float8"])  # type: ignore[arg-type]


def _model(row: Row) -> ModelConfig:
    if not row["ffn_dim"].isdigit():
        raise NotCovered("mixtures of experts have no profile")
    dim, heads = _whole(row, "dim"), _whole(row, "heads")
    return ModelConfig(
        vocab_size=_whole(row, "vocab"), dim=dim, n_layers=_whole(row, "layers"), n_heads=heads,
        n_kv_heads=_whole(row, "kv_heads"), head_dim=dim // heads, ffn_dim=int(row["ffn_dim"]),
        max_seq_len=_whole(row, "seq_len"),
        tie_embeddings="tied" in row["vocab"],
    )  # fmt: skip


def _whole(row: Row, name: str) -> int:
    """Raises: NotCovered, where the row does not begin with a number there."""
    if found := re.match(r"\d+", row[name]):
        return int(found[0])
    raise NotCovered(f"its {name} is not published" if not row[name] else f"{name} {row[name]} has no profile")


def _recompute(text: str) -> Literal["none", "full", "op"] | int:
    """As [activation_checkpoint] would say it."""
    if found := re.search(r"every (\d+)", text):
        return int(found[1])
    if text.startswith("selective op"):
        return "op"
    if text.startswith("full"):
        return "full"
    if text.startswith("none"):
        return "none"
    raise NotCovered(f"recompute {text!r} has no profile")


def score_row(line: int, row: Row) -> list[Score]:
    """All numbers of a row against their predictions.

    Raises:
        NotCovered: see job_of_row.
    """
    if covers(row):
        return _megatron(line, row)
    job = job_of_row(row)
    if not job.profile.is_linear and any(action.kind in "IW" for rank in job.actions for action in rank):
        raise NotCovered("a split backward of a loss over whole logits has no profile")
    memory = max(memory_of(job), key=lambda rank: rank.peak.allocated)
    scores = []
    if row["resident_mem_GiB"]:
        resident = memory.resident.total / GIB
        scores.append(Score(line, "resident", job.profile.name, float(row["resident_mem_GiB"]), resident, None))
    if row["peak_mem_GiB"]:
        scores.append(_peak(line, row, memory))
    return scores


def _peak(line: int, row: Row, memory: RankMemory) -> Score:
    """`fits`: the allocator gets along with 97 % of the device, giving cached memory back where it must."""
    if not re.fullmatch(r"OOM|[\d.]+", row["peak_mem_GiB"]):
        raise NotCovered(f"{row['peak_mem_GiB']} is no number of GiB")
    capacity = int(USABLE * float(row["gpu_mem_GiB"]) * GIB) if row["gpu_mem_GiB"] else None
    run = replayed(memory, expandable=memory.job.profile.expandable, capacity=capacity)
    is_allocated = row["mem_kind"].startswith(("allocated", "active"))
    predicted = memory.peak.allocated if is_allocated else run.peak_reserved
    measured = None if row["peak_mem_GiB"] == "OOM" else float(row["peak_mem_GiB"])
    kind = "allocated" if is_allocated else "reserved"
    fits = None if capacity is None else run.fits
    return Score(line, kind, memory.job.profile.name, measured, predicted / GIB, fits)


def _megatron(line: int, row: Row) -> list[Score]:
    """A row of Megatron's code, whose allocator is not replayed."""
    run, scores = run_of(row), []
    memory = measured_rank(row, run)
    if row["resident_mem_GiB"]:
        measured = float(row["resident_mem_GiB"])
        scores.append(Score(line, "resident", run.profile, measured, memory.resident / GIB, None))
    if row["peak_mem_GiB"]:
        peak = None if row["peak_mem_GiB"] == "OOM" else float(row["peak_mem_GiB"])
        if peak is not None and not row["mem_kind"].startswith("allocated"):
            raise NotCovered(f"memory as {row['mem_kind'] or 'nobody says what'} is not predicted, allocated memory is")
        predicted = memory.peak / GIB
        fits = predicted <= USABLE * float(row["gpu_mem_GiB"]) if row["gpu_mem_GiB"] else None
        scores.append(Score(line, "allocated", run.profile, peak, predicted, fits))
    return scores


# Columns of whole numbers above 0, and of measured sizes and rates; either may be empty.
WHOLE = (
    "layers", "dim", "heads", "kv_heads", "seq_len", "dp_shard", "dp_replicate", "tp", "pp", "cp", "ep", "micro_bs",
    "grad_accum",
)  # fmt: skip
MEASURED = ("gpu_mem_GiB", "peak_mem_GiB", "resident_mem_GiB", "tokens_per_s_per_gpu")
WORDS = (
    "source_url", "framework", "framework_version", "model", "ffn_dim", "vocab", "gpu", "ngpus", "sp", "pp_schedule",
    "global_bs", "ac", "compile", "precision", "float8", "optimizer", "other_flags", "mem_kind", "complete",
    "dup_group", "family", "notes",
)  # fmt: skip
NEEDED = ("framework", "complete", "layers", "dim", "heads", "kv_heads", "ffn_dim", "vocab", "seq_len")


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Line number and row; what is not there is empty.

    Raises:
        ConfigError: columns are missing that every row needs.
    """
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        table = csv.DictReader(file, restval="")
        if missing := [name for name in NEEDED if name not in (table.fieldnames or ())]:
            raise ConfigError(f"--csv {path} lacks the columns {', '.join(missing)}; name a CSV of published runs")
        for line, row in enumerate(table, start=2):
            row.pop(None, None)  # cells beyond the header's
            yield line, {**dict.fromkeys((*WHOLE, *MEASURED, *WORDS), ""), **row}


@contextmanager
def usable(row: Row) -> Iterator[None]:
    """Around what reads a row.

    Raises:
        NotCovered: a cell is no number, or the numbers do not describe a run.
    """
    for name in WHOLE:
        if row[name] and not (row[name].isascii() and row[name].isdigit() and int(row[name])):
            raise NotCovered(f"{name} is {row[name]!r}, not a whole number above 0")
    for name in MEASURED:
        is_number = re.fullmatch(r"\d*\.?\d+", row[name]) and float(row[name])
        if row[name] and not is_number and (name, row[name]) != ("peak_mem_GiB", "OOM"):
            raise NotCovered(f"{name} is {row[name]!r}, not a number above 0")
    try:
        yield
    except (ValueError, ArithmeticError) as error:
        raise NotCovered(f"its numbers do not describe a run: {str(error).splitlines()[0]}") from error


def score_file(path: Path) -> tuple[list[Score], list[tuple[int, str]]]:
    """Scores of all complete rows with memory, and those left out: (line, reason)."""
    scores, left_out = [], []
    for line, row in read_rows(path):
        if row["complete"] != "1" or not (row["peak_mem_GiB"] or row["resident_mem_GiB"]):
            continue
        try:
            if "ANALYTICAL" in row["mem_kind"]:
                raise NotCovered("a computed, not a measured number")
            with usable(row):
                scores += score_row(line, row)
        except NotCovered as reason:
            left_out.append((line, f"{MEGATRON}: {reason}" if covers(row) else str(reason)))
    return scores, left_out


def summary(scores: Sequence[Score], left_out: Sequence[tuple[int, str]]) -> str:
    """The line that a run ends with: n, mean and 95th percentile of the absolute error in percent, fit or no fit; then
    the same of Megatron's rows, if there are any."""
    own = [score for score in scores if score.profile.startswith(MEGATRON)]
    own_left = [entry for entry in left_out if entry[1].startswith(MEGATRON)]
    first = _figures([score for score in scores if score not in own], len(left_out) - len(own_left))
    return f"{first}; {MEGATRON}: {_figures(own, len(own_left))}" if own or own_left else first


def _figures(scores: Sequence[Score], left_out: int) -> str:
    parts = []
    for kind in ("resident", "allocated", "reserved"):
        errors = sorted(abs(score.error) for score in scores if score.kind == kind and score.error is not None)
        if errors:
            high = errors[min(len(errors) - 1, int(0.95 * len(errors)))]
            parts.append(f"{kind} n {len(errors)} mean {sum(errors) / len(errors):.1f} % p95 {high:.1f} %")
        else:
            parts.append(f"{kind} n 0")
    judged = [(score.fits, score.measured is not None) for score in scores if score.fits is not None]
    right = sum(fits == ran for fits, ran in judged)
    return f"{'; '.join(parts)}; fit right {right} of {len(judged)}; left out {left_out}"


def write_table(path: Path, scores: Sequence[Score]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["line", "profile", "kind", "measured_GiB", "predicted_GiB", "error_percent", "fits"])
        for score in scores:
            error = "" if score.error is None else f"{score.error:.2f}"
            measured = "OOM" if score.measured is None else score.measured
            writer.writerow(
                [score.line, score.profile, score.kind, measured, f"{score.predicted:.3f}", error, score.fits]
            )


def write_plot(path: Path, points: Sequence[tuple[str, float, float]], unit: str) -> None:
    """Predicted against measured, (kind, measured, predicted); on the diagonal they agree."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6))
    for kind in sorted({kind for kind, _, _ in points}):
        chosen = [point[1:] for point in points if point[0] == kind]
        axes.scatter([x for x, _ in chosen], [y for _, y in chosen], s=14, label=f"{kind} ({len(chosen)})")
    if points:
        top = max(max(sizes) for _, *sizes in points) * 1.05
        axes.plot([0, top], [0, top], color="grey", linewidth=1)
        axes.legend()
    axes.set_xlabel(f"measured, {unit}")
    axes.set_ylabel(f"predicted, {unit}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser("estimation.validate", description=__doc__)
    options.add_argument("--csv", type=Path, required=True, help="published runs, one a row")
    options.add_argument("--output", type=Path, required=True, help="folder for the table and the plot")
    options.add_argument("--what", choices=("memory", "time"), default="memory", help="what is scored")
    chosen = options.parse_args(argv)
    try:
        if not chosen.csv.is_file():
            raise ConfigError(f"--csv {chosen.csv} is no file; name the CSV of published runs")
        chosen.output.mkdir(parents=True, exist_ok=True)
        (_validate_time if chosen.what == "time" else _validate_memory)(chosen.csv, chosen.output)
    except OSError as error:
        print(f"error: --output {chosen.output} cannot be written: {error}; name another folder", file=sys.stderr)
        raise SystemExit(2) from None
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _validate_memory(path: Path, output: Path) -> None:
    scores, left_out = score_file(path)
    write_table(output / "memory.csv", scores)
    points = [(_group(score), score.measured, score.predicted) for score in scores]
    _plot(output / "memory.png", points, "GiB")
    for line, reason in left_out:
        print(f"left out: line {line}: {reason}")
    print(summary(scores, left_out))


def _group(score: Score) -> str:
    """As the plot names a score."""
    return f"{score.profile}: {score.kind}" if score.profile.startswith(MEGATRON) else score.kind


def _validate_time(path: Path, output: Path) -> None:
    from estimation.time import validate as time  # which imports this module's rows

    scores, left_out = time.score_times(path)
    time.write_table(output / "time.csv", scores)
    points = [(score.family, score.measured, score.predicted) for score in scores]
    _plot(output / "time.png", points, "tokens per second and device")
    for line, reason in left_out:
        print(f"left out: line {line}: {reason}")
    print(time.summary(scores, left_out))


def _plot(path: Path, points: Sequence[tuple[str, float | None, float]], unit: str) -> None:
    if find_spec("matplotlib"):
        write_plot(path, [(kind, measured, value) for kind, measured, value in points if measured is not None], unit)
    else:
        print("no plot was drawn: it needs matplotlib (pip install matplotlib)")


if __name__ == "__main__":
    main()
