"""The seeded faults: each as the edits that put it into `fused`, with the signals that must and that may show it.

A signal is the name of a metric or check of service.catalogue; `allowed` also takes the name of a family of findings.
What is not allowed must stay as it is. Runs no kernel: runners.kernels.faults.mutation makes a mutant of the edits.
"""

from dataclasses import dataclass

from runners.kernels.faults import Edit

KERNEL = "fused"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that is measured. `number` is its place in the project's list; `required` signals must all be seen,
    and none but these and the `allowed` ones. `parallel` says that several ranks are needed to see it."""

    number: str
    name: str
    edits: tuple[Edit, ...]
    required: frozenset[str]
    allowed: frozenset[str] = frozenset()
    parallel: bool = False


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A fault of the list that `ulpwatch selftest` does not measure, and why."""

    number: str
    name: str
    reason: str


def _signals(names: str) -> frozenset[str]:
    return frozenset(names.split())


# One more or one less operation a chunk.
_WORK = "operations traffic_bytes allocations"
_G_LP = "g_rel_l2_lp g_row_rel_l2_max_lp g_ulp_p50_lp g_ulp_p999_lp g_zero_sum_lp g_scale_lp"
_G_ENT = "g_rel_l2_ent g_row_rel_l2_max_ent g_ulp_p50_ent g_ulp_p999_ent g_zero_sum_ent g_scale_ent"
_TARGET = "g_tgt_rel_max legacy_delta_g_lp"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "1",
        "gradient_in_bf16",
        (("p.masked_fill_(dead, 0.0)\n", "p.copy_(p.masked_fill_(dead, 0.0).bfloat16())\n"),),
        required=_signals("g_mantissa_bits g_bf16_grid g_rel_l2_lp g_ulp_p50_lp g_rel_l2_ent within_gates"),
        allowed=_signals(f"{_G_LP} {_G_ENT} {_TARGET} {_WORK} step_peak_bytes"),
    ),
    Fault(
        "2",
        "target_column_in_bf16",
        (
            (
                "p.scatter_add_(1, column, -owned.float())",
                "p.scatter_(1, column, (p.gather(1, column).bfloat16() - owned.bfloat16()).float())",
            ),
        ),
        required=_signals("g_tgt_rel_max g_rel_l2_lp within_gates"),
        allowed=_signals(f"{_G_LP} {_TARGET} {_WORK}"),
    ),
    Fault(
        "3",
        "entropy_gradient_dropped",
        (("p.add_(entropy_term)", "pass"),),
        required=_signals("g_rel_l2_ent g_scale_ent grad_coverage_miss_ent"),
        allowed=_signals(_G_ENT),
    ),
    Fault(
        "4",
        "entropy_gradient_of_a_negated_softmax",
        (
            ("dead = upstream == 0\n", "dead = upstream == 0\n            p.neg_()\n"),
            ("-owned.float()).mul_(upstream / -plan.temperature)", "owned.float()).mul_(upstream / plan.temperature)"),
        ),
        required=_signals("g_rel_l2_ent g_scale_ent"),
        # With a mask the entropy's softmax is another, which stays right: the two then differ.
        allowed=_signals(f"{_G_ENT} {_WORK} mask_entropy_unmasked"),
    ),
    Fault(
        "5",
        "upstream_read_as_a_scalar",
        (
            (
                "ctx.spent = True\n",
                "ctx.spent = True\n        upstream_log_prob = upstream_log_prob[:1].expand_as(upstream_log_prob)\n",
            ),
        ),
        required=_signals("g_rel_l2_lp g_scale_lp grad_coverage_miss_lp"),
        # The first row's is zero, and so is the whole gradient: it has no bits.
        allowed=_signals(f"{_G_LP} {_TARGET} g_mantissa_bits within_gates"),
    ),
    Fault(
        "6",
        "phantom_pad_columns",
        (
            (
                "total = buffer.exp_().sum(1, keepdim=True)\n",
                "total = buffer.exp_().sum(1, keepdim=True) + (-maximum).exp() * (-buffer.shape[1] % 1024)\n",
            ),
        ),
        required=_signals("lp_abs_max ent_abs_max ent_range_viol g_zero_sum_lp within_gates"),
        allowed=_signals(f"precision {_WORK}"),
    ),
    Fault(
        "10a",
        "entropy_of_masked_logits",
        (("_softmax_(q, logits, None,", "_softmax_(q, logits, dropped_ids(keep_mask, column, owned),"),),
        required=_signals("ent_abs_max g_rel_l2_ent mask_entropy_unmasked within_gates"),
        allowed=_signals(f"{_G_ENT} {_WORK} grad_coverage_miss_ent"),
    ),
    Fault(
        "10b",
        "target_not_forced_into_the_mask",
        (("dropped_ids(keep_mask, column, owned)\n", "~keep_mask\n"),),
        required=_signals("lp_abs_max nonfinite_unexpected mask_target_kept"),
        allowed=_signals("precision within_gates"),
    ),
    Fault(
        "11",
        "last_chunk_dropped_in_backward",
        (
            (
                "in row_chunks(softmax.shape[0], plan.chunk_size):",
                "in row_chunks(softmax.shape[0], plan.chunk_size)[: -1 if plan.chunk_size else None]:",
            ),
        ),
        required=_signals("g_rel_l2_lp g_rel_l2_ent grad_leak_lp chunk_invariant"),
        # The rows keep what their buffer held: the softmax, another one under a mask, anything at all in bfloat16.
        allowed=_signals("precision mask_entropy_unmasked half_precision_logits within_gates"),
    ),
    Fault(
        "13",
        "log_prob_in_bf16",
        (
            (
                "return log_prob, entropy\n\n    @staticmethod",
                "return log_prob.bfloat16(), entropy\n\n    @staticmethod",
            ),
        ),
        required=_signals("lp_abs_max result_dtype within_gates"),
        # Autograd hands the backward an upstream gradient in bfloat16 too; over a uniform softmax it leaves few bits.
        allowed=_signals(f"{_G_LP} {_TARGET} {_WORK} legacy_delta_lp g_bf16_grid"),
    ),
    Fault(
        "14",
        "entropy_graph_kept_for_a_value",
        (("entropy_graph=graph and with_entropy and with_entropy_grad", "entropy_graph=graph and with_entropy"),),
        required=_signals("saved_bytes step_peak_bytes entropy_requires_grad"),
        allowed=_signals("memory work"),
    ),
    Fault(
        "15",
        "extra_copy_and_out_of_place",
        (
            (
                "_load_(buffer, logits, plan.temperature)\n    if",
                "_load_(buffer, logits.float().clone(), plan.temperature)\n    if",
            ),
            (
                "total = buffer.exp_().sum(1, keepdim=True)",
                "exponential = buffer.exp()\n    total = exponential.sum(1, keepdim=True)",
            ),
            ("buffer.div_(both[:, 1:])", "buffer.copy_(exponential / both[:, 1:])"),
        ),
        required=_signals("forward_peak_bytes step_peak_bytes traffic_bytes"),
        allowed=_signals("memory work"),
    ),
    Fault(
        "16",
        "result_cached_by_data_pointer",
        (
            ("class _LogProbEntropy(", "_LAST: list[Any] = []\n\n\nclass _LogProbEntropy("),
            (
                "ctx.plan, ctx.dtype,",
                "if _LAST and (_LAST[0].data_ptr(), _LAST[0].shape) == (logits.data_ptr(), logits.shape):\n"
                "            log_prob = _LAST[1].clone()\n"
                "        _LAST[:] = logits.detach(), log_prob.detach()\n"
                "        ctx.plan, ctx.dtype,",
            ),
        ),
        required=_signals("repeat_bitwise"),
    ),
    Fault(
        "18",
        "loop_over_rows",
        (("chunk_size=chunk_size,\n        temperature", "chunk_size=1,\n        temperature"),),
        required=_signals("operations allocations"),
    ),
    Fault(
        "20",
        "logits_overwritten",
        (
            (
                "softmax = _whole_buffer(logits) if plan.graph else None",
                "softmax = None if not plan.graph else "
                "_whole_buffer(logits) if plan.entropy else logits.detach().float()",
            ),
        ),
        required=_signals("inputs_unchanged"),
    ),
    Fault(
        "21",
        "no_gradient_where_one_upstream_is_none",
        (
            ("set_materialize_grads(True)", "set_materialize_grads(False)"),
            ("upstream_entropy is None):\n", "upstream_entropy is None):\n            return None, None, None, None\n"),
        ),
        required=_signals("gradient_defined g_rel_l2_lp g_rel_l2_ent grad_coverage_miss_lp grad_coverage_miss_ent"),
        allowed=_signals(f"{_G_LP} {_G_ENT} {_TARGET} contract precision"),
    ),
    Fault(
        "7",
        "shard_missing_from_the_sum",
        (
            (
                "    total = buffer.exp_().sum(1, keepdim=True)\n",
                "    total = buffer.exp_().sum(1, keepdim=True)\n"
                "    if plan.group is not None and plan.group.rank() == 1:\n"
                "        total.zero_()\n",
            ),
        ),
        required=_signals("tp_invariant lp_abs_max g_rel_l2_lp ent_abs_max g_rel_l2_ent"),
        allowed=_signals("contract precision work"),
        parallel=True,
    ),
    Fault(
        "8",
        "sum_times_ranks",
        (
            (
                "    buffer.div_(both[:, 1:])\n",
                "    if plan.group is not None:\n"
                "        both[:, 1].mul_(plan.group.size())\n"
                "    buffer.div_(both[:, 1:])\n",
            ),
        ),
        required=_signals("tp_invariant lp_abs_max g_rel_l2_lp ent_abs_max g_rel_l2_ent"),
        allowed=_signals("contract precision work"),
        parallel=True,
    ),
    Fault(
        "9",
        "no_gradient_where_the_target_is_not",
        (("-owned.float()).mul_(upstream", "-owned.float()).mul_(owned).mul_(upstream"),),
        required=_signals("tp_invariant g_rel_l2_lp g_zero_sum_lp"),
        allowed=_signals(f"{_G_LP} {_TARGET} within_gates {_WORK}"),
        parallel=True,
    ),
    Fault(
        "19",
        "collective_skipped_on_one_rank",
        (
            (
                "    return all_reduce_sum(_finite_logits(logits, plan.temperature).mul_(p).sum(1), plan.group)\n",
                "    mine = _finite_logits(logits, plan.temperature).mul_(p).sum(1)\n"
                "    is_second = plan.group is not None and plan.group.rank() == 1\n"
                "    return mine if is_second else all_reduce_sum(mine, plan.group)\n",
            ),
        ),
        required=_signals("completes"),
        parallel=True,
    ),
)

UNMEASURED: tuple[Unmeasured, ...] = (
    Unmeasured("12", "32-bit row offset", "needs more than 2^31 elements, and a kernel that does its own addressing"),
    Unmeasured("17", "work on a side stream", "needs a CUDA device"),
)
