"""Does a composition give the answer of one process? The check behind scripts/parity.py and tests/distributed/.

Every rank builds the composed model and, beside it, the plain decoder on the whole batch with a loss of its own. Loss,
grad norm and the gradient of every parameter must agree after one step, and the weights after three more steps of
clipped SGD (Adam would hide a constant factor). Labels are few and unequal: valid fractions of 5 to 95 % per row, and
none in the first micro-batch. A rank's micro-batches come through the loader, the whole batch does not.
"""

import faulthandler
import json
import math
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_like.config import Config
from titan_like.data.loader import Batch, BatchSource
from titan_like.loss import IGNORED
from titan_like.models.decoder import Decoder
from titan_like.models.documents import document_lengths
from titan_like.models.flavors import ModelConfig, resolve
from titan_like.parallel.apply import build_model
from titan_like.parallel.distributed import close_process_group, init_process_group
from titan_like.parallel.init import init_weights
from titan_like.parallel.mesh import Mesh, build_mesh
from titan_like.parallel.model import ParallelModel
from titan_like.quantize.float8 import convert
from titan_like.quantize.layers import float8_plan
from titan_like.step import evaluation_step, read_results, training_step

TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}  # relative; bf16 itself has 8 bits
# float8 keeps 3 bits, of a gradient 2. With the reference's scales a difference in the last bit of fp32 can still carry
# a number over a boundary; with others, and in the steps after that, each number is rounded in a way of its own, by up
# to 1/16 (1/8): sums over many agree better than tensors.
FLOAT8_TOLERANCE, FLOAT8_OTHER_SCALES = 1e-2, 0.3
SGD_STEPS, LEARNING_RATE = 3, 0.1
TIMEOUT_SECONDS = 60
ATTEMPTS = 2  # for a crash of torch's own threads: docs/parallelism.md
LOG_CHARACTERS = 4000


@dataclass
class Report:
    """Relative differences to one process, the largest over all ranks.

    Attributes:
        gradient, weight: max |a - b| / max |b| of the worst parameter, whose name follows; with float8
            norm(a - b) / norm(b).
        problem: what went wrong besides numbers; empty if nothing did.
    """

    name: str
    loss: float = 0.0
    evaluation_loss: float = 0.0
    grad_norm: float = 0.0
    gradient: float = 0.0
    gradient_name: str = ""
    weight: float = 0.0
    weight_name: str = ""
    problem: str = ""
    tolerance: float = TOLERANCE["float32"]
    gradient_tolerance: float = TOLERANCE["float32"]
    weight_tolerance: float = TOLERANCE["float32"]

    def table(self) -> str:
        """For people: one row per quantity, and the verdict."""
        rows = [
            ("loss", self.loss, ""), ("evaluation loss", self.evaluation_loss, ""), ("grad norm", self.grad_norm, ""),
            ("worst gradient", self.gradient, self.gradient_name), ("worst weight", self.weight, self.weight_name),
        ]  # fmt: skip
        lines = [self.name, *(f"  {title:<16} {number:8.1e}  {parameter}" for title, number, parameter in rows)]
        if self.problem:
            lines.append(f"  {self.problem}")
        verdict = "equal to one process" if self.is_exact else "NOT EQUAL to one process"
        others = f"; gradients {self.gradient_tolerance:g}, weights {self.weight_tolerance:g}"
        others = others if self.weight_tolerance != self.tolerance else ""
        return "\n".join([*lines, f"  {verdict} (relative tolerance {self.tolerance:g}{others})"])

    @property
    def is_exact(self) -> bool:
        sums = (self.loss, self.evaluation_loss, self.grad_norm)
        are_tensors_near = self.gradient <= self.gradient_tolerance and self.weight <= self.weight_tolerance
        return not self.problem and all(n <= self.tolerance for n in sums) and are_tensors_near  # nan is not


Tamper = Callable[[ParallelModel, list[Batch]], None]  # a fault to inject, on this rank


def run_case(name: str, config: Config, tamper: Tamper | None = None) -> Report:
    """Compare on this rank; collective, and the same report on every rank."""
    device = torch.device("cpu")
    mesh = build_mesh("cpu", config.parallelism)
    shape = resolve(config.model.name, config.model.flavor, config.model.overrides)
    order = 2 if config.float8.enable else math.inf  # single elements of float8 say little
    report = Report(name)
    report.tolerance, report.gradient_tolerance, report.weight_tolerance = _tolerances(config)
    model = build_model(shape, config, mesh, device)
    optimizer = torch.optim.SGD([p for _, p in model.named_parameters()], lr=LEARNING_RATE)
    reference = _Reference(shape, config)

    gradients: dict[str, Tensor] = {}
    hook = optimizer.register_step_pre_hook(lambda *_: gradients.update(_full(model, "grad")))
    for step in range(1 + SGD_STEPS):
        whole = make_batch(shape, config, mesh, step)
        batches = local_rows(whole, config, mesh)
        if tamper is not None and step == 0:
            tamper(model, batches)
        loss, norm = reference.backward(whole)
        max_norm = 1e9 if step == 0 else norm / 2
        (result,) = read_results([training_step(model, optimizer, batches, max_norm)])
        if step == 0:
            hook.remove()
            report.loss, report.grad_norm = _relative(result.loss, loss), _relative(result.grad_norm, norm)
            report.gradient, report.gradient_name = _worst(gradients, reference.gradients(), order)
        reference.step(max_norm)
        if step == 1:  # between optimizer steps; the next one must not notice
            evaluation, _ = evaluation_step(model, batches)
            report.evaluation_loss = _relative(evaluation, reference.evaluate(whole))
            updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if not all(id(parameter) in updated for _, parameter in model.named_parameters()):
                report.problem = "evaluation has left parameters that the optimizer does not know"
    report.weight, report.weight_name = _worst(_full(model, "data"), reference.weights(), order)
    return _agree(report, set(gradients), set(reference.weights()))


class _Reference:
    """The plain decoder in fp32 on the whole batch, and a loop that shares nothing with step.py."""

    def __init__(self, shape: ModelConfig, config: Config) -> None:
        self._model = Decoder(shape)
        if config.float8.enable:  # the same layers, the same recipe; what is gathered how changes nothing here
            alone = config.float8.model_copy(update={"enable_fsdp_float8_all_gather": False})
            convert(self._model, float8_plan(shape, config).converted, alone)
        self._rows = _rows_that_share_a_scale(config)
        self._z_loss = config.training.z_loss
        init_weights(self._model.named_parameters(), shape, config.training.seed)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)

    def backward(self, batch: Batch) -> tuple[float, float]:
        """(loss, grad norm) of the whole batch."""
        loss = 0.0
        for part in self._losses(batch, self._z_loss):
            part.backward()
            loss += part.item()
        norm = torch.stack([p.grad.double().norm() for p in self._model.parameters() if p.grad is not None]).norm()
        return loss, norm.item()

    def evaluate(self, batch: Batch) -> float:
        with torch.no_grad():
            return sum(part.item() for part in self._losses(batch, 0.0))

    def _losses(self, batch: Batch, z_loss: float) -> Iterator[Tensor]:
        """Parts of the mean loss, one after the other."""
        count = (batch.labels != IGNORED).sum()
        for first in range(0, len(batch.tokens), self._rows or len(batch.tokens)):
            rows = slice(first, first + self._rows if self._rows else None)
            part = rows_of(batch, rows)
            logits = self._model(part.tokens, part.positions, part.documents()).flatten(0, 1).double()
            labels = part.labels.flatten()
            log_z = logits.logsumexp(1)[labels != IGNORED]
            yield (F.cross_entropy(logits, labels, reduction="sum") + z_loss * log_z.square().sum()) / count

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self._model.named_parameters() if p.grad is not None}

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._model.named_parameters()}

    def step(self, max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _tolerances(config: Config) -> tuple[float, float, float]:
    """Of sums, gradients and weights."""
    tolerance = TOLERANCE[config.training.mixed_precision_param]
    if not config.float8.enable:
        return tolerance, tolerance, tolerance
    float8, parallelism = config.float8, config.parallelism
    # One scale per tensor: of this rank's part of a sequence, and of its rows of a weight that is gathered in float8.
    others = float8.recipe == "tensorwise" and parallelism.context_parallel_degree > 1
    others |= float8.enable_fsdp_float8_all_gather and parallelism.tensor_parallel_degree > 1
    others |= config.training.mixed_precision_param != "float32"
    return FLOAT8_TOLERANCE, FLOAT8_OTHER_SCALES if others else FLOAT8_TOLERANCE, FLOAT8_OTHER_SCALES


def _rows_that_share_a_scale(config: Config) -> int:
    """Rows that a float8 layer sees, and scales, together; 0: all, for without float8 it makes no difference."""
    if not config.float8.enable:
        return 0
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree > 1:
        return parallelism.pipeline_parallel_microbatch_size
    return config.training.local_batch_size


def make_batch(shape: ModelConfig, config: Config, mesh: Mesh, step: int) -> Batch:
    """The global batch of a step, the same on every rank: random tokens, labels and documents."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows, columns = config.training.global_batch_size, config.training.seq_len
    if rows == -1:
        rows = config.training.local_batch_size * mesh.degree("dp_replicate", "dp_shard")
    tokens = torch.randint(0, shape.vocab_size, (rows, columns + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    keep = torch.rand(rows, 1, generator=generator) * 0.9 + 0.05
    labels[torch.rand(rows, columns, generator=generator) > keep] = IGNORED
    size = config.training.local_batch_size
    labels[: size if rows > size else 1] = IGNORED  # a whole micro-batch of one rank, where there are several
    index = torch.arange(columns).expand(rows, columns)
    begins = torch.rand(rows, columns, generator=generator) < 0.12
    starts = torch.where(begins, index, 0).cummax(1).values
    positions = index - starts if config.data.reset_position_ids else index.clone()
    batch = Batch(tokens[:, :-1].contiguous(), labels, positions)
    if not config.data.reset_attention_mask:
        return batch
    return replace(batch, starts=starts, lengths=document_lengths(starts))


def local_rows(batch: Batch, config: Config, mesh: Mesh) -> list[Batch]:
    """This rank's micro-batches, as the loader hands them out; which labels count is `batch`'s choice."""
    source = BatchSource(
        _Samples(batch),
        local_batch_size=config.training.local_batch_size,
        global_batch_size=len(batch.tokens),
        dp_rank=mesh.batch_rank,
        dp_size=mesh.degree("dp_replicate", "dp_shard"),
        reset_attention_mask=config.data.reset_attention_mask,
        reset_position_ids=config.data.reset_position_ids,
    )
    batches = source.next_step()
    for local, ids in zip(batches, source.last_ids, strict=True):
        local.labels.copy_(batch.labels[ids])
    return batches


@dataclass(frozen=True)
class _Samples:
    """The rows of a batch as the loader reads them: tokens and document starts, (2, S + 1) each."""

    batch: Batch

    @property
    def seq_len(self) -> int:
        return self.batch.tokens.shape[1]

    def __len__(self) -> int:
        return len(self.batch.tokens)

    def __getitem__(self, k: int, /) -> np.ndarray:
        index, starts = torch.arange(self.seq_len), self.batch.starts
        row = torch.stack([self.batch.tokens[k], index - self.batch.positions[k] if starts is None else starts[k]])
        return torch.cat([row, row[:, -1:]], dim=1).numpy()  # the last token would only be a label

    def place(self, k: int, at: int, /) -> str:
        return f"row {k}"


def rows_of(batch: Batch, rows: slice) -> Batch:
    return replace(batch, **{name: value[rows] for name, value in vars(batch).items() if value is not None})


def _full(model: ParallelModel, attribute: str) -> dict[str, Tensor]:
    """Whole tensors of this rank's stages by name; collective within each stage."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = getattr(parameter, attribute)
        if tensor is not None:
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if name in found and not torch.equal(found[name], tensor):
                tensor = torch.full_like(tensor, torch.nan)  # the two copies of a tied table differ
            found[name] = tensor.clone()
    return found


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected)


def _worst(found: dict[str, Tensor], expected: dict[str, Tensor], order: float) -> tuple[float, str]:
    """The largest relative difference in the norm of this order, and its parameter; nan counts as the largest."""
    worst, worst_name = 0.0, ""
    for name, tensor in found.items():
        scale = expected[name].norm(order).clamp(min=1e-12)
        difference = ((tensor - expected[name]).norm(order) / scale).item()
        if not difference <= worst:
            worst, worst_name = difference, name
    return worst, worst_name


def _agree(report: Report, found: set[str], expected: set[str]) -> Report:
    """The worst of all ranks in one report, and whether each parameter has a gradient somewhere."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (report, found))
    reports = [entry[0] for entry in gathered]

    def badness(value: float) -> float:
        return float("inf") if value != value else value

    for key in ("loss", "evaluation_loss", "grad_norm", "gradient", "weight"):
        worst = max(reports, key=lambda r, key=key: badness(getattr(r, key)))  # type: ignore[misc]
        setattr(report, key, getattr(worst, key))
        if key in ("gradient", "weight"):
            setattr(report, f"{key}_name", getattr(worst, f"{key}_name"))
    report.problem = next((each.problem for each in reports if each.problem), "")
    missing = expected - set().union(*(entry[1] for entry in gathered))
    if missing:
        report.problem = f"no gradient for {', '.join(sorted(missing))}"
    return report


def launch(
    cases: Mapping[str, Config],
    processes: int,
    tampers: Mapping[str, Tamper] | None = None,
    timeout_seconds: float = 300,
    inductor_cache: Path | None = None,
) -> list[Report]:
    """Run each case on gloo processes of this machine; reports in the order of `cases`.

    Every case has processes of its own: torch keeps threads and caches for the process groups of a process, which
    outlive the groups. They are forked from one that has imported torch, so that a case starts in tenths of a second.

    Args:
        tampers: faults to inject by case, functions of a module.
        timeout_seconds: for one case.
        inductor_cache: folder of compiled code, to share it with other launches.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["titan_like.oracle", "torch._dynamo"])
    with tempfile.TemporaryDirectory() as folder:
        reports = []
        for number, (name, config) in enumerate(cases.items()):
            cache = inductor_cache or Path(folder, "inductor")
            for files in (Path(folder, f"{number}-{attempt}") for attempt in range(ATTEMPTS)):
                arguments = (name, config, (tampers or {}).get(name), processes, files, cache)
                ranks = [context.Process(target=_run_rank, args=(rank, *arguments)) for rank in range(processes)]
                has_crashed = _run_all(ranks, timeout_seconds)
                report = _read_report(name, files)
                if not has_crashed:
                    break
                warnings.warn(f"a signal ended a rank of {name}: {report.problem}", RuntimeWarning, stacklevel=2)
            reports.append(report)
    return reports


def _run_all(ranks: Sequence[BaseProcess], timeout_seconds: float) -> bool:
    """Start, and wait until all have ended well; end them all when one fails or time is up.

    Returns:
        whether a rank was ended by a signal before that: no exception of Python, and no number, but a crash.
    """
    deadline = time.monotonic() + timeout_seconds
    for rank in ranks:
        rank.start()
    while running := [rank for rank in ranks if rank.is_alive()]:
        wait([rank.sentinel for rank in running], timeout=max(0.0, deadline - time.monotonic()))
        if any(rank.exitcode for rank in ranks) or time.monotonic() >= deadline:
            break
    has_crashed = any((rank.exitcode or 0) < 0 for rank in ranks)
    for rank in ranks:
        rank.kill()
        rank.join()
    return has_crashed


def _read_report(name: str, files: Path) -> Report:
    """The first report that a rank has written; a rank that raises ends the case, so it is the cause."""
    reports = files.with_suffix(".jsonl")
    if reports.exists():
        return Report(**json.loads(reports.read_text().splitlines()[0]))
    log = files.with_suffix(".log").read_text().strip() or "nothing was said"
    return Report(name, problem=f"the processes ended without a report: {log[-LOG_CHARACTERS:]}")


def _run_rank(
    rank: int, name: str, config: Config, tamper: Tamper | None, processes: int, files: Path, cache: Path
) -> None:
    """One rank of one case; what it says goes to a file."""
    log = os.open(files.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    torch.set_num_threads(1)
    store = dist.FileStore(str(files.with_suffix(".store")), processes)
    try:
        init_process_group(torch.device("cpu"), TIMEOUT_SECONDS, store)
        report = run_case(name, config, tamper)
    except Exception:
        traceback.print_exc()
        _append(files, Report(name, problem=traceback.format_exc().strip().splitlines()[-1]))
        os._exit(1)  # a clean exit could wait for peers that wait for this rank
    if rank == 0:
        _append(files, report)
    close_process_group()


def _append(files: Path, report: Report) -> None:
    with files.with_suffix(".jsonl").open("a") as file:
        file.write(json.dumps(asdict(report)) + "\n")
