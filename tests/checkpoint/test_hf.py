"""To and from Hugging Face folders in one process: equal logits through transformers, equal bits after a round trip."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from scripts import convert_hf
from tests.tiny_run import run, write_corpus
from titan_like.checkpoint import hf, manager
from titan_like.checkpoint.commit import CheckpointError
from titan_like.config.errors import ConfigError
from titan_like.models.decoder import Decoder
from titan_like.models.flavors import ModelConfig
from titan_like.models.hf_format import hf_name
from titan_like.parallel.init import local_ranges

transformers = pytest.importorskip("transformers")
SHAPE: dict[str, Any] = dict(
    vocab_size=97, dim=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=80, max_seq_len=64, norm_eps=1e-5
)
LLAMA31: dict[str, Any] = dict(rope_theta=1e6, rope_scaling_factor=8.0, rope_original_max_seq_len=16)
CASES: dict[str, dict[str, Any]] = {
    "llama3.1, head size not dim / heads": LLAMA31,
    "one kv head": dict(n_kv_heads=1),
    "64 heads on 8": dict(n_heads=64, n_kv_heads=8, head_dim=4, dim=256),
    "tied": dict(tie_embeddings=True),
    "qwen2": dict(qkv_bias=True, norm_eps=1e-6, rope_theta=1e6, tie_embeddings=True),
    "qwen3": dict(qk_norm=True, norm_eps=1e-6, rope_theta=1e6),
}


def random_model(config: ModelConfig) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(config)
    for parameter in model.parameters():  # also norms and biases, so that none can be lost
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def save(model: Decoder, folder: Path) -> Path:
    """A checkpoint of step 7, as a run leaves it."""
    record = {"model": model.config.model_dump(), "tokenizer": None}
    convert_hf.init_process_group(torch.device("cpu"), 60)
    try:
        manager.save(folder, 7, manager.model_tensors(model), record, "")
    finally:
        convert_hf.close_process_group()
    return folder / "step-7"


def export(model: Decoder, folder: Path, **options: Any) -> Path:
    checkpoint = folder / "checkpoint" / "step-7"
    if not checkpoint.exists():
        save(model, checkpoint.parent)
    exporting = hf.Export(folder / "hf", model.config, **options)
    exporting.write(checkpoint)
    exporting.finish({"eos_token_id": 2})
    return folder / "hf"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("case", CASES)
def test_logits_and_round_trip(case: str, tmp_path: Path) -> None:
    """R208, R215: ours -> transformers has our logits; transformers -> ours has theirs; the bits come back."""
    ours = random_model(ModelConfig(**{**SHAPE, **CASES[case]}))
    folder = export(ours, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = torch.randint(0, 97, (2, 64))
    positions = torch.arange(64).expand(2, 64)
    expected = ours(tokens, positions)
    torch.testing.assert_close(theirs(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    assert (theirs.config.eos_token_id, theirs.config.bos_token_id, theirs.config.pad_token_id) == (2, None, None)

    theirs.save_pretrained(tmp_path / "theirs")  # in transformers' own words
    convert_hf.main(["import", str(tmp_path / "theirs"), str(tmp_path / "back")])
    back = Decoder(ModelConfig(**manager.read_record(tmp_path / "back", 0)["model"]))
    manager.load(tmp_path / "back", 0, manager.model_tensors(back), rng=False)
    assert back.config == ours.config
    for name, parameter in ours.named_parameters():
        assert torch.equal(dict(back.named_parameters())[name], parameter), name
    assert torch.equal(back(tokens, positions), expected)


def test_one_file_or_shards_with_an_index(tmp_path: Path) -> None:
    """R210: every tensor in one file, the index right, nothing left of the export before."""
    ours = random_model(ModelConfig(**SHAPE))
    folder = export(ours, tmp_path, max_shard_bytes=50_000)
    index = json.loads((folder / hf.INDEX).read_text())
    held = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                assert name not in held
                held[name] = file.name
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= 50_000
    assert held == index["weight_map"] and set(held) == {hf_name(name) for name, _ in ours.named_parameters()}
    assert index["metadata"]["total_size"] == 4 * sum(parameter.numel() for parameter in ours.parameters())
    count = len({*held.values()})
    assert count > 2 and f"model-00001-of-{count:05}.safetensors" in held.values()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.lm_head.weight, ours.output.weight)

    (folder / "README.md").write_text("the user's own")
    export(ours, tmp_path, max_shard_bytes=200_000)
    files = {*json.loads((folder / hf.INDEX).read_text())["weight_map"].values()}
    assert {path.name for path in folder.glob("*.safetensors")} == files and 1 < len(files) < count
    export(ours, tmp_path)
    assert names(folder) == ["README.md", "config.json", "model.safetensors"]


def test_a_tensor_larger_than_a_shard(tmp_path: Path) -> None:
    shards = hf.Export(tmp_path, ModelConfig(**SHAPE), max_shard_bytes=1).shards
    assert all(len(held) == 1 for held in shards.values()) and len(shards) == 3 + 2 * 9


@pytest.mark.parametrize("max_shard_bytes", [50_000, hf.MAX_SHARD_BYTES])
def test_tied(max_shard_bytes: int, tmp_path: Path) -> None:
    """R211: no lm_head without data, the flag set, one table in transformers."""
    folder = export(random_model(ModelConfig(**SHAPE, tie_embeddings=True)), tmp_path, max_shard_bytes=max_shard_bytes)
    held = [name for file in folder.glob("*.safetensors") for name in load_file(file)]
    assert "lm_head.weight" not in held and "model.embed_tokens.weight" in held
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.tie_word_embeddings and loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_padded_vocabulary(tmp_path: Path) -> None:
    """R218: 97 rows, padded to 128 inside, are 97 again after export."""
    source = export(random_model(ModelConfig(**SHAPE)), tmp_path / "source")
    convert_hf.import_folder(source, tmp_path / "padded", vocab_size=128)
    padded = manager.read_record(tmp_path / "padded", 0)
    assert padded["model"]["vocab_size"] == 128
    convert_hf.main(["export", str(tmp_path / "padded"), str(tmp_path / "out"), "--vocab_size=97"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 97
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    rows = hf.read_weights(tmp_path / "padded" / "step-0", ModelConfig(**padded["model"]), ["output.weight"])
    assert not rows["output.weight"][97:].any() and rows["output.weight"][:97].any()
    with pytest.raises(ConfigError, match="vocab_size 98 is not within the model's 97 rows"):
        hf.Export(tmp_path / "other", ModelConfig(**SHAPE), vocab_size=98)
    with pytest.raises(ConfigError, match="--vocab_size 96 would cut the 97 rows"):
        convert_hf.import_folder(source, tmp_path / "cut", vocab_size=96)


def test_dtypes(tmp_path: Path) -> None:
    """R132: bf16 on disk is fp32 in training, and so are the moments."""
    ours = random_model(ModelConfig(**SHAPE))
    folder = export(ours, tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert transformers.AutoConfig.from_pretrained(folder).dtype == torch.bfloat16
    write_corpus(tmp_path / "train")
    shape = {f"model__overrides__{key}": value for key, value in SHAPE.items()}
    trainer = run(
        tmp_path / "run", training__steps=1, training__mixed_precision_param="bfloat16", model__hf_path=folder,
        optimizer__lr=1e-30, model__name="llama2", **shape,
    )  # fmt: skip
    for name, parameter in trainer.model.named_parameters():
        expected = ours.get_parameter(name).bfloat16().float()
        torch.testing.assert_close(parameter.full_tensor(), expected, rtol=0, atol=1e-28)
        assert parameter.dtype == torch.float32
        assert trainer.optimizer.state[parameter]["exp_avg"].dtype == torch.float32


def test_a_checkpoint_wins_over_the_weights_to_start_from_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R082."""
    folder = export(random_model(ModelConfig(**SHAPE)), tmp_path)
    write_corpus(tmp_path / "train")
    settings = {f"model__overrides__{key}": value for key, value in SHAPE.items()}
    settings |= {"model__hf_path": folder, "model__name": "llama2", "checkpoint__enable": True}
    run(tmp_path / "run", training__steps=1, **settings)
    assert "ignored" not in capsys.readouterr().out
    run(tmp_path / "run", training__steps=2, checkpoint__resume="auto", **settings)
    assert f"model.hf_path {folder} is ignored: step 1 is here" in capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return export(random_model(ModelConfig(**SHAPE)), tmp_path, max_shard_bytes=60_000)


def damage(folder: Path, kind: str) -> None:
    file = folder / json.loads((folder / hf.INDEX).read_text())["weight_map"]["model.norm.weight"]
    tensors = load_file(file)
    if kind == "no file":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    elif kind == "index":
        (folder / hf.INDEX).write_text("{}")
    elif kind == "no tensor":
        save_file({name: t for name, t in tensors.items() if name != "model.norm.weight"}, file)
    elif kind == "another tensor":
        save_file({**tensors, "model.norm.bias": torch.zeros(48)}, file)
    elif kind == "shape":
        save_file({**tensors, "model.norm.weight": torch.zeros(47)}, file)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no file", "lacks model-000"),
        ("cut", "is damaged"),
        ("index", "index.json is damaged"),
        ("no tensor", "lacks the weights model.norm.weight"),
        ("another tensor", "has the weights model.norm.bias, which config.json's model has not"),
        ("shape", "model.norm.weight has the shape (47,), but config.json says (48,)"),
    ],
)
def test_damaged_folder(kind: str, message: str, folder: Path) -> None:
    damage(folder, kind)
    with pytest.raises(ConfigError) as caught:
        hf.Weights(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"])
def test_what_transformers_ignores_too(name: str, tmp_path: Path) -> None:
    """Buffers of old exports, and a head beside a tied table."""
    folder = export(random_model(ModelConfig(**SHAPE, tie_embeddings=True)), tmp_path)
    save_file({**load_file(folder / "model.safetensors"), name: torch.zeros(8)}, folder / "model.safetensors")
    hf.Weights(folder)


def test_a_part_is_read(folder: Path) -> None:
    weights = hf.Weights(folder)
    whole = weights.read("layers.1.attention.wo.weight", [(0, 48), (0, 64)])
    assert torch.equal(weights.read("layers.1.attention.wo.weight", [(3, 7), (16, 32)]), whole[3:7, 16:32])
    target = torch.full((128, 48), 5.0)
    hf.load_weights(weights, [("output.weight", torch.nn.Parameter(target))], local_ranges)
    assert torch.equal(target[:97], weights.read("output.weight", [(0, 97), (0, 48)])) and (target[97:] == 5).all()


def test_weights_of_others_are_not_written_over(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    save_file({"x": torch.zeros(1)}, theirs / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"model-00001-of-00002.safetensors is there and was not exported by titan_like"
    ):
        hf.Export(theirs, ModelConfig(**SHAPE))


def test_an_export_that_fails_leaves_the_one_before(folder: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    exporting = hf.Export(folder, ModelConfig(**SHAPE))
    with pytest.raises(CheckpointError, match="could not be loaded"):
        exporting.write(tmp_path / "nowhere")
    exporting.write(tmp_path / "checkpoint" / "step-7")  # and is killed before finish
    assert {path: path.read_bytes() for path in before} == before
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        hf.Export(blocked / "hf", ModelConfig(**SHAPE)).write(tmp_path / "checkpoint" / "step-7")


@pytest.mark.parametrize("tied", [False, True])
def test_torch_file(tied: bool, tmp_path: Path) -> None:
    ours = random_model(ModelConfig(**SHAPE, tie_embeddings=tied))
    hf.export_torch(save(ours, tmp_path / "checkpoint"), tmp_path / "to" / "model.pt", ours.config, torch.float32)
    loaded = Decoder(ours.config)
    loaded.load_state_dict(torch.load(tmp_path / "to" / "model.pt", weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), ours.parameters(), strict=True))
    assert names(tmp_path / "to") == ["model.pt"]


def test_memory_is_about_one_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is alive at a time: the tensors of one shard when exporting, one tensor when importing."""
    ours = random_model(ModelConfig(**SHAPE))
    read, sizes = hf.read_weights, []

    def watched(*arguments: Any) -> dict[str, torch.Tensor]:
        found = read(*arguments)
        sizes.append(sum(tensor.nbytes for tensor in found.values()))
        return found

    monkeypatch.setattr(hf, "read_weights", watched)
    folder = export(ours, tmp_path, max_shard_bytes=50_000)
    assert max(sizes) <= 50_000 and sum(sizes) == 4 * sum(parameter.numel() for parameter in ours.parameters())
    meta = hf.tensors_to_import(ours.config)
    assert all(tensor.is_meta and tensor.dtype == torch.float32 for tensor in meta.values())
    planner = hf.ReadingPlanner(hf.Weights(folder))
    planner.set_up_planner(meta, is_coordinator=True)
    plan = planner.create_local_plan()
    assert len(plan.items) == len(meta)
    for item in plan.items:
        name = item.index.fqn.removeprefix("model.")
        assert torch.equal(planner.resolve_data(item), ours.get_parameter(name))
    convert_hf.main(["import", str(folder), str(tmp_path / "back")])  # DCP keeps in memory what one file holds
    assert len(list((tmp_path / "back" / "step-0").glob("*.distcp"))) == len(meta)
