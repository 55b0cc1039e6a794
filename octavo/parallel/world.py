"""The processes of a run: rank, size, device and mesh, and the small collectives that a run needs.

`setup` reads the environment variables of torchrun. In one process there is no process group and no mesh, and the
collectives of `World` return their input, so that callers need no second code path.

Objects are sent as JSON in uint8 tensors, because `torch.distributed`'s object collectives use pickle.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from octavo.base import accelerator
from octavo.base.safe_read import first_line
from octavo.config.sections.train import ParallelSection
from octavo.parallel import nccl_flight_recorder
from octavo.parallel.errors import WorldError
from octavo.parallel.hang_watch import Heartbeat, Progress, describe_missing
from octavo.parallel.layout import Layout
from octavo.parallel.rendezvous import compare_facts, describe_differences, meet

TIMEOUT = 600.0  # seconds: longer than any regular wait (a checkpoint, an evaluation), shorter than a night
NOTICE_SECONDS = 20.0  # after which a rank that waits for others at the start prints a message
COLLECTIVE_SHARE = 0.9  # of the timeout; the remaining time is for finding and naming the missing rank


@dataclass(frozen=True)
class World:
    """This process and its place among the `size` processes of a run.

    device   where this rank computes
    mesh     the axis "shard" or, with copies of the model, the axes "replicate" and "shard"; None for one process
    timeout  seconds within which a missing rank is named
    heartbeat  of this rank (:mod:`octavo.parallel.hang_watch`); None for one process
    group    process group of the collectives below, or None for the group of all ranks
    layout   all axes
    experts  the expert mesh, if experts are distributed over ranks (`Layout.expert_axes`)

    `sum`, `all_reduce_max`, `any`, `barrier`, `gather_objects`, `gather_bytes`, `run_on_main` and
    `with_separate_group` are collectives: all ranks call them, in the same order. `set_phase` sends nothing, but every
    rank must call it in the same order.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")
    mesh: DeviceMesh | None = None
    timeout: float = TIMEOUT
    heartbeat: Heartbeat | None = None
    progress: Progress = field(default_factory=Progress, compare=False)
    group: dist.ProcessGroup | None = None
    layout: Layout = Layout()
    experts: DeviceMesh | None = None

    @property
    def data_rank(self) -> int:
        """The index of the part of a global batch that this rank trains on; the ranks of a context-parallel group share
        one."""
        return self.rank // self.layout.context

    @property
    def data_size(self) -> int:
        """The number of parts of a global batch that are trained on at once."""
        return self.size // self.layout.context

    @property
    def context_rank(self) -> int:
        """The index of this rank's slice of each row, from 0 to `layout.context` - 1."""
        return self.rank % self.layout.context

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes files."""
        return self.rank == 0

    def set_phase(self, phase: str) -> None:
        """Record the current phase ("step 7, loading its batch"), for the message of other ranks if this one hangs in
        it. Sends nothing. All ranks record the same phases, in the same order."""
        self.progress.count, self.progress.phase = self.progress.count + 1, phase

    def lost_rank_error(self, error: RuntimeError) -> WorldError | None:
        """Return an error that names the missing rank if ``error`` is from a collective that timed out or lost a rank,
        else None."""
        if self.heartbeat is None or isinstance(error, WorldError):
            return None
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            return None
        trace = nccl_flight_recorder.save(self.rank) if accelerator.has_flight_recorder(self.device) else None
        record = f"Its last collectives are in {trace}; torchfrtrace reads the files of all ranks. " if trace else ""
        return WorldError(
            f"a collective failed on rank {self.rank} of {self.size} at {self.progress.phase} (run.timeout: "
            f"{self.timeout:g} s): {describe_missing(self.heartbeat)}. See that rank's own message, above or in its "
            f"log, for the cause; if it only needs more time, raise run.timeout. {record}({first_line(error)})"
        )

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum over ranks, as a new tensor on the tensor's device."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum over ranks, as a new tensor on the tensor's device."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank, so that all ranks act at the same step on a signal that only one
        received."""
        return bool(self.all_reduce_max(torch.tensor(int(flag))).item())

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        # An all-reduce rather than dist.barrier, which guesses a device under NCCL.
        self.sum(torch.zeros(1))

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order, on every rank. Values are JSON (a tuple becomes a list).

        Raises TypeError for any other value, on its rank, before anything is sent.
        """
        return [json.loads(data) for data in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order, on every rank."""
        if self.size == 1:
            return [data]
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(data)
        lengths = self.sum(lengths)
        # One row per rank, summed: the rows of other ranks are zero here, so uint8 cannot overflow.
        table = torch.zeros(self.size, int(lengths.max()), dtype=torch.uint8)
        if data:
            table[self.rank, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        table = self.sum(table)
        return [row[:length].numpy().tobytes() for row, length in zip(table, lengths.tolist(), strict=True)]

    def run_on_main(self, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0 only and return its result (JSON) on all ranks.

        An exception is raised on every rank: unchanged on rank 0, as a WorldError with its text on the others.
        """
        if self.size == 1:
            return json.loads(json.dumps(action()))
        failure: Exception | None = None
        answer: dict[str, Any] = {}
        if self.is_main:
            try:
                answer = {"value": action()}
            except Exception as error:  # raised below, after the others have received it: they wait for the answer
                failure, answer = error, {"error": f"{type(error).__name__}: {error}"}
        answer = self.gather_objects(answer)[0]
        if failure is not None:
            raise failure
        if "error" in answer:
            raise WorldError(f"rank 0 failed, and rank {self.rank} with it: {answer['error']}")
        return answer["value"]

    def with_separate_group(self) -> World:
        """Return this world with a new gloo group, for a thread that runs during the steps: in the same group,
        its collectives could be matched with the collectives of the steps. Returns self in a single-process run."""
        if self.size == 1:
            return self
        return replace(
            self, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_SHARE * self.timeout))
        )

    def close(self) -> None:
        """Leave the process group. Does nothing if there is none or it was already left."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
            # Gloo's worker threads outlive the group while a mesh refers to it (every DTensor does). A thread that
            # frees the last collective's tensor while the interpreter shuts down aborts the process ("terminate
            # called without an active exception"). The sleep releases the GIL, which it waits for.
            time.sleep(0.1)

    def _reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        result = tensor.detach().clone()
        if self.size == 1:
            return result
        try:
            dist.all_reduce(result, op=op, group=self.group)
        except RuntimeError as error:
            if (lost := self.lost_rank_error(error)) is None:
                raise
            raise lost from error
        return result


def setup(
    threads: int | None = None, timeout: float = TIMEOUT, trace_dir: Path | None = None,
    facts: Callable[[], Mapping[str, str]] | None = None, section: ParallelSection | None = None,
) -> World:  # fmt: skip
    """Join the run that torchrun started, or create the world of a single process. Call once, before the model is
    built.

    Reads RANK, WORLD_SIZE, LOCAL_RANK (and, through torch, MASTER_ADDR and MASTER_PORT). If WORLD_SIZE is unset or
    1, there is no process group. CPU tensors use gloo, tensors of an accelerator the backend that torch registers
    for it (CUDA: NCCL).

    threads  torch's intra-op threads; None leaves torch's default (torchrun exports OMP_NUM_THREADS=1)
    timeout  seconds within which a missing rank is named, here and in every collective
    trace_dir  directory for NCCL's last collectives once one has failed (:mod:`octavo.parallel.nccl_flight_recorder`)
    facts    returns settings that must be equal on all ranks, key -> value; called only if there are several ranks
    section  the requested sizes of the axes

    A rank that has waited `NOTICE_SECONDS` for others prints a message to stderr and keeps waiting.

    Raises WorldError if the environment contradicts itself, the product of the axes is not the number of ranks, a rank
    has no accelerator of its own, or other ranks do not join in time. If ranks differ in WORLD_SIZE or facts, every
    rank that has joined raises it.
    """
    if threads is not None:
        if threads < 1:
            raise WorldError(f"threads is {threads}; it must be at least 1")
        torch.set_num_threads(threads)
    rank, size, local_rank = _read_env(os.environ)
    layout = Layout.from_section(size, section or ParallelSection())
    device = _device(local_rank, size)
    if size == 1:
        return World(device=device)
    backend = _backend(device)
    if accelerator.has_flight_recorder(device) and trace_dir is not None:
        nccl_flight_recorder.enable(trace_dir)
    settings = None if facts is None else facts()
    try:
        with _print_if_waiting(rank, size, timeout):
            wait = timedelta(seconds=COLLECTIVE_SHARE * timeout)
            # world_size 1: otherwise rank 0's store would wait for WORLD_SIZE ranks, and ranks with a different
            # WORLD_SIZE could not report it. `meet` waits for the ranks.
            store = next(dist.rendezvous("env://", rank, 1, timeout=wait))[0]
            store = meet(store, rank, size, COLLECTIVE_SHARE * timeout)
        if settings is not None and (
            differences := compare_facts(store, rank, size, settings, COLLECTIVE_SHARE * timeout)
        ):
            raise WorldError(
                f"the ranks of this run have different settings: {describe_differences(differences)}. Start all of "
                "them with the same files, versions and command line"
            )
        group = dist.PrefixStore("group", store)
        dist.init_process_group(backend, rank=rank, world_size=size, store=group, timeout=wait)
    except WorldError:
        raise
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            f"rank {rank} of {size} could not reach the others at {_master_address()}: {first_line(error)}. Start all "
            "ranks with torchrun, e.g. torchrun --nproc-per-node 2 -m octavo train FILE"
        ) from error
    mesh, experts = (
        init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)) if axes else None
        for axes in (layout.axes, layout.expert_axes if layout.expert > 1 else {})
    )
    progress = Progress()
    heartbeat = Heartbeat(store, rank, size, min(1.0, timeout / 40), progress)
    return World(rank, size, local_rank, device, mesh, timeout, heartbeat, progress, None, layout, experts)


def _master_address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


@contextmanager
def _print_if_waiting(rank: int, size: int, timeout: float) -> Iterator[None]:
    """Print a message to stderr if this rank still waits for others after `NOTICE_SECONDS`."""
    others = f"one of the {size - 1} other ranks" if rank == 0 else "rank 0"

    def print_notice() -> None:
        print(
            f"octavo: rank {rank} of {size} has waited {NOTICE_SECONDS:g} s for {others} at {_master_address()}, and "
            f"waits up to {COLLECTIVE_SHARE * timeout:g} s (run.timeout). Are all ranks running, with "
            f"WORLD_SIZE={size} and the same MASTER_ADDR and MASTER_PORT?", file=sys.stderr, flush=True,
        )  # fmt: skip

    timer = threading.Timer(NOTICE_SECONDS, print_notice)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read_env(env: Mapping[str, str]) -> tuple[int, int, int]:
    """Return (rank, size, local rank) from torchrun's variables."""

    def number(name: str, default: int | None) -> int:
        text = env.get(name)
        if text is None and default is not None:
            return default
        try:
            return int(text or "")
        except ValueError:
            state = "is not set" if text is None else f"is {text!r}"
            raise WorldError(
                f"WORLD_SIZE={env['WORLD_SIZE']} requires several processes, but {name} {state}; it must be a number. "
                "Start the run with torchrun, or unset WORLD_SIZE for a single process"
            ) from None

    size = number("WORLD_SIZE", 1)
    if size == 1 and ("WORLD_SIZE" not in env or env.get("RANK", "0") == "0"):
        return 0, 1, 0
    rank = number("RANK", None)
    if size < 1 or not 0 <= rank < size:
        raise WorldError(f"RANK={rank} and WORLD_SIZE={size} contradict each other: 0 <= RANK < WORLD_SIZE is required")
    return rank, size, number("LOCAL_RANK", rank)


def _device(local_rank: int, size: int) -> torch.device:
    try:
        devices = accelerator.device_count()
    except accelerator.DeviceError as error:
        raise WorldError(str(error)) from error
    if devices and local_rank >= devices:
        raise WorldError(
            f"local rank {local_rank} needs a separate accelerator, but this machine has {devices}. Start at most "
            f"{devices} processes here (torchrun --nproc-per-node), or set {accelerator.VARIABLE}=cpu to run on the CPU"
        )
    return accelerator.select(local_rank if size > 1 else None)


def _backend(device: torch.device) -> str:
    """Return torch's backend string: gloo for CPU tensors and the device's backend for its tensors."""
    if not accelerator.has_own_memory(device):
        return "gloo"
    try:
        return f"cpu:gloo,{device.type}:{accelerator.collective_backend(device)}"
    except accelerator.DeviceError as error:
        raise WorldError(str(error)) from error
