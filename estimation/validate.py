"""Scores the formula against published runs: `python -m estimation.validate --csv FILE --output FOLDER`.

Each row is estimated by the profile of its trainer and version; nothing is fitted. Rows that no profile covers are
listed with the reason, not dropped in silence.
"""

import argparse
import csv
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from estimation.devices import GIB
from estimation.formula import RankMemory, memory_of
from estimation.job import Job
from estimation.profiles import (
    TITAN_2024_03,
    TITAN_2024_06,
    TITAN_2024_08,
    TITAN_2024_12,
    TITAN_2025_06,
    TORCHTUNE,
    Profile,
)
from estimation.reserve import replayed
from estimation.schedules import Action
from titan_like.models.flavors import ModelConfig

Row = Mapping[str, str]
USABLE = 0.97  # of the capacity: a run that came this far ran


class NotCovered(Exception):
    """No profile describes what a row's run did; the message says what."""


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
        return TORCHTUNE
    if not framework.startswith(("torchtitan", "prime-rl")):
        raise NotCovered(f"no profile for {row['framework']}")
    year, month = _date(version)
    if (year, month) < (2024, 5):
        return TITAN_2024_03
    if (year, month) < (2024, 9):
        return TITAN_2024_06 if month < 8 else TITAN_2024_08
    return TITAN_2024_12 if (year, month) < (2025, 5) else TITAN_2025_06


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
    profile = profile_of(row)
    model = _model(row)
    number = {name: int(row[name] or 1) for name in ("dp_shard", "dp_replicate", "tp", "pp", "cp", "micro_bs")}
    if number["pp"] > 1:
        raise NotCovered("pipeline rows of this family have no profile")
    compiled = not row["compile"].startswith("no")
    loss = "chunked" if "chunked" in row["other_flags"] + row["compile"] else "whole"
    if compiled and profile.name >= "torchtitan 2025-06" and profile is not TORCHTUNE:
        loss = "compiled"
    if "8bit" in row["optimizer"]:
        profile = replace(profile, adam="8bit")
    if "SimpleFSDP" in row["other_flags"] or "FSDP1" in row["other_flags"]:
        raise NotCovered("another implementation of FSDP has no profile")
    if "abs() in SAC" in row["other_flags"]:
        raise NotCovered("a defect of that commit, which kept absolute values of weights")
    if "offload" in row["other_flags"] or "optimizer_in_bwd" in row["other_flags"]:
        raise NotCovered("offloading and updates in the backward have no profile")
    profile = replace(profile, loss=loss, loss_chunks=8 if loss == "chunked" else 1)  # type: ignore[arg-type]
    is_wrapped = profile is not TORCHTUNE and profile.weights == "fp32"
    reshard = "never" not in row["other_flags"]
    if "always" in row["other_flags"]:
        profile = replace(profile, last_block_stays=False)
    fsdp = number["dp_shard"] * number["cp"]
    return Job(
        model=model, rows=number["micro_bs"], batch_rows=number["micro_bs"], seq_len=int(row["seq_len"]),
        accumulation=int(row["grad_accum"] or 1), replicate=number["dp_replicate"], fsdp=fsdp, cp=number["cp"],
        tp=number["tp"], stages=(range(model.n_layers),), actions=((Action("F", 0, 0), Action("B", 0, 0)),),
        recompute=_recompute(row["ac"]), number=2, reduce_number=4, reshard=reshard, wrapped=is_wrapped,
        compiled=compiled, only_first_step="step 1" in row["notes"].split(";")[0], profile=profile,
    )  # fmt: skip


def _model(row: Row) -> ModelConfig:
    if not row["ffn_dim"].isdigit():
        raise NotCovered("mixtures of experts have no profile")
    vocab = re.match(r"\d+", row["vocab"])
    dim, heads = int(row["dim"]), int(row["heads"])
    assert vocab is not None
    return ModelConfig(
        vocab_size=int(vocab[0]), dim=dim, n_layers=int(row["layers"]), n_heads=heads, n_kv_heads=int(row["kv_heads"]),
        head_dim=dim // heads, ffn_dim=int(row["ffn_dim"]), max_seq_len=int(row["seq_len"]),
        tie_embeddings="tied" in row["vocab"],
    )  # fmt: skip


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
    job = job_of_row(row)
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
    capacity = int(USABLE * float(row["gpu_mem_GiB"]) * GIB) if row["gpu_mem_GiB"] else None
    run = replayed(memory, expandable=memory.job.profile.expandable, capacity=capacity)
    is_allocated = row["mem_kind"].startswith(("allocated", "active"))
    predicted = memory.peak.allocated if is_allocated else run.peak_reserved
    measured = None if row["peak_mem_GiB"] == "OOM" else float(row["peak_mem_GiB"])
    kind = "allocated" if is_allocated else "reserved"
    fits = None if capacity is None else run.fits
    return Score(line, kind, memory.job.profile.name, measured, predicted / GIB, fits)


def score_file(path: Path) -> tuple[list[Score], list[tuple[int, str]]]:
    """Scores of all complete rows with memory, and those left out: (line, reason)."""
    scores, left_out = [], []
    with path.open(newline="") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            if row["complete"] != "1" or not (row["peak_mem_GiB"] or row["resident_mem_GiB"]):
                continue
            try:
                if "ANALYTICAL" in row["mem_kind"]:
                    raise NotCovered("a computed, not a measured number")
                scores += score_row(line, row)
            except NotCovered as reason:
                left_out.append((line, str(reason)))
    return scores, left_out


def summary(scores: Sequence[Score], left_out: Sequence[tuple[int, str]]) -> str:
    """The line that a run ends with: n, mean and 95th percentile of the absolute error in percent, fit or no fit."""
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
    return f"{'; '.join(parts)}; fit right {right} of {len(judged)}; left out {len(left_out)}"


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
    if not chosen.csv.is_file():
        print(f"error: --csv {chosen.csv} is no file; name the CSV of published runs", file=sys.stderr)
        raise SystemExit(2)
    chosen.output.mkdir(parents=True, exist_ok=True)
    if chosen.what == "time":
        _validate_time(chosen.csv, chosen.output)
        return
    scores, left_out = score_file(chosen.csv)
    write_table(chosen.output / "memory.csv", scores)
    _plot(chosen.output / "memory.png", [(score.kind, score.measured, score.predicted) for score in scores], "GiB")
    for line, reason in left_out:
        print(f"left out: line {line}: {reason}")
    print(summary(scores, left_out))


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
