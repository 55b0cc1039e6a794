"""The sections of a step: ``train``, ``optimizer`` and ``parallel``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer
from pydantic_core import PydanticCustomError

from octavo.config.sections.data import DataSection, Dataset
from octavo.config.sections.names import FROM_LIST, Section
from octavo.config.sections.text_types import Text

Recompute = Literal["none", "selective", "full"]


class RecomputeSection(Section):
    """What the blocks of each component recompute in backward instead of keeping."""

    image_encoder: Recompute = Field(default="none", description="Blocks of the vision tower.")
    audio_encoder: Recompute = Field(default="none", description="Blocks of the audio encoder.")
    foundation: Recompute = Field(default="none", description="Blocks of the language model.")


def _expand_word(value: Any) -> Any:
    """Return a single word as the setting of every component."""
    known = isinstance(value, str) and value in get_args(Recompute)
    return dict.fromkeys(RecomputeSection.model_fields, value) if known else value


_OR_WORD = BeforeValidator(_expand_word, json_schema_input_type=Recompute | RecomputeSection)


#: `train.gc`: when Python's cyclic garbage collector runs
_Threshold = Annotated[int, Field(ge=1, le=10**9)]
_Thresholds = tuple[_Threshold, _Threshold, _Threshold]


def _gc_from_text(value: Any) -> Any:
    """``700,10,1000`` and ``[700, 10, 1000]`` as a tuple of thresholds."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,10}(\s*,\s*\d{1,10})+\s*", value):
        value = [int(part) for part in value.split(",")]
    if isinstance(value, list) and not (len(value) == 3 and all(type(n) is int and 0 < n <= 10**9 for n in value)):
        why = "expected three thresholds of at least 1 (700,10,1000), freeze or a number of steps, found {found}"
        raise PydanticCustomError("no_thresholds", why, {"found": f"{value!r:.80}"})
    return tuple(value) if isinstance(value, list) else value


Gc = Annotated[
    Literal["freeze"] | _Threshold | _Thresholds | None,
    BeforeValidator(_gc_from_text, json_schema_input_type=Literal["freeze"] | _Threshold | _Thresholds | str | None),
]


class _StepSection(Section):
    """Length, batch, learning rate, loss and memory of training, or of one stage of it."""

    phase: Literal["pretrain", "sft", "preference", "rl"] = Field(
        default="sft",
        description="What the model learns: all text (pretrain), answers (sft), which of two answers is better "
        "(preference), or completions with high rewards (rl).",
    )
    steps: int | None = Field(
        default=None, ge=1, le=10**9, description="Optimizer steps of the whole run; this or `epochs` is required."
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        le=10**6,
        description="Instead of steps: passes over data.train, each with as many rows as all its data sets have "
        "together (weights decide how often each data set's rows come); with data.packing the packs are counted first. "
        "The run writes the resulting steps into its config.yaml.",
    )
    seq_length: int = Field(default=2048, ge=1, le=2**22, description="Maximum number of tokens per sample.")
    micro_batch: int = Field(default=1, ge=1, le=2**16, description="Samples in one forward pass, per process.")
    global_batch: int = Field(
        default=8,
        ge=1,
        le=2**24,
        description="Samples in one optimizer step, over all processes; packs with data.packing.",
    )
    lr: float = Field(default=2e-5, gt=0, le=1000, description="Peak learning rate.")
    schedule: Literal["cosine", "linear", "constant", "onecycle"] = Field(
        default="cosine", description="Schedule of the learning rate after warm-up."
    )
    warmup: int = Field(default=0, ge=0, le=10**9, description="Steps of linear warm-up.")
    min_lr: float = Field(default=0.0, ge=0, le=1000, description="Learning rate at the end of the schedule.")
    loss: Literal["token", "sample", "microbatch"] = Field(
        default="token",
        description="Reduction: token = sum over the global batch by its token count; sample = mean of the samples' "
        "means; microbatch = mean of the micro-batches' means.",
    )
    router_aux_loss_coef: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="Factor of the routers' load-balancing loss of a mixture of experts; 0: off. Absent: the factor "
        "in the checkpoint's config.json.",
    )
    clip: float = Field(default=1.0, ge=0, le=1e9, description="Maximum gradient norm; 0 disables clipping.")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        default="auto",
        description="Compute dtype of all that is not FP8; auto = bf16 on CUDA, fp32 on a CPU. The base of LoRA is "
        "BF16 "
        "on any device, or fp32 with fp32. fp16: 11 bits of significand instead of BF16's 8, but such a small range "
        "that losses are scaled (loss_scale); weights and their gradients stay fp32.",
    )
    loss_scale: Literal["dynamic"] | Annotated[int, Field(ge=1, le=2**40)] | None = Field(
        default=None,
        description="With precision fp16: factor that losses are multiplied by before backward, and gradients divided "
        "by after it, so that they fit in FP16. dynamic: starts at 65536, is halved where gradients overflow (that "
        "step "
        "is skipped) and doubled after 2000 steps without an overflow; a power of two is constant. Absent: dynamic.",
    )
    gather: Literal["stored", "bf16"] = Field(
        default="stored",
        description="Dtype in which ranks exchange weights and gradients (FSDP2): as stored, or bf16, half the bytes "
        "of "
        "fp32; shards and checkpoints stay fp32. FP8 weights (fp8.param) are sent as codes in either case. One process "
        "sends nothing.",
    )
    exchange: Literal["stored", "fp8"] = Field(
        default="stored",
        description="How ranks exchange outputs of attention (parallel.context) and rows of experts (parallel.expert): "
        "as stored, or as FP8 codes where the next layer would cast them to the same codes.",
    )
    recompute: Annotated[RecomputeSection, _OR_WORD] = Field(
        default_factory=RecomputeSection,
        description="Activation checkpointing, what blocks recompute in backward instead of keeping it: none; "
        "selective (what is cheap to compute); full (everything: blocks keep only their inputs). One word, or one each "
        "for image_encoder, audio_encoder and foundation.",
    )
    offload_activations: bool = Field(
        default=False,
        description="Move activations that blocks keep for backward to host memory, and fetch them one block ahead. "
        "Needs a GPU.",
    )
    synchronize_per_layer: bool = Field(
        default=False,
        description="Wait for the GPU after every block, in forward and backward, to limit the memory that its "
        "allocator holds.",
    )
    logits: Literal["chunked", "full"] = Field(
        default="chunked",
        description="chunked: compute loss and gradient a few tokens at a time, so that full logits never exist; full: "
        "compute all logits.",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the target distribution that is spread evenly over the vocabulary.",
    )
    z_loss: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="Factor of the squared log of the softmax's denominator in the loss (PaLM: 1e-4).",
    )
    gc: Gc = Field(
        default=None,
        description="When Python's garbage collector runs: thresholds of its three generations (700,10,1000); freeze: "
        "objects that exist after the first steps are never examined again; a number N: every N steps, on all "
        "ranks at once, and never otherwise. Absent: Python's default.",
    )
    compile: bool = Field(
        default=False,
        description="Run every block of the vision tower and the language model under torch.compile. The first step of "
        "each component and the steps with health figures run eagerly, because they are counted by layer. Compiling "
        "takes minutes at the start, so it pays in long runs; needs a C++ compiler on a CPU, Triton on a GPU.",
    )
    cuda_graphs: bool = Field(
        default=False,
        description="Capture forward and backward of a micro-batch into a CUDA graph and replay it where shapes "
        "repeat, as in pretraining on rows of one length; batches with images or padding run without a graph. Weights "
        "are then cast in every micro-batch. Needs a GPU and one process; settings that do not work with graphs are "
        "refused.",
    )

    @property
    def total_steps(self) -> int:
        """``steps`` of a configuration whose ``epochs`` were resolved (:mod:`octavo.train.setup.resolve_config`)."""
        assert self.steps is not None, "epochs were not resolved to steps"
        return self.steps


class _OnlyChanges(Section):
    """A section of which only the keys that were set are written: the others are the run's."""

    @model_serializer(mode="wrap")
    def _only_set(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {key: value for key, value in dump(self).items() if key in self.model_fields_set}


class StageData(_OnlyChanges, DataSection):
    """What a stage reads otherwise than the run: any keys of ``data``."""

    train: Annotated[tuple[Dataset, ...], FROM_LIST] = Field(
        default=(), min_length=1, description="Data sets to train on."
    )


class StageSection(_OnlyChanges, _StepSection):
    """A stage: any keys of ``train`` that differ from the run's, and what it freezes and reads."""

    freeze: Annotated[tuple[Text, ...], FROM_LIST] = Field(
        default=(), description="Parts that are not trained in this stage, as in model.freeze."
    )
    data: StageData | None = Field(
        default=None, description="What this stage reads otherwise than the run: any keys of `data`."
    )


class TrainSection(_StepSection):
    """The training step: length, batch, learning rate, loss and memory."""

    stages: Annotated[tuple[StageSection, ...], FROM_LIST] = Field(
        default=(),
        max_length=100,
        description="Stages that are trained one after the other, each from the weights of the one before, with a new "
        "optimizer and schedule: a list of mappings with any keys of `train` (steps, lr, ...), `freeze` (instead of "
        "model.freeze) and `data` (any keys of `data`). Keys that a stage lacks are the run's. "
        "run.resume: auto continues in the stage that was interrupted.",
    )


class OptimizerSection(Section):
    """AdamW and the dtypes of its states and master weights."""

    betas: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], FROM_LIST] = (
        Field(default=(0.9, 0.95), description="Decay of the first and the second moment.")
    )
    eps: float = Field(default=1e-8, gt=0, le=1, description="Added to the root of the second moment.")
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="Decoupled weight decay; norms and biases have none.",
    )
    states: Literal["fp32", "bf16", "fp8", "coat"] = Field(
        default="fp32",
        description="How the two moments are stored: fp32 (8 bytes per parameter), bf16 (4), fp8 (2.06), coat (2.19, "
        "as published by COAT).",
    )
    master: Literal["fp32", "bf16+16", "bf16+sr"] = Field(
        default="fp32",
        description="How weights are stored: fp32 (4 bytes); bf16+16 (a BF16 model and the 16 bits that complete it to "
        "exact fp32, 4 bytes, gradients in BF16); bf16+sr (a BF16 model with stochastic rounding, 2 bytes).",
    )
    update: Literal["step", "backward"] = Field(
        default="step",
        description="When weights are updated: after backward (step), or during backward as soon as each gradient is "
        "complete, so that gradients are not kept. backward needs one micro-batch per step and process, and with "
        "train.clip a second pass through the graph.",
    )
    offload: bool = Field(
        default=False, description="Keep the optimizer's states in host memory and stream them. Needs a GPU."
    )


class ParallelSection(Section):
    """How the ranks of a run share a model and its data; the number of ranks is replicate x shard x context."""

    replicate: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Copies of the model. Parameters are sharded within a copy; gradients are summed over shards and "
        "copies.",
    )
    shard: Literal["auto"] | Annotated[int, Field(ge=1, le=2**16)] = Field(
        default="auto",
        description="Parts of a global batch that a copy trains on at once, each on `context` ranks; auto: the number "
        "of ranks divided by `replicate` and `context`. Parameters are sharded over shard x context ranks.",
    )
    context: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Ranks that share the tokens of a row (context parallel); needs data.packing.",
    )
    ulysses: Literal["auto"] | Annotated[int, Field(ge=1, le=2**16)] = Field(
        default="auto",
        description="How many of the `context` ranks exchange heads for tokens (Ulysses); across groups of them keys "
        "and values are gathered. auto: the largest number that divides `context` and the query heads.",
    )
    expert: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Ranks that the experts of a layer are distributed over (expert parallel); divides shard x "
        "context.",
    )
