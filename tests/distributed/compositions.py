"""The compositions that are compared with one process, by number of gloo processes.

Each is a line of short settings, see SHORT. A test checks that every pair of features that config/composition.py allows
is in some line.
"""

from titan_like.config import Config, load_config

SHORT = {
    "pp": "parallelism.pipeline_parallel_degree",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "replicate": "parallelism.data_parallel_replicate_degree",
    "shard": "parallelism.data_parallel_shard_degree",
    "reshard": "parallelism.fsdp_reshard_after_forward",
    "cp": "parallelism.context_parallel_degree",
    "rotate": "parallelism.context_parallel_rotate_method",
    "balance": "parallelism.context_parallel_load_balance",
    "tp": "parallelism.tensor_parallel_degree",
    "loss_parallel": "parallelism.enable_loss_parallel",
    "split": "parallelism.pipeline_parallel_split",
    "virtual": "parallelism.pipeline_parallel_virtual_stages",
    "microbatch": "parallelism.pipeline_parallel_microbatch_size",
    "recompute": "activation_checkpoint.mode",
    "option": "activation_checkpoint.selective_ac_option",
    "compile": "compile.enable",
    "dtype": "training.mixed_precision_param",
    "batch": "training.local_batch_size",
    "global": "training.global_batch_size",
    "documents": "data.reset_attention_mask",
    "restart": "data.reset_position_ids",
    "chunks": "training.loss_chunks",
    "z": "training.z_loss",
    "float8": "float8.recipe",
    "gather": "float8.enable_fsdp_float8_all_gather",
    "scales": "float8.precompute_float8_dynamic_scale_for_fsdp",
    "family": "model.name",
    "tied": "model.overrides.tie_embeddings",
    "vocab": "model.overrides.vocab_size",
    "kv": "model.overrides.n_kv_heads",
    "ffn": "model.overrides.ffn_dim",
    "layers": "model.overrides.n_layers",
}
SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

ONE = (
    "dtype=bfloat16 chunks=3 z=0.01",
    "recompute=selective",
    "documents=true restart=true global=8",
    "compile=true recompute=full chunks=3 z=0.01",
)
TWO = (
    "global=16",
    "global=16 reshard=never chunks=3 z=0.01",
    "reshard=always dtype=bfloat16",
    "shard=1 replicate=2",
    "documents=true restart=true",
    "batch=1 global=4 documents=true restart=true",
    "tp=2",
    "tp=2 batch=1 global=2",
    "tp=2 loss_parallel=false vocab=257",
    "tp=2 loss_parallel=false chunks=3 z=0.01",
    "tp=2 dtype=bfloat16 chunks=3 z=0.01",
    "tp=2 family=qwen3 recompute=selective",
    "tp=2 family=qwen2 vocab=259 chunks=3 z=0.01",
    "cp=2",
    "cp=2 rotate=alltoall balance=false chunks=3 z=0.01",
    "cp=2 documents=true",
    "pp=2 tied=true layers=5 global=8",
    "pp=2 tied=true schedule=ZBVZeroBubble chunks=3 z=0.01",
    "pp=2 schedule=Interleaved1F1B split=1,2,3 microbatch=2 batch=8",
    "pp=2 schedule=LoopedBFS virtual=3 layers=6",
    "pp=2 schedule={csv}",
    "shard=2 tied=true compile=true recompute=selective chunks=3 z=0.01",
    "tp=2 float8=tensorwise family=qwen3",
    "tp=2 float8=tensorwise kv=2 documents=true",
    "tp=2 float8=rowwise_with_gw_hp family=qwen2 loss_parallel=false",
    "pp=2 float8=rowwise tied=true chunks=3 z=0.01",
    "pp=2 float8=tensorwise gather=true chunks=3 z=0.01",
    "cp=2 float8=tensorwise documents=true restart=true",
    "global=16 float8=tensorwise gather=true scales=true reshard=never",
    "shard=2 float8=tensorwise gather=true scales=true compile=true recompute=selective",
    "tp=2 float8=rowwise compile=true recompute=full",
)
FOUR = (
    "replicate=2 global=32",
    "replicate=2 recompute=full dtype=bfloat16 reshard=always chunks=3 z=0.01",
    "replicate=2 shard=1 tp=2 documents=true restart=true",
    "replicate=2 shard=1 cp=2 global=16",
    "shard=2 tp=2 vocab=257 recompute=selective",
    "shard=2 tp=2 tied=true reshard=always recompute=full",
    "shard=2 tp=2 dtype=bfloat16 global=16",
    "shard=2 cp=2 recompute=selective option=2 reshard=always",
    "shard=2 cp=2 rotate=alltoall global=16 recompute=full",
    "shard=2 tp=2 documents=true dtype=bfloat16 recompute=selective global=16 reshard=always chunks=3 z=0.01",
    "cp=4 rotate=alltoall recompute=selective",
    "cp=4 balance=false documents=true",
    "cp=2 tp=2",
    "cp=2 tp=2 documents=true restart=true tied=true",
    "cp=2 tp=2 rotate=alltoall dtype=bfloat16",
    "tp=4 kv=4 vocab=257",
    *(f"pp=2 shard=2 schedule={name} global=16" for name in SCHEDULES),
    *(f"pp=2 tp=2 schedule={name} chunks=3 z=0.01" for name in SCHEDULES),
    *(f"pp=2 cp=2 schedule={name}" for name in SCHEDULES),
    "pp=2 replicate=2 shard=1 recompute=selective",
    "pp=2 replicate=2 shard=1 schedule=ZBVZeroBubble documents=true",
    "pp=2 cp=2 schedule=ZBVZeroBubble documents=true restart=true",
    "pp=2 tp=2 schedule=InterleavedZeroBubble loss_parallel=false",
    "pp=2 cp=2 rotate=alltoall tied=true dtype=bfloat16",
    "pp=2 cp=2 rotate=alltoall schedule=InterleavedZeroBubble tied=true",
    "pp=2 shard=2 reshard=always schedule=Interleaved1F1B documents=true",
    "pp=2 shard=2 tied=true schedule=DualPipeV dtype=bfloat16 chunks=3 z=0.01",
    "pp=2 tp=2 tied=true recompute=full",
    "pp=4",
    "pp=4 schedule=ZBVZeroBubble layers=8 batch=8",
    "shard=2 tp=2 compile=true",
    "cp=2 tp=2 compile=true recompute=full documents=true",
    "pp=2 tp=2 compile=true schedule=Interleaved1F1B",
    "replicate=2 compile=true dtype=bfloat16 reshard=always global=32",
    "pp=2 cp=2 compile=true rotate=alltoall tied=true",
    "replicate=2 float8=tensorwise gather=true scales=true reshard=always recompute=full dtype=bfloat16 global=32",
    "replicate=2 float8=rowwise reshard=always recompute=full dtype=bfloat16 global=32",
    "shard=2 tp=2 float8=tensorwise gather=true scales=true documents=true tied=true recompute=selective",
    "shard=2 tp=2 float8=rowwise documents=true restart=true recompute=selective",
    "shard=2 cp=2 float8=tensorwise gather=true rotate=alltoall",
    "cp=4 float8=rowwise rotate=alltoall",
    "pp=2 shard=2 float8=tensorwise gather=true scales=true schedule=ZBVZeroBubble global=16",
    "pp=2 tp=2 float8=rowwise schedule=InterleavedZeroBubble",
)
EIGHT = (
    "replicate=2 shard=2 tp=2",
    "replicate=2 shard=2 cp=2 documents=true",
    "replicate=2 shard=2 cp=2 rotate=alltoall reshard=always tied=true",
    "shard=2 cp=2 tp=2 global=16 tied=true",
    "pp=2 shard=2 tp=2 schedule=Interleaved1F1B tied=true global=16",
    "pp=2 shard=2 tp=2 schedule=ZBVZeroBubble",
    "pp=2 cp=2 tp=2 schedule=DualPipeV",
    "pp=2 cp=2 tp=2 documents=true restart=true vocab=257 recompute=full",
    "pp=2 shard=2 cp=2 schedule=InterleavedZeroBubble",
    "pp=2 replicate=2 shard=2 recompute=selective",
    "pp=2 replicate=2 shard=1 cp=2 schedule=ZBVZeroBubble",
)
MATRIX = {1: ONE, 2: TWO, 4: FOUR, 8: EIGHT}

# A 1F1B order for two ranks, written by hand: 4 micro-batches, the stages 0 and 1.
CSV = "0F0,0F1,,0B0,0F2,0B1,0F3,0B2,,0B3\n,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,\n"


def composition(line: str) -> Config:
    """The config of a line, for a model of 4 blocks with grouped-query attention and sequences of 32."""
    # With float8, sizes of which two tensor-parallel ranks have multiples of 16 each.
    float8 = {"n_kv_heads": 4, "ffn_dim": 64} if "float8=" in line else {}
    shape = {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 48, "vocab_size": 64}
    settings = {
        **{f"model.overrides.{key}": value for key, value in (shape | float8).items()},
        "model.overrides.tie_embeddings": "false",
        "training.seq_len": 32,
        "training.local_batch_size": 4,
        "training.mixed_precision_param": "float32",
        **{SHORT[key]: value for key, value in (pair.split("=", 1) for pair in line.split())},
    }
    if "float8.recipe" in settings:  # every layer of 16 and more, emulated
        settings |= {"float8.enable": "true", "float8.emulate": "true", "float8.filter_fqns": "output"}
    return load_config([f"--{key}={value}" for key, value in settings.items()])
