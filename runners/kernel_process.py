"""The half of a measured process in which the kernel runs, and the other half's way to it.

Here a stranger's code runs: everything of ours is imported before it, and nothing of ours is imported after it. This
half answers calls (runners.instruments.calls) and holds nothing else: neither the channel to the job, nor a nonce of
it, nor the oracle. What it is told and what it answers goes through runners.packets.
"""

import ctypes
import fcntl
import os
import resource
import secrets
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from runners.binding import UnmeasurableError, bind
from runners.channel import NONCE_BYTES, GarbageError, Plan, SubjectPlan
from runners.instruments.calls import KINDS, Answer, Call, Local, RaisedError, answer, last_line
from runners.instruments.subject import ARGUMENTS, Options, ResultShapeError, Subject
from runners.instruments.torch_state import StatedSettings
from runners.kernels.faults.mutation import mutated
from runners.kernels.inputs import Inputs, make_inputs
from runners.kernels.registry import kernel
from runners.packets import Connection
from service.wire import Case

_PR_SET_PDEATHSIG = 1
_DESCRIPTOR_MIN = 200  # out of the way of code that closes or writes to low numbers
_FEW_BYTES = 1 << 16
# How long ranks wait for each other: to start, and in a kernel's collective.
_TO_START, _IN_THE_KERNEL = (timedelta(seconds=seconds) for seconds in (60, 15))
# What the kernel's half learns of a plan, before it is ready and then: nothing of the way to the job.
_FIRST, _THEN = {"threads", "file_bytes"}, {"subject", "device", "ranks"}

OnGarbage = Callable[[str], NoReturn]
OnEnd = Callable[[int], NoReturn]


class KernelProcess:
    """The other half's view of the kernel: asks it, one call at a time. A Measured.

    `on_garbage` is told what the kernel's process cannot have said, and `on_end` its id if it is gone; neither returns.
    """

    def __init__(self, process: int, connection: Connection, on_garbage: OnGarbage, on_end: OnEnd) -> None:
        self._process = process
        self.name = ""
        self.takes: frozenset[str] = frozenset()
        self.omitted: tuple[str, ...] = ()
        self.doubts: dict[str, str] = {}
        self._connection = connection
        self._on_garbage = on_garbage
        self._on_end = on_end
        self._number = 0
        self._keeps = True

    def make_ready(self, plan: Plan) -> None:
        """Have it limited as the plan says, and import all of ours that it will need."""
        self._connection.offer_memory(_memory_bytes(plan.cases))
        self._say(plan.model_dump(mode="json", include=_FIRST))
        self._hear()

    def begin_bind(self, plan: Plan, rank: int) -> None:
        """Have the kernel found."""
        self._say(plan.model_dump(mode="json", include=_THEN) | {"rank": rank})

    def finish_bind(self, subject: SubjectPlan) -> None:
        """Hear whether it was found. Raises UnmeasurableError."""
        reply = self._hear()
        if "unmeasurable" in reply:
            raise UnmeasurableError(str(reply["unmeasurable"]))
        mapped = ARGUMENTS if subject.kernel is None else frozenset(subject.kernel.arguments)
        self.name = subject.name
        self.omitted = tuple(name for name in subject.omittable if name in reply["omitted"])
        self.takes = mapped - set(self.omitted)
        self.doubts |= subject.doubts

    def ask(self, call: Call, inputs: Inputs) -> Answer:
        """The answer to `call` on `inputs`. Raises RaisedError and ResultShapeError."""
        self.begin(call, inputs)
        return self.finish()

    def begin(self, call: Call, inputs: Inputs) -> None:
        """Ask. The tensors of an answer to memory and work hold until something else is asked, others for ever."""
        self._keeps = call.kind not in ("memory", "work")
        self._say({"call": asdict(call), "inputs": _slots(inputs)})

    def finish(self) -> Answer:
        """The answer. Raises RaisedError and ResultShapeError."""
        reply = self._hear()
        if note := reply["settings"]:
            self.doubts["torch_settings"] = f"changed by the commit's code and set back: {note}"
        if "misshapen" in reply:
            raise ResultShapeError(reply["misshapen"])
        if "raised" in reply:
            raise RaisedError(**reply["raised"])
        facts: dict[str, Any] = reply["answer"]
        facts |= {name: tuple(facts[name]) for name in ("gradients", "requires_grad")}
        facts["collectives"] = [(name, size) for name, size in facts["collectives"]]
        facts["left"] = facts["left"] and Inputs(**facts["left"])
        return Answer(**facts)

    def _say(self, message: dict[str, Any]) -> None:
        self._number += 1
        try:
            self._connection.send(message | {"number": self._number})
        except OSError:
            self._on_end(self._process)

    def _hear(self) -> dict[str, Any]:
        """The reply to what was said last, which carries its number."""
        try:
            reply = self._connection.receive(keep=self._keeps)
            if reply.get("number") != self._number:
                raise GarbageError("the kernel's process spoke out of turn")
        except GarbageError as error:
            self._on_garbage(str(error))
        except (EOFError, OSError):
            self._on_end(self._process)
        return reply


def start_kernel_process(on_garbage: OnGarbage, on_end: OnEnd) -> KernelProcess:
    """Fork the half that will run the kernel, before anything is known here that it must not know."""
    ours, theirs = socket.socketpair()
    nonce = secrets.token_bytes(NONCE_BYTES)
    parent = os.getpid()
    process = os.fork()
    if process == 0:
        try:
            _serve(theirs, nonce, parent)
        except BaseException:  # noqa: BLE001 -- whatever a stranger left for the end of the process must not run
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)
    theirs.close()
    return KernelProcess(process, Connection(ours, nonce), on_garbage, on_end)


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that ends. Linux only, like the descriptors."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def limit(file_bytes: int) -> None:
    """Lower this process's limits for good."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, file_bytes)


def _lower(kind: int, most: int) -> None:
    """A limit that the host has set lower stays."""
    hard = resource.getrlimit(kind)[1]
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (wanted, wanted))


def close_stdin() -> None:
    """Put nothing where stdin was."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _memory_bytes(cases: Sequence[Case]) -> int:
    """What the greatest message needs: the inputs as a step left them, mask included, and its gradient."""
    elements = max((case.tokens * case.vocabulary for case in cases), default=0)
    tokens = max((case.tokens for case in cases), default=0)
    return 10 * elements + 64 * tokens + _FEW_BYTES


def _slots(inputs: Inputs) -> dict[str, Any]:
    return {field.name: getattr(inputs, field.name) for field in fields(Inputs)}


# --- The kernel's half ----------------------------------------------------------------------------------------------


def _serve(end: socket.socket, nonce: bytes, parent: int) -> None:
    """Answer calls until the other half is gone."""
    _die_with(parent)
    close_stdin()
    connection = Connection(_alone(end), nonce)
    connection.take_memory()
    told = connection.receive()
    limit(told["file_bytes"])
    torch.set_num_threads(told["threads"])
    _warm_up()
    connection.send({"number": told["number"]})
    settings = StatedSettings()
    told = connection.receive()
    try:
        plan = SubjectPlan.model_validate(told["subject"])
        subject, alone = _prepare(plan, told["device"], rank=told["rank"], ranks=told["ranks"])
    except UnmeasurableError as error:
        connection.send({"unmeasurable": str(error), "number": told["number"]})
        return
    subject, alone = (replace(one, run=settings.around(one.run)) for one in (subject, alone))
    connection.send({"omitted": list(subject.omitted), "number": told["number"]})
    while True:
        try:
            message = connection.receive(keep=False)
        except EOFError:
            return
        reply = _answer(alone if message["call"]["alone"] else subject, message, settings)
        _reply(connection, reply, {"settings": settings.note, "number": message["number"]})


def _alone(end: socket.socket) -> socket.socket:
    """The socket at a high descriptor that no program started from here inherits; all others are closed."""
    moved = socket.socket(fileno=fcntl.fcntl(end.detach(), fcntl.F_DUPFD_CLOEXEC, _DESCRIPTOR_MIN))
    os.closerange(3, moved.fileno())
    os.closerange(moved.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return moved


def _answer(subject: Subject, message: dict[str, Any], settings: StatedSettings) -> dict[str, Any]:
    call = Call(**{**message["call"], "how": Options(**message["call"]["how"])})
    settings.restore()
    try:
        with settings.outside_inference():
            got = answer(subject, call, Inputs(**message["inputs"]))
    except ResultShapeError as error:
        return {"misshapen": str(error)}
    except RaisedError as error:
        told = {"message": str(error), "out_of_memory": error.out_of_memory, "import_failure": error.import_failure}
        return {"raised": told}
    finally:
        settings.restore()
    left = None if got.left is None else _slots(got.left)
    return {"answer": {field.name: getattr(got, field.name) for field in fields(Answer)} | {"left": left}}


def _reply(connection: Connection, reply: dict[str, Any], always: dict[str, Any]) -> None:
    try:
        connection.send(reply | always)
    except (ValueError, RuntimeError, TypeError) as error:  # tensors that no kernel of this contract returns
        told = {"message": f"its results cannot be handed over: {last_line(error)}"}
        connection.send({"raised": told} | always)


def _warm_up() -> None:
    """Have torch import what the calls need later, before a target's directories come first on the path."""
    subject = Subject("fused", kernel("fused").run)
    inputs = make_inputs(tokens=2, vocabulary=8)
    for kind in KINDS:
        Local(subject).ask(Call(kind, Options(), repetitions=1), inputs)


# --- Preparing ------------------------------------------------------------------------------------------------------


def _prepare(subject: SubjectPlan, device: str, *, rank: int, ranks: int) -> tuple[Subject, Subject]:
    """The bound kernel with the group that it is called with, and the same for the whole vocabulary on this rank.
    Raises UnmeasurableError."""
    needs_group = subject.process_group or subject.megatron
    world = _world(rank, ranks) if needs_group or ranks > 1 else None
    bound = _bound(subject, device)
    if subject.megatron:
        _initialise_megatron(ranks)
    if world is None or ranks == 1:
        return (replace(bound, group=world),) * 2
    apart = dist.new_group(timeout=_IN_THE_KERNEL)
    each_alone = [dist.new_group([one]) for one in range(ranks)]
    return replace(bound, group=apart), replace(bound, group=each_alone[rank] if needs_group else None)


def _bound(subject: SubjectPlan, device: str) -> Subject:
    if subject.built_in is None:
        assert subject.kernel is not None
        return bind(subject.kernel, Path(subject.files), subject.path, subject.omittable, device)
    found = kernel(subject.built_in)
    if found.missing is not None:
        raise UnmeasurableError(found.missing)
    if subject.edits:
        found = mutated(found, subject.edits)
    return Subject(found.name, found.run, contract=found.contract, device=device)


def _world(rank: int, ranks: int) -> dist.ProcessGroup:
    """A group of this kernel's ranks, which needs no network beyond the loopback interface."""
    meeting_place = Path.cwd() / "process-group"
    dist.init_process_group("gloo", f"file://{meeting_place}", _TO_START, world_size=ranks, rank=rank)
    world = dist.group.WORLD
    assert world is not None
    return world


def _initialise_megatron(ranks: int) -> None:
    """Initialise megatron-core's parallel state; nothing where it is not installed."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        return
    try:
        from megatron.core import parallel_state  # noqa: PLC0415 - optional, and slow to import

        parallel_state.initialize_model_parallel(ranks)
    except Exception as error:  # a stranger's package can raise anything
        raise UnmeasurableError(f"megatron-core's parallel state cannot be initialised: {last_line(error)}") from error
