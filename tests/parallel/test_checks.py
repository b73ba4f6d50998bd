"""What a model's shape asks of the mesh."""

import pytest

from titan_like.config import load_config
from titan_like.models.flavors import resolve
from titan_like.parallel.checks import model_checks


def problems(*argv: str, **shape: int) -> list[str]:
    config = load_config(argv)
    return model_checks(resolve(config.model.name, config.model.flavor, shape), config)


def test_heads_that_tensor_parallelism_cannot_share() -> None:
    """R095: 3 key/value heads on 2 ranks."""
    tp2 = "--parallelism.tensor_parallel_degree=2"
    (problem,) = problems(tp2, dim=96, n_heads=6, n_kv_heads=3)
    assert problem == (
        "parallelism.tensor_parallel_degree (2) does not divide n_kv_heads (3) of llama3 debug; degrees that fit: 1, 3"
    )
    assert problems(tp2, n_heads=4, n_kv_heads=2) == []


@pytest.mark.parametrize(("layers", "stages"), [(3, 4), (1, 4)])
def test_more_stages_than_layers(layers: int, stages: int) -> None:
    argv = ("--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=LoopedBFS")
    (problem,) = problems(*argv, n_layers=layers)
    assert problem.startswith(f"{stages} pipeline stages need {stages} layers or more, but llama3 debug has {layers}")
    assert problems(*argv, n_layers=stages) == []


def test_a_split_at_a_layer_that_is_not_there() -> None:
    (problem,) = problems(
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.pipeline_parallel_split=4",
        "--training.local_batch_size=2",
    )
    assert "names layer 4, but the layers of llama3 debug are 0 to 3" in problem
