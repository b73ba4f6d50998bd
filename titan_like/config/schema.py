"""Every setting of a run: one frozen model per TOML section. The descriptions here are what --help prints.

Types are strict: no value is converted except an int given for a float. NaN and infinity are refused, lists are held
as tuples. To add a key, add one line here; the command line, --help and the error messages follow from it.
Relative paths are relative to the current directory.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _list_to_tuple(value: Any) -> Any:
    """TOML has lists, a frozen model needs tuples; anything else goes on to the strict type check."""
    return tuple(value) if isinstance(value, list) else value


SINGLE_STAGE = ("GPipe", "1F1B")  # one stage per rank
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the first and the last stage share a rank
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SHAPED)  # gradients of inputs and of weights at different times
SCHEDULES = (*SINGLE_STAGE, "LoopedBFS", "Interleaved1F1B", *SPLIT_BACKWARD)

AUTO_FILTER = "auto_filter_small_kn"  # torchtitan's name for the filter by size

Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
MinusOne = Annotated[int, Field(ge=-1, le=-1)]  # not Literal[-1], which takes -1.0 even in strict mode
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_list_to_tuple)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Naturals = Annotated[tuple[Natural, ...], BeforeValidator(_list_to_tuple)]
Layers = Annotated[tuple[Positive, ...], BeforeValidator(_list_to_tuple)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_list_to_tuple)]
Precision = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class Job(Section):
    """Where the run lives. (--job.config_file, on the command line only, names the TOML file.)"""

    dump_folder: Text = Field("outputs/run", description="the run folder: logs, metrics, checkpoints")
    description: str = Field("", description="a note that is saved with the run")


class Model(Section):
    """Which model is trained."""

    name: Literal["llama2", "llama3", "qwen2", "qwen3"] = Field("llama3", description="model family")
    flavor: Text = Field("debug", description="size of the model within its family")
    tokenizer_path: str = Field("", description="a SentencePiece .model; empty: the one named by the data's manifest")
    overrides: dict[str, int | float | bool] = Field({}, description="model fields that replace those of the flavor")
    hf_path: str = Field(
        "", description="a Hugging Face folder whose weights the training starts from; empty: random weights"
    )


class Training(Section):
    """Length, batch and numerics of the training."""

    steps: Positive = Field(100, description="optimizer steps of the whole run")
    seq_len: Positive = Field(2048, description="tokens per sequence")
    local_batch_size: Positive = Field(1, description="sequences per micro-batch per data-parallel rank")
    global_batch_size: MinusOne | Positive = Field(
        -1, description="sequences per optimizer step; -1: one micro-batch of every data-parallel rank"
    )
    max_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this global norm")
    seed: Seed = Field(0, description="seed of the initial weights and of all randomness but the data order")
    deterministic: bool = Field(False, description="bitwise repeatable kernels, slower")
    mixed_precision_param: Precision = Field("bfloat16", description="dtype of the weights while computing")
    mixed_precision_reduce: Precision = Field("float32", description="dtype of the gradients while being reduced")
    loss_chunks: MinusOne | Positive = Field(
        -1,
        description="the head and the loss go over a micro-batch's tokens in so many chunks, one chunk's logits at a "
        "time; 1: all at once; -1: chunks of as many tokens as the model is wide, or of 1024",
    )
    z_loss: float = Field(
        0.0, ge=0, description="factor of the squared log of the softmax's denominator, added to the training loss"
    )
    skip_nonfinite: bool = Field(
        True, description="skip a step whose gradient is not finite, and say so; false: stop at the next logged step"
    )
    gc_freq: Positive = Field(
        50, description="steps between two garbage collections of Python, which all ranks do at the same step"
    )

    def chunks_of(self, tokens: int, dim: int) -> int:
        """Chunks of the loss over `tokens` hidden states of width `dim` on one rank.

        A chunk as long as the model is wide has as many logits as the head has weights: shorter ones would save little
        and make the sum of the head's gradient, which is read and written once per chunk, dearer than the products.
        """
        return self.loss_chunks if self.loss_chunks > 0 else -(-tokens // max(dim, 1024))


class Weighted(Section):
    """A set of shards in a blend."""

    prefix: Text = Field(description="as an entry of data.train")
    weight: float = Field(gt=0, description="share of the samples, and so of the tokens; the sum of all is made 1")


class Data(Section):
    """The token shards that are read and their order."""

    train: Annotated[tuple[Text | Weighted, ...], BeforeValidator(_list_to_tuple)] = Field(
        ("data/stdlib/train",),
        min_length=1,
        description="prefixes of the .idx/.bin shards to train on, read as one set; or a blend by weights. "
        "A folder or prefix* stands for all shards in it",
    )
    validation: Texts = Field(("data/stdlib/validation",), description="the same to validate on, without weights")
    seed: Seed = Field(0, description="seed of the order of the samples")
    reset_attention_mask: bool = Field(
        False, description="no token sees another document of its row, and none predicts the next one's first token"
    )
    reset_position_ids: bool = Field(False, description="positions start at 0 in every document of a row")
    eod_mask_loss: bool = Field(
        False, description="the label after a document's last token (its EOD) does not count, whatever the masks are"
    )
    num_workers: Natural = Field(0, description="loader processes per rank; 0: read in the training process")
    on_exhausted: Literal["repeat", "stop"] = Field(
        "repeat",
        description="after one epoch (of any set in a blend): repeat in a new order, or stop the run with a checkpoint",
    )

    @property
    def train_entries(self) -> tuple[str, ...]:
        return tuple(entry.prefix if isinstance(entry, Weighted) else entry for entry in self.train)

    @property
    def train_weights(self) -> tuple[float, ...] | None:
        """One per entry, None for a single set."""
        weights = tuple(entry.weight for entry in self.train if isinstance(entry, Weighted))
        return weights or None


class Optimizer(Section):
    """How gradients change the weights."""

    name: Literal["adamw", "sgd"] = Field("adamw", description="the update rule")
    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    betas: Betas = Field((0.9, 0.95), description="AdamW's decay rates of the first and second moment")
    eps: float = Field(1e-8, gt=0, description="AdamW's term against division by zero")
    weight_decay: float = Field(
        0.1, ge=0, description="weight decay, not on norms and biases; decoupled in adamw, added to the gradient in sgd"
    )
    implementation: Literal["auto", "fused", "foreach", "for-loop"] = Field(
        "auto", description="kernel; auto: fused where it exists"
    )


class LRSchedule(Section):
    """Warm-up, stable phase, decay: the learning rate over the steps as a factor of optimizer.lr."""

    warmup_steps: Natural = Field(
        0, description="steps of linear rise from zero; may exceed training.steps if decay_steps is -1"
    )
    decay_steps: MinusOne | Natural = Field(-1, description="last steps that decay; -1: all after the warm-up")
    decay_type: Literal["linear", "cosine", "1-sqrt"] = Field("linear", description="shape of the decay")
    min_lr_factor: float = Field(0.0, ge=0, le=1, description="the factor that the decay ends at")


class Parallelism(Section):
    """Degrees of the device mesh and how each axis works; the product of the degrees is the number of processes."""

    data_parallel_replicate_degree: Positive = Field(1, description="copies of the model (DDP, or HSDP's outer axis)")
    data_parallel_shard_degree: Literal[-1] | Positive = Field(
        -1, description="ranks that share one copy (FSDP2); -1: all remaining ranks"
    )
    tensor_parallel_degree: Positive = Field(
        1, description="ranks that share each matrix and, between them, the sequence (sequence parallel)"
    )
    context_parallel_degree: Positive = Field(1, description="ranks that share each sequence, attention included")
    pipeline_parallel_degree: Positive = Field(1, description="ranks that share the layers")
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = Field(
        "default",
        description="free gathered weights after the forward pass; default: always without pipelining, else never. "
        "never also reduces gradients once per step instead of once per micro-batch",
    )
    enable_loss_parallel: bool = Field(
        True,
        description="with tensor parallel: each rank has the logits of its part of the vocabulary; false: of its part "
        "of the sequence, for which the head's table is gathered",
    )
    enable_async_tensor_parallel: bool = Field(
        False, description="overlap tensor-parallel communication with matrix products (GPU, needs compile.enable)"
    )
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = Field(
        "allgather", description="how ring attention moves keys and values"
    )
    context_parallel_load_balance: bool = Field(
        True, description="give each rank an early and a late part of the sequence: equal work under a causal mask"
    )
    pipeline_parallel_schedule: Text = Field(
        "1F1B", description=f"{', '.join(SCHEDULES)}, or the path of a .csv file with one row of actions per rank"
    )
    pipeline_parallel_microbatch_size: Positive = Field(
        1, description="sequences per pipeline micro-batch; training.local_batch_size is split into these"
    )
    pipeline_parallel_virtual_stages: Literal[-1] | Positive = Field(
        -1, description="stages per rank; -1: as many as the schedule needs (1, or 2 for those that take turns)"
    )
    pipeline_parallel_split: Layers = Field(
        (), description="the first layer of every stage but the first, ascending; empty: balanced by parameters"
    )


class ActivationCheckpoint(Section):
    """Recompute activations in the backward pass instead of keeping them."""

    mode: Literal["none", "selective", "full", "auto"] = Field(
        "none",
        description="which blocks recompute what; auto: the lightest of these that fits estimation.device or the GPU",
    )
    selective_ac_option: Literal["op"] | Positive = Field(
        "op",
        description="selective: op keeps every second matrix product, attention and reductions; n: every n-th layer",
    )


class Compile(Section):
    """torch.compile."""

    enable: bool = Field(False, description="compile the components below")
    components: Annotated[tuple[Literal["blocks", "loss"], ...], BeforeValidator(_list_to_tuple)] = Field(
        ("blocks", "loss"),
        min_length=1,
        description="what is compiled: each transformer block (one graph for all), the loss",
    )


class Float8(Section):
    """Matrix products of linear layers in float8, through torchao; the weights themselves stay as they are."""

    enable: bool = Field(False, description="convert linear layers; pays on large ones, with compile.enable")
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = Field(
        "tensorwise",
        description="one scale per tensor, fastest; one per row, more exact; the same with weight gradients in bf16",
    )
    filter_fqns: Texts = Field(
        (AUTO_FILTER,),
        description="layers that are not converted: those whose name holds one of these; "
        f'"{AUTO_FILTER}": those too small to gain. Never converted: the head, sizes that 16 does not divide',
    )
    enable_fsdp_float8_all_gather: bool = Field(
        False, description="FSDP gathers the weights in float8: half the bytes of bf16 (tensorwise only)"
    )
    precompute_float8_dynamic_scale_for_fsdp: bool = Field(
        False, description="find the scales for that gather in one collective after each update"
    )
    emulate: bool = Field(False, description="compute float8 products in fp32, slowly, on any hardware: for tests")


class Checkpoint(Section):
    """Saving and resuming."""

    enable: bool = Field(True, description="save checkpoints, and allow resuming from them")
    folder: Text = Field("checkpoint", description="where they lie: inside job.dump_folder, an absolute path, or a URL")
    interval: Positive = Field(500, description="steps between two checkpoints; the last step is always saved")
    keep_latest_k: Natural = Field(3, description="checkpoints that are kept; 0: all")
    keep_every_n: Natural = Field(0, description="keep those of steps that are multiples of n, for ever; 0: none")
    async_mode: Literal["disabled", "thread", "process"] = Field(
        "disabled",
        description="write in the background, from one more copy of each rank's state in host memory: in a thread, or "
        "in a process that takes no time from this one",
    )
    on_error: Literal["stop", "continue"] = Field(
        "stop", description="if a checkpoint cannot be written: stop, or say so and go on; the last one must succeed"
    )
    stop_after_seconds: Natural = Field(
        0, description="save and stop at a step's end once a process is that old, before a queue's limit; 0: never"
    )
    resume: Literal["never", "auto"] | Natural = Field(
        "never", description="where to start: never (anew), auto (newest intact checkpoint, if any), or a step"
    )
    verify: bool = Field(True, description="compare a checkpoint with its hashes before loading; false: sizes only")
    allow_changes: bool = Field(
        False, description="resume even if settings were changed that make the run another one than was saved"
    )
    export_hf: str = Field(
        "",
        description="folder for the final weights in Hugging Face format, inside job.dump_folder or an absolute path; "
        "empty: none",
    )


class Validation(Section):
    """Loss on held-out data during training."""

    interval: Natural = Field(0, description="steps between two validations; 0: none")
    samples: Positive = Field(64, description="sequences per validation")


class Metrics(Section):
    """What is shown and written while training."""

    log_freq: Positive = Field(10, description="steps between two logged lines")
    enable_tensorboard: bool = Field(True, description="write TensorBoard events to the run folder")
    progress_bar: bool = Field(True, description="show a progress bar where standard output is a terminal")
    log_sample_ids: bool = Field(
        False, description="write the numbers of each step's samples, gathered from all ranks, to sample_ids.jsonl"
    )


class Profiling(Section):
    """Traces of chosen steps, and snapshots of GPU memory, one file per rank."""

    enable_profiling: bool = Field(False, description="write traces; scripts/where_time_goes.py adds one up")
    save_traces_folder: Text = Field(
        "profile_traces", description="for the traces: inside job.dump_folder, or an absolute path"
    )
    profile_freq: Positive = Field(
        10, description="steps between two traces or snapshots, which end with steps that are multiples of it"
    )
    profiler_active: Positive = Field(1, description="steps in a trace")
    profiler_warmup: Natural = Field(3, description="steps before a trace that are recorded and thrown away")
    profiler_ranks: Naturals = Field((), description="ranks that write; empty: all")
    enable_memory_snapshot: bool = Field(
        False, description="write snapshots, also when memory runs out; see docs.pytorch.org/memory_viz (GPU)"
    )
    save_memory_snapshot_folder: Text = Field(
        "memory_snapshot", description="for the snapshots: inside job.dump_folder, or an absolute path"
    )


class Comm(Section):
    """Communication between the processes."""

    mode: Literal["real", "fake"] = Field(
        "real", description="fake: one process builds the program of one rank of any world, runs a step for its shapes"
    )
    fake_rank: Natural = Field(0, description="with mode fake: the rank that is built, below the number of processes")
    backend: Literal["auto", "nccl", "gloo"] = Field("auto", description="auto: nccl on GPUs, gloo on CPUs")
    init_timeout_seconds: Positive = Field(300, description="limit for the start and the first step")
    train_timeout_seconds: Positive = Field(300, description="limit for any collective after the first step")


class Estimation(Section):
    """A forecast of each rank's memory before anything is allocated (needs a GPU, or the name of a device)."""

    preflight: Literal["off", "warn", "abort"] = Field(
        "warn", description="where the run would not fit: off (no forecast), warn, or abort before it starts"
    )
    device: str = Field("", description="what to compare with, as titan-estimate --device; empty: this machine's GPU")


class Config(Section):
    """All settings of a run, checked."""

    job: Job = Job()
    model: Model = Model()
    training: Training = Training()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    lr_schedule: LRSchedule = LRSchedule()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    float8: Float8 = Float8()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    estimation: Estimation = Estimation()
