"""The processes of a run: who am I, how many are we, and the few things we say to each other.

`setup` reads what torchrun wrote into the environment. One process is the ordinary case: then there is no process
group, no mesh, and every helper of `World` is the identity, so that callers need no second code path.

Objects cross between ranks as JSON in uint8 tensors: `torch.distributed`'s own object collectives are pickle.
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
from octavo.parallel.hang_watch import Marks, Pulse, missing_words
from octavo.parallel.layout import Layout
from octavo.parallel.rendezvous import agree, in_words, meet

TIMEOUT = 600.0  # seconds: longer than any honest wait (a checkpoint, an evaluation), shorter than a night
SOON = 20.0  # seconds until a rank that waits for others at the start says so
WAITS = 0.9  # of the timeout a collective waits; in the rest of it the rank that did not come is found and named


@dataclass(frozen=True)
class World:
    """One process among `size`. `device` is where this rank computes; `mesh` has the axis "shard" or, with copies of
    the model, the axes "replicate" and "shard", and is None for a single process; `layout` says what all axes are, and
    `experts` is the mesh of experts where they are dealt to ranks (`Layout.expert_axes`);
    `timeout` is how many seconds it may take until a rank that does not come is named; `group` what its own collectives
    go through (None: the group of all ranks). Every method is a collective: all ranks call it, in the same order.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")
    mesh: DeviceMesh | None = None
    timeout: float = TIMEOUT
    pulse: Pulse | None = None
    marks: Marks = field(default_factory=Marks, compare=False)
    group: dist.ProcessGroup | None = None
    layout: Layout = Layout()
    experts: DeviceMesh | None = None

    @property
    def data_rank(self) -> int:
        """Which part of a global batch this rank trains on; ranks of a context share one."""
        return self.rank // self.layout.context

    @property
    def data_size(self) -> int:
        """How many parts of a global batch are trained on at once."""
        return self.size // self.layout.context

    @property
    def context_rank(self) -> int:
        """Which part of each row this rank has, among `layout.context`."""
        return self.rank % self.layout.context

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes files."""
        return self.rank == 0

    def at(self, place: str) -> None:
        """Say where this rank is now ("step 7, reading its rows"): how others name it should it hang there. Sends
        nothing; all ranks say the same, in the same order."""
        self.marks.count, self.marks.place = self.marks.count + 1, place

    def lost(self, error: RuntimeError) -> WorldError | None:
        """The error of a collective that waited in vain, with the rank that did not come; None for any other error."""
        if self.pulse is None or isinstance(error, WorldError):
            return None
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            return None
        trace = nccl_flight_recorder.save(self.rank) if accelerator.traces_collectives(self.device) else None
        kept = "" if trace is None else f"Its last collectives are in {trace}; torchfrtrace reads those of all ranks. "
        return WorldError(
            f"rank {self.rank} of {self.size} waited in vain at {self.marks.place} (run.timeout: {self.timeout:g} s): "
            f"{missing_words(self.pulse)}. A message of that rank, further up or in its log, has the cause; a wait "
            f"that was honest needs a larger run.timeout. {kept}({first_line(error)})"
        )

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise sum over ranks, as a new tensor on the tensor's own device; the input is left alone."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum over ranks, as a new tensor on the tensor's own device."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """True where any rank says so: how a signal that reached one rank is acted upon by all at the same step."""
        return bool(self.all_reduce_max(torch.tensor(int(flag))).item())

    def barrier(self) -> None:
        """Wait until every rank is here."""
        # A reduced tensor rather than dist.barrier: the same call for gloo and NCCL, without guessing a device.
        self.sum(torch.zeros(1))

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank. Values are what JSON holds (a tuple returns as a list).

        Raises TypeError for anything else, on the rank that tried, before a word is sent.
        """
        data = json.dumps(value).encode()
        if self.size == 1:
            return [json.loads(data)]
        mine = torch.tensor(list(data), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = mine.numel()
        lengths = self.sum(lengths)
        # One row a rank, summed: rows of the others are zero, so uint8 cannot overflow.
        table = torch.zeros(self.size, int(lengths.max()), dtype=torch.uint8)
        table[self.rank, : mine.numel()] = mine
        table = self.sum(table)
        return [json.loads(bytes(row[:length].tolist())) for row, length in zip(table, lengths.tolist(), strict=True)]

    def from_main(self, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0 alone and give its result (JSON) to all.

        An exception raised there leaves every rank: as itself on rank 0, as WorldError with its words elsewhere.
        """
        if self.size == 1:
            return json.loads(json.dumps(action()))
        failure: Exception | None = None
        answer: dict[str, Any] = {}
        if self.is_main:
            try:
                answer = {"value": action()}
            except Exception as error:  # sent to the others first, raised below
                failure, answer = error, {"error": f"{type(error).__name__}: {error}"}
        answer = self.gather_objects(answer)[0]
        if failure is not None:
            raise failure
        if "error" in answer:
            raise WorldError(f"rank 0 failed, and rank {self.rank} with it: {answer['error']}")
        return answer["value"]

    def beside(self) -> World:
        """The same ranks with a gloo group of their own, for a thread that works beside the steps: in the steps' group
        what it sends could meet a collective of theirs. In one process the same world."""
        if self.size == 1:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=WAITS * self.timeout)))

    def close(self) -> None:
        """Leave the process group. Harmless without one, and when called twice."""
        if self.pulse is not None:
            self.pulse.stop()
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
            # Gloo's worker threads outlive the group while a mesh refers to it (every DTensor does). One that drops
            # the last tensor of the last collective after the interpreter began to end aborts the process
            # ("terminate called without an active exception"); asleep, we let it have the GIL it waits for.
            time.sleep(0.1)

    def _reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        result = tensor.detach().clone()
        if self.size == 1:
            return result
        try:
            dist.all_reduce(result, op=op, group=self.group)
        except RuntimeError as error:
            if (lost := self.lost(error)) is None:
                raise
            raise lost from error
        return result


def setup(
    threads: int | None = None, timeout: float = TIMEOUT, traces: Path | None = None,
    facts: Callable[[], Mapping[str, str]] | None = None, section: ParallelSection | None = None,
) -> World:  # fmt: skip
    """Join the run that torchrun started, or be its only process. Call once, before the model is built.

    Reads RANK, WORLD_SIZE, LOCAL_RANK (and, through torch, MASTER_ADDR and MASTER_PORT). Without WORLD_SIZE, or with
    1, there is no process group. Beside gloo, for what lives on the CPU,
    an accelerator takes what torch registers for it: CUDA NCCL.
    `threads` sets torch's intra-op threads; None leaves torch's own choice (torchrun exports OMP_NUM_THREADS=1).
    `timeout`: seconds until a rank that does not come is named, here and in every collective. `traces`: the directory
    where NCCL's last collectives go once one was in vain (:mod:`octavo.parallel.nccl_flight_recorder`). `facts`: what
    all ranks must start with alike, key -> value, asked where there are several. `section`: the sizes of the axes that
    are asked for.

    A rank that has waited `SOON` seconds for others says so on stderr, and goes on waiting.

    Raises WorldError where the environment contradicts itself, the axes do not multiply to the number of ranks, a rank
    has no GPU of its own, peers do not appear, or ranks were started for another number of ranks or with other facts:
    then on every rank that has come.
    """
    if threads is not None:
        if threads < 1:
            raise WorldError(f"threads={threads} was asked; at least 1 is needed")
        torch.set_num_threads(threads)
    rank, size, local_rank = _read(os.environ)
    layout = Layout.of(size, section or ParallelSection())
    device = _device(local_rank, size)
    if size == 1:
        return World(device=device)
    backend = _wire(device)
    if accelerator.traces_collectives(device) and traces is not None:
        nccl_flight_recorder.record(traces)
    own = None if facts is None else facts()
    try:
        with _patience(rank, size, timeout):
            wait = timedelta(seconds=WAITS * timeout)
            # "1 rank": the store of rank 0 would wait for as many as it was given, and no rank could tell it of another
            # number; whom to wait for is the meeting's business.
            store = next(dist.rendezvous("env://", rank, 1, timeout=wait))[0]
            store = meet(store, rank, size, WAITS * timeout)
        if own is not None and (differences := agree(store, rank, size, own, WAITS * timeout)):
            raise WorldError(
                f"the ranks of this run did not start alike: {in_words(differences)}. Start all of them with the same "
                "files, versions and command line"
            )
        group = dist.PrefixStore("group", store)
        dist.init_process_group(backend, rank=rank, world_size=size, store=group, timeout=wait)
    except WorldError:
        raise
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            f"rank {rank} of {size} could not meet the others at {_place()}: {first_line(error)}. Start all ranks with "
            "torchrun, e.g. torchrun --nproc-per-node 2 -m octavo train FILE"
        ) from error
    mesh, experts = (
        init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)) if axes else None
        for axes in (layout.axes, layout.expert_axes if layout.expert > 1 else {})
    )
    marks = Marks()
    pulse = Pulse(store, rank, size, min(1.0, timeout / 40), marks)
    return World(rank, size, local_rank, device, mesh, timeout, pulse, marks, None, layout, experts)


def _place() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


@contextmanager
def _patience(rank: int, size: int, timeout: float) -> Iterator[None]:
    """Say on stderr, after `SOON` seconds, that this rank still waits for others."""
    others = f"one of its {size - 1} other ranks" if rank == 0 else "rank 0"

    def say() -> None:
        print(
            f"octavo: rank {rank} of {size} has waited {SOON:g} s for {others} at {_place()}, and waits up to "
            f"{WAITS * timeout:g} s (run.timeout). Do all ranks run, with WORLD_SIZE={size} and the same MASTER_ADDR "
            "and MASTER_PORT?", file=sys.stderr, flush=True,
        )  # fmt: skip

    timer = threading.Timer(SOON, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read(env: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, size, local rank) from torchrun's variables."""

    def number(name: str, default: int | None) -> int:
        text = env.get(name)
        if text is None and default is not None:
            return default
        try:
            return int(text or "")
        except ValueError:
            found = "is not set" if text is None else f"is {text!r}"
            raise WorldError(
                f"WORLD_SIZE={env['WORLD_SIZE']} asks for several processes, but {name} {found}, not a number. "
                "Start the run with torchrun, or unset WORLD_SIZE for a single process"
            ) from None

    size = number("WORLD_SIZE", 1)
    if size == 1 and ("WORLD_SIZE" not in env or env.get("RANK", "0") == "0"):
        return 0, 1, 0
    rank = number("RANK", None)
    if size < 1 or not 0 <= rank < size:
        raise WorldError(f"RANK={rank} and WORLD_SIZE={size} contradict each other: 0 <= RANK < WORLD_SIZE is needed")
    return rank, size, number("LOCAL_RANK", rank)


def _device(local_rank: int, size: int) -> torch.device:
    try:
        found = accelerator.count()
    except accelerator.DeviceError as error:
        raise WorldError(str(error)) from error
    if found and local_rank >= found:
        raise WorldError(
            f"local rank {local_rank} needs an accelerator of its own, but this machine shows {found}. Start at most "
            f"{found} processes here (torchrun --nproc-per-node), or set {accelerator.VARIABLE}=cpu to run on the CPU"
        )
    return accelerator.select(local_rank if size > 1 else None)


def _wire(device: torch.device) -> str:
    """gloo for what lives on the CPU, and beside it what carries tensors of the device."""
    if not accelerator.has_own_memory(device):
        return "gloo"
    try:
        return f"cpu:gloo,{device.type}:{accelerator.collective_backend(device)}"
    except accelerator.DeviceError as error:
        raise WorldError(str(error)) from error
