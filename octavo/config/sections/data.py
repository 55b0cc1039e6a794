"""The section ``data``: the data sets, and how their rows become samples. Its videos are
:mod:`octavo.config.sections.video`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.config.sections.names import FROM_LIST, Section
from octavo.config.sections.text_types import FilePath, Text
from octavo.config.sections.video import VideoSection


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
