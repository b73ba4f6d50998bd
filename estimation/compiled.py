"""Compiled blocks in a trace: inductor says what a block's forward keeps, and in which order buffers come and go.

Each kind of block is compiled once, for the tensors that it is called with, but without the machine code of fused
kernels. What inductor wrote around them (buffers, products, attention, collectives) then runs in place of the block, on
tensors that may have no memory. It is written for a CPU, whatever the kernels of attention and norms are.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function  # private, as all below; checked on torch 2.13
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import async_compile, codecache, compile_fx, cpp_builder, cpu_vec_isa
from torch._inductor import config as inductor
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.select_algorithm import extern_kernels
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.fx.traceback import preserve_node_meta
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from estimation.kernels import fused_norm, gpu_rms_norm
from estimation.tracker import Tracker
from titan_like.models.decoder import Decoder

Programs = dict[object, Callable[..., Tensor] | str]  # by kind of block; or why there is none


def compile_blocks(model: Decoder, programs: Programs) -> None:
    """In place of titan_like.parallel.compile.compile_blocks.

    Args:
        programs: those that are known; of models that differ in nothing but the number of their layers.
    """
    for block in model.layers.values():
        block.forward = _CompiledBlock(block, block.forward, programs)


class _CompiledBlock:
    """The forward of a block. Blocks of a kind share their program."""

    def __init__(self, block: nn.Module, forward: Callable[..., Tensor], programs: Programs) -> None:
        self._block, self._forward, self._programs = block, forward, programs

    def __call__(self, *inputs: Any) -> Tensor:  # tensors, tuples with tensors in them, None
        parameters, (given, form) = dict(self._block.named_parameters()), tree_flatten(inputs)
        flat = [*(x for x in given if isinstance(x, Tensor)), *parameters.values()]
        fixed = [None if isinstance(x, Tensor) else (x,) for x in given]
        key = (*map(type, self._block.modules()), form, *fixed, *map(_kind, flat))
        tracker = _tracker()
        if key not in self._programs:
            try:
                self._programs[key] = self._compile(flat, parameters, lambda left: _put(form, fixed, left))
            except Exception as error:  # whatever torch says: the trace goes on, and tells
                self._programs[key] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        program = self._programs[key]
        if isinstance(program, str):
            tracker.note(f"compilation: a block is traced as it is, for {program}")
            return self._forward(*inputs)
        out = program(*flat)
        tracker.claim(out)
        return out

    def _compile(
        self, inputs: list[Tensor], parameters: Mapping[str, Tensor], arguments: Callable[[Iterator[Tensor]], Any]
    ) -> Callable[..., Tensor]:
        """A function of `inputs`, of which parameters are the last; `arguments` puts the rest together."""
        forward, names = _numbered(self._forward), list(parameters)
        is_cut = any(isinstance(x, DTensor) for x in parameters.values())

        def run(*flat: Tensor) -> Tensor:  # outlives this call: it must not know the tensors above
            left = iter(flat)
            again = arguments(left)
            with preserve_node_meta(), _reparametrize_module(self._block, dict(zip(names, left, strict=True))):
                return forward(*again)

        def cut(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            if not is_cut:  # plain parameters are those of which dynamo says that they stay
                primals = [node for node in joint.graph.nodes if node.op == "placeholder" and "primals" in node.name]
                options["static_lifetime_input_indices"] = list(range(len(inputs) - len(names), len(primals)))
            return compile_fx.partition_fn(joint, inputs, **options)

        compiled = aot_function(
            run, fw_compiler=_forward, bw_compiler=_backward, partition_fn=cut, decompositions=select_decomp_table()
        )
        with _tracker().pause(), _recording(list(parameters.values())):
            # Compiles, and runs once uncounted. The graphs remember what they are recorded on.
            compiled(*map(_alike, inputs))
        return compiled


def _put(form: TreeSpec, fixed: list[tuple[Any] | None], left: Iterator[Tensor]) -> Any:
    """Arguments of the `form`: what is `fixed`, and tensors where nothing is."""
    return tree_unflatten([next(left) if x is None else x[0] for x in fixed], form)


def _numbered(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As dynamo hands a recomputed region to AOTAutograd: its operations are tagged, and the partitioner obeys."""
    if not isinstance(forward, partial):
        return forward
    contexts = forward.keywords["context_fn"]

    def numbered() -> Any:
        first, again = contexts()
        first.ac_graph_id = 0
        return first, again

    return partial(forward, context_fn=numbered, early_stop=False)


def _alike(x: Tensor) -> Tensor:
    """Of other memory; a float8 weight, which has no such, is as it is."""
    local = x._local_tensor if isinstance(x, DTensor) else x
    if type(local) not in (Tensor, nn.Parameter, FakeTensor):
        return x
    return torch.empty_like(x).requires_grad_(x.requires_grad)


def _kind(x: Tensor) -> tuple[object, ...]:
    placed = x.placements if isinstance(x, DTensor) else None
    return type(x), tuple(x.shape), x.stride(), x.dtype, x.requires_grad, placed


def _tracker() -> Tracker:
    return next(mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Tracker))


@contextmanager
def _recording(tensors: list[Tensor]) -> Iterator[None]:
    """What AOTAutograd and inductor find here instead of dynamo's."""
    norm = patch.object(F, "rms_norm", fused_norm) if F.rms_norm is gpu_rms_norm else nullcontext()
    with (
        tracing(TracingContext(detect_fake_mode(tensors))),
        saved_tensors_hooks(lambda x: x, lambda x: x),  # not those of a checkpoint around it
        norm,
    ):
        yield


def _forward(gm: fx.GraphModule, example_inputs: Any) -> Any:
    with _without_kernels():
        extra = compile_fx.create_compiler_config_extra(gm)
        return compile_fx.compile_fx_forward(gm, example_inputs, 1, len(example_inputs), extra)


def _backward(gm: fx.GraphModule, example_inputs: Any) -> Any:
    with _without_kernels():
        return compile_fx.compile_fx_backward(gm, example_inputs, compile_fx.create_compiler_config_extra(gm))


@contextmanager
def _without_kernels() -> Iterator[None]:
    """Inductor makes no machine code, and what it writes is loaded for tensors that may have no memory."""
    settings = {"force_disable_caches": True, "compile_threads": 1, "cpp.vec_isa_ok": True}
    with (
        _disable_current_modes(),
        inductor.patch(settings),
        patch.object(cpu_vec_isa, "pick_vec_isa", cpu_vec_isa.VecAVX2),  # tries a compiler, of which there may be none
        patch.multiple(cpp_builder, is_gcc=lambda: True, is_msvc_cl=lambda: False),
        patch.object(async_compile.AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None),
        patch.object(codecache.PyCodeCache, "load_by_key_path", _load),
    ):
        yield


def _load(key: str, path: str, linemap: Any = None, attrs: dict[str, Any] | None = None) -> ModuleType:
    """A module of inductor's of its own: a real compilation of the same block must not find it."""
    module = ModuleType(key)
    module.__file__ = path
    module.__dict__.update(attrs or {})
    exec(compile(Path(path).read_text(), path, "exec"), module.__dict__)
    module.__dict__.update(  # these know real tensors only
        empty_strided_cpu=lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype),
        reinterpret_tensor=lambda x, shape, strides, at=0: x.as_strided(shape, strides, x.storage_offset() + at),
        assert_size_stride=lambda *_: None,
        extern_kernels=_ExternKernels(),
    )
    return module


class _ExternKernels:
    """Torch's own operators that fill a buffer; that of float8 has no shape function, and would run on real tensors."""

    def __getattr__(self, name: str) -> Any:
        return getattr(extern_kernels, name)

    @staticmethod
    def _scaled_mm(*_: Any, out: Tensor, **__: Any) -> Tensor:
        return out
