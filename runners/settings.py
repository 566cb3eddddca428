"""The runner's settings: one frozen object out of ULPWATCH_* variables. No other file of the runner reads them."""

import re
import socket
from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class RunnerSettings(BaseSettings):
    """Every setting of the runner daemon and of the client commands, with its default and its meaning."""

    model_config = SettingsConfigDict(env_prefix="ULPWATCH_", frozen=True, extra="ignore")

    url: str = Field(default="http://127.0.0.1:8750", description="Address of the service.")
    token: SecretStr = Field(default=SecretStr(""), description="API token of the caller's scope; never logged.")
    name: str = Field(default="", description="The runner's name at the service; default HOST-DEVICE.")
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="Where it measures: cpu or cuda:K.")
    spool: Path = Field(
        default=Path(".ulpwatch/spool"), description="Directory of results that the service does not have yet."
    )
    cache: Path = Field(default=Path(".ulpwatch/cache"), description="Directory of mirrors of remote repositories.")
    poll_seconds: float = Field(default=5.0, gt=0, description="Mean pause between two claims while there is no job.")
    retry_seconds_max: float = Field(
        default=60.0, gt=0, description="Longest pause between two tries while the service does not answer."
    )
    request_seconds: float = Field(default=30.0, gt=0, description="How long one request may take.")
    case_seconds: float = Field(default=120.0, gt=0, description="How long one case may take before it is a timeout.")
    memory_bytes: int | None = Field(
        default=None,
        ge=1 << 28,
        description="What a measured process and all it starts may hold, bytes; default nine tenths of the host's.",
    )
    threads: int = Field(default=1, ge=1, description="Threads of a measured process; part of the environment.")

    @property
    def device_class(self) -> str:
        """`cpu` or `cuda`."""
        return self.device.partition(":")[0]

    @property
    def runner_name(self) -> str:
        """The given name, or HOST-DEVICE in the characters that a name may have."""
        words = self.name or f"{socket.gethostname()}-{self.device}"
        return re.sub(r"[^A-Za-z0-9._-]", "-", words).lstrip("._-")[:64] or "runner"
