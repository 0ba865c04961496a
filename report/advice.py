"""What to try after a run: the one setting, or the search, that its waits suggest, with the command that proves it."""

from __future__ import annotations

from gapmeter.analysis.judge.words import SHARED, STRANGERS, held_by
from gapmeter.analysis.ledger.cores import UNKNOWN
from gapmeter.analysis.ledger.switches import ANOTHER
from gapmeter.analysis.numbers import share
from gapmeter.analysis.results.latency import Anatomy
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.run import FAIL, INVALID, PASS, RunResult
from gapmeter.analysis.stages import UNEXPLAINED_OWNER
from gapmeter.report import document as doc
from gapmeter.report import marks, why
from gapmeter.report.command import Command
from gapmeter.report.document import BRIEF, Block, Section
from gapmeter.report.why import BASE, NOTABLE, deciding, main_metric, payer, typical_misses
from gapmeter.report.words import as_sentence
from gapmeter.scenarios.model import MOST_BATCH, RATED_ARRIVALS

_NOTABLE_CPU = 0.5  # of a core, of a load tester that more processes would help
_WORTH = 0.05  # of the wait at the percentile: an owner who could save less gets no advice
_BUSY = {429, 503}  # what a server answers that takes no more
_MOMENT_S = 1e-6  # a trace whose requests all came at once has no rate


def why_and_advice(result: RunResult, manifest: Manifest) -> Section | None:
    """In short: owners at the limit's percentile and beyond typical requests, what that says, and what to try."""
    table, tried, step = why.owners(result, in_letters=True), advice(result, manifest), next_step(result, manifest)
    if not any(isinstance(one, doc.Pre) for one in tried):  # one command is enough here; the page has both
        tried = [*tried, *step]
    if table is None:
        known = [doc.Paragraph(text)] if (text := why.unprobed_sentence(result)) else []
        return Section("why", "", [*known, *tried], on=BRIEF) if known or tried else None
    said = [*why.said_of(result, listed=True), why.most_an_upgrade_brings(result, listed=True)]
    lead = doc.Paragraph(" ".join(as_sentence(one) for one in said if one))
    return Section("why", "", [table, lead, *tried], on=BRIEF)


def advice(result: RunResult, manifest: Manifest) -> list[Block]:
    """One setting for the stage that has most of the difference (or of what everybody pays), and what proves it."""
    if result.verdict == INVALID:
        return []
    metric = main_metric(result)
    anatomy = result.tail.of(metric) if metric else None
    if anatomy is not None and (stranger := _stranger(result, anatomy)):
        return [doc.Paragraph(stranger)]
    search = _search(result, manifest) if result.verdict == FAIL else None
    if search and (overload := _overload(result)):
        return [doc.Paragraph(f"{overload}. To find the rate that it can sustain:"), doc.Pre(str(search))]
    if anatomy is None:
        return []
    all_pay = anatomy.typical.total_ms >= BASE * anatomy.at.total_ms and result.verdict == FAIL
    parts, decided = anatomy.owners, deciding(result)
    if decided is not None and result.verdict == FAIL and typical_misses(anatomy, decided):
        parts, all_pay = (payer(anatomy),), True  # what others could save would not meet the limit
    gains = [(part.at_ms if all_pay else part.ms, part.stages) for part in parts if part.owner != UNEXPLAINED_OWNER]
    first = sorted((-gain, stages) for gain, stages in gains if gain >= _WORTH * anatomy.at.total_ms)
    for stage in (stage for _, stages in first[:2] for stage in stages):
        if stage == "core_wait":
            return [doc.Paragraph(_more_cores(result))]
        if stage == "generator_lag" and (result.trust.client_cpu_share or 0.0) < _NOTABLE_CPU:
            continue  # it waited for something else than its own work
        if (tried := setting(stage, manifest)) is not None:
            key, now, other = tried
            command = Command.parse(manifest.command).as_comparison(f"{key}={other}")
            if command is None:
                return []
            words = f"Try {key}={other} (now {now}) to shorten {marks.words(stage)}. To test it:"
            return [doc.Paragraph(words), doc.Pre(str(command))]
    return []


def next_step(result: RunResult, manifest: Manifest) -> list[Block]:
    """After a run at a rate that met its SLOs: the command that finds the highest such rate."""
    search = _search(result, manifest) if result.verdict == PASS else None
    return [doc.Paragraph("To find how much the server can take:"), doc.Pre(str(search))] if search else []


def _search(result: RunResult, manifest: Manifest) -> Command | None:
    """The command that searches its capacity; None for a load that no search takes, and for one of a search."""
    asked = manifest.asked
    has_rate = asked.load.arrivals in (*RATED_ARRIVALS, "trace") and result.load.window_s > _MOMENT_S
    takes = has_rate and asked.workload.kind != "conversation" and result.slo
    return Command.parse(manifest.command).as_search() if takes and manifest.capacity_of is None else None


def _more_cores(result: RunResult) -> str:
    """What shortens the wait for a core, which no setting of a server does."""
    held = [one.process for one in result.ledger.core_held or () if one.share >= NOTABLE]
    others = not held or {ANOTHER, UNKNOWN} & set(held)
    stop = ", or stop other programs on them" if others else ""
    return f"No setting shortens the wait for a core: try {SHARED[1]}{stop}."


def _overload(result: RunResult) -> str:
    """That more requests pile up than failed; that failures are mostly such as an overloaded server gives; or ""."""
    slope, failed = result.steady.methods.queue_slope, result.counts.failed_by_server
    grown = slope.in_flight[1] - slope.in_flight[0] if slope is not None and slope.grows else 0.0
    if grown > failed:
        return "The load is more than the server can do"
    some = result.load.loop == "open" and result.outage is None and result.counts.succeeded
    if not some or not (grown or main_metric(result) is None):
        return ""
    full = [f.count for f in result.failures if f.name == "timeout" or {e.status for e in f.examples} & _BUSY]
    if 2 * sum(full) <= failed:
        return ""
    return "Requests timed out or were rejected: the load may be more than the server can do"


def _stranger(result: RunResult, anatomy: Anatomy) -> str:
    """What to do first where typical requests wait for cores that mostly something else than the server had; or ""."""
    typical, held = anatomy.typical, (result.ledger.core_held or [None])[0]
    if held is not None and held.process == "stopped":  # it stopped a few requests, not the typical ones
        cause, aim = STRANGERS[held.process]
        notable = anatomy.at.stages_ms.get("core_wait", 0.0) >= NOTABLE * anatomy.at.total_ms
        part = f"for {share(held.share)} of the time that requests waited for a core, {cause}"
        return f"Before changing settings, try {aim}: {part}." if notable else ""
    waited_ms = typical.stages_ms.get("core_wait", 0.0)
    if held is None or held.process not in STRANGERS or waited_ms < NOTABLE * typical.total_ms:
        return ""
    who = held_by(held.process, held.stage, held.program)
    part = f"in {share(held.share)} of all waits for a core, {who} was using it"
    return f"Before changing settings, try {STRANGERS[held.process][1]}: {part}."


def setting(stage: str, manifest: Manifest) -> tuple[str, str, str] | None:
    """The key that may shorten a stage, its value now, and the one to try; None where no setting of ours does."""
    server, load = manifest.asked.server, manifest.asked.load
    if server.engine == "attach" and stage != "generator_lag":
        return None
    if stage in ("queue", "other_step") and server.max_batch and 2 * server.max_batch <= MOST_BATCH:
        return "server.max_batch", f"{server.max_batch}", f"{2 * server.max_batch}"
    if stage == "preempted" and server.max_batch and server.max_batch > 1:
        return "server.max_batch", f"{server.max_batch}", f"{server.max_batch // 2}"
    spelled = {flag: f"server.args.{name}" for flag, name in zip(server.flags, server.args, strict=False)}
    supported = manifest.target.precision.supported if manifest.target.precision else ()
    if stage in ("prefill", "decode") and server.precision == "float32" and "bfloat16" in supported:
        return "server.precision", "float32", "bfloat16"
    if stage == "launch_gap" and server.engine == "transformers" and server.flags.get("cuda_graphs") is not True:
        graphs = spelled.get("cuda_graphs", "server.args.cuda_graphs")
        return graphs, "false", "true"  # Transformers captures none unless it is told to
    if stage == "launch_gap" and server.flags.get("enforce_eager") is True:
        return spelled["enforce_eager"], "true", "false"
    if stage in ("interference", "engine_wait") and server.engine == "vllm":
        now = server.flags.get("max_num_batched_tokens")  # vLLM chooses by the device where none is given
        if isinstance(now, int) and now > 256:
            return spelled["max_num_batched_tokens"], f"{now}", f"{now // 4}"
    more = 2 * load.processes
    if stage == "generator_lag" and manifest.workers is None and more <= (load.concurrency or more):
        return "load.processes", f"{load.processes}", f"{more}"
    return None
