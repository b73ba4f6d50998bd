"""Training with float8 layers, emulated, in one process; what more processes do is shown in tests/distributed/."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import float8_scaling_utils
from torchao.float8.float8_linear import Float8Linear

from tests.distributed.compositions import composition
from tests.tiny_run import losses, run, write_corpus
from titan_like.checkpoint.manager import model_tensors
from titan_like.config import Config, load_config
from titan_like.config.schema import Float8
from titan_like.models.flavors import resolve
from titan_like.oracle import make_batch
from titan_like.parallel.apply import build_model
from titan_like.parallel.mesh import build_mesh
from titan_like.parallel.model import ParallelModel
from titan_like.quantize.float8 import hardware_checks
from titan_like.step import accumulate_gradients

SHAPE = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 128}
SETTINGS = {
    **{f"model.overrides.{key}": value for key, value in SHAPE.items()},
    "training.seq_len": 32,
    "training.local_batch_size": 8,
    "optimizer.lr": 0.003,
}
PLAIN = "kv=4 ffn=64"  # the shape of the compositions with float8
DEBUG = (  # the shipped debug model, every layer of its blocks in float8
    *("--float8.enable", "--float8.emulate", "--float8.filter_fqns=output", "--training.mixed_precision_param=float32"),
    *("--training.seq_len=256", "--training.local_batch_size=4"),
)
STEPS, BOUND = 50, 0.01  # of the loss, relative, at every step


def float8(recipe: str = "tensorwise", **more: object) -> dict[str, object]:
    on = {"enable": "true", "emulate": "true", "filter_fqns": "[]", "recipe": recipe, **more}
    return {f"float8.{key}": value for key, value in on.items()}


def curve(folder: Path, **settings: object) -> list[float]:
    settings = {"training.steps": STEPS, "training.mixed_precision_param": "bfloat16", **settings}
    run(folder, **SETTINGS, **settings)
    return list(losses(folder).values())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A folder beside the corpus, and the losses in bf16."""
    folder = tmp_path_factory.mktemp("float8")
    write_corpus(folder / "train", documents=200)
    return folder, curve(folder / "bf16")


def distance(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "recipe", ["tensorwise", "rowwise", pytest.param("rowwise_with_gw_hp", marks=pytest.mark.slow)]
)
def test_the_loss_tracks_that_of_bf16(recipe: str, plain: tuple[Path, list[float]]) -> None:
    folder, expected = plain
    assert expected[-1] < 0.5 * expected[0]  # it learns
    found = curve(folder / recipe, **float8(recipe))
    assert 0 < distance(found, expected) < BOUND


def test_a_wrong_scale_leaves_the_bound(plain: tuple[Path, list[float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: without scales the gradients are too small for float8."""
    monkeypatch.setattr(float8_scaling_utils, "tensor_to_scale", lambda *args, **kwargs: torch.ones(()))
    folder, expected = plain
    found = curve(folder / "unscaled", **{**float8(), "training.steps": 20, "lr_schedule.decay_steps": 0})
    assert distance(found, expected[:20]) > 2 * BOUND


def test_float8_and_plain_runs_load_each_other_bit_by_bit(plain: tuple[Path, list[float]]) -> None:
    """Names and weights in a checkpoint are those of plain layers, also where FSDP gathers them in float8."""
    base = {
        **SETTINGS, "training.mixed_precision_param": "float32", "checkpoint.enable": True,
        "checkpoint.resume": "auto", "checkpoint.allow_changes": "true",
    }  # fmt: skip
    on = float8(enable_fsdp_float8_all_gather="true", precompute_float8_dynamic_scale_for_fsdp="true")
    for first, then in ((on, {}), ({}, on)):
        folder = plain[0] / f"saved-{'float8' if first else 'plain'}"
        saved = model_tensors(run(folder, **base, **first, **{"training.steps": 2}).model)
        loaded = model_tensors(run(folder, **base, **then, **{"training.steps": 2}).model)
        assert saved.keys() == loaded.keys()
        for name in saved:
            assert torch.equal(local(saved[name]), local(loaded[name])), name
            assert type(local(saved[name])) in (torch.Tensor, torch.nn.Parameter)
        again = run(folder, **base, **then, **{"training.steps": 4})
        assert again.counters.step == 4
        assert all(torch.isfinite(local(tensor)).all() for tensor in model_tensors(again.model).values())


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def built(line: str) -> ParallelModel:
    config = composition(line)
    shape = resolve(config.model.name, config.model.flavor, config.model.overrides)
    return build_model(shape, config, build_mesh("cpu", config.parallelism), torch.device("cpu"))


@pytest.mark.usefixtures("one_process")
def test_weights_start_as_they_are_without_float8() -> None:
    plain, converted = built(PLAIN), built("float8=tensorwise gather=true")
    assert sum(isinstance(module, Float8Linear) for module in converted.parts[0].modules()) == 4 * 7
    expected = dict(plain.named_parameters())
    assert list(expected) == [name for name, _ in converted.named_parameters()]
    for name, tensor in model_tensors(converted).items():
        assert torch.equal(local(tensor), expected[name.removeprefix("model.")])
        assert local(tensor).dtype == torch.float32


@pytest.mark.usefixtures("one_process")
def test_gradients_are_roughly_those_of_fp32() -> None:
    """e4m3 rounds by up to 1/16 and e5m2 by 1/8; over a matrix the errors average out to some percent."""
    found = {}
    for line in (PLAIN, "float8=tensorwise", "float8=rowwise"):
        model = built(line)
        batch = make_batch(model.config, composition(line), model.mesh, 0)
        accumulate_gradients(model, [batch], torch.tensor(1.0))
        found[line] = torch.cat([p.grad.flatten() for _, p in model.named_parameters() if p.grad is not None])
    for line in ("float8=tensorwise", "float8=rowwise"):
        assert 1e-3 < (found[line] - found[PLAIN]).norm() / found[PLAIN].norm() < 0.1


class Count(TorchDispatchMode):
    """Operations that really run: not those that selective recompute answers from what it saved."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_difference_in_the_last_bit_grows_to_that_of_float8(recipe: str) -> None:
    """So no two orders of a sum give the same gradients, however they come about: here, embeddings that differ by 1e-7
    in one process. The debug model has numbers enough for some to be carried over a boundary."""
    config = load_config([*DEBUG, f"--float8.recipe={recipe}"])
    without = config.model_copy(update={"float8": Float8()})
    shape, mesh = resolve("llama3", "debug", {}), build_mesh("cpu", config.parallelism)
    batch = make_batch(shape, config, mesh, step=0)

    def gradients(config: Config, factor: float) -> dict[str, torch.Tensor]:
        model = build_model(shape, config, mesh, torch.device("cpu"))
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            parameters["tok_embeddings.weight"].mul_(factor)
        accumulate_gradients(model, [batch], torch.tensor(1.0))
        return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}

    def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
        return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)

    plain, other = gradients(config, 1.0), gradients(config, 1 + 1.2e-7)
    assert 1e-2 < worst(other, plain) < 0.3
    assert 1e-2 < worst(plain, gradients(without, 1.0)) < 0.3


def operations(line: str) -> Counter[str]:
    model = built(line)
    batch = make_batch(model.config, composition(line), model.mesh, 0)
    with Count() as count:
        accumulate_gradients(model, [batch], torch.tensor(1.0))
    return count.found


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("recipe", "look"), [("tensorwise", "aten::max"), ("rowwise", "aten::amax")])
def test_selective_recompute_knows_float8_products_and_keeps_their_scales(recipe: str, look: str) -> None:
    """Of the 7 products of each of 4 blocks every second is kept, so 4 are computed again; the scales all are kept."""
    none, selective = (operations(f"float8={recipe} {mode}") for mode in ("", "recompute=selective"))
    assert selective["aten::mm"] == none["aten::mm"] + 4 * 4
    # 2 casts for each product: 3 products, 28 layers.
    assert selective[look] == none[look] == operations("")[look] + 2 * 3 * 28


@pytest.mark.usefixtures("one_process")
def test_a_gather_in_float8_of_whole_weights_is_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "titan_like.parallel.apply")
    built("float8=tensorwise gather=true")
    assert "enable_fsdp_float8_all_gather has no effect: no weight is sharded" in caplog.text


def test_hardware_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """R130."""
    settings, gpu = Float8(enable=True), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    (problem,) = hardware_checks(gpu, settings)
    assert "NVIDIA A100 has compute capability 8.0; set float8.emulate" in problem
    assert hardware_checks(gpu, Float8(enable=True, emulate=True)) == hardware_checks(gpu, Float8()) == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert hardware_checks(gpu, settings) == []
