"""A verdict as text, Markdown, JUnit XML or JSON, and as an exit code. Decides nothing and reads no database.

Takes the verdict as the API gives it (the JSON of service.queries.VerdictView), so that a gate needs neither the
service's database nor its libraries.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any
from xml.etree import ElementTree

from service.catalogue import BY_NAME

Verdict = Mapping[str, Any]

MARKDOWN_LIMIT = 65_536
PASSED, REGRESSED, UNDECIDED = 0, 1, 2
_STATES = ("regress", "invalid", "incomparable", "missing", "no-baseline", "inconclusive", "improve", "pass")
_DECIDED = ("accepted", "dismissed")
_ROWS_A_FINDING = 10
_SHORT = 7


def document(view: Any) -> dict[str, Any]:
    """A VerdictView as the plain JSON values that the functions here take."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(view), default=_instant))
    return plain


def _instant(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def exit_code(verdict: Verdict) -> int:
    """0 where the verdict passes CI, 1 where it fails, 2 for everything undecided; nothing else ever passes."""
    return {"pass": PASSED, "fail": REGRESSED}.get(verdict["ci"], UNDECIDED)


def render(verdict: Verdict, form: str, *, link: str | None = None) -> str:
    """The verdict as `text`, `markdown`, `junit` or `json`. KeyError names the forms for any other."""
    forms: dict[str, Callable[[], str]] = {
        "text": lambda: text(verdict, link=link),
        "markdown": lambda: markdown(verdict, link=link),
        "junit": lambda: junit(verdict),
        "json": lambda: json.dumps(verdict, indent=2, sort_keys=True, allow_nan=False),
    }
    if form not in forms:
        raise KeyError(f"unknown format {form!r}; known are {', '.join(forms)}")
    return forms[form]()


def text(verdict: Verdict, *, link: str | None = None) -> str:
    """For a terminal: the state and its reason, findings, what is inherited or recovered, and what is undecided."""
    lines = [f"{verdict['sha'][:_SHORT]}  {verdict['state']}: {verdict['reason']}", f"baseline: {_baseline(verdict)}"]
    lines += [f"compared: {_counts(verdict['counts'])}"] if verdict["counts"] else []
    for finding in verdict["findings"]:
        lines += ["", f"{finding['direction']}{_aside(finding)}  {finding['sentence']}"]
        lines += [f"  {_step(step)}" for step in finding["affected"][:_ROWS_A_FINDING]]
        lines += _rest(finding["affected"], _ROWS_A_FINDING, "  and {} more")
        lines += [f"  reproduce: {finding['reproduce']}"] if finding["reproduce"] else []
    for word in ("inherited", "recovered"):
        lines += [""] if verdict[word] else []
        lines += [f"{word}  {finding['sentence']}" for finding in verdict[word]]
    lines += [""] if verdict["undecided"] else []
    lines += [f"{step['state']}  {_step(step)}" for step in verdict["undecided"][:_ROWS_A_FINDING]]
    lines += _rest(verdict["undecided"], _ROWS_A_FINDING, "and {} more undecided")
    lines += [""] if verdict["notices"] else []
    lines += [f"notice  {_step(step)}" for step in verdict["notices"][:_ROWS_A_FINDING]]
    lines += _rest(verdict["notices"], _ROWS_A_FINDING, "and {} more notices")
    lines += ["", link] if link else []
    return "\n".join(lines)


def _aside(finding: Mapping[str, Any]) -> str:
    if finding["direction"] == "regress" and finding["state"] in _DECIDED:
        return f" ({finding['state']})"
    return "" if finding["required"] else " (not required by the target)"


def markdown(verdict: Verdict, *, link: str | None = None, limit: int = MARKDOWN_LIMIT) -> str:
    """For a pull request's comment: at most `limit` characters, the least serious left out first and counted."""
    head = "\n".join(
        [
            f"## ulpwatch: {verdict['state']}",
            "",
            _escape(verdict["reason"]),
            "",
            f"Commit `{verdict['sha'][:_SHORT]}` of {_escape(verdict['target'])} against {_baseline(verdict)}.",
            *([_counts(verdict["counts"]) + "."] if verdict["counts"] else []),
            *([f"[Full verdict]({link})"] if link else []),
        ]
    )
    sections = [*map(_markdown_finding, verdict["findings"])]
    sections += [f"- inherited: {_escape(finding['sentence'])}" for finding in verdict["inherited"]]
    sections += [f"- recovered: {_escape(finding['sentence'])}" for finding in verdict["recovered"]]
    sections += [f"- {step['state']}: {_escape(_step(step))}" for step in verdict["undecided"]]
    sections += [f"- notice: {_escape(_step(step))}" for step in verdict["notices"]]
    return _fit(head, sections, limit)


def _markdown_finding(finding: Mapping[str, Any]) -> str:
    steps = finding["affected"]
    lines = [
        f"### {_escape(finding['sentence'])}{_aside(finding)}",
        "",
        "| case | metric | before | after | limit |",
        "|---|---|--:|--:|--:|",
        *[
            f"| {step['case_id']} | {step['metric']} | {_value(step, 'before')} | {_value(step, 'after')} "
            f"| {_value(step, 'limit')} |"
            for step in steps[:_ROWS_A_FINDING]
        ],
        *_rest(steps, _ROWS_A_FINDING, "\nand {} more"),
        *(["", f"`{finding['reproduce']}`"] if finding["reproduce"] else []),
    ]
    return "\n".join(lines)


def _fit(head: str, sections: Sequence[str], limit: int) -> str:
    """As many sections as fit, in order, and a line that counts those that do not."""
    reserve = 80  # for that line
    if len(head) + reserve > limit:
        return head[: limit - 1] + "…"
    body, kept = head, 0
    for section in sections:
        if len(body) + len(section) + 2 + reserve > limit:
            break
        body += "\n\n" + section
        kept += 1
    left_out = len(sections) - kept
    return body + (f"\n\n{left_out} more left out for length." if left_out else "") + "\n"


def junit(verdict: Verdict) -> str:
    """For CI's test report: a case for the verdict and one per finding; undecided is an error, and regressions that the
    target requires fail."""
    findings, code = verdict["findings"], exit_code(verdict)
    regressions = [finding for finding in findings if _fails(finding)]
    suite = ElementTree.Element(
        "testsuite",
        name=f"ulpwatch {verdict['target']}",
        tests=str(len(findings) + 1),
        failures=str(len(regressions) + (code == REGRESSED)),
        errors=str(int(code == UNDECIDED)),
    )
    whole = ElementTree.SubElement(suite, "testcase", classname=verdict["target"], name=f"verdict {verdict['sha']}")
    if code != PASSED:
        tag = "failure" if code == REGRESSED else "error"
        ElementTree.SubElement(whole, tag, message=_xml(f"{verdict['state']}: {verdict['reason']}"))
    for finding in findings:
        name = f"{finding['kernel']} {finding['family']} {finding['direction']}"
        case = ElementTree.SubElement(suite, "testcase", classname=verdict["target"], name=name)
        if finding in regressions:
            failure = ElementTree.SubElement(case, "failure", message=_xml(finding["sentence"]))
            failure.text = _xml("\n".join(_step(step) for step in finding["affected"]))
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _fails(finding: Mapping[str, Any]) -> bool:
    return finding["direction"] == "regress" and finding["required"] and finding["state"] not in _DECIDED


def _xml(words: str) -> str:
    """XML 1.0 cannot write control characters, surrogates and U+FFFE and U+FFFF; a kernel's message may hold them."""
    return "".join(sign if _is_xml(sign) else "\N{REPLACEMENT CHARACTER}" for sign in words)


def _is_xml(sign: str) -> bool:
    return sign in "\t\n\r" or " " <= sign < "\ud800" or "\ue000" <= sign < "\ufffe" or sign > "\uffff"


def _baseline(verdict: Verdict) -> str:
    if verdict["baseline_sha"] is None:
        return "no baseline"
    distance = verdict["baseline_distance"]
    back = f", {distance} commit{'' if distance == 1 else 's'} back" if distance else ""
    return f"{verdict['baseline_sha'][:_SHORT]}{back}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[state]} {state}" for state in _STATES if counts.get(state))


def _step(step: Mapping[str, Any]) -> str:
    """One comparison in one line."""
    values = f"{_value(step, 'before')} -> {_value(step, 'after')}"
    limit = f" (limit {_value(step, 'limit')})" if step["limit"] is not None else ""
    reason = f": {step['reason']}" if step["reason"] else ""
    return f"{step['kernel']} {step['case_id']} {step['metric']} {values}{limit}{reason}"


def _value(step: Mapping[str, Any], name: str) -> str:
    value = step[name]
    if value is None:
        return "-"
    unit = BY_NAME[step["metric"]].unit if step["metric"] in BY_NAME else step["unit"]
    if unit == "byte":
        in_units = f" ({value / step['unit_bytes']:.2f} U)" if step["unit_bytes"] else ""
        return f"{value:,.0f} B{in_units}"
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.3g}"


def _rest(items: Sequence[Any], shown: int, words: str) -> list[str]:
    return [words.format(len(items) - shown)] if len(items) > shown else []


def _escape(words: str) -> str:
    """Text of a kernel or a commit as Markdown text: no markup, no mention, one line."""
    flat = " ".join(words.split())
    for sign in "\\`*_[]<>|#":
        flat = flat.replace(sign, "\\" + sign)
    return flat.replace("@", "@\N{ZERO WIDTH SPACE}")
