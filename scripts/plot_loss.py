#!/usr/bin/env python3
"""Draw the loss of one or more runs from their metrics.jsonl as a PNG (matplotlib is in the `dev` extra):

python scripts/plot_loss.py outputs/debug --output loss.png --baseline 6.3
"""

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

Curve = tuple[list[float], list[float]]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        runs = {run: read(run / "metrics.jsonl") for run in args.runs}
    except (OSError, ValueError) as error:
        print(f"error: {error}; name folders of runs that have logged a step", file=sys.stderr)
        return 2
    picture = draw(runs, args.baseline)
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_bytes(picture)
    except OSError as error:
        if args.output.is_file():
            args.output.unlink()  # a part of a picture is none
        print(f"error: {args.output} could not be written ({error.strerror}); name another --output", file=sys.stderr)
        return 2
    print(f"wrote {args.output}")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draw the loss of runs over their steps.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders (job.dump_folder)")
    parser.add_argument("--output", type=Path, default=Path("loss.png"), help="the PNG to write (default loss.png)")
    parser.add_argument("--baseline", type=float, help="a loss to draw as a line, such as that of counting tokens")
    return parser.parse_args(argv)


def read(path: Path) -> dict[str, Curve]:
    """Steps and values of "loss" and of "validation_loss"; a value that is not finite leaves a gap.

    Raises:
        ValueError: no line holds a loss.
    """
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    curves = {key: curve(lines, key) for key in ("loss", "validation_loss")}
    if not curves["loss"][0]:
        raise ValueError(f"{path} holds no loss")
    return curves


def curve(lines: list[dict[str, Any]], key: str) -> Curve:
    found = [(line["step"], float("nan") if line[key] is None else line[key]) for line in lines if key in line]
    return [step for step, _ in found], [value for _, value in found]


def draw(runs: dict[Path, dict[str, Curve]], baseline: float | None) -> bytes:
    """A PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for run, curves in runs.items():
        name = f"{run.name}: " if len(runs) > 1 else ""
        (line,) = axes.plot(*curves["loss"], label=f"{name}training")
        axes.plot(*curves["validation_loss"], "o", color=line.get_color(), label=f"{name}validation")
    if baseline is not None:
        axes.axhline(baseline, color="gray", linestyle="--", label="counting tokens alone")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    pyplot.close(figure)
    return picture.getvalue()


if __name__ == "__main__":
    sys.exit(main())
