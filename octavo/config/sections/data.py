"""The section ``data``: the data sets, and how their rows become samples. Videos have a section in
:mod:`octavo.config.sections.video`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.config.sections.names import FROM_LIST, Section
from octavo.config.sections.text_types import FilePath, Text
from octavo.config.sections.video import VideoSection


class Dataset(Section):
    """One data set: a file or folder of conversations, or of other rows that the phase learns from."""

    path: FilePath = Field(
        min_length=1,
        description="JSON, JSONL, CSV, parquet or tar file (WebDataset), a folder of such files or of `datasets`; in "
        "phase pretrain also .txt and .md files or a folder of them, a document a file; "
        "relative to the configuration file; a URL (s3://bucket/folder, hf://, file://), whose files are fetched; or, "
        "if no such path exists, a name on the Hugging Face hub, org/name. python:train_data (in data.train) and "
        "python:eval_data (in data.eval) are the rows that a program passes to octavo.run.",
    )
    revision: Text | None = Field(
        default=None,
        min_length=1,
        description="Branch, tag or commit of a data set on the hub. Absent: the newest, which the run records.",
    )
    split: Text | None = Field(default=None, min_length=1, description="Split of a data set on the hub. Absent: train.")
    subset: Text | None = Field(
        default=None, min_length=1, description="Subset (configuration) of a data set on the hub. Absent: its default."
    )
    images: FilePath | None = Field(
        default=None,
        description="Folder that image paths in the rows are relative to (and must stay in). Absent: the folder of "
        "the data file.",
    )
    stream: bool = Field(
        default=False,
        description="Read rows from the original files, parquet by row groups, JSONL and CSV by lines, without a copy "
        "in the cache: for data larger than the disk. Rows, order and resume are the same; each read costs more.",
    )
    fetch_gb: float | None = Field(
        default=None,
        gt=0,
        le=10**6,
        description="For a data set at a URL: limit of its files in data.cache, in GB (10^9 bytes). Absent: 50.",
    )
    weight: float = Field(
        default=1.0, ge=1e-6, le=1e6, description="Weight of this data set in the mixture, relative to the others."
    )
    max_samples: int | None = Field(default=None, ge=1, le=10**12, description="Use the first N rows only.")
    shuffle_buffer: int | None = Field(
        default=None,
        ge=2,
        le=2**24,
        description="Take files in a random order and shuffle this many rows at a time, for data sets of many files or "
        "of more rows than memory can order. Absent: all rows together up to 2^24; 16,384 for larger data sets and "
        "for those at a URL.",
    )
    columns: dict[Text, Text] | None = Field(
        default=None,
        description="Renamed keys of rows (Octavo's key: key in the file), e.g. {prompt: question, answer: solution}.",
    )
    format: Literal["auto", "llava", "sharegpt", "messages", "alpaca", "prompt", "text"] = Field(
        default="auto",
        description="Layout of the rows; auto detects it from the first rows. prompt: rows with prompt and, except in "
        "phase rl, answer or completion. text: plain text of phase pretrain (`text`, with `images` in their places; or "
        "lists `texts` and `images`). Preferences are detected by their keys.",
    )


class DataSection(Section):
    """The data sets and how rows become samples."""

    train: Annotated[tuple[Dataset, ...], FROM_LIST] = Field(min_length=1, description="Data sets to train on.")
    eval: Annotated[tuple[Dataset, ...], FROM_LIST] = Field(default=(), description="Held-out data sets.")
    on_bad_sample: Literal["error", "skip"] = Field(
        default="error",
        description="For a row that cannot be used (missing image, unknown role, ...): stop, or skip, count and list "
        "it.",
    )
    on_long: Literal["drop", "cut", "error"] = Field(
        default="drop",
        description="For a conversation over seq_length: drop and count it, cut it (never inside an image), or stop.",
    )
    join: bool = Field(
        default=True,
        description="Phase pretrain: join documents of plain text, each with its end token, and cut them into samples "
        "of seq_length; false: each document is a sample, subject to on_long. Rows with images and conversations are "
        "always separate samples.",
    )
    packing: bool = Field(
        default=False,
        description="Pack samples into rows of up to seq_length tokens (phases sft and pretrain); no sample attends to "
        "another. train.micro_batch is then 1 pack, and train.global_batch counts packs.",
    )
    window: int = Field(
        default=1000,
        ge=1,
        le=10**6,
        description="Rows of the mixture that are packed together, all of one epoch; a larger window wastes fewer "
        "positions, but counts more rows in advance.",
    )
    train_on_prompt: bool = Field(default=False, description="Put loss on all turns, not only on the assistant's.")
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
        default=None, description="Sampling of frames and limits of video files; absent: the model family's defaults."
    )
    workers: int | None = Field(
        default=None,
        ge=0,
        le=256,
        description="Processes that prepare samples; 0: in the training process. Absent: with a GPU up to 4, as cores "
        "allow; 0 on a CPU, whose cores train. The samples do not depend on it.",
    )
    cache: FilePath | None = Field(
        default=None,
        description="Folder for data files as Arrow, converted once and shared by all readers. Absent: OCTAVO_CACHE, "
        "or octavo in the user's cache folder.",
    )
    system: Text | None = Field(default=None, description="System message for conversations that have none.")
    template_args: dict[Text, Any] | None = Field(
        default=None,
        description="Variables of the chat template (enable_thinking, preserve_thinking, add_vision_id, ...), for "
        "every conversation. A variable that the template does not read is an error.",
    )
    mask_empty_think: bool = Field(
        default=True, description="No loss on the empty thinking block that templates write before an answer."
    )
    mask_reasoning: bool = Field(
        default=False, description="No loss on reasoning and its marks, which are then only context of the answer."
    )
    split_turns: bool = Field(
        default=False,
        description="Phase sft: split a conversation into a row for each of its questions, which ends with the answer "
        "and has loss only on it. So all reasoning is learned even if the template omits the reasoning of earlier "
        "turns.",
    )
    sealed: bool = Field(
        default=False,
        description="The rows were written by `octavo seal data`: numbers permuted by a key that the run never sees, "
        "for a model of `octavo seal model` with the same key. Phases sft, pretrain, and preference with pairs.",
    )
