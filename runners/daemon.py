"""The runner daemon: claim a job, measure it, spool the result, post it, repeat. Runs nobody else's code itself.

A result is on disk before it is on the network, and a job's result ends the job, so that a kill at any moment loses
and doubles nothing: the next start posts what is spooled and gives back the job that was held.
"""

import logging
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from uuid import UUID

from runners.checkout import CheckoutError, UnreachableError
from runners.client import FORBIDDEN_STATUS, TOKEN_STATUS, Client, ClientError, RefusedError, ServiceUnreachableError
from runners.heartbeat import Heartbeat, LeaseLostError
from runners.job import Limits, PlanError, measure_commit
from runners.keeper import hide
from runners.process import isolation
from runners.settings import RunnerSettings
from runners.spool import Spool
from service.wire import ClaimRequest, LeasedJob, Result, RunnerHello

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.5
SIGNAL_SLICE_SECONDS = 0.2
FIRST_POSTPONEMENT_SECONDS = 10.0
POSTPONEMENT_SECONDS_MAX = 3600.0


class GivenBack(BaseException):
    """Raised into a running job by the second signal; no `except Exception` may take it for a failed measurement."""


class Stop:
    """What SIGTERM and SIGINT ask for: the first to finish the job, the second to give it back."""

    def __init__(self) -> None:
        self.asked = False
        self.interruptible = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        del number, frame
        if self.asked and self.interruptible:
            self.interruptible = False  # once: a third signal must not break off the clearing up
            raise GivenBack
        self.asked = True

    def pause(self, seconds: float) -> None:
        """Sleep, but not past a signal."""
        end = time.monotonic() + seconds
        while not self.asked and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, SIGNAL_SLICE_SECONDS))

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """A stretch of work that a second signal breaks off with GivenBack."""
        self.interruptible = True
        try:
            yield
        finally:
            self.interruptible = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listen to both signals; the main thread only."""
        before = {number: signal.signal(number, self.handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Postponed:
    """The spooled results that this runner's token may not post now: each waits longer after every refusal."""

    def __init__(self) -> None:
        self._waits: dict[UUID, tuple[float, float]] = {}  # attempt: due at time.monotonic(), and the wait before

    def put_off(self, attempt: UUID) -> float:
        """Wait with a result; the seconds."""
        _, last = self._waits.get(attempt, (0.0, FIRST_POSTPONEMENT_SECONDS / 2))
        seconds = min(2 * last, POSTPONEMENT_SECONDS_MAX)
        self._waits[attempt] = (time.monotonic() + seconds, seconds)
        return seconds

    def is_due(self, attempt: UUID) -> bool:
        """Whether it is time to try, for the first time or again."""
        return time.monotonic() >= self._waits.get(attempt, (0.0, 0.0))[0]

    def forget(self) -> None:
        """Try all of them at once: something has changed."""
        self._waits.clear()


@dataclass(frozen=True, slots=True)
class Daemon:
    """What the steps of the loop work with."""

    settings: RunnerSettings
    client: Client
    spool: Spool
    stop: Stop
    postponed: Postponed = field(default_factory=Postponed)


def run(settings: RunnerSettings, *, once: bool = False) -> int:
    """Work until a signal, or with `once` until one job is done or there is none. Returns the exit code: 0, or 1 if
    the service refused this runner. Raises SpoolBusyError if another daemon works with the spool.
    """
    hide()
    if not (found := isolation()).works:
        log.warning(
            "measured processes are not isolated (%s): they run as this user and reach what it reaches", found.words
        )
    stop = Stop()
    with (
        Spool(settings.spool) as spool,
        Client(settings.url, settings.token, request_seconds=settings.request_seconds) as client,
        stop.installed(),
    ):
        daemon = Daemon(settings, client, spool, stop)
        try:
            _work(daemon, once=once)
        except RefusedError as error:
            log.error("the service refuses this runner; what is spooled stays in %s: %s", settings.spool, error)
            return 1
    return 0


def _work(daemon: Daemon, *, once: bool) -> None:
    """Say hello, then job after job. While the service does not answer, pause longer and longer and begin anew."""
    retry_seconds = FIRST_RETRY_SECONDS
    known = False
    while not daemon.stop.asked:
        try:
            flush(daemon)
            if not known:
                _hello(daemon)
                known = True
                daemon.postponed.forget()  # the name, and with it what was leased to it, now belongs to this token
                flush(daemon)
            job = _claim(daemon)
            retry_seconds = FIRST_RETRY_SECONDS
            if job is not None:
                do_job(daemon, job)
                flush(daemon)
            if once:
                return
            if job is None:
                daemon.stop.pause(daemon.settings.poll_seconds * random.uniform(0.5, 1.5))  # noqa: S311 - no secret
        except ServiceUnreachableError as error:
            log.warning("%s; next try in %.1f s", error, retry_seconds)
            known = False  # a claim whose answer was lost goes back to the queue with the next hello
            daemon.stop.pause(retry_seconds * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            retry_seconds = min(2 * retry_seconds, daemon.settings.retry_seconds_max)


def flush(daemon: Daemon) -> None:
    """Post every spooled result, oldest first; forget what the service has, set aside what it refuses to take. What it
    refuses from this runner's token says nothing of the result: it stays, and is tried again.
    """
    for spooled in daemon.spool.pending():
        if not daemon.postponed.is_due(spooled.attempt):
            continue
        try:
            daemon.client.post_result(spooled.body())
        except RefusedError as error:
            if error.status in TOKEN_STATUS:
                raise
            if error.status in FORBIDDEN_STATUS:
                seconds = daemon.postponed.put_off(spooled.attempt)
                log.warning(
                    "result of attempt %s stays in %s, next try in %.0f s: the token may not post it: %s",
                    spooled.attempt,
                    spooled.path,
                    seconds,
                    error,
                )
                continue
            kept = daemon.spool.reject(spooled, str(error))
            log.error("result of attempt %s set aside as %s: %s", spooled.attempt, kept, error)
        else:
            daemon.spool.delete(spooled)
            log.info("result of attempt %s posted", spooled.attempt)


def _hello(daemon: Daemon) -> None:
    settings = daemon.settings
    hello = RunnerHello.model_validate(
        {
            "name": settings.runner_name,
            "device_class": settings.device_class,
            "capabilities": {"device": settings.device, "threads": settings.threads},
        }
    )
    daemon.client.register(hello)
    log.info("registered as %s at %s", settings.runner_name, settings.url)


def _claim(daemon: Daemon) -> LeasedJob | None:
    settings = daemon.settings
    request = {"runner": settings.runner_name, "device_class": settings.device_class}
    return daemon.client.claim(ClaimRequest.model_validate(request))


def do_job(daemon: Daemon, job: LeasedJob) -> None:
    """Measure a job and spool its result, or say why there is none."""
    log.info("job %d: %s at %s, suite %s", job.id, job.target.name, job.commit, job.suite)
    try:
        with Heartbeat(daemon.client, job) as heartbeat, daemon.stop.interrupting():
            result = _measure(daemon, job, heartbeat)
    except LeaseLostError as error:
        log.warning("%s", error)
    except GivenBack:
        _fail(daemon, job, transient=True, reason="the runner was stopped and gives the job back", given_back=True)
    except UnreachableError as error:
        _fail(daemon, job, transient=True, reason=str(error))
    except (CheckoutError, PlanError) as error:
        _fail(daemon, job, transient=False, reason=str(error))
    except Exception as error:  # whatever broke here must not stop the next job
        log.exception("job %d", job.id)
        _fail(daemon, job, transient=True, reason=f"{type(error).__name__}: {error}")
    else:
        daemon.spool.put(job.attempt, result.model_dump_json().encode())


def _measure(daemon: Daemon, job: LeasedJob, heartbeat: Heartbeat) -> Result:
    settings = daemon.settings
    return measure_commit(
        job.target,
        job.target.repository,
        job.commit,
        attempt=job.attempt,
        suite=job.suite,
        job_id=job.id,
        on_progress=heartbeat.report,
        limits=Limits.of(settings),
        cache=settings.cache,
        device=settings.device,
    )


def _fail(daemon: Daemon, job: LeasedJob, *, transient: bool, reason: str, given_back: bool = False) -> None:
    log.warning("job %d given up: %s", job.id, reason)
    try:
        daemon.client.fail(job.id, job.attempt, transient=transient, reason=reason, given_back=given_back)
    except ClientError as error:
        log.warning("job %d: not reported, its lease will run out: %s", job.id, error)
