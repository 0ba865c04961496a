"""What a run's result says, in sentences: of each part, from its figures.

``Words`` of a result go into ``summary.json``. Texts that a rule made of what it found (checks, warnings, reasons) are
data and stand in the result; here they are only put together.
"""

from __future__ import annotations

from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.run import RunResult, Words
from gapmeter.report.words.cost import cost_sentence as cost_sentence
from gapmeter.report.words.cost import energy_sentence as energy_sentence
from gapmeter.report.words.cost import many_requests as many_requests
from gapmeter.report.words.cost import price_words as price_words
from gapmeter.report.words.cost import value_sentence as value_sentence
from gapmeter.report.words.device import roofline_line as roofline_line
from gapmeter.report.words.device import roofline_sentence as roofline_sentence
from gapmeter.report.words.device import telemetry_sentence as telemetry_sentence
from gapmeter.report.words.device import utilisation_sentence as utilisation_sentence
from gapmeter.report.words.trust import drift_sentence as drift_sentence
from gapmeter.report.words.trust import floor_sentence as floor_sentence
from gapmeter.report.words.trust import steady_sentence as steady_sentence
from gapmeter.report.words.trust import trust_figures as trust_figures
from gapmeter.report.words.trust import trust_sentence as trust_sentence
from gapmeter.report.words.verdict import headline as headline
from gapmeter.report.words.verdict import slo_sentence as slo_sentence
from gapmeter.report.words.waits import CLOSED_LOOP as CLOSED_LOOP
from gapmeter.report.words.waits import closed_loop_sentence as closed_loop_sentence
from gapmeter.report.words.waits import compute_sentence as compute_sentence
from gapmeter.report.words.waits import difference_sentence as difference_sentence
from gapmeter.report.words.waits import tail_sentence as tail_sentence
from gapmeter.report.words.waits import tail_sentences as tail_sentences
from gapmeter.report.words.waits import turns_sentence as turns_sentence
from gapmeter.report.words.waits import upgrade_sentence as upgrade_sentence
from gapmeter.report.words.waits import upgrade_sentences as upgrade_sentences


def words_of(result: RunResult, manifest: Manifest) -> Words:
    """Everything that is said of a run."""
    telemetry, compute = result.telemetry, result.compute
    per_metric = {"ttft": compute.ttft, "e2e": compute.e2e}
    return Words(
        headline=headline(result),
        slo=tuple(slo_sentence(answer) for answer in result.slo),
        trust=trust_sentence(result),
        steady=steady_sentence(result.steady, measured=result.counts.measured, offered=result.load.requested_rate),
        drift=drift_sentence(result.drift),
        closed_loop=closed_loop_sentence(result.closed_loop) if result.closed_loop else None,
        turns=turns_sentence(result.turns),
        tail=tail_sentences(result),
        upgrade=upgrade_sentences(result),
        compute={
            metric: sentence
            for metric, shares in per_metric.items()
            if shares and (sentence := compute_sentence(shares, metric, result.device))
        },
        telemetry=telemetry_sentence(telemetry) if telemetry else None,
        utilisation=utilisation_sentence(telemetry.utilisation) if telemetry else None,
        roofline=roofline_sentence(result.roofline),
        cost=cost_sentence(result.cost, simulated=manifest.asked.server.engine == "simulated"),
        energy=energy_sentence(result.energy),
        value=value_sentence(result.value, result.goodput.share_ci),
    )
