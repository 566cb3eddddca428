"""Keeps a job's lease while the job is measured, in a thread of its own. Decides nothing about the job."""

import logging
import threading
from types import TracebackType
from typing import Self

from runners.client import LEASE_LOST_STATUS, Client, RefusedError, ServiceUnreachableError
from service.wire import LeasedJob

log = logging.getLogger(__name__)


class LeaseLostError(Exception):
    """The service has given the job to somebody else, or dropped it: measuring on is of no use."""


class Heartbeat:
    """A context in which a lease is renewed three times in its length. A service that does not answer is no loss: it
    takes a late result as well.
    """

    def __init__(self, client: Client, job: LeasedJob) -> None:
        self._client = client
        self._job = job
        self._progress = "starting"
        self._ended = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat-{job.id}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def report(self, progress: str) -> None:
        """Say what is being done, for the next renewal. Raises LeaseLostError if the lease is lost."""
        self._progress = progress
        if self._lost.is_set():
            raise LeaseLostError(f"job {self._job.id} is no longer leased to this runner")

    def _beat(self) -> None:
        while not self._ended.wait(self._job.lease_seconds / 3):
            try:
                self._client.renew(self._job.id, self._job.attempt, self._progress)
            except ServiceUnreachableError as error:
                log.warning("job %d: lease not renewed: %s", self._job.id, error)
            except RefusedError as error:
                log.warning("job %d: %s", self._job.id, error)
                if error.status in LEASE_LOST_STATUS:
                    self._lost.set()
                    return
