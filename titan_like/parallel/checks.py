"""What a model's shape asks of the mesh. Imports no torch: the launcher calls it before any process starts."""

from titan_like.config import Config
from titan_like.config.composition import stage_count
from titan_like.models.flavors import ModelConfig


def model_checks(model: ModelConfig, config: Config) -> list[str]:
    """One sentence for each reason why `model` cannot be cut as `config` asks."""
    return [*_tensor(model, config), *_pipeline(model, config), *_recompute(model, config)]


def _tensor(model: ModelConfig, config: Config) -> list[str]:
    degree = config.parallelism.tensor_parallel_degree
    sizes = {"n_heads": model.n_heads, "n_kv_heads": model.n_kv_heads, "ffn_dim": model.ffn_dim}
    if all(size % degree == 0 for size in sizes.values()):
        return []
    shown = ", ".join(f"{name} ({size})" for name, size in sizes.items() if size % degree)
    fits = [d for d in range(1, model.n_kv_heads + 1) if all(size % d == 0 for size in sizes.values())]
    return [
        f"parallelism.tensor_parallel_degree ({degree}) does not divide {shown} of {config.model.name} "
        f"{config.model.flavor}; degrees that fit: {', '.join(map(str, fits))}"
    ]


def _recompute(model: ModelConfig, config: Config) -> list[str]:
    option = config.activation_checkpoint.selective_ac_option
    if option == "op" or option <= model.n_layers:
        return []
    return [
        f"activation_checkpoint.selective_ac_option ({option}) recomputes every {option}th layer, but "
        f"{config.model.name} {config.model.flavor} has {model.n_layers}, so none; lower it, or set "
        'activation_checkpoint.mode to "none"'
    ]


def _pipeline(model: ModelConfig, config: Config) -> list[str]:
    if config.parallelism.pipeline_parallel_degree == 1:
        return []
    try:
        split, stages = config.parallelism.pipeline_parallel_split, stage_count(config)
    except (OSError, ValueError):  # of a schedule's file: config/checks.py says so
        return []
    if stages > model.n_layers:
        return [
            f"{stages} pipeline stages need {stages} layers or more, but {config.model.name} {config.model.flavor} has "
            f"{model.n_layers}; lower parallelism.pipeline_parallel_degree or pipeline_parallel_virtual_stages"
        ]
    if split and max(split) >= model.n_layers:
        return [
            f"parallelism.pipeline_parallel_split {list(split)} names layer {max(split)}, but the layers of "
            f"{config.model.name} {config.model.flavor} are 0 to {model.n_layers - 1}; lower it"
        ]
    return []
