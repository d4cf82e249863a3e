"""Text and data of `millpond.explain(df)`: where each stateful operator runs, with which store, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.humanize import counted
from millpond.plan.decision.decision import Decision, Operator
from millpond.plan.exchange.combining import Combination, combine
from millpond.plan.lookahead.source import prefetch_sources
from millpond.plan.lookahead.stages import stage_title
from millpond.plan.reading.processor import ProcessorReading
from millpond.plan.reading.reading import Reading
from millpond.plan.replay.repeatable import needs_sync


def as_dict(decision: Decision, nowhere: Sequence[Operator] = ()) -> dict[str, Any]:
    """Return the decision as plain data.

    Args:
        decision: where operators run.
        nowhere: operators that are left to Spark, but that Spark does not run on streams.

    Returns:
        A dictionary with these entries:

        - `output_mode`.
        - `operators`, bottom up, each with `title` and `engine` (`millpond`, `spark`, `none`). On Millpond also
          `index`, `store`, `why`, `keys`, `functions`; `lookaheads`, the names of prefetch sources for its keys;
          `combined`, whether Spark may combine its rows before the exchange; `combined_reason`, for aggregates, why
          not. Elsewhere also `reason` (`code`, `text`).
        - `wrong`: the query shapes for which Spark, and Millpond with it, returns wrong rows. Each has `code`, `title`
          of the operator, `text`, `advice` and `certain` (refused at start unless `onWrongInSpark` is `warn`).
        - `stages`: the stages made by `millpond.lookahead`. Each has `columns`, `operators` (the indexes of operators
          that it may prefetch for) and `reasons` (why not for other operators, by title).
        - `commit_mode` and `commit_reason`: the default mode, unless `spark.millpond.commit.mode` sets another.
    """
    reason = needs_sync(decision) if decision.on_millpond else None
    ahead = prefetch_sources(decision)
    return {
        "output_mode": decision.output_mode,
        "operators": [
            _operator(operator, any(operator is other for other in nowhere), ahead.get(operator.index or 0, ()))
            for operator in decision.operators
        ],
        "wrong": [
            {
                "code": wrong.code,
                "title": wrong.title,
                "text": str(wrong),
                "advice": wrong.advice,
                "certain": wrong.certain,
            }
            for wrong in decision.wrong
        ],
        "stages": [
            {
                "columns": list(stage.columns),
                "operators": sorted(stage.hints),
                "reasons": dict(stage.reasons),
            }
            for stage in decision.stages
        ],
        "commit_mode": "sync" if reason else "async",
        "commit_reason": reason,
    }


def _operator(operator: Operator, nowhere: bool, ahead: Sequence[str]) -> dict[str, Any]:
    if operator.spec is None:
        assert operator.reason is not None
        reason = {"code": operator.reason.code, "text": str(operator.reason)}
        return {"title": operator.title, "engine": "none" if nowhere else "spark", "reason": reason}
    pattern = operator.spec.access_pattern
    how = combine(operator.spec, operator.reading) if operator.spec.calls else None
    return {
        "title": operator.title,
        "engine": "millpond",
        "index": operator.index,
        "store": pattern.store,
        "why": pattern.why,
        "keys": [f"{field.name}: {field.type}" for field in operator.spec.output_keys],
        "functions": [*operator.spec.functions, *_user_functions(operator)],
        "lookaheads": list(ahead),
        "combined": isinstance(how, Combination),
        "combined_reason": how if isinstance(how, str) else None,
    }


def _user_functions(operator: Operator) -> list[str]:
    """Describe the user functions, which Spark's Python workers call."""
    if not isinstance(operator.reading, Reading):
        return []
    if isinstance(operator.reading, ProcessorReading):
        processor = operator.reading.processor
        limit = None if processor is None else processor.in_flight
        return [] if limit is None else [f"asynchronous, with at most {counted(limit, 'key')} in flight"]
    return [
        f"{function.name}: {function.kind.name.lower().replace('_', ' ')}"
        for function in operator.reading.user_calls.functions
    ]


def as_text(decision: Decision, nowhere: Sequence[Operator] = ()) -> str:
    """Return the decision as text; arguments as for `as_dict`."""
    data = as_dict(decision, nowhere)
    operators = data["operators"]
    if not operators:
        return "no stateful operators: the query runs on Spark as it is"
    noun = "stateful operator" if all(operator.stateful for operator in decision.operators) else "operator"
    lines = [f"{counted(len(operators), noun)}, {data['output_mode']} mode"]
    for operator in operators:
        if operator["engine"] == "none":
            lines += [f"  [nowhere] {operator['title']}", "      Spark does not run it on streams either"]
        if operator["engine"] == "spark":
            lines += [f"  [spark] {operator['title']}"]
        if operator["engine"] != "millpond":
            lines += [f"      {operator['reason']['text']}"]
            continue
        lines += [
            f"  [millpond {operator['index']}] {operator['title']}",
            f"      {operator['store']}: {operator['why']}",
        ]
        lines += [f"      keys: {', '.join(operator['keys'])}"] if operator["keys"] else []
        lines += [f"      functions: {', '.join(operator['functions'])}"] if operator["functions"] else []
        if operator["combined"] or operator["combined_reason"]:
            how = "yes, where that leaves few of them" if operator["combined"] else f"no, {operator['combined_reason']}"
            lines.append(f"      rows combined before the exchange: {how}")
        lines += (
            [f"      keys may be announced by: {', '.join(operator['lookaheads'])}"] if operator["lookaheads"] else []
        )
    for wrong in data["wrong"]:
        lines += [
            f"  [wrong in Spark, {'always' if wrong['certain'] else 'for some data'}] {wrong['title']}",
            f"      {wrong['text']}",
            f"      {wrong['advice']}",
            *(["      the query does not start unless spark.millpond.onWrongInSpark=warn"] if wrong["certain"] else []),
        ]
    for stage in data["stages"]:
        if not stage["operators"]:
            why = "; ".join(f"{name}: {reason}" for name, reason in stage["reasons"].items()) or "no operator above it"
            lines.append(f"  {stage_title(stage['columns'])} announces nothing ({why})")
    if any(operator["engine"] == "millpond" for operator in operators):
        why = f" because {data['commit_reason']}" if data["commit_reason"] else ""
        lines.append(f"  commits: {data['commit_mode']}{why}")
    return "\n".join(lines)
