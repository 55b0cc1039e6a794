"""What a run may say: one frozen type per section of the YAML file, each field with its meaning.

These types are the only list of options. The JSON schema for editors, the nearest-name hints and ``octavo schema`` are
derived from them. Importing this module imports no torch, so a wrong file is answered in a fraction of a second.
The section of the model is :mod:`octavo.config.sections.model`, that of FP8 :mod:`octavo.config.sections.fp8`; rules
that need two fields at once live in :mod:`octavo.config.rules.general`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from octavo.config.collecting import Gc
from octavo.config.sections.names import FROM_LIST, Section
from octavo.config.sections.text_types import FilePath, Letters, Text
from octavo.config.sections.video import VideoSection


class LoraSection(Section):
    """Low-rank adapters beside a frozen base (Hu et al. 2021), by PEFT: y = base(x) + alpha / rank * B(A(x))."""

    rank: int = Field(default=16, ge=1, le=65536, description="Inner dimension of the adapters.")
    alpha: float = Field(
        default=32.0, gt=0, le=1e6, description="Adapters are scaled by alpha / rank (rsLoRA: / sqrt(rank))."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Share of the inputs of A that training zeroes.")
    rslora: bool = Field(default=False, description="Scale by alpha / sqrt(rank) (Kalajdzievski 2023).")
    dora: bool = Field(
        default=False,
        description="Train magnitudes of the rows of the weight too (DoRA, Liu et al. 2024); not for experts.",
    )
    targets: Annotated[tuple[Letters, ...], FROM_LIST] = Field(
        default=("foundation",),
        min_length=1,
        description="What gets adapters: foundation, image_encoder, image_projector, audio_encoder, audio_projector "
        '(all their linear layers and experts), or globs over module names ("**.q_proj"). Each must match something.',
    )
    exclude: Annotated[tuple[Letters, ...], FROM_LIST] = Field(
        default=(), description="Components or globs over module names that get none, though a target names them."
    )
    dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="In which A and B are kept; optimizer.master says how BF16 ones are updated."
    )
    adapter: FilePath | None = Field(
        default=None,
        min_length=1,
        description="Folder of a PEFT adapter to go on from, relative to the file that names it; its rank, alpha and "
        "targets must be those given here.",
    )


class Dataset(Section):
    """One data set: a file or folder of conversations, or of what else the phase learns from."""

    path: FilePath = Field(
        min_length=1,
        description="JSON, JSONL, CSV, parquet or tar file (WebDataset), a folder of such files, or one of `datasets`, "
        "relative to the file that names it; a URL of one (s3://bucket/folder, hf://, file://), whose files are "
        "fetched; or where there is none a name of the Hugging Face hub, org/name.",
    )
    revision: Text | None = Field(
        default=None,
        min_length=1,
        description="Branch, tag or commit of a data set of the hub. Absent: the newest, which the run writes down.",
    )
    split: Text | None = Field(default=None, min_length=1, description="Split of a data set of the hub. Absent: train.")
    subset: Text | None = Field(
        default=None, min_length=1, description="Subset (configuration) of a data set of the hub. Absent: its default."
    )
    images: FilePath | None = Field(
        default=None,
        description="Folder that image paths in the rows are relative to (and may not leave). Absent: the data "
        "file's own folder.",
    )
    stream: bool = Field(
        default=False,
        description="Read rows where they lie, parquet by row groups and JSONL and CSV by lines, and keep no copy in "
        "the cache: for data larger than the disk. Rows, order and resume are the same; each costs more.",
    )
    fetch_gb: float | None = Field(
        default=None,
        gt=0,
        le=10**6,
        description="Of a data set at a URL: most GB (10^9 bytes) of its files that lie in data.cache at a time. "
        "Absent: 50.",
    )
    weight: float = Field(
        default=1.0, ge=1e-6, le=1e6, description="Share of this data set in the mixture, against the others'."
    )
    max_samples: int | None = Field(default=None, ge=1, le=10**12, description="Use the first N rows only.")
    shuffle_buffer: int | None = Field(
        default=None,
        ge=2,
        le=2**24,
        description="Files in a random order, and so many rows at a time shuffled together, for sets of many files or "
        "more rows than memory orders. Absent: all rows of up to 2^24 together; 16,384 of larger sets and of those "
        "that are fetched.",
    )
    columns: dict[Text, Text] | None = Field(
        default=None,
        description="What keys of the rows are called, ours: theirs, as in {prompt: question, answer: solution}.",
    )
    format: Literal["auto", "llava", "sharegpt", "messages", "alpaca", "prompt", "text"] = Field(
        default="auto",
        description="Layout of the rows; auto looks at the first ones. prompt: rows with prompt and, but in phase rl, "
        "answer or completion. text: plain text of phase pretrain (`text`, with `images` in their places; or lists "
        "`texts` and `images`). Preferences are told by their keys.",
    )


class DataSection(Section):
    """What the model sees."""

    train: Annotated[tuple[Dataset, ...], FROM_LIST] = Field(min_length=1, description="Data sets to train on.")
    eval: Annotated[tuple[Dataset, ...], FROM_LIST] = Field(default=(), description="Held-out data sets.")
    on_bad_sample: Literal["error", "skip"] = Field(
        default="error",
        description="A row that cannot be used (missing image, unknown role, ...): stop, or skip, count and list it.",
    )
    on_long: Literal["drop", "cut", "error"] = Field(
        default="drop",
        description="A conversation over seq_length: drop it (counted), cut it (never inside an image), or stop.",
    )
    join: bool = Field(
        default=True,
        description="Phase pretrain: documents of plain text are joined, each with its end token, and cut into samples "
        "of seq_length; false: each is a sample of its own, as on_long says. Rows with images and conversations always "
        "are.",
    )
    packing: bool = Field(
        default=False,
        description="Samples share rows of up to seq_length tokens (phases sft and pretrain), none of which sees "
        "another's; train.micro_batch is 1 pack, and train.global_batch counts packs.",
    )
    window: int = Field(
        default=1000,
        ge=1,
        le=10**6,
        description="Rows of the mixture that are packed together, all of one epoch; more waste fewer places, and are "
        "counted ahead.",
    )
    train_on_prompt: bool = Field(default=False, description="Put loss on all turns, not on the assistant's alone.")
    max_pixels: int | None = Field(
        default=None, ge=1, le=10**8, description="Larger images are scaled down to this many pixels."
    )
    min_pixels: int | None = Field(
        default=None, ge=1, le=10**8, description="Smaller images are scaled up to this many pixels."
    )
    max_image_megapixels: float = Field(
        default=100.0, gt=0, le=1000, description="An image file that would decode to more megapixels is a bad sample."
    )
    video: VideoSection | None = Field(
        default=None, description="Which frames of videos are taken, and what a file may be; absent: the family's own."
    )
    workers: int | None = Field(
        default=None,
        ge=0,
        le=256,
        description="Processes that prepare samples; 0 = in the training process. Absent: beside a GPU up to 4, as "
        "cores allow; none on a CPU, whose cores train. Any number gives the same samples.",
    )
    cache: FilePath | None = Field(
        default=None,
        description="Folder for data files as Arrow, converted once and shared by all who read them. Absent: "
        "OCTAVO_CACHE, or octavo in the user's cache folder.",
    )
    system: Text | None = Field(default=None, description="System message put before conversations that have none.")
    template_args: dict[Text, Any] | None = Field(
        default=None,
        description="Variables of the chat template (enable_thinking, preserve_thinking, add_vision_id, ...), given "
        "to it wherever it writes a conversation. One that it does not read is an error.",
    )
    mask_empty_think: bool = Field(
        default=True, description="No loss on an empty block of thinking before an answer, which templates write."
    )
    mask_reasoning: bool = Field(
        default=False, description="No loss on reasoning nor on the marks around it: it is context of the answer."
    )
    split_turns: bool = Field(
        default=False,
        description="Phase sft: a conversation becomes a row for each of its questions, which ends with the answer and "
        "teaches that alone. So all reasoning is learned by templates that leave out that of earlier turns.",
    )
    sealed: bool = Field(
        default=False,
        description="Rows are those of `octavo seal data`, numbers in the order of a key that the run never sees, for "
        "a model of `octavo seal model` with the same key. Phases sft, pretrain and, of pairs, preference.",
    )


Recompute = Literal["none", "selective", "full"]


class RecomputeSection(Section):
    """What the blocks of each component compute again in backward instead of keeping it."""

    image_encoder: Recompute = Field(default="none", description="Blocks of the vision tower.")
    audio_encoder: Recompute = Field(default="none", description="Blocks of the tower of sound.")
    foundation: Recompute = Field(default="none", description="Blocks of the language model.")


def _for_both(value: Any) -> Any:
    """One word says it of every component."""
    known = isinstance(value, str) and value in get_args(Recompute)
    return dict.fromkeys(RecomputeSection.model_fields, value) if known else value


_OR_WORD = BeforeValidator(_for_both, json_schema_input_type=Recompute | RecomputeSection)


class TrainSection(Section):
    """The step."""

    phase: Literal["pretrain", "sft", "preference", "rl"] = Field(
        default="sft",
        description="What is learnt: text as it is (pretrain), answers (sft), which of two answers is better "
        "(preference), or what earns rewards (rl).",
    )
    steps: int | None = Field(
        default=None, ge=1, le=10**9, description="Optimizer steps of the whole run; this or `epochs` is required."
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        le=10**6,
        description="Instead of steps: passes over data.train, each of as many rows as its data sets have in all "
        "(weights say whose come how often); with data.packing their packs are counted ahead. The run writes the steps "
        "that follow into its config.yaml.",
    )
    seq_length: int = Field(default=2048, ge=1, le=2**22, description="Most tokens a sample may have.")
    micro_batch: int = Field(default=1, ge=1, le=2**16, description="Samples in one forward pass, per process.")
    global_batch: int = Field(
        default=8,
        ge=1,
        le=2**24,
        description="Samples in one optimizer step, over all processes; packs with data.packing.",
    )
    lr: float = Field(default=2e-5, gt=0, le=1000, description="Peak learning rate.")
    schedule: Literal["cosine", "linear", "constant", "onecycle"] = Field(
        default="cosine", description="Course of the learning rate after warm-up."
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
        description="Factor of the routers' load-balancing loss of a mixture of experts. Absent: the checkpoint's own; "
        "0 switches it off.",
    )
    clip: float = Field(default=1.0, ge=0, le=1e9, description="Largest gradient norm; 0 = no clipping.")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        default="auto",
        description="Compute dtype of what is not FP8; auto = bf16 on CUDA, fp32 on a CPU. The base of LoRA is BF16 "
        "everywhere, and fp32 where fp32 is asked. fp16: 11 bits of significand in place of BF16's 8, and so little "
        "range that losses are scaled (loss_scale); weights and their gradients stay fp32.",
    )
    loss_scale: Literal["dynamic"] | Annotated[int, Field(ge=1, le=2**40)] | None = Field(
        default=None,
        description="With precision fp16: what losses are multiplied by before backward, and gradients divided by "
        "after it, so that FP16 holds them. dynamic: from 65536, halved where gradients overflow (that step is "
        "skipped), doubled after 2000 steps without; a power of two stays. Absent: dynamic.",
    )
    gather: Literal["stored", "bf16"] = Field(
        default="stored",
        description="What ranks send each other (FSDP2): weights and gradients in the dtype in which they are stored, "
        "or in bf16, half of fp32; shards and what is saved stay fp32. FP8 weights (fp8.param) are sent as codes in "
        "either case. In one process nothing is sent.",
    )
    exchange: Literal["stored", "fp8"] = Field(
        default="stored",
        description="How outputs of attention (parallel.context) and rows of experts (parallel.expert) go from rank to "
        "rank: as they are, or as FP8 codes where the layer behind casts them so anyway.",
    )
    recompute: Annotated[RecomputeSection, _OR_WORD] = Field(
        default_factory=RecomputeSection,
        description="What blocks compute again in backward instead of keeping it: none; selective (what is cheap to "
        "compute); full (all: they keep their inputs alone). One word, or one for image_encoder, audio_encoder and "
        "foundation each.",
    )
    offload_activations: bool = Field(
        default=False,
        description="Move what blocks keep for backward to host memory, and fetch it one block ahead. Needs a GPU.",
    )
    synchronize_per_layer: bool = Field(
        default=False,
        description="Wait for the GPU after every block, forward and backward, which caps what its allocator holds.",
    )
    logits: Literal["chunked", "full"] = Field(
        default="chunked",
        description="chunked: loss and gradient a few tokens at a time, so that full logits never exist; full: plain.",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the target that is spread over the whole vocabulary."
    )
    z_loss: float = Field(
        default=0.0, ge=0, le=1e6, description="Factor of the squared log of the softmax's denominator (PaLM: 1e-4)."
    )
    gc: Gc = Field(
        default=None,
        description="When Python's garbage collector runs: thresholds of its three generations (700,10,1000); freeze: "
        "after the first steps, what is there is never looked at again; a number: after so many steps, on all ranks at "
        "once, and never in between. Absent: as Python has it.",
    )
    compile: bool = Field(
        default=False,
        description="Run every block of the vision tower and the language model under torch.compile. The first step of "
        "each component and the steps with health figures run eagerly, because they are counted by layer. Compiling "
        "takes minutes at the start and pays in long runs; needs a C++ compiler on a CPU, Triton on a GPU.",
    )
    cuda_graphs: bool = Field(
        default=False,
        description="Capture forward and backward of a micro-batch into a CUDA graph and replay it where shapes "
        "repeat, as in pretraining on rows of one length; batches with images or padding run without. Weights are then "
        "cast in every micro-batch. Needs a GPU and one process; what cannot be beside it is refused.",
    )


class OptimizerSection(Section):
    """AdamW."""

    betas: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], FROM_LIST] = (
        Field(default=(0.9, 0.95), description="Decay of the first and the second moment.")
    )
    eps: float = Field(default=1e-8, gt=0, le=1, description="Added to the root of the second moment.")
    weight_decay: float = Field(default=0.0, ge=0, le=100, description="Decoupled; norms and biases are spared.")
    states: Literal["fp32", "bf16", "fp8", "coat"] = Field(
        default="fp32",
        description="How the two moments are stored: fp32 (8 bytes a parameter), bf16 (4), fp8 (2.06), coat (2.19, as "
        "published).",
    )
    master: Literal["fp32", "bf16+16", "bf16+sr"] = Field(
        default="fp32",
        description="How weights are stored: fp32 (4 bytes); bf16+16 (a BF16 model and the 16 bits that make it "
        "exactly fp32, 4 bytes, gradients in BF16); bf16+sr (a BF16 model, stochastically rounded, 2 bytes).",
    )
    update: Literal["step", "backward"] = Field(
        default="step",
        description="When weights are updated: after backward, or in backward as soon as each gradient is complete, so "
        "that gradients are never held. backward needs one micro-batch a step and process, and with train.clip a "
        "second pass through the graph.",
    )
    offload: bool = Field(
        default=False, description="Keep the optimizer's states in host memory and stream them. Needs a GPU."
    )


class ParallelSection(Section):
    """How the ranks of a run share a model and its data: replicate x shard x context is their number."""

    replicate: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Copies of the model. Within a copy parameters are sharded; gradients are summed over both.",
    )
    shard: Literal["auto"] | Annotated[int, Field(ge=1, le=2**16)] = Field(
        default="auto",
        description="Parts of a global batch that a copy trains on at once, each on `context` ranks; auto: all ranks "
        "divided by `replicate` and `context`. Parameters are sharded over shard x context ranks.",
    )
    context: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Ranks that share the tokens of a row (context parallel); needs data.packing.",
    )
    ulysses: Literal["auto"] | Annotated[int, Field(ge=1, le=2**16)] = Field(
        default="auto",
        description="Of the `context` ranks, so many exchange heads for tokens; the others gather keys and values. "
        "auto: the most that divide `context` and the heads of queries.",
    )
    expert: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Ranks that the experts of a layer are dealt to (expert parallel); divides shard x context.",
    )

    @property
    def axes(self) -> dict[str, Any]:
        """What the number of ranks must agree with, as `parallel.Layout.of` takes it."""
        return self.model_dump(include={"replicate", "shard", "context", "expert"})
