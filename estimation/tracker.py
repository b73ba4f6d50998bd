"""One dispatch mode that sees every storage of a rank: when it is allocated and freed, for what, and in which module.

Works on real and on fake tensors alike, for any composition: wrappers such as DTensor unwrap first, so that what
arrives here is what lies in memory. What an operation allocates inside its kernel and frees again is not seen.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.pipelining.stage as pipeline_stage
from torch import Tensor, nn
from torch._subclasses import FakeTensor  # private, as all that is patched below; checked on torch 2.13
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from estimation.types import (
    ALL_GATHER,
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    INPUTS,
    LOSS,
    OPTIMIZER,
    RECOMPUTE,
    REDUCE_SCATTER,
)  # fmt: skip
from titan_like import fake
from titan_like.parallel.model import ParallelModel
from titan_like.quantize.float8 import plain

# To a gradient that nobody but autograd has, as Tracker._adds_in_place counts them: the arguments' tuple, the name
# there, getrefcount's own, and one for all of C++ (CPython 3.10 to 3.13).
REFERENCES = 4
ACTIVATIONS, PARAMETERS, GRADIENTS, STATE, BUFFERS = (
    "activations",
    "parameters",
    "gradients",
    "optimizer state",
    "buffers",
)
_add = torch.ops.aten.add.Tensor
_wait_tensor = torch.ops._c10d_functional.wait_tensor.default
_LABELS = (  # what is allocated inside these methods
    (FSDPParamGroup, "unshard", ALL_GATHER),
    (FSDPParamGroup, "wait_for_unshard", ALL_GATHER),
    (FSDPParamGroup, "post_backward", REDUCE_SCATTER),
    (FSDPParamGroup, "finalize_backward", REDUCE_SCATTER),
    (pipeline_stage.PipelineStage, "_prepare_forward_infra", COMMUNICATION),
    (pipeline_stage.PipelineStage, "_prepare_backward_infra", COMMUNICATION),
    (fake, "zeros", INPUTS),
    (ParallelModel, "local_batch", INPUTS),
)
Composite = Callable[..., Any]


@dataclass(eq=False, slots=True)
class Record:
    """One stay of a storage in memory.

    Attributes:
        size: bytes asked for.
        operation, phase, module, label, step, stream: of the allocation.
        freed_phase, freed_label: "" while it lives.
        backwards, freed_backwards: how many backward events had been when it came and went.
        tag: what it turned out to be (a parameter, a gradient, ...), else "".
    """

    number: int
    size: int
    operation: str
    phase: str
    module: str
    label: str
    step: int
    stream: int
    backwards: int
    tag: str = ""
    freed_phase: str = ""
    freed_label: str = ""
    freed_backwards: int = -1

    @property
    def kind(self) -> str:
        """The category; final only when the trace has ended."""
        if self.tag:
            return self.tag
        if self.phase == "initialisation":
            return PARAMETERS
        if self.label:
            return self.label
        if self.freed_label == REDUCE_SCATTER and self.phase == "backward":
            return REDUCE_SCATTER  # a whole gradient
        if self.phase == "optimizer":
            return OPTIMIZER
        if self.module in ("loss", "output"):
            return LOSS
        if self.phase == "recompute":
            return RECOMPUTE
        if self.phase == "forward" and self.freed_backwards != self.backwards:
            return ACTIVATIONS
        if self.operation.startswith(("_c10d_functional::", "c10d::")):
            return COMMUNICATION
        return FORWARD if self.phase == "forward" else BACKWARD


class Tracker(TorchDispatchMode):
    """Use as a context around building the weights and training; inside of FakeTensorMode if there is one.

    Args:
        names: name of each module that may run.
        composites: operators to be run as the Python function given, so that what they allocate inside is seen.

    Attributes:
        events: (+1 allocated or -1 freed, record), in order.
        operations: names of all that ran.
        notes: what was not traced as it runs.
    """

    def __init__(self, names: Mapping[nn.Module, str], composites: Mapping[Any, Composite]) -> None:
        super().__init__()
        self.events: list[tuple[int, Record]] = []
        self.operations: set[str] = set()
        self.notes: list[str] = []
        self._names, self._composites = names, composites
        self._live: dict[int, tuple[Any, Record]] = {}
        self._modules: list[str] = []
        self._labels: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self._streams: dict[int, int] = {}
        self._phase = "initialisation"  # "": told from autograd
        self._paused = self._backwards = 0
        self._step = 1
        self._exit = ExitStack()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if any(hasattr(t, "__tensor_flatten__") and t is not FakeTensor for t in types):
            return NotImplemented  # DTensor and the like unwrap first; their inner operations come here
        if func is _wait_tensor and isinstance(args[0], FakeTensor):
            return args[0]  # as the real operator does; the fake one copies
        if func is _add and self._adds_in_place(*args):
            return args[0]
        if func in self._composites:
            with self:
                return self._composites[func](*args, **kwargs)
        self.operations.add(func._schema.name)
        result = func(*args, **kwargs)
        if torch.is_grad_enabled():  # the newest node of the graph belongs to this operation, or to one before it
            self._module_of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, self._module())
        if not is_view(func):  # a view of what is not known is one of a tensor from before
            for tensor in _tensors(result):
                self._see(tensor, func)
        return result

    def _adds_in_place(self, gradient: Tensor, other: Any) -> bool:
        """Where gradients meet, autograd adds into the first if nobody else has it, but never into a fake tensor."""
        if self.current_phase != "backward" or not isinstance(gradient, FakeTensor) or not isinstance(other, Tensor):
            return False
        storage = gradient.untyped_storage()
        users = torch._C._storage_Use_Count(storage._cdata)  # the tensor, and this function's handle
        found = self._live.get(storage._cdata)  # what a pipeline received is its own buffer
        is_own = found is not None and found[1].phase in ("backward", "recompute") and users == 2
        is_own &= sys.getrefcount(gradient) <= REFERENCES  # a split backward keeps gradients that enter float8 layers
        return is_own and gradient.shape == other.shape and gradient.dtype == other.dtype

    def start_training(self) -> None:
        """The weights are there; from now on phases are forward, backward, recompute and optimizer."""
        self._phase = ""

    @property
    def current_phase(self) -> str:
        if self._phase:
            return self._phase
        if torch._C._current_graph_task_id() == -1:
            return "forward"
        return "recompute" if torch.is_grad_enabled() else "backward"

    def tag(self, tensor: Tensor, tag: str) -> None:
        """Say what a tensor is, from its allocation on."""
        found = self._live.get(_local(tensor).untyped_storage()._cdata)
        if found:
            found[1].tag = tag

    def claim(self, result: Tensor) -> None:
        """The node that made `result` belongs to the module at work."""
        if result.grad_fn is not None:
            self._module_of_node[result.grad_fn._sequence_nr()] = self._module()

    def _module(self) -> str:
        if self._modules:
            return self._modules[-1]
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            return self._module_of_node.get(node._sequence_nr(), "")
        return "loss" if self.current_phase == "forward" else ""

    def _see(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live and tensor.device.type == "cpu" and storage.nbytes():
            self._live[key] = (
                weakref.ref(storage, partial(self._die, key)),
                self._allocate(storage.nbytes(), func.name()),
            )

    def _allocate(self, size: int, operation: str) -> Record:
        stream = self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))
        phase = self.current_phase
        self._backwards += phase == "backward"
        record = Record(
            len(self.events), size, operation, phase, self._module(), self._labels[-1] if self._labels else "",
            self._step, stream, self._backwards,
        )  # fmt: skip
        self.events.append((1, record))
        return record

    def _free(self, record: Record) -> None:
        record.freed_phase = self.current_phase
        self._backwards += record.freed_phase == "backward"
        record.freed_label = self._labels[-1] if self._labels else ""
        record.freed_backwards = self._backwards
        self.events.append((-1, record))

    def _die(self, key: int, reference: Any) -> None:
        found = self._live.pop(key, None)
        if found:
            self._free(found[1])

    def _resize(self, original: Any, storage: torch.UntypedStorage, size: int) -> None:
        """FSDP frees and allocates gathered weights by resizing their storages."""
        original(storage, size)
        found = self._live.pop(storage._cdata, None)
        if found is not None and found[1].size:
            self._free(found[1])
        if size:
            record = self._allocate(size, "resize_")
            self._live[storage._cdata] = weakref.ref(storage, partial(self._die, storage._cdata)), record

    @contextmanager
    def _label(self, label: str) -> Iterator[None]:
        self._labels.append(label)
        try:
            yield
        finally:
            self._labels.pop()

    def note(self, what: str) -> None:
        """That something was not traced as it runs."""
        if what not in self.notes:
            self.notes.append(what)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What runs inside is not seen."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def _labelled(self, label: str, method: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._label(label):
                return method(*args, **kwargs)

        return run

    def watch(self) -> ExitStack:
        """Everything that is not an operation: modules, optimizers, storages that change size, FSDP, pipelines."""
        stack = ExitStack()
        # Modules of a global hook come before those of the module: FSDP's work is done inside its module.
        stack.callback(register_module_forward_pre_hook(self._enter_module).remove)
        stack.callback(register_module_forward_hook(self._leave_module, always_call=True).remove)
        stack.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        stack.callback(register_optimizer_step_post_hook(self._after_update).remove)
        resize = torch.UntypedStorage.resize_
        stack.enter_context(
            patch.object(torch.UntypedStorage, "resize_", lambda storage, size: self._resize(resize, storage, size))
        )
        # DTensor finds out result shapes by running the operation in full size on fake tensors: that is no allocation.
        stack.enter_context(patch.object(ShardingPropagator, "_fake_mode_lock", _Reusable(self.pause)))
        for owner, name, label in _LABELS:
            stack.enter_context(patch.object(owner, name, self._labelled(label, getattr(owner, name))))
        finish = ParallelModel.finish_gradients

        def finish_gradients(model: ParallelModel) -> Any:
            self._phase = "optimizer"  # clipping belongs to it
            return finish(model)

        stack.enter_context(patch.object(ParallelModel, "finish_gradients", finish_gradients))
        return stack

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        self._modules.append(self._names.get(module, "loss"))

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._modules.pop()

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.tag(parameter, PARAMETERS)
                if parameter.grad is not None:
                    self.tag(parameter.grad, GRADIENTS)

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self.tag(value, STATE)
        self._phase = ""
        self._step += 1


class _Reusable:
    """A context manager that may be entered many times."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._open: list[Any] = []

    def __enter__(self) -> None:
        self._open.append(self._make())
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


@cache
def is_view(func: Any) -> bool:
    """Whether the result never has memory of its own; reshape, contiguous and the like may."""
    return func.is_view and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors(item)


def _local(tensor: Tensor) -> Tensor:
    return plain(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
