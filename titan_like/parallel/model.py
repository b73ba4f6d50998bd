"""This rank's part of a parallel model, as the training step sees it."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from titan_like.models.decoder import Decoder, canonical_name
from titan_like.models.flavors import ModelConfig
from titan_like.parallel.mesh import Mesh
from titan_like.parallel.pipeline import Pipeline
from titan_like.quantize.float8 import precompute_scales


@dataclass(frozen=True)
class ParallelModel:
    """What parallel/apply.py builds.

    Attributes:
        parts: this rank's pipeline stages, in order; without pipelining the whole decoder.
        sequence_index: the indices of a row that this rank holds, (S / cp,) int64; None: all.
        reduces_once: gradients are reduced with the last micro-batch of a step only.
        precomputes_scales: the float8 scales of the weights are found after each update, not as they are gathered.
    """

    config: ModelConfig
    mesh: Mesh
    parts: list[Decoder]
    pipeline: Pipeline | None
    sequence_index: Tensor | None
    reduces_once: bool
    precomputes_scales: bool = False

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names that they have in checkpoints. A table that is tied across pipeline stages comes
        once per copy, under one name."""
        for part in self.parts:
            for name, parameter in part.named_parameters():
                yield canonical_name(name, self.config), parameter

    def local_batch(self, batch: Any) -> Any:
        """This rank's part of every sequence of a micro-batch (a dataclass, all tensors of which are (B, S))."""
        if self.sequence_index is None:
            return batch
        cut = {
            field.name: value[:, self.sequence_index].contiguous()
            for field in dataclasses.fields(batch)
            if isinstance(value := getattr(batch, field.name), Tensor)
        }
        return dataclasses.replace(batch, **cut)

    def forward_backward(self, batch: Any, scale: Tensor, *, is_last: bool) -> Tensor:
        """Add up gradients of scale x summed loss; returns that loss, 0 on ranks without the last stage."""
        if self.pipeline is not None:
            with record_function("pipeline"):  # its stages name each forward and backward
                return self.pipeline.forward_backward(batch, scale)
        model = self.parts[0]
        if self.reduces_once and isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
        with record_function("forward"):
            loss = model(batch.tokens, batch.positions, batch.documents(), batch.labels, scale)
        with record_function("backward"):
            loss.backward()
        return loss.detach()

    def forward(self, batch: Any) -> Tensor:
        """Summed loss without gradients, 0 on ranks without the last stage."""
        if self.pipeline is not None:
            return self.pipeline.forward(batch)
        return self.parts[0](batch.tokens, batch.positions, batch.documents(), batch.labels)

    def reshard(self) -> None:
        """Leave each rank its shards only. What FSDP keeps gathered after a forward, it gives up after the backward;
        where none follows, parameters would be whole ones that neither the optimizer nor a checkpoint knows."""
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def finish_gradients(self) -> list[tuple[nn.Parameter, int]]:
        """Complete the gradients after the last backward; returns each parameter with the number of its copies on
        pipeline stages: 2 for a tied table, else 1."""
        parameters = [parameter for _, parameter in self.named_parameters()]
        for parameter in parameters:
            gradient = parameter.grad
            # Tensor parallelism alone leaves gradients of norms and tables to be added up.
            if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
                parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        copies = self._tied_copies()
        if copies:
            self._sum_tied_gradients(copies)
        tied = {id(copy) for copy in copies.values()}
        return [(parameter, 2 if id(parameter) in tied else 1) for parameter in parameters]

    def after_update(self) -> None:
        """What follows from the weights, after each update of theirs."""
        if self.precomputes_scales:
            precompute_scales(self.parts)

    def _tied_copies(self) -> dict[str, nn.Parameter]:
        """The copies here of a table that first and last stage share: "tok_embeddings", "output", or both."""
        if self.pipeline is None or not self.config.tie_embeddings:
            return {}
        modules = {name: module for part in self.parts for name, module in part.named_children()}
        return {name: modules[name].weight for name in ("tok_embeddings", "output") if modules.get(name) is not None}  # type: ignore[misc]

    @torch.no_grad()
    def _sum_tied_gradients(self, copies: dict[str, nn.Parameter]) -> None:
        gradients = [_local(copy.grad) for copy in copies.values() if copy.grad is not None]
        if len(gradients) == 2:  # a V-shaped schedule: both are here
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
            return
        (gradient,) = gradients
        group = self.mesh.axes["pp"].get_group()
        peer = dist.get_global_rank(group, 0 if "output" in copies else group.size() - 1)
        other = torch.empty_like(gradient)
        exchange = [dist.P2POp(dist.isend, gradient, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        gradient += other  # a + b here and b + a there are the same bits


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
