"""Scores predicted throughput against published runs: `python -m estimation.validate --what time ...`.

Nothing is fitted to the rows: what the rows' trainers did comes from the profiles that memory uses too, and Way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from pathlib import Path

from estimation.devices import DEVICES, Device
from estimation.profiles import NotCovered
from estimation.row_checks import usable
from estimation.row_table import LeftOut, Row, score_rows, total, write_lines
from estimation.rows import date_of, is_torch, job_of_row
from estimation.time.step import step_time
from estimation.time.way import Way

GPUS = {
    "H100 SXM (HBM2e 96GB": "h100-96gb-500w", "A100 80GB": "a100-80gb", "H200": "h200", "B200": "b200",
    "MI300X": "mi300x",
}  # fmt: skip
NOISE = 0.02  # two published runs that differ by less have no order: runs of one setting differ by more
# torchtitan prefers cuDNN's attention where the device is a B200, and everywhere from 2025-11 on.
CUDNN_COMMITS = ("d9bdfbb20",)
FUSED_SINCE = (2025, 3)  # torchtitan pull request 881, at the end of February


@dataclass(frozen=True)
class TimeScore:
    """Tokens per second of one device.

    Attributes:
        family: the trainer; complete: the row says all that its speed depends on.
        table: rows of one table were published together.
    """

    line: int
    family: str
    table: str
    complete: bool
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Signed, in percent of the measured value."""
        return 100 * (self.predicted / self.measured - 1)


def device_of_row(row: Row) -> Device:
    """The device of the table that a row ran on.

    Raises:
        NotCovered: no device of the table.
    """
    if "power-limited" in row["notes"]:
        raise NotCovered("its power limit is not published")
    for text, name in GPUS.items():
        if row["gpu"].startswith(text):
            return DEVICES[name]
    raise NotCovered(f"speeds of {row['gpu']} are not in the table of devices")


def way_of_row(row: Row) -> Way:
    """How a row's run computed and communicated.

    Raises:
        NotCovered: a scaling of float8 for whose products no speed is published.
    """
    float8 = row["float8"]
    if float8 and not float8.startswith("float8 tensorwise"):
        raise NotCovered(f"the speed of products in {float8.split(',')[0]} is not published")
    is_late = any(commit in row["framework_version"] for commit in CUDNN_COMMITS)
    return Way(
        async_tensor="async TP" in row["other_flags"],
        float8=bool(float8),
        float8_gather="fp8 all-gather" in float8,
        float8_again="force_recompute_fp8_weight_in_bwd" in float8 + row["other_flags"],
        attention="cudnn" if is_late or row["gpu"].startswith("B200") else "flash",
        update="foreach" if _is_foreach(row) else "fused",
    )


def _is_foreach(row: Row) -> bool:
    """torchtitan left the kernel of its optimizer to torch at first; torchtune's recipes ask for a fused one."""
    if not row["framework"].lower().startswith("torchtitan") or "fused=True" in row["other_flags"]:
        return False
    return date_of(row) < FUSED_SINCE


def score_times(path: Path) -> tuple[list[TimeScore], list[LeftOut]]:
    """Scores of all rows of PyTorch trainers with a throughput, and the other rows: (line, reason).

    A run that is listed twice, with two measures of memory, counts once.
    """
    seen: set[tuple[str, ...]] = set()

    def score(line: int, row: Row) -> list[TimeScore]:
        if not is_torch(row):
            raise NotCovered(f"no step time for {row['framework'] or 'a trainer that is not named'}")
        if not row["tokens_per_s_per_gpu"]:
            raise NotCovered("no throughput is published")
        run = tuple(value for key, value in row.items() if "mem" not in key and key not in ("other_flags", "notes"))
        if run in seen:
            raise NotCovered("the same run is in a line above")
        with usable(row):
            found = _score(line, row)
        seen.add(run)
        return [found]

    return score_rows(path, score)


def _score(line: int, row: Row) -> TimeScore:
    if not all(row[key] for key in ("seq_len", "micro_bs")):
        raise NotCovered("its batch is not published")
    # A graph that no compiler has written kernels for (SimpleFSDP's aot_eager) runs torch's own.
    job = replace(job_of_row(row), compiled=not row["compile"].startswith("no"))
    predicted = step_time(job, device_of_row(row), way_of_row(row)).tokens_per_second
    table = f"{row['source_url']} {row['dup_group']} {row['framework_version']}"
    family = row["framework"].split()[0].lower()
    return TimeScore(line, family, table, row["complete"] == "1", float(row["tokens_per_s_per_gpu"]), predicted)


def summary(scores: Sequence[TimeScore], left_out: Sequence[LeftOut]) -> str:
    """n, mean and 95th percentile of the absolute error by trainer, incomplete rows apart; the ranking;
    and what became of all rows."""
    parts = []
    for name, chosen in _families(scores).items():
        errors = sorted(abs(score.error) for score in chosen)
        high = errors[min(len(errors) - 1, int(0.95 * len(errors)))]
        parts.append(f"{name} n {len(errors)} mean {sum(errors) / len(errors):.1f} % p95 {high:.1f} %")
    right, pairs, ordered, tables = ranking(scores)
    parts.append(f"order right in {right} of {pairs} pairs, {ordered} of {tables} tables whole")
    return f"{'; '.join(parts)}; {total(len(scores), len(left_out))}"


def _families(scores: Sequence[TimeScore]) -> Mapping[str, list[TimeScore]]:
    found: dict[str, list[TimeScore]] = {}
    for score in sorted(scores, key=lambda score: (not score.complete, score.family != "torchtitan", score.family)):
        found.setdefault(score.family if score.complete else f"{score.family} (incomplete rows)", []).append(score)
    return found


def ranking(scores: Sequence[TimeScore]) -> tuple[int, int, int, int]:
    """(pairs of a table in the right order, pairs, tables all of whose pairs are, tables)."""
    right = pairs = ordered = tables = 0
    by_table = sorted(scores, key=lambda score: score.table)
    for _, members in groupby(by_table, key=lambda score: score.table):
        verdicts = [
            (a.measured > b.measured) == (a.predicted > b.predicted) and a.predicted != b.predicted
            for a, b in combinations(members, 2)
            if abs(a.measured / b.measured - 1) > NOISE
        ]
        right, pairs = right + sum(verdicts), pairs + len(verdicts)
        ordered, tables = ordered + (bool(verdicts) and all(verdicts)), tables + bool(verdicts)
    return right, pairs, ordered, tables


def write_table(path: Path, scores: Sequence[TimeScore], left_out: Sequence[LeftOut]) -> None:
    """A line for each row."""
    header = ["line", "trainer", "complete", "measured_tokens_per_s", "predicted", "error_percent"]
    cells = [
        (score.line, score.family, score.complete, score.measured, f"{score.predicted:.0f}", f"{score.error:.1f}")
        for score in scores
    ]
    write_lines(path, header, cells, left_out)
