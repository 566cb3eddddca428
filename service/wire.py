"""The wire contract: what runners, CI and the service say to each other. Version 1.

Everything that crosses the network is validated here, so that nonsense is refused before it is stored. Imports
pydantic, the catalogue and the standard library only. Times are aware UTC, durations seconds, sizes bytes.

History of WIRE_VERSION: 1, the first.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from service.catalogue import BY_NAME, Metric, MetricClass

WIRE_VERSION = 1


INTEGER_MAX = (1 << 63) - 1
_TEXT_MAX = 4000
_MEMBERS_MAX = 1000


def _storable(text: str) -> str:
    if "\x00" in text:
        raise ValueError("the character U+0000 cannot be stored")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("half of a surrogate pair cannot be stored")
    return text


def _storable_fact(value: JsonValue) -> JsonValue:
    """Refuse at any depth what no database and no other program could hold: pydantic checks typed fields only."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("NaN and infinity cannot be stored")
    if isinstance(value, int) and abs(value) > INTEGER_MAX:
        raise ValueError("an integer of more than 64 bits cannot be stored")
    if isinstance(value, str) and len(_storable(value)) > _TEXT_MAX:
        raise ValueError(f"a text of more than {_TEXT_MAX} characters cannot be stored")
    if isinstance(value, dict | list) and len(value) > _MEMBERS_MAX:
        raise ValueError(f"more than {_MEMBERS_MAX} members cannot be stored")
    for item in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
        _storable_fact(item)
    return value


def _as_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("lies outside the years 1 to 9999 in UTC") from error


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Sha = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$", description="full hexadecimal commit id, lower case")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256, hexadecimal")]
Short = Annotated[str, Field(max_length=200), AfterValidator(_storable)]
Line = Annotated[str, Field(max_length=500), AfterValidator(_storable)]
Text = Annotated[str, Field(max_length=_TEXT_MAX), AfterValidator(_storable)]
Branch = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_storable)]
Moment = Annotated[AwareDatetime, AfterValidator(_as_utc)]
Fact = Annotated[JsonValue, AfterValidator(_storable_fact)]
Facts = Annotated[dict[Name, Fact], Field(max_length=_MEMBERS_MAX)]
RowId = Annotated[int, Field(ge=1, lt=1 << 31)]
Samples = Annotated[list[float], Field(min_length=1, max_length=10_000, fail_fast=True)]
Dtype = Literal["float32", "bfloat16", "float16"]
EntropyMode = Literal["off", "value", "gradient"]
Distribution = Literal[
    "flat", "spread", "confident", "confident_wrong", "offset", "ties", "one_hot", "masked", "bf16_exact", "neg_inf"
]
Upstream = Literal["signed", "one_row"]
Outcome = Literal["ok", "unmeasurable", "raised", "out_of_memory", "killed", "timeout", "exited", "garbage"]


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _canonical_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def paths_digest(paths: Sequence[str]) -> str:
    """SHA-256 of a target's list of watched paths, whatever its order."""
    return _canonical_digest(sorted(set(paths)))


class Case(_Wire):
    """One point of the grid. `tokens` is N, `vocabulary` the whole V (each rank holds V / tensor_parallel)."""

    tokens: int = Field(ge=0, le=1 << 24)
    vocabulary: int = Field(ge=1, le=1 << 24)
    dtype: Dtype = "float32"
    entropy: EntropyMode = "gradient"
    keep_mask: bool = False
    chunk_size: int | None = Field(default=None, ge=1, le=1 << 24)
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    temperature: float = Field(default=1.0, gt=0, le=1e6)
    distribution: Distribution = "spread"
    upstream: Upstream = "signed"
    seed: int = Field(default=0, ge=0, lt=1 << 63)

    @property
    def id(self) -> str:
        """The case in one word. Parameters at their defaults are left out, so that a new parameter keeps old series."""
        parts = [f"n{self.tokens}", f"v{self.vocabulary}", self.dtype, self.entropy]
        parts += ["mask"] if self.keep_mask else []
        parts += [f"chunk{self.chunk_size}"] if self.chunk_size is not None else []
        parts += [f"tp{self.tensor_parallel}"] if self.tensor_parallel != 1 else []
        parts += [f"t{self.temperature!r}"] if self.temperature != 1.0 else []
        parts += [self.distribution] if self.distribution != "spread" else []
        parts += [self.upstream] if self.upstream != "signed" else []
        parts += [f"seed{self.seed}"] if self.seed else []
        return "-".join(parts)

    @property
    def logits_unit_bytes(self) -> int:
        """U: the bytes of one float32 logits buffer of one rank, N x V/TP x 4, whatever the dtype."""
        return self.tokens * (self.vocabulary // self.tensor_parallel) * 4


class Measurement(_Wire):
    """What one kernel did on one case: an outcome always, raw samples where there are any.

    `values` maps a metric's name to its samples in the metric's base unit; a metric that came out NaN or infinite has
    no value and is named in `nonfinite`. `notes` holds doubts and reasons in words, by topic (a check's name,
    `outcome`, ...).
    """

    kernel: Name
    role: Literal["kernel", "control"] = "kernel"
    case: Case
    outcome: Outcome = "ok"
    inputs_digest: Digest | None = None
    values: dict[Name, Samples] = Field(default_factory=dict, max_length=_MEMBERS_MAX)
    nonfinite: list[Name] = Field(default_factory=list, max_length=_MEMBERS_MAX)
    notes: dict[Name, Text] = Field(default_factory=dict, max_length=_MEMBERS_MAX)

    @field_validator("values")
    @classmethod
    def _values_fit_the_catalogue(cls, values: dict[str, list[float]]) -> dict[str, list[float]]:
        for name, samples in values.items():
            _check_samples(_known(name), samples)
        return values

    @field_validator("nonfinite")
    @classmethod
    def _nonfinite_fits_the_catalogue(cls, nonfinite: list[str]) -> list[str]:
        for name in nonfinite:
            if _known(name).metric_class is not MetricClass.NUMERIC:
                raise ValueError(f"metric {name!r} is not numeric and cannot be nonfinite")
        if len(set(nonfinite)) != len(nonfinite):
            raise ValueError("a metric is named twice")
        return nonfinite

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if both := sorted(set(self.values) & set(self.nonfinite)):
            raise ValueError(f"metric {both[0]!r} is named both in values and in nonfinite")
        if self.outcome != "ok" and "outcome" not in self.notes:
            raise ValueError(f"outcome {self.outcome!r} needs its reason in notes.outcome")
        return self


def _known(name: str) -> Metric:
    if name not in BY_NAME:
        raise ValueError(f"unknown metric {name!r}: it is not in the catalogue")
    return BY_NAME[name]


def _check_samples(metric: Metric, samples: list[float]) -> None:
    for sample in samples:
        if sample < 0 and not metric.signed:
            raise ValueError(f"metric {metric.name!r} cannot be negative, got {sample}")
        if metric.metric_class is MetricClass.EXACT and not (sample.is_integer() and sample <= INTEGER_MAX):
            raise ValueError(f"metric {metric.name!r} counts whole {metric.unit}s of 64 bits, got {sample}")
        if metric.metric_class is MetricClass.CONTRACT and sample not in (0.0, 1.0):
            raise ValueError(f"metric {metric.name!r} is 1 (pass) or 0 (fail), got {sample}")


class Environment(_Wire):
    """The measuring host. `exact`, `numeric` and `timing` hold the facts that end a segment of that class when they
    change.
    """

    device_class: Literal["cpu", "cuda"]
    device: Text
    exact: Facts
    numeric: Facts
    timing: Facts
    volatile: Facts = Field(default_factory=dict)

    def identity(self, metric_class: MetricClass) -> str:
        """SHA-256 of the facts that identify a series of this class. Contract checks share the numeric identity."""
        facts = {
            MetricClass.EXACT: self.exact,
            MetricClass.NUMERIC: self.numeric,
            MetricClass.CONTRACT: self.numeric,
            MetricClass.TIMING: self.timing,
        }[metric_class]
        return _canonical_digest([self.device_class, facts])


class Commit(_Wire):
    """A commit and its place in the graph. `watched_digest` is the hash of the target's watched paths in its tree,
    `watched_paths` the `paths_digest` of the paths that it covers: those of the target's newest version if it is left
    out.
    """

    sha: Sha
    parents: list[Sha] = Field(max_length=64)
    author: Short = ""
    subject: Line = ""
    committed_at: Moment
    watched_digest: Digest | None = None
    watched_paths: Digest | None = None

    @model_validator(mode="after")
    def _parents_are_others(self) -> Self:
        if self.sha in self.parents or len(set(self.parents)) != len(self.parents):
            raise ValueError("parents: a commit is not its own parent, and has each parent once")
        return self


class Result(_Wire):
    """One attempt's measurements of one commit: the body of POST /api/v1/results, idempotent by `attempt`.

    `units` names the unit of every metric that occurs, so that two sides with different catalogues notice.
    `suite_digest` names what the whole suite asks, cases and metrics: where it changes, what the suite dropped is
    reported missing once, and no more expected.
    """

    wire_version: Literal[1] = 1
    attempt: UUID
    job: RowId | None = None
    target: Name
    commit: Commit
    suite: Name
    suite_digest: Digest | None = None
    environment: Environment
    started_at: Moment
    finished_at: Moment
    units: dict[Name, Short] = Field(max_length=_MEMBERS_MAX)
    measurements: list[Measurement] = Field(min_length=1, max_length=20_000, fail_fast=True)

    @field_validator("units")
    @classmethod
    def _units_are_the_catalogues(cls, units: dict[str, str]) -> dict[str, str]:
        for name, unit in units.items():
            if unit != _known(name).unit:
                raise ValueError(f"metric {name!r} is in {_known(name).unit!r}, not in {unit!r}")
        return units

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.finished_at < self.started_at:
            raise ValueError("finished_at lies before started_at")
        seen: set[tuple[str, str]] = set()
        for index, measurement in enumerate(self.measurements):
            key = (measurement.kernel, measurement.case.id)
            if key in seen:
                raise ValueError(f"measurements[{index}]: kernel {key[0]!r} on case {key[1]!r} occurs twice")
            seen.add(key)
            for name in measurement.values:
                if name not in self.units:
                    raise ValueError(f"measurements[{index}]: the unit of metric {name!r} is missing in units")
        return self


# --- Targets --------------------------------------------------------------------------------------------------------

CASE_ARGUMENTS = (
    "logits",
    "targets",
    "keep_mask",
    "group",
    "chunk_size",
    "temperature",
    "with_entropy",
    "with_entropy_grad",
)
_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_RETURN = re.compile(r"_|-?(log_prob|entropy)(\[:, 0\])?")


def _known_arguments(arguments: dict[str, str]) -> dict[str, str]:
    unknown = sorted(set(arguments) - set(CASE_ARGUMENTS))
    if unknown:
        raise ValueError(f"unknown case argument {unknown[0]!r}; known are {', '.join(CASE_ARGUMENTS)}")
    return arguments


def _relative_path(path: str) -> str:
    _storable(path)
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"path {path!r} must lie inside the repository")
    return path


RelativePath = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_relative_path)]


class Budget(_Wire):
    """How many bytes a kernel may take: `units` U and `slack_bytes`."""

    units: float = Field(ge=0, le=1e6)
    slack_bytes: int = Field(default=0, ge=0, lt=1 << 53)


Budgeted = Literal["forward_peak_bytes", "step_peak_bytes", "saved_bytes", "largest_allocation_bytes"]

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]


class TargetKernel(_Wire):
    """How to call one kernel of a repository.

    `arguments` maps ours (CASE_ARGUMENTS) to the parameter names of the repository's function; an argument of ours
    that is not mapped is not passed, and cases that need it are not planned. `absent` gives what to pass where ours
    is None (`chunk_size = -1`). `returns` names what the function returns, in order: `log_prob`, `entropy`, `_` to
    ignore, with a leading `-` for a negated output and `[:, 0]` for a trailing dimension of one. `since` names the
    first commit whose function takes an argument: before it, a missing parameter is left out and recorded. `contract`
    holds the kernel to the absolute gates of its gradient's precision, `budget` to bytes, whatever the history says.
    """

    name: Name
    entry: Line
    arguments: Annotated[dict[Name, Short], Field(max_length=_MEMBERS_MAX), AfterValidator(_known_arguments)]
    returns: list[Short] = Field(min_length=1, max_length=8)
    absent: Annotated[Facts, AfterValidator(_known_arguments)] = Field(default_factory=dict)
    since: Annotated[dict[Name, Short], Field(max_length=_MEMBERS_MAX), AfterValidator(_known_arguments)] = Field(
        default_factory=dict
    )
    control: Name | None = None
    budget: Annotated[dict[Budgeted, Budget], Field(max_length=4)] = Field(default_factory=dict)
    contract: Annotated[dict[Literal["gradient"], Literal["float32", "bfloat16"]], Field(max_length=1)] | None = None

    @model_validator(mode="after")
    def _is_callable(self) -> Self:
        if not _ENTRY.fullmatch(self.entry):
            raise ValueError(f"entry {self.entry!r} is not of the form package.module:function")
        for item in self.returns:
            if not _RETURN.fullmatch(item):
                raise ValueError(
                    f"returns: {item!r} is not one of log_prob, entropy, _ with an optional '-' or '[:, 0]'"
                )
        names = [item.lstrip("-").removesuffix("[:, 0]") for item in self.returns]
        if names.count("log_prob") != 1 or names.count("entropy") > 1:
            raise ValueError("returns must name log_prob once and entropy at most once")
        for required in ("logits", "targets"):
            if required not in self.arguments:
                raise ValueError(f"arguments must map {required!r}")
        if unmapped := sorted(set(self.since) - set(self.arguments)):
            raise ValueError(f"since names {unmapped[0]!r}, which arguments does not map")
        return self


class TargetPython(_Wire):
    """The interpreter's set-up: `path` entries inside the repository, needed distributions, environment variables.

    `process_group` starts a gloo group before the first call; `megatron` also initialises megatron-core's parallel
    state.
    """

    path: list[RelativePath] = Field(default_factory=lambda: ["."], max_length=_MEMBERS_MAX)
    requires: list[Text] = Field(default_factory=list, max_length=_MEMBERS_MAX)
    env: dict[VariableName, Text] = Field(default_factory=dict, max_length=_MEMBERS_MAX)
    process_group: bool = False
    megatron: bool = False


class TargetRequire(_Wire):
    """What a verdict must have; everything else is shown and decides nothing."""

    devices: list[Literal["cpu", "cuda"]] = Field(default=["cpu"], min_length=1, max_length=2)
    metrics: list[MetricClass] = Field(
        default_factory=lambda: [MetricClass.EXACT, MetricClass.NUMERIC, MetricClass.CONTRACT],
        min_length=1,
        max_length=len(MetricClass),
    )


StateName = Literal["regress", "invalid", "incomparable", "missing", "no-baseline", "inconclusive", "improve", "pass"]
CiResult = Literal["pass", "fail", "undecided"]


class Target(_Wire):
    """A repository and how its kernels are called: the content of a target file. `ci` says what states mean to CI where
    that is not the usual."""

    name: Name
    repository: Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_storable)]
    branch: Branch = "main"
    paths: list[RelativePath] = Field(min_length=1, max_length=_MEMBERS_MAX)
    suite: Name = "quick"
    python: TargetPython = Field(default_factory=TargetPython)
    kernels: list[TargetKernel] = Field(min_length=1, max_length=_MEMBERS_MAX)
    require: TargetRequire = Field(default_factory=TargetRequire)
    ci: Annotated[dict[StateName, CiResult], Field(max_length=8)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _kernel_names_differ(self) -> Self:
        names = [kernel.name for kernel in self.kernels] + [k.control for k in self.kernels if k.control]
        own = [kernel.name for kernel in self.kernels]
        if len(set(own)) != len(own) or set(own) & {k.control for k in self.kernels if k.control}:
            raise ValueError(f"kernel names must differ from each other and from the controls: {names}")
        return self


# --- Jobs -----------------------------------------------------------------------------------------------------------


class JobRequest(_Wire):
    """Ask for a commit to be measured. The same open job is never made twice."""

    target: Name
    commit: Sha
    kind: Literal["measure"] = "measure"
    suite: Name | None = None
    device_class: Literal["cpu", "cuda"] = "cpu"
    priority: int = Field(default=0, ge=-100, le=100)


class RunnerHello(_Wire):
    """A runner introduces itself at start; jobs it held in an earlier life go back to the queue."""

    name: Name
    device_class: Literal["cpu", "cuda"]
    capabilities: Facts = Field(default_factory=dict)


class ClaimRequest(_Wire):
    """Ask for the next job that this runner can do."""

    runner: Name
    device_class: Literal["cpu", "cuda"]


class LeasedJob(_Wire):
    """A job that is this runner's until `lease_expires_at`, unless it renews; the result carries `attempt`."""

    id: RowId
    attempt: UUID
    kind: Literal["measure"]
    target: Target
    commit: Sha
    suite: Name
    lease_seconds: float = Field(gt=0, le=1e9)
    lease_expires_at: Moment


class Renewal(_Wire):
    """Keep a lease. `progress` is what the runner is doing, for the dashboard."""

    attempt: UUID
    progress: Short = ""


class Failure(_Wire):
    """Give a job up: a transient failure returns it to the queue until its attempts are used up, a permanent one ends
    it. `given_back` says that the runner stops: the job returns to the queue and the attempt does not count.
    """

    attempt: UUID
    transient: bool
    reason: Text
    given_back: bool = False


class Finish(_Wire):
    """End a job whose result has been stored."""

    attempt: UUID
