"""The section ``run``: the run directory, what the run saves, evaluates and writes, and how often."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from octavo.config.sections.names import FROM_LIST, Section
from octavo.config.sections.text_types import FilePath

TrackerName = Literal["wandb", "trackio", "mlflow", "swanlab"]


class RunSection(Section):
    """The run directory and what the run writes."""

    dir: FilePath = Field(
        default="runs/octavo",
        min_length=1,
        description="Run directory, relative to the working directory. An existing one is continued (run.resume) or "
        "refused, never overwritten.",
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="Seed of data order and initialization.")
    resume: FilePath = Field(
        default="never",
        description="never, auto (the newest complete checkpoint of run.dir, or a new run), or the path of a "
        "checkpoint such as runs/first/checkpoints/step_200.",
    )
    fork: FilePath | None = Field(
        default=None,
        description="Begin from a checkpoint of another run, with its weights, optimizer states, step and position in "
        "the data; seed, FP8 settings and what backward keeps may differ. Absent: begin from the model.",
    )
    start_from: FilePath | None = Field(
        default=None,
        min_length=1,
        description="Begin a new training with the weights and adapters of a checkpoint (runs/first/checkpoints/"
        "step_200, or a run directory: its newest); optimizer states, schedule, random states and position in the data "
        "start over. Absent: begin with the weights of model.path.",
    )
    milestones: Annotated[tuple[Annotated[int, Field(ge=1, le=10**9)], ...], FROM_LIST] = Field(
        default=(), description="Steps whose checkpoints are kept permanently, in milestones/, in addition to run.keep."
    )
    save_every: int | None = Field(
        default=None,
        ge=0,
        le=10**9,
        description="Steps between checkpoints; 0 = only at the end. Absent: a tenth of the run, but at least 50.",
    )
    keep: int = Field(
        default=2,
        ge=1,
        le=10**9,
        description="Checkpoints that are kept; one more until an update after the newest one was applied.",
    )
    save: Literal["sync", "async"] = Field(
        default="sync",
        description="How checkpoints are written. async: during the following steps, from a copy of this rank's part "
        "in host memory; a step waits only for the copy, and for an earlier save that is not finished.",
    )
    encrypt: bool = Field(
        default=False,
        description="Encrypt checkpoints, hf/, adapter/ and lists of rows, answers and completions (AES-256-GCM); "
        "messages quote no data. The key comes from --key-file, OCTAVO_KEY_FILE or OCTAVO_KEY, never from the "
        "configuration.",
    )
    save_states: bool = Field(
        default=True,
        description="Save optimizer and random states in checkpoints, so that the run can be resumed; false: only "
        "weights, a third of the bytes or less, which run.start_from can begin a new training with.",
    )
    eval_every: int = Field(default=0, ge=0, le=10**9, description="Steps between evaluations; 0 = only at the end.")
    log_every: int = Field(default=1, ge=1, le=10**9, description="Steps between lines of metrics.jsonl.")
    health_every: int = Field(default=25, ge=0, le=10**9, description="Steps between FP8 health figures; 0 = none.")
    check_every: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="Steps between checks for silent corruption: 1/32 of the FP8 GEMMs, a different subset each time, "
        "are recomputed: casts bit for bit by the reference, products by the same kernel and, in part, by the "
        "reference on the CPU. A difference stops the run and names rank and device; losses do not change; 0 = none.",
    )
    gain_steps: int = Field(
        default=0,
        ge=0,
        le=10**6,
        description="Steps that are timed alternately in FP8 and in high precision once the run is warm, to measure "
        "the gain of FP8. They train nothing and change no loss; 0 = not measured.",
    )
    tensorboard: bool = Field(default=True, description="Write TensorBoard events too.")
    trackers: Annotated[tuple[TrackerName, ...], FROM_LIST] = Field(
        default=(),
        description="Trackers that receive the configuration, the rows of metrics.jsonl and at the end the run's page: "
        "wandb, trackio, mlflow, swanlab. Each is a separate package, configured by its environment variables.",
    )
    hf: bool = Field(
        default=True,
        description="Write hf/ (safetensors that from_pretrained loads) at the end; with LoRA, adapter/ (PEFT format).",
    )
    timeout: float = Field(
        default=600.0,
        ge=1,
        le=604800,
        description="Seconds that the run waits for a rank that does not reach the others' collective, for a data "
        "worker that does not return its row, and for the end after a signal. Then the run ends and names what it "
        "waited for.",
    )
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of torch; absent = torch's own choice."
    )
