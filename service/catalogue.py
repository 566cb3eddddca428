"""The one catalogue of metrics: name, unit, direction, class, rule. Read by the wire, the judge, the dashboard and
the docs.

It holds no values and decides nothing; the rules themselves are in service.detection. Standard library only.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class MetricClass(StrEnum):
    """Decides which rule of METHOD applies and which facts of an environment end a series' segment."""

    EXACT = "exact"
    NUMERIC = "numeric"
    TIMING = "timing"
    CONTRACT = "contract"


class Rule(StrEnum):
    """How two values of a metric are compared."""

    BYTES = "bytes"  # regress above max(4 KiB, 0.1 %)
    COUNT = "count"  # regress if it grows by more than 1 % and by at least 2
    ANY_CHANGE = "any-change"  # every change regresses
    ERROR_MAX = "error-max"  # log2 ratio of at least 1, above the floor
    ERROR_RMS = "error-rms"  # log2 ratio of at least 0.5, above the floor
    TALLY = "tally"  # a count of wrong rows or elements: any growth regresses
    SHARE = "share"  # a fraction that jumps past 1e-2 and doubles
    BITS = "bits"  # regress if it falls by 3 or more
    CHECK = "check"  # pass -> fail regresses
    INFORMATIONAL = "informational"  # stored and shown, decides nothing


class Family(StrEnum):
    """What a finding is about, in the word a person would use; series of one family form one finding.

    The most serious first.
    """

    CONTRACT = "contract"
    PRECISION = "precision"
    MEMORY = "memory"
    COMMUNICATION = "communication"
    WORK = "work"
    TIME = "time"

    @property
    def rank(self) -> int:
        """0 for the most serious."""
        return list(Family).index(self)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `code` is its place in packed rows: stable for ever, never reused.

    `relative` errors have scale 1 in their floor; absolute ones the scale measured as metric `scale`. `noise` names the
    metric that holds the case's own reorder noise. `gate` is the absolute limit of a declared float32 contract in words
    (service.detection.gates has it in numbers), empty where there is none.
    """

    code: int
    name: str
    unit: str
    title: str
    metric_class: MetricClass
    family: Family
    rule: Rule
    higher_is_better: bool = False
    noise: str | None = None
    scale: str | None = None
    signed: bool = False
    gate: str = ""


def _exact(code: int, name: str, unit: str, title: str, family: Family, rule: Rule) -> Metric:
    return Metric(code, name, unit, title, MetricClass.EXACT, family, rule)


def _error(
    code: int, name: str, unit: str, title: str, rule: Rule, noise: str | None, scale: str | None = None
) -> Metric:
    return Metric(code, name, unit, title, MetricClass.NUMERIC, Family.PRECISION, rule, noise=noise, scale=scale)


def _fact(code: int, name: str, unit: str, title: str) -> Metric:
    return Metric(code, name, unit, title, MetricClass.NUMERIC, Family.PRECISION, Rule.INFORMATIONAL)


def _time(code: int, name: str, title: str) -> Metric:
    return Metric(code, name, "second", title, MetricClass.TIMING, Family.TIME, Rule.INFORMATIONAL)


def _ratio(code: int, name: str, title: str, higher_is_better: bool = False) -> Metric:
    return Metric(code, name, "1", title, MetricClass.TIMING, Family.TIME, Rule.INFORMATIONAL, higher_is_better)


def _check(code: int, name: str, title: str) -> Metric:
    return Metric(code, name, "pass", title, MetricClass.CONTRACT, Family.CONTRACT, Rule.CHECK, higher_is_better=True)


def _gradient(first_code: int, branch: str, words: str) -> tuple[Metric, ...]:
    """The gradient metrics of one branch: `lp` is the log-prob's gradient alone, `ent` the entropy's alone."""
    noise = f"perm_delta_g_{branch}"
    return (
        _error(
            first_code, f"g_rel_l2_{branch}", "1", f"relative L2 error of the {words} gradient", Rule.ERROR_RMS, noise
        ),
        _error(
            first_code + 1,
            f"g_row_rel_l2_max_{branch}",
            "1",
            f"worst row's relative L2 error of the {words} gradient",
            Rule.ERROR_MAX,
            noise,
        ),
        _error(
            first_code + 2, f"g_ulp_p50_{branch}", "ulp", f"median error of the {words} gradient", Rule.ERROR_RMS, noise
        ),
        _error(
            first_code + 3,
            f"g_ulp_p999_{branch}",
            "ulp",
            f"99.9th percentile error of the {words} gradient",
            Rule.ERROR_MAX,
            noise,
        ),
        _error(
            first_code + 4,
            f"g_zero_sum_{branch}",
            "1",
            f"row sum of the {words} gradient over its L1 norm, worst row",
            Rule.ERROR_MAX,
            noise,
        ),
        Metric(
            first_code + 5,
            f"g_scale_{branch}",
            "1",
            f"scale error of the {words} gradient, <G,R>/<R,R> - 1",
            MetricClass.NUMERIC,
            Family.PRECISION,
            Rule.ERROR_MAX,
            noise=noise,
            signed=True,
        ),
        _fact(
            first_code + 6,
            f"g_ratio_to_peer_{branch}",
            "1",
            f"error of the {words} gradient over the plain fp32 form's",
        ),
        _error(
            first_code + 7,
            f"grad_coverage_miss_{branch}",
            "row",
            f"rows with an upstream but a zero {words} gradient",
            Rule.TALLY,
            None,
        ),
        _error(
            first_code + 8,
            f"grad_leak_{branch}",
            "row",
            f"rows without an upstream but a non-zero {words} gradient",
            Rule.TALLY,
            None,
        ),
        _fact(
            first_code + 9,
            noise,
            "1",
            f"reorder noise of the {words} gradient: relative L2 change, vocabulary permuted",
        ),
    )


# |x| is the greatest finite logit over the temperature, peer the plain float32 form's error on the same inputs.
_GATES = {
    "lp_abs_max": "2 ulp(max(|x|, ln V)) + 1e-6",
    "ent_abs_max": "8 ulp(|x|) + 2e-5",
    "g_rel_l2_lp": "1e-6 on flat",
    "g_bf16_grid": "1e-2",
    "g_zero_sum_lp": "1e-5 on flat, spread, offset",
    "g_tgt_rel_max": "max(4 peer, 1e-4) on confident",
    "tp_delta_lp": "10 perm_delta_lp",
    "tp_delta_ent": "10 perm_delta_ent",
    "tp_delta_g_lp": "10 perm_delta_g_lp",
    "tp_delta_g_ent": "10 perm_delta_g_ent",
}

_UNGATED: tuple[Metric, ...] = (
    # Exact: bytes and counts beyond the inputs, one call after warm-up, measured twice.
    _exact(1, "forward_peak_bytes", "byte", "peak memory, forward", Family.MEMORY, Rule.BYTES),
    _exact(2, "step_peak_bytes", "byte", "peak memory, forward + backward", Family.MEMORY, Rule.BYTES),
    _exact(3, "saved_bytes", "byte", "memory saved for backward", Family.MEMORY, Rule.BYTES),
    _exact(4, "largest_allocation_bytes", "byte", "largest allocation", Family.MEMORY, Rule.BYTES),
    _exact(5, "traffic_bytes", "byte", "dispatched traffic, forward + backward", Family.WORK, Rule.COUNT),
    _exact(6, "operations", "operation", "dispatched operations, forward + backward", Family.WORK, Rule.COUNT),
    _exact(7, "allocations", "allocation", "allocations, forward + backward", Family.WORK, Rule.COUNT),
    _exact(8, "collectives", "collective", "collectives, forward + backward", Family.COMMUNICATION, Rule.ANY_CHANGE),
    _exact(9, "collective_bytes", "byte", "bytes given to collectives", Family.COMMUNICATION, Rule.BYTES),
    # Beside them on CUDA: what the caching allocator makes of the requests.
    _exact(
        15,
        "allocated_peak_bytes",
        "byte",
        "peak of the allocator's blocks",
        Family.MEMORY,
        Rule.INFORMATIONAL,
    ),
    _exact(
        16,
        "reserved_peak_bytes",
        "byte",
        "peak of reserved memory",
        Family.MEMORY,
        Rule.INFORMATIONAL,
    ),
    _exact(
        17,
        "allocation_retries",
        "retry",
        "allocations that had to empty the allocator's cache first",
        Family.MEMORY,
        Rule.INFORMATIONAL,
    ),
    # Numeric: against the float64 oracle on the same rounded inputs.
    _error(20, "lp_abs_max", "nat", "worst log-prob error", Rule.ERROR_MAX, "perm_delta_lp", "lp_scale"),
    _error(21, "ent_abs_max", "nat", "worst entropy error", Rule.ERROR_MAX, "perm_delta_ent", "ent_scale"),
    _fact(22, "lp_scale", "nat", "largest finite log-prob of the oracle, absolute"),
    _fact(23, "ent_scale", "nat", "largest finite entropy of the oracle, absolute"),
    _fact(24, "perm_delta_lp", "nat", "reorder noise of the log-prob: worst change, vocabulary permuted"),
    _fact(25, "perm_delta_ent", "nat", "reorder noise of the entropy: worst change, vocabulary permuted"),
    _error(
        26,
        "g_tgt_rel_max",
        "1",
        "worst relative error of the log-prob gradient at the target column",
        Rule.ERROR_MAX,
        "perm_delta_tgt",
    ),
    _fact(27, "perm_delta_tgt", "1", "reorder noise of the gradient at the target column: worst relative change"),
    _error(28, "g_bf16_grid", "1", "share of log-prob gradients that lie on the bfloat16 grid", Rule.SHARE, None),
    Metric(
        29,
        "g_mantissa_bits",
        "bit",
        "effective mantissa bits of the log-prob gradient",
        MetricClass.NUMERIC,
        Family.PRECISION,
        Rule.BITS,
        higher_is_better=True,
    ),
    _error(30, "lp_pos_count", "row", "rows with a log-prob above 0", Rule.TALLY, None),
    _error(31, "ent_range_viol", "row", "rows with an entropy outside [0, ln V]", Rule.TALLY, None),
    _error(
        32,
        "nonfinite_unexpected",
        "element",
        "elements that are finite in one of kernel and oracle only",
        Rule.TALLY,
        None,
    ),
    _error(
        33,
        "legacy_delta_lp",
        "nat",
        "worst log-prob distance to the legacy kernel",
        Rule.ERROR_MAX,
        "perm_delta_lp",
        "lp_scale",
    ),
    _error(
        34,
        "legacy_delta_g_lp",
        "1",
        "distance to the legacy log-prob gradient, both rounded to bfloat16, relative L2",
        Rule.ERROR_RMS,
        "perm_delta_g_lp",
    ),
    _fact(35, "logits_abs_max", "1", "largest finite logit over the temperature, absolute"),
    _fact(36, "peer_tgt_rel_max", "1", "the plain fp32 form's g_tgt_rel_max"),
    *_gradient(40, "lp", "log-prob"),
    *_gradient(50, "ent", "entropy"),
    # Over several ranks, against the kernel's own result where one rank holds all; tp_invariant decides.
    _fact(60, "tp_delta_lp", "nat", "worst change of the log-prob with the ranks"),
    _fact(61, "tp_delta_ent", "nat", "worst change of the entropy with the ranks"),
    _fact(62, "tp_delta_g_lp", "1", "relative L2 change of the log-prob gradient with the ranks"),
    _fact(63, "tp_delta_g_ent", "1", "relative L2 change of the entropy gradient with the ranks"),
    _error(64, "rank_disagree", "row", "rows whose outputs are not the same bits on every rank", Rule.TALLY, None),
    # Timing: raw samples; informational until paired confirmation exists.
    _time(70, "forward_cpu_seconds", "process CPU time, forward without graph"),
    _time(71, "train_forward_cpu_seconds", "process CPU time, forward with graph"),
    _time(72, "step_cpu_seconds", "process CPU time, forward + backward"),
    _time(73, "forward_wall_seconds", "wall time, forward without graph"),
    _time(74, "train_forward_wall_seconds", "wall time, forward with graph"),
    _time(75, "step_wall_seconds", "wall time, forward + backward"),
    _ratio(76, "step_ratio_to_legacy", "CPU time over the legacy kernel's beside it, forward + backward"),
    _time(77, "first_call_seconds", "wall time of the first forward + backward, compiling and tuning included"),
    # On CUDA, by events on the current stream from a cold L2 cache.
    _time(78, "forward_device_seconds", "device time, forward without graph"),
    _time(79, "train_forward_device_seconds", "device time, forward with graph"),
    _time(80, "step_device_seconds", "device time, forward + backward"),
    _ratio(81, "forward_roofline_share", "least time that memory allows, over the forward's", True),
    _ratio(82, "step_roofline_share", "least time that memory allows, over the step's", True),
    _ratio(83, "throttled_share", "samples dropped for throttled clocks"),
    Metric(
        84,
        "compilations",
        "compilation",
        "graphs that torch.compile made for the case, the first included",
        MetricClass.TIMING,
        Family.TIME,
        Rule.INFORMATIONAL,
    ),
    # Contract: 1 passes, 0 fails.
    _check(90, "callable", "the entry can be imported and called"),
    _check(91, "completes", "the case ends in a result: no exception, kill, hang, exit or garbage"),
    _check(92, "entropy_presence", "entropy is returned exactly when asked for"),
    _check(93, "entropy_requires_grad", "entropy requires grad exactly when asked for"),
    _check(94, "gradient_defined", "each output used alone gives a defined gradient"),
    _check(95, "inputs_unchanged", "logits, targets and mask are bit-identical after forward and backward"),
    _check(96, "second_backward", "a second backward equals the first or raises"),
    _check(97, "repeat_bitwise", "the same call gives the same bits"),
    _check(98, "chunk_invariant", "every chunk size gives the same result"),
    _check(99, "mask_target_kept", "a masked-out target is kept"),
    _check(100, "mask_zero_gradient", "masked entries get an exactly zero log-prob gradient"),
    _check(101, "mask_entropy_unmasked", "entropy comes from the unmasked logits"),
    _check(102, "empty_batch", "N = 0 works, forward and backward"),
    _check(103, "noncontiguous_logits", "non-contiguous logits give the same result"),
    _check(104, "half_precision_logits", "bfloat16 and float16 logits work"),
    _check(105, "target_range", "an out-of-range target is a clear error or a documented ignore"),
    _check(106, "result_dtype", "outputs are float32 and the gradient has the logits' dtype"),
    _check(
        107,
        "zero_upstream",
        "a row without an upstream gradient gets a zero gradient, even of NaN logits",
    ),
    _check(108, "result_shape", "outputs have the shapes that the target declares"),
    _check(109, "within_gates", "errors lie within the absolute gates of the declared contract"),
    _check(110, "no_grad", "without gradients (no_grad, inference_mode) the outputs are the same and require none"),
    _check(111, "autocast", "under bfloat16 autocast the result is the same"),
    _check(112, "thread_safe", "two threads, each with inputs of its own, get what each gets alone"),
    _check(113, "within_budget", "memory lies within the declared budget"),
    _check(114, "unseen_inputs", "what memory and work are measured on, inputs never seen before, comes out right"),
    _check(115, "own_thread", "all operations run on the thread that calls the kernel"),
    _check(120, "tp_invariant", "any number of ranks gives the same result, gradient and gradient norm"),
    _check(121, "collectives_agree", "every rank makes the same collectives, in number, order and bytes"),
    _check(125, "async_escape", "on CUDA the device's work ends with the current stream's"),
)

METRICS: tuple[Metric, ...] = tuple(replace(metric, gate=_GATES.get(metric.name, "")) for metric in _UNGATED)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
BY_CODE: dict[int, Metric] = {metric.code: metric for metric in METRICS}
