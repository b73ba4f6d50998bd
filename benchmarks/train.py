#!/usr/bin/env python3
"""titan_like beside a loop written by hand and the trainers one would take instead, in one run, in turns.

    python benchmarks/train.py [--peers_python PYTHON] [--modes eager compiled packed fsdp2] [--rounds 3] [--name NAME]

Each contender is a process of its own (two with FSDP2), each process pinned to a core and on one thread. All train a
Llama of the same shape on the same tokens in fp32 with fused AdamW and clipping. They start one after the other, then
take turns of some steps, A B C, C B A, and so on. tok/s: tokens per CPU second of these steps over all processes, the
median and the range of the turns. Ratios are taken within a round. First step: wall seconds from the process's start
to the end of its first optimizer step, the fastest of --starts; when compiled, with cold caches. Peak: resident memory.

The peers (transformers, litgpt, torchtitan) are looked for in the environment of --peers_python. Results go to
benchmarks/results/NAME.json. Linux only: processes are pinned, and their memory is read from /proc.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))  # as a script, Python looks in benchmarks/ only

import numpy as np  # noqa: E402

from benchmarks.peers.gate import Task  # noqa: E402
from estimation.options import whole  # noqa: E402
from titan_like.data.dataset import TokenDataset  # noqa: E402
from titan_like.data.indexed import IndexedWriter  # noqa: E402
from titan_like.launch import check_folder  # noqa: E402

OURS, RECOMPUTE, DENSE = "titan_like", "titan_like, recompute", "titan_like, dense mask"
BARE = ("bare", "bare, chunked loss")
PEERS = ("transformers", "litgpt", "torchtitan", "torchtitan, no recompute")
EAGER = ", eager"  # of a contender's name: uncompiled beside those that are compiled
EAGER_PEERS = tuple(f"{who}{EAGER}" for who in PEERS if who != "torchtitan")
PACKAGES = ("torch", "transformers", "accelerate", "litgpt", "lightning", "torchtitan")
START_SECONDS, TURN_SECONDS = 600, 300  # limits
MEAN_DOCUMENT = 200  # tokens
PAGE = REPOSITORY / "docs" / "benchmarks.md"
BEGIN, END = "<!-- begin: written by benchmarks/train.py --docs -->", "<!-- end -->"


@dataclass(frozen=True)
class Mode:
    """A table: who takes part in what. The peers' compilation of whole models takes minutes."""

    contenders: tuple[str, ...]
    processes: int = 1
    compiled: bool = False
    packed: bool = False


MODES = {
    "eager": Mode((OURS, RECOMPUTE, *BARE, *PEERS)),
    "compiled": Mode((OURS, *BARE, "torchtitan, no recompute", *EAGER_PEERS), compiled=True),
    "packed": Mode((OURS, DENSE), packed=True),
    "fsdp2": Mode((OURS, RECOMPUTE, *BARE, *PEERS), processes=2),
    "compiled packed": Mode((OURS, DENSE), compiled=True, packed=True),
    "compiled fsdp2": Mode((OURS, *BARE), processes=2, compiled=True),
}
QUICK = [OURS, *BARE, DENSE]
COUNT = whole(1, 10**6)
DEFAULT_MODES = ("eager", "compiled", "packed", "fsdp2")  # together 15 minutes


@dataclass
class Result:
    """What one contender did in one mode; `reason`: why it did not."""

    tokens_per_cpu_second: list[float] = field(default_factory=list)
    first_step_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    loss: float = 0.0
    reason: str = ""


class Failed(Exception):
    """The contender cannot go on; the message is for the table."""


class Contender:
    """The processes of one task, started; they wait where each turn begins."""

    def __init__(self, task: Task, python: str) -> None:
        self.task = task
        self.log = Path(task.folder) / "log.txt"
        self.log.parent.mkdir(parents=True)
        self.started_at = time.time()
        cores, port = sorted(os.sched_getaffinity(0)), str(free_port())
        self.processes = []
        for rank in range(task.processes):
            env = environment(task.folder) | {"BENCHMARK_CORE": str(cores[-1 - rank % len(cores)])}
            if task.processes > 1:
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(task.processes)}
                env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            with self.log.open("a") as log:
                command = [python, "-m", "benchmarks.peers", json.dumps(asdict(task))]
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
                self.processes.append(subprocess.Popen(command, text=True, cwd=REPOSITORY, env=env, **pipes))

    def read(self, key: str, limit: float) -> list[Any]:
        """The value of the next message of every process, which must be `key`."""
        timer = threading.Timer(limit, self.kill)
        timer.start()
        try:
            lines = [process.stdout.readline() for process in self.processes if process.stdout]
        finally:
            timer.cancel()
        messages = [json.loads(line or "{}") for line in lines]
        if any(key not in message for message in messages):
            self.kill()
            reasons = [message["reason"] for message in messages if "reason" in message]
            raise Failed(reasons[0] if reasons else last_line(self.log))
        return [message[key] for message in messages]

    def turn(self) -> float:
        """Tokens per CPU second."""
        for process in self.processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended; reading tells
                process.stdin.write("go\n")
                process.stdin.flush()
        seconds = sum(self.read("turn_cpu", TURN_SECONDS))
        return self.task.turn * self.task.batch * self.task.seq_len / seconds

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def parse() -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options, and what `describe` says of their Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers_python", default=sys.executable, help="of the environment with the peers")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: eager compiled packed fsdp2")
    contenders = sorted({who for mode in MODES.values() for who in mode.contenders})
    parser.add_argument("--contenders", nargs="+", choices=contenders, help="default: those of each mode, see MODES")
    parser.add_argument("--rounds", type=COUNT, help="turns of each contender (default 3; quick: 1)")
    parser.add_argument("--steps", type=COUNT, default=2, help="steps of a turn (default 2)")
    parser.add_argument("--starts", type=COUNT, help="starts of each contender, eager (default 2; quick: 1)")
    parser.add_argument("--name", default="train", help="of the file in --results (default train)")
    parser.add_argument("--results", type=Path, help="folder of the file (default benchmarks/results)")
    parser.add_argument("--docs", action="store_true", help="also write the tables into docs/benchmarks.md")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, one round, without the peers, eager and packed; no file"
    )
    args = parser.parse_args()
    if args.quick:
        if args.docs:
            parser.error("the tables of a --quick run are not for the documentation; leave --quick or --docs out")
        args.rounds, args.starts, args.contenders = args.rounds or 1, args.starts or 1, args.contenders or QUICK
    elif args.results is None:
        args.results = REPOSITORY / "benchmarks" / "results"
    args.rounds, args.starts = args.rounds or 3, args.starts or 2
    chosen = set(args.contenders or contenders)
    default = ["eager", "packed"] if args.quick else DEFAULT_MODES
    for name in args.modes or ():
        if not chosen & set(MODES[name].contenders):
            parser.error(f"mode {name} has none of --contenders; it has: {'; '.join(MODES[name].contenders)}")
    args.modes = args.modes or [name for name in default if chosen & set(MODES[name].contenders)]
    if args.results is not None and (problems := check_folder("--results", str(args.results))):
        parser.error(problems[0])
    try:
        return args, describe(args.peers_python)
    except (OSError, subprocess.CalledProcessError, ValueError):
        parser.error(f"--peers_python {args.peers_python} is no Python that runs; name one")


def main() -> None:
    args, about = parse()
    results = {}
    with tempfile.TemporaryDirectory(prefix="train_benchmark_") as folder:
        for name in args.modes:
            results[name] = measure(name, Path(folder) / name, args)
            print(f"\n{table(name, results[name])}", flush=True)
    about["load_after"] = os.getloadavg()
    if args.results is not None:
        path = write(args.results / f"{args.name}.json", about, results)
        print(f"\nwritten to {path}")
        if args.docs:
            PAGE.write_text(insert(PAGE.read_text(), report(path)))
    print(summary(results))


def write(path: Path, about: dict[str, Any], results: dict[str, dict[str, Result]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    modes = {name: {who: asdict(result) for who, result in found.items()} for name, found in results.items()}
    path.write_text(json.dumps({"environment": about, "arguments": sys.argv[1:], "modes": modes}, indent=1) + "\n")
    return path


def measure(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Result]:
    """Start all contenders of the mode, then let them take turns."""
    mode = MODES[name]
    make = task_maker(mode, folder, args)
    results = {who: Result() for who in mode.contenders if not args.contenders or who in args.contenders}
    running: dict[str, Contender] = {}
    try:
        for who, result in results.items():
            python = args.peers_python if who.removesuffix(EAGER) in PEERS else sys.executable
            starts = 1 if mode.compiled else args.starts
            with reason_into(result):
                running[who] = start(who, starts, make, python, result)
        for number in range(args.rounds):
            for who in list(running)[:: -1 if number % 2 else 1]:
                with reason_into(results[who]):
                    results[who].tokens_per_cpu_second.append(running[who].turn())
        for who, contender in running.items():
            with reason_into(results[who]):
                finish(results[who], contender)
    finally:
        for contender in running.values():
            contender.kill()
    return results


@contextmanager
def reason_into(result: Result) -> Iterator[None]:
    """Note why a contender cannot go on; the first reason stays."""
    try:
        yield
    except Failed as error:
        result.reason = result.reason or str(error)


def start(who: str, starts: int, make: Callable[[str, int], Task], python: str, result: Result) -> Contender:
    """Start it some times; the last one stays."""
    for number in range(starts):
        contender = Contender(make(who, number), python)
        first = max(contender.read("first_step_at", START_SECONDS))
        result.first_step_seconds.append(first - contender.started_at)
        if number < starts - 1:
            contender.kill()
    contender.read("ready", START_SECONDS)
    return contender


def finish(result: Result, contender: Contender) -> None:
    (loss, *_), peaks = contender.read("loss", TURN_SECONDS), contender.read("peak_bytes", TURN_SECONDS)
    result.loss, result.peak_bytes = loss, max(peaks)


def task_maker(mode: Mode, folder: Path, args: argparse.Namespace) -> Callable[[str, int], Task]:
    """Write the corpus; returns what makes the task of one start of one contender."""
    folder.mkdir()
    shape = {"dim": 256, "n_layers": 6, "n_heads": 16, "ffn_dim": 768, "vocab_size": 2048}
    seq_len = 1024
    if args.quick:
        shape, seq_len = {"dim": 32, "n_layers": 2, "n_heads": 2, "ffn_dim": 64, "vocab_size": 128}, 128
    common = {
        "shape": shape, "seq_len": seq_len, "batch": 4, "warmup": 2, "turn": args.steps, "turns": args.rounds,
        "processes": mode.processes, "packed": mode.packed, "lr": 3e-4,
        "corpus": f"{folder}/corpus", "rows": f"{folder}/rows.npy",
    }  # fmt: skip
    needed = Task(contender="", folder="", compiled=mode.compiled, **common).steps * 4
    write_corpus(Path(common["corpus"]), shape["vocab_size"], 2 * needed * seq_len)
    dataset = TokenDataset([common["corpus"]], seq_len, seed=0)
    np.save(common["rows"], np.stack([dataset[k] for k in range(needed)]))

    def make(who: str, number: int) -> Task:
        place = f"{folder}/{who}/{number}".replace(", ", "_").replace(" ", "_")
        is_compiled = mode.compiled and not who.endswith(EAGER)
        return Task(contender=who.removesuffix(EAGER), folder=place, compiled=is_compiled, **common)

    return make


def write_corpus(prefix: Path, vocabulary: int, tokens: int) -> None:
    """Documents of exponential length in which each token is the one before plus 1: something that can be learnt."""
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        while tokens > 0:
            length = int(rng.exponential(MEAN_DOCUMENT)) + 1
            writer.add_document((rng.integers(vocabulary) + np.arange(length)) % vocabulary)
            tokens -= length


def environment(folder: str) -> dict[str, str]:
    """One thread, caches of its own, nothing from the network."""
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")}
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    cache = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    return {**inherited, **threads, **offline, **cache, "PYTHONPATH": str(REPOSITORY)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or "Exception: " in line]
    return (errors or lines or ["it ended without a word"])[-1][-200:]


def describe(peers_python: str) -> dict[str, Any]:
    """The machine and the versions of both environments."""
    code = "import importlib.metadata as m, json, sys; print(json.dumps([sys.version.split()[0], {d.name: d.version \
for d in m.distributions()}]))"
    found = {}
    for name, python in (("titan_like", sys.executable), ("peers", peers_python)):
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
        version, packages = json.loads(answer)
        found[name] = {"python": version, **{p: packages[p] for p in PACKAGES if p in packages}}
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(": ")[1] for line in cpuinfo.splitlines() if line.startswith("model name")), "")
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"), "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)), "platform": platform.platform(), "versions": found,
        "load_before": os.getloadavg(),
    }  # fmt: skip


def ratios(a: Result, b: Result) -> list[float]:
    """Of tokens per CPU second, round by round."""
    return [x / y for x, y in zip(a.tokens_per_cpu_second, b.tokens_per_cpu_second, strict=True)]


def table(name: str, results: dict[str, Result]) -> str:
    """A mode's table in Markdown, columns aligned."""
    head = (name, "tok/s", "range", "titan_like / it", "first step", "peak", "loss")
    rows = [head, ("---", "---:", "---:", "---:", "---:", "---:", "---:")]
    ours = results.get(OURS)
    for who, result in results.items():
        if result.reason:
            rows.append((who, "n/a", "", "", "", "", ""))
            continue
        rates = result.tokens_per_cpu_second
        ratio = ""
        if ours is not None and ours is not result and not ours.reason:
            found = ratios(ours, result)
            ratio = f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
        rate, span = f"{statistics.median(rates):.0f}", f"{min(rates):.0f} to {max(rates):.0f}"
        first, peak = f"{min(result.first_step_seconds):.1f} s", f"{result.peak_bytes / 2**30:.2f} GiB"
        rows.append((who, rate, span, ratio, first, peak, f"{result.loss:.3f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    reasons = [f"{who}: n/a ({result.reason})" for who, result in results.items() if result.reason]
    return "\n".join([*lines, *(["", *reasons] if reasons else [])])


def load(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Result]]]:
    """A results file: its environment, and the results of each contender by mode."""
    found = json.loads(path.read_text())
    modes = {name: {who: Result(**r) for who, r in each.items()} for name, each in found["modes"].items()}
    return found["environment"], modes


def report(path: Path) -> str:
    """What a results file says, for the documentation."""
    about, modes = load(path)
    peers = about["versions"]["peers"]
    versions = ", ".join(f"{package} {peers[package]}" for package in PACKAGES if package in peers)
    where = f"{about['cpu']}, {about['cores']} cores, Python {peers['python']}, {versions}; {about['time'][:10]}"
    return "\n\n".join([f"Measured on: {where}.", *(table(*each) for each in modes.items()), f"`{summary(modes)}`"])


def insert(page: str, text: str) -> str:
    """The page with what lies between its markers replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def summary(results: dict[str, dict[str, Result]]) -> str:
    """One line: titan_like's tokens per CPU second over those of the best bare loop and of each peer."""
    parts = []
    for name, found in results.items():
        ran = {who: result for who, result in found.items() if not result.reason}
        if OURS not in ran:
            parts.append(f"{name}: titan_like n/a")
            continue
        bare = {who: result for who, result in ran.items() if who in BARE}
        rivals = {who: result for who, result in ran.items() if who in (*PEERS, DENSE)}
        eager = {who: result for who, result in ran.items() if who in EAGER_PEERS}
        for title, group in (("bare loop", bare), ("eager peer", eager)):
            if group:
                best = max(group, key=lambda who: statistics.median(group[who].tokens_per_cpu_second))
                rivals = {f"best {title} ({best.removesuffix(EAGER)})": group[best], **rivals}
        each = [f"{who} {statistics.median(ratios(ran[OURS], result)):.2f}" for who, result in rivals.items()]
        parts.append(f"{name}: {', '.join(each) or 'n/a'}")
    return "titan_like / it: " + "; ".join(parts)


if __name__ == "__main__":
    main()
