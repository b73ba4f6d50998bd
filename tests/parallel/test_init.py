"""Initial weights are a function of (seed, name). That they are bit-equal on every mesh, tests/distributed/ shows: the
oracle compares each composed model with a plain one of the same seed."""

import torch
from torch import nn

from titan_like.models.decoder import Decoder
from titan_like.models.flavors import resolve
from titan_like.parallel.init import init_weights

SHAPE = resolve("llama3", "debug", {"n_layers": 2, "vocab_size": 300, "init_std": 0.02})


def initialised(seed: int) -> dict[str, torch.Tensor]:
    model = Decoder(SHAPE)
    init_weights(model.named_parameters(), SHAPE, seed)
    return dict(model.named_parameters())


def test_same_seed_same_bits_other_seed_other_weights() -> None:
    first, again, other = initialised(1), initialised(1), initialised(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["output.weight"], other["output.weight"])


def test_the_name_counts_not_the_order() -> None:
    first = initialised(1)
    alone = nn.Parameter(torch.empty(300, 128))
    init_weights(iter([("output.weight", alone)]), SHAPE, 1)
    assert torch.equal(alone, first["output.weight"])
    assert not torch.equal(first["tok_embeddings.weight"], first["output.weight"])


def test_the_definition_is_fixed() -> None:
    """A change of these numbers changes every model that is started from a seed: they must never change."""
    weight = initialised(0)["tok_embeddings.weight"]
    expected = torch.tensor(FIRST_ROW)
    torch.testing.assert_close(weight[0, :4], expected, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(weight[299, :4], torch.tensor(LAST_ROW), rtol=1e-5, atol=1e-8)


def test_norms_are_one_and_projections_back_are_smaller() -> None:
    weights = initialised(3)
    assert torch.equal(weights["norm.weight"], torch.ones(128))
    assert abs(weights["layers.0.attention.wq.weight"].std().item() - 0.02) < 1e-3
    assert abs(weights["layers.0.attention.wo.weight"].std().item() - 0.02 / (2 * 2) ** 0.5) < 1e-3


FIRST_ROW = [-0.018587992, -0.014062666, 0.045611553, -0.000167687]
LAST_ROW = [0.016371554, -0.026558496, -0.001513365, -0.021279618]
