"""Tables for the terminal: the console they go to, and a result as one. Measures and decides nothing."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runners.terminal import plain
from service.catalogue import BY_NAME, MetricClass
from service.wire import Measurement, Result

_NOTE_LENGTH = 120
_COLUMNS_MIN = 150  # where the table goes to a file or a log, which has no width of its own


def wide_console() -> Console:
    """Standard output, as wide as the terminal, and wide enough for a table where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _COLUMNS_MIN)
    return console


def summary(result: Result) -> Table:
    """One row a kernel and case: outcome, memory in U, work, gradient errors, and the checks that fail."""
    table = Table(title=f"{result.target} at {result.commit.sha[:7]}, suite {result.suite}", title_justify="left")
    for heading in ("kernel", "case", "outcome"):
        table.add_column(heading, no_wrap=True)
    for heading in ("peak U", "saved U", "operations", "log-prob grad error", "entropy grad error"):
        table.add_column(heading, justify="right", min_width=7)
    table.add_column("fails")
    for measurement in result.measurements:
        table.add_row(
            measurement.kernel,
            measurement.case.id,
            measurement.outcome,
            _in_units(measurement, "step_peak_bytes"),
            _in_units(measurement, "saved_bytes"),
            _value(measurement, "operations", ".0f"),
            _value(measurement, "g_rel_l2_lp", ".1e"),
            _value(measurement, "g_rel_l2_ent", ".1e"),
            _failures(measurement),
        )
    return table


def _value(measurement: Measurement, metric: str, form: str) -> str:
    samples = measurement.values.get(metric)
    if metric in measurement.nonfinite:
        return "non-finite"
    return "-" if samples is None else format(max(samples), form)


def _in_units(measurement: Measurement, metric: str) -> str:
    samples, unit = measurement.values.get(metric), measurement.case.logits_unit_bytes
    return f"{max(samples) / unit:.2f}" if samples and unit else "-"


def _failures(measurement: Measurement) -> str:
    """The failing checks, or why there is no result."""
    if measurement.outcome != "ok":
        return escape(plain(measurement.notes["outcome"])[:_NOTE_LENGTH])
    failing = [
        name
        for name, samples in measurement.values.items()
        if BY_NAME[name].metric_class is MetricClass.CONTRACT and min(samples) == 0
    ]
    return ", ".join(failing)
