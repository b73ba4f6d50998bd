"""Scores the formula against published runs: `python -m estimation.validate --csv FILE --output FOLDER`.

Each row is estimated by the profile of its trainer and version; nothing is fitted. Every row is scored or left out:
the table has the reason of each row that is left out, and the last line the number of both.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from estimation.devices import GIB
from estimation.formula import RankMemory, memory_of
from estimation.megatron import NAME as MEGATRON
from estimation.megatron_rows import covers, measured_rank, run_of
from estimation.profiles import NotCovered
from estimation.reserve import replayed
from estimation.row_checks import KINDS, check_word, usable
from estimation.row_table import LeftOut, Row, say_left_out, score_rows, total, write_lines
from estimation.rows import is_torch, job_of_row
from estimation.time import validate as times
from titan_like.config.errors import ConfigError

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
    """`fits`: the allocator gets along with 97 % of the device, giving cached memory back where it must. A peak of
    which nobody says what it is was reserved, as torchtitan prints it."""
    check_word(row, "mem_kind", KINDS)
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


def score_file(path: Path) -> tuple[list[Score], list[LeftOut]]:
    """Scores of all complete rows with memory, and the other rows: (line, reason)."""
    return score_rows(path, _checked)


def _checked(line: int, row: Row) -> list[Score]:
    if not is_torch(row) and not covers(row):
        raise NotCovered(f"no profile for {row['framework'] or 'a trainer that is not named'}")
    if row["complete"] != "1":
        raise NotCovered(f"not complete: complete is {row['complete']!r}, not 1")
    if not (row["peak_mem_GiB"] or row["resident_mem_GiB"]):
        raise NotCovered("no memory is published")
    if "ANALYTICAL" in row["mem_kind"]:
        raise NotCovered("a computed, not a measured number")
    with usable(row):
        return score_row(line, row)


def summary(scores: Sequence[Score], left_out: Sequence[LeftOut]) -> str:
    """The line that a run ends with: n, mean and 95th percentile of the absolute error in percent, fit or no fit; the
    same of Megatron's rows, if there are any; and what became of all rows."""
    own = [score for score in scores if score.profile.startswith(MEGATRON)]
    first = _figures([score for score in scores if score not in own])
    rows = total(len({score.line for score in scores}), len(left_out))
    return f"{first}; {MEGATRON}: {_figures(own)}; {rows}" if own else f"{first}; {rows}"


def _figures(scores: Sequence[Score]) -> str:
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
    return f"{'; '.join(parts)}; fit right {right} of {len(judged)}"


def write_table(path: Path, scores: Sequence[Score], left_out: Sequence[LeftOut]) -> None:
    """A line for each score and each row that is left out."""
    header = ["line", "profile", "kind", "measured_GiB", "predicted_GiB", "error_percent", "fits"]
    cells = [
        (
            score.line, score.profile, score.kind, "OOM" if score.measured is None else score.measured,
            f"{score.predicted:.3f}", "" if score.error is None else f"{score.error:.2f}", score.fits,
        )
        for score in scores
    ]  # fmt: skip
    write_lines(path, header, cells, left_out)


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
    options.add_argument("--csv", required=True, help="published runs, one a row")
    options.add_argument("--output", type=Path, required=True, help="folder for the table and the plot")
    options.add_argument("--what", choices=("memory", "time"), default="memory", help="what is scored")
    chosen = options.parse_args(argv)
    try:
        if not Path(chosen.csv).is_file():
            raise ConfigError(f"--csv {chosen.csv or repr('')} is no file; name the CSV of published runs")
        chosen.output.mkdir(parents=True, exist_ok=True)
        (_validate_time if chosen.what == "time" else _validate_memory)(Path(chosen.csv), chosen.output)
    except OSError as error:
        print(f"error: --output {chosen.output} cannot be written: {error}; name another folder", file=sys.stderr)
        raise SystemExit(2) from None
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _validate_memory(path: Path, output: Path) -> None:
    scores, left_out = score_file(path)
    write_table(output / "memory.csv", scores, left_out)
    points = [(_group(score), score.measured, score.predicted) for score in scores]
    _plot(output / "memory.png", points, "GiB")
    for sentence in say_left_out(left_out):
        print(sentence)
    print(summary(scores, left_out))


def _group(score: Score) -> str:
    """As the plot names a score."""
    return f"{score.profile}: {score.kind}" if score.profile.startswith(MEGATRON) else score.kind


def _validate_time(path: Path, output: Path) -> None:
    scores, left_out = times.score_times(path)
    times.write_table(output / "time.csv", scores, left_out)
    points = [(score.family, score.measured, score.predicted) for score in scores]
    _plot(output / "time.png", points, "tokens per second and device")
    for sentence in say_left_out(left_out):
        print(sentence)
    print(times.summary(scores, left_out))


def _plot(path: Path, points: Sequence[tuple[str, float | None, float]], unit: str) -> None:
    if find_spec("matplotlib"):
        write_plot(path, [(kind, measured, value) for kind, measured, value in points if measured is not None], unit)
    else:
        print("no plot was drawn: it needs matplotlib (pip install matplotlib)")


if __name__ == "__main__":
    main()
