"""The section ``run``: where a run is, what it saves, evaluates and writes, and how often."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from octavo.config.sections.names import FROM_LIST, Section
from octavo.config.sections.text_types import FilePath

TrackerName = Literal["wandb", "trackio", "mlflow", "swanlab"]


class RunSection(Section):
    """Where the run lives and what it writes."""

    dir: FilePath = Field(
        default="runs/octavo",
        min_length=1,
        description="Run directory, relative to where the command is started. One that exists is continued "
        "(run.resume) or refused, never overwritten.",
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="Seed of data order and initialisation.")
    resume: FilePath = Field(
        default="never",
        description="never, auto (the newest whole checkpoint of run.dir, or a fresh start), or the path of a "
        "checkpoint such as runs/first/checkpoints/step_200.",
    )
    fork: FilePath | None = Field(
        default=None,
        description="Begin from a checkpoint of another run, with its weights, optimizer, step and place in the data; "
        "seed, FP8 and what backward keeps may differ. Absent: begin from the model.",
    )
    start_from: FilePath | None = Field(
        default=None,
        min_length=1,
        description="Begin a new training with the weights and adapters of a checkpoint (runs/first/checkpoints/"
        "step_200, or the directory of a run: its newest); optimizer, schedule, random numbers and place in the data "
        "are new. Absent: begin with the weights of model.path.",
    )
    milestones: Annotated[tuple[Annotated[int, Field(ge=1, le=10**9)], ...], FROM_LIST] = Field(
        default=(), description="Steps whose checkpoints are kept for good, in milestones/ beside those of run.keep."
    )
    save_every: int | None = Field(
        default=None,
        ge=0,
        le=10**9,
        description="Steps between checkpoints; 0 = only at the end. Absent: a tenth of the run, and at least 50.",
    )
    keep: int = Field(
        default=2, ge=1, le=10**9, description="Checkpoints kept; one more until a step from the newest was applied."
    )
    save: Literal["sync", "async"] = Field(
        default="sync",
        description="How checkpoints are written. async: beside the steps that follow, from a copy in host memory of "
        "this rank's part; a step waits for the copy alone, and for a save that is still under way.",
    )
    encrypt: bool = Field(
        default=False,
        description="Checkpoints, hf/, adapter/ and lists of rows, answers and completions are encrypted "
        "(AES-256-GCM), and messages quote no data. The key comes from --key-file, OCTAVO_KEY_FILE or "
        "OCTAVO_KEY, never from here.",
    )
    save_states: bool = Field(
        default=True,
        description="Checkpoints hold optimizer and random states, so that the run can be continued; false: weights "
        "alone, a third of the bytes or less, from which run.start_from begins anew.",
    )
    eval_every: int = Field(default=0, ge=0, le=10**9, description="Steps between evaluations; 0 = only at the end.")
    log_every: int = Field(default=1, ge=1, le=10**9, description="Steps between lines of metrics.jsonl.")
    health_every: int = Field(default=25, ge=0, le=10**9, description="Steps between FP8 health figures; 0 = none.")
    check_every: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="Steps between checks for silent corruption: a 32nd of the FP8 GEMMs, each time others, is "
        "computed again, casts bit for bit by the reference, products by the same kernel and, in part, by the "
        "reference on the CPU. What differs names rank and device and stops the run; losses stay what they are; "
        "0 = none.",
    )
    gain_steps: int = Field(
        default=0,
        ge=0,
        le=10**6,
        description="Steps timed in FP8 and in high precision, side by side, once the run is warm: the gain that FP8 "
        "really brings. They train nothing and change no loss; 0 = not measured.",
    )
    tensorboard: bool = Field(default=True, description="Write TensorBoard events too.")
    trackers: Annotated[tuple[TrackerName, ...], FROM_LIST] = Field(
        default=(),
        description="Trackers that get the configuration, the rows of metrics.jsonl and at the end the run's page: "
        "wandb, trackio, mlflow, swanlab. Each is a package of its own; its environment variables say where it writes.",
    )
    hf: bool = Field(
        default=True,
        description="Write hf/ (safetensors that from_pretrained loads) at the end; adapter/ (PEFT's) with LoRA.",
    )
    timeout: float = Field(
        default=600.0,
        ge=1,
        le=604800,
        description="Seconds that anything may keep the others waiting: a rank that does not come to where the others "
        "are, a data worker that does not bring its row, an end after a signal. What does is named, and the run ends.",
    )
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of torch; absent = torch's own choice."
    )
