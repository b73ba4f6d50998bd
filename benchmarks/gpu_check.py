"""What `scripts/gpu_check.sh` runs: correctness, speed and memory of one GPU, against what the estimator says.

Each case is a training run in a process of its own, through the Trainer, on random tokens. The most telling ones come
first; those that the time limit leaves no room for are listed as not run. `--dry` runs the same program on the CPU with
a model of toy size, to see that it runs: its numbers mean nothing.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from estimation.calibrate import matrix_rate
from estimation.options import number
from titan_like.config import Config, load_config
from titan_like.data.indexed import IndexedWriter
from titan_like.device import peak_flops
from titan_like.launch import check_folder
from titan_like.observe.appended import replace_text

ROOT = Path(__file__).parents[1]
OUTPUT = Path("benchmarks/results/gpu_check.json")
DRY_OUTPUT = Path("outputs/gpu_check_dry.json")  # apart: it must not replace a real result
LIMIT_SECONDS = 520.0  # of the whole check
CASE_SECONDS = 150.0
WARM_UP, STEPS = 4, 8  # the first steps compile, create the optimizer's state, and fill the allocator
LOSS_TOLERANCE = 1e-4  # relative, fp32 against the CPU over 10 steps: other kernels add in another order
GIB = 2**30

COMPILE = "--compile.enable=true"
SELECTIVE, FULL = ("--activation_checkpoint.mode=selective",), ("--activation_checkpoint.mode=full",)
TENSORWISE = ("--float8.enable=true", "--float8.recipe=tensorwise")
ROWWISE = ("--float8.enable=true", "--float8.recipe=rowwise")
PACKED = ("--data.reset_attention_mask=true", "--data.reset_position_ids=true")
WHOLE_LOGITS = ("--training.loss_chunks=1",)
# name -> settings; every case has 16,384 tokens a step
CASES: dict[str, tuple[str, ...]] = {
    "1B compiled": ("--model.flavor=1B", COMPILE),
    "1B eager": ("--model.flavor=1B",),
    "1B compiled, float8 tensorwise": ("--model.flavor=1B", COMPILE, *TENSORWISE),
    "3B compiled": ("--model.flavor=3B", COMPILE),
    "3B compiled, float8 tensorwise": ("--model.flavor=3B", COMPILE, *TENSORWISE),
    "1B compiled, packed documents": ("--model.flavor=1B", COMPILE, *PACKED),
    "1B compiled, whole logits": ("--model.flavor=1B", COMPILE, *WHOLE_LOGITS),
    "3B compiled, float8 rowwise": ("--model.flavor=3B", COMPILE, *ROWWISE),
    "1B compiled, full recompute": ("--model.flavor=1B", COMPILE, *FULL),
    "1B eager, full recompute": ("--model.flavor=1B", *FULL),
    "1B eager, selective recompute": ("--model.flavor=1B", *SELECTIVE),
    "3B eager, selective recompute": ("--model.flavor=3B", *SELECTIVE),
    "1B eager, 2 micro-batches": ("--model.flavor=1B", "--training.local_batch_size=1"),
    "1B eager, whole logits": ("--model.flavor=1B", *WHOLE_LOGITS),
    "1B compiled, float8 rowwise": ("--model.flavor=1B", COMPILE, *ROWWISE),
}
SIZES = ("--training.seq_len=8192", "--training.local_batch_size=2", "--training.global_batch_size=2")
DRY_SIZES = (
    "--model.flavor=debug", "--training.seq_len=64", "--training.mixed_precision_param=float32",
    "--comm.backend=gloo",
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    folder: Path
    dry: bool

    def settings(self, name: str, steps: int, more: Sequence[str] = ()) -> list[str]:
        """The command line of a case."""
        dry: list[str] = []
        if self.dry:
            dry = [*DRY_SIZES, "--float8.emulate=true", "--float8.filter_fqns=[]"]
            dry = dry if "float8" in name else dry[:-2]
        return [
            f"--job.dump_folder={self.folder}/{name.replace(' ', '_')}", f"--data.train={self.folder}/train",
            "--data.validation=[]", "--checkpoint.enable=false", "--metrics.enable_tensorboard=false",
            f"--training.steps={steps}", f"--metrics.log_freq={STEPS}", "--estimation.preflight=off", *SIZES,
            *CASES.get(name, ()), *dry, *more,
        ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    if options.case is not None:
        print("result " + json.dumps(measure(load_config(json.loads(options.case)))))
        return
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        check = Check(Path(name), options.dry)
        write_tokens(check.folder / "train", documents=1_000 if options.dry else 20_000)
        found = {
            "environment": environment(),
            "dry": options.dry,
            "matrix_tflops": round(matrix_tflops(options.dry), 1),
        }
        found["correctness"] = correctness(check)
        found["cases"] = {}
        for case in options.chosen:
            left = options.limit - (time.monotonic() - started)
            result = (
                run(check.settings(case, WARM_UP + STEPS), min(CASE_SECONDS, left)) if left > 20 else "not run: no time"
            )
            found["cases"][case] = result
            print(f"{case}: {result}", flush=True)
    found["seconds"] = round(time.monotonic() - started)
    print(*table(found), sep="\n", flush=True)
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        replace_text(options.output, json.dumps(found, indent=2) + "\n")
    except OSError as error:
        print(f"error: {options.output} could not be written ({error.strerror})", file=sys.stderr)
        sys.exit(2)
    print(f"written to {options.output}")
    if not found["correctness"]["ok"]:
        sys.exit(1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on the CPU, at toy size")
    parser.add_argument("--output", type=Path, help=f"where the JSON goes (default {OUTPUT}; --dry: {DRY_OUTPUT})")
    parser.add_argument("--limit", type=number(0, 10**6), default=LIMIT_SECONDS, help="seconds (default %(default)s)")
    parser.add_argument("--only", default="", help="only cases with this in their name")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # what a child process runs
    options = parser.parse_args(argv)
    if options.case is not None:
        return options
    options.output = options.output or (DRY_OUTPUT if options.dry else OUTPUT)
    options.chosen = [name for name in CASES if options.only in name]
    if not options.chosen:
        parser.error(f"--only {options.only!r} is in the name of no case; there are: {'; '.join(CASES)}")
    if options.output.exists() and not options.output.is_file():
        parser.error(f"--output {options.output} is no file; name one")
    if problems := check_folder("--output", str(options.output.parent)):
        parser.error(problems[0])
    if not options.dry and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --dry runs the check on the CPU")
    return options


def environment() -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": gpu.name if gpu else platform.processor() or platform.machine(),
        "memory_gib": round(gpu.total_memory / GIB, 1) if gpu else None,
        "cuda": torch.version.cuda,
    }


def matrix_tflops(dry: bool) -> float:
    """The best rate of a large bf16 product in this run, 1e12 FLOP/s: the ceiling of all other numbers."""
    if dry:
        return matrix_rate(torch.device("cpu"), torch.float32, 512) / 1e12
    return matrix_rate(torch.device("cuda"), torch.bfloat16) / 1e12


def write_tokens(prefix: Path, documents: int, mean: int = 400) -> None:
    """Random tokens in documents of `mean` tokens on average; the toy model has a vocabulary of 4,096."""
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for length in rng.exponential(mean, documents).astype(int) + 2:
            writer.add_document(rng.integers(0, 4096, length))


def correctness(check: Check) -> dict[str, Any]:
    """The losses of ten fp32 steps of the debug model on this device and on the CPU."""
    more = ["--model.flavor=debug", "--training.seq_len=256", "--training.mixed_precision_param=float32"]
    losses = {}
    for device, backend in (("cpu", "gloo"), ("here", "gloo" if check.dry else "auto")):
        folder = check.folder / f"correctness-{device}"
        extra = [f"--job.dump_folder={folder}", f"--comm.backend={backend}", "--metrics.log_freq=1"]
        result = run(check.settings("correctness", 10, [*more, *extra]), CASE_SECONDS)
        if isinstance(result, str):
            return {"ok": False, "problem": result}
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        losses[device] = [json.loads(line)["loss"] for line in lines]
    worst = max(abs(a - b) / b for a, b in zip(losses["here"], losses["cpu"], strict=True))
    return {"ok": worst <= LOSS_TOLERANCE, "worst_relative_difference": worst, **losses}


def run(settings: list[str], seconds: float) -> dict[str, Any] | str:
    """The numbers of one run in a process of its own, or why there are none."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--case", json.dumps(settings)]
    try:
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"failed: longer than {seconds:.0f} s"
    results = [line for line in process.stdout.splitlines() if line.startswith("result ")]
    if not results:
        said = [line for line in process.stderr.splitlines() if line.strip()]
        return f"failed: {said[-1] if said else f'exit code {process.returncode}'}"
    found: dict[str, Any] = json.loads(results[-1].removeprefix("result "))
    return found


def measure(config: Config) -> dict[str, Any]:
    """Train, and time the steps after the warm-up; memory beside what the estimator says of it."""
    from titan_like.models.flavors import flops_per_token
    from titan_like.trainer import Trainer

    started = time.perf_counter()
    trainer = Trainer(config)
    on_gpu = trainer.device.type == "cuda"
    trainer.fit(until=1)
    first = time.perf_counter() - started
    trainer.fit(until=min(WARM_UP, config.training.steps))
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began, before = time.perf_counter(), trainer.counters.processed_positions
    trainer.fit()  # it reads the last step's result, and so waits for the device
    seconds = time.perf_counter() - began
    tokens = trainer.counters.processed_positions - before
    model, peak = trainer.model.config, peak_flops(trainer.device)
    tflops = flops_per_token(model, config.training.seq_len) * tokens / seconds / 1e12
    memory = torch.cuda.memory_stats() if on_gpu else {}
    trainer.close()
    return {
        "tokens_per_s": round(tokens / seconds, 1),
        "tflops": round(tflops, 3),
        "mfu": tflops * 1e12 / peak if peak else None,
        "first_step_s": round(first, 1),
        "allocated_gib": gib(memory.get("allocated_bytes.all.peak")),
        "reserved_gib": gib(memory.get("reserved_bytes.all.peak")),
        **forecast(config),
    }


def forecast(config: Config) -> dict[str, Any]:
    """What the formula says of the same run; None where it covers less than the run does."""
    from estimation.formula import memory_of
    from estimation.job import job_of

    report = memory_of(job_of(config, 1))[0].report()
    return {"forecast_allocated_gib": gib(report.peak_bytes), "forecast_reserved_gib": gib(report.reserved_bytes)}


def gib(size: int | None) -> float | None:
    return None if size is None else round(size / GIB, 2)


def table(found: dict[str, Any]) -> list[str]:
    """For people: a line per case."""
    device = found["environment"]["device"]
    lines = [f"{device}, torch {found['environment']['torch']}, matrix products {found['matrix_tflops']:.0f} TFLOP/s"]
    correct = found["correctness"]
    lines.append(f"loss against the CPU: {correct.get('worst_relative_difference', correct.get('problem'))}")
    lines.append(
        f"{'':34} {'tokens/s':>9} {'TFLOP/s':>8} {'of matrix':>9} {'allocated':>9} {'forecast':>8} {'reserved':>8}"
    )
    for name, case in found["cases"].items():
        if isinstance(case, str):
            lines.append(f"{name:34} {case}")
            continue
        share = case["tflops"] / found["matrix_tflops"] if found["matrix_tflops"] else 0
        memory = (case["allocated_gib"], case["forecast_allocated_gib"], case["reserved_gib"])
        shown = " ".join(
            f"{'n/a' if size is None else f'{size:.2f}':>{w}}" for size, w in zip(memory, (9, 8, 8), strict=True)
        )
        lines.append(f"{name:34} {case['tokens_per_s']:9,.0f} {case['tflops']:8.1f} {share:9.1%} {shown}")
    return lines


if __name__ == "__main__":
    main()
