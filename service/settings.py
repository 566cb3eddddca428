"""The service's settings: one frozen object out of ULPWATCH_* variables. No other file reads the environment."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Every setting of the service, with its default and its meaning."""

    model_config = SettingsConfigDict(env_prefix="ULPWATCH_", frozen=True, extra="ignore")

    database_url: str = Field(
        default="sqlite:///./.ulpwatch/ulpwatch.sqlite3",
        repr=False,
        description="Database URL: sqlite:///PATH, or postgresql+psycopg://... for more than one machine.",
    )
    host: str = Field(default="127.0.0.1", description="Address that `ulpwatch serve` listens on.")
    port: int = Field(default=8750, ge=0, le=65535, description="Port that `ulpwatch serve` listens on.")
    public_read: bool = Field(default=False, description="Let callers without a token read.")
    body_bytes_max: int = Field(
        default=32 << 20, gt=0, description="Largest request body in bytes; a larger one gets 413."
    )
    lease_seconds: float = Field(default=60.0, gt=0, description="How long a claim holds without a renewal, seconds.")
    attempts_allowed: int = Field(default=3, ge=1, description="How often a job is tried before it counts as failed.")
    judge_interval_seconds: float = Field(
        default=1.0,
        gt=0,
        description="Longest pause of the judge, and between looks for leases that ran out, seconds; a posted result "
        "wakes the judge at once.",
    )
    verdict_wait_seconds_max: float = Field(
        default=300.0, ge=0, description="Longest wait of one request for a verdict, seconds."
    )
