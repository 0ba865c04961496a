from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from gapmeter.analysis.results.run import RunResult
from gapmeter.analysis.stages import STAGES
from gapmeter.report import html
from gapmeter.report.run import document
from tests.kit.results import figure_at
from tests.kit.runs import write_run

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&"


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, and the text between them."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = source
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def _page(folder: Any) -> Page:
    return Page(str(html.page(document(folder), [html.asset("request.js")])))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_run(tmp_path_factory.mktemp("run") / "r", count=600, rate=22.0, failures=4, error="HTTP 500")


@pytest.fixture(scope="module")
def page(run: Any) -> Page:
    return _page(run)


def test_every_figure_in_the_page_is_the_one_in_the_summary(run: Any, page: Page) -> None:
    summary = json.loads(run.summary.read_text())
    found = {a["data-key"]: a["data-value"] for _, a in page.elements if "data-key" in a}
    assert len(found) > 500
    for key, value in found.items():
        assert json.loads(value) == figure_at(summary, key), key
    assert [f"slo.{at}.value_{'share' if slo['metric'] == 'errors' else 'ms'}" in found
            for at, slo in enumerate(summary["slo"])] == [True] * 3  # fmt: skip


def _bars(page: Page, kind: str) -> dict[str, dict[str, dict[str, float]]]:
    """Of every chart of a kind: its bars by height, each stage by stage."""
    bars: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    chart = ""
    for tag, attributes in page.elements:
        if tag == "svg" and "chart" in attributes.get("class", "").split():
            chart = attributes["aria-labelledby"].partition("-title")[0]
        if tag == "svg" and "stage" in attributes.get("class", "").split() and chart.startswith(kind):
            bars[chart][attributes["y"]][attributes["data-stage"]] = float(attributes["data-ms"])
        if tag == "section":
            chart = ""
    return bars


_CHARTS = {"ttft": "first-token", "e2e": "last-token", "itl": "token-gap"}


def test_the_segments_of_a_bar_add_up_to_what_its_requests_waited(run: Any, page: Page) -> None:
    bands, bars = json.loads(run.summary.read_text())["bands"], _bars(page, "stack-")
    drawn = 0
    for metric, name in _CHARTS.items():
        for band in ("p90", "p985", "p99", "p999"):
            slow = bands[metric]["slow"][band]
            rows = list(bars.get(f"stack-{name}" + ("" if band == "p985" else f"-{band}"), {}).values())
            assert bool(rows) == bool(slow)
            if slow:
                drawn += 1
                totals = [bands[metric]["typical"]["total_ms"], slow["total_ms"]]
                assert [sum(row.values()) for row in rows[:2]] == pytest.approx(totals, rel=1e-6)
                usual = bands[metric]["typical"]["stages_ms"]
                grown = {s: ms - usual[s] for s, ms in slow["stages_ms"].items() if ms > usual[s]}
                assert rows[2] == pytest.approx(grown, rel=1e-5, abs=1e-6)
                assert all("unexplained" in row for row in rows[:2])
    assert drawn >= 7


def test_the_slices_of_everyone_add_up_and_hold_everyone(run: Any, page: Page) -> None:
    summary, bars = json.loads(run.summary.read_text()), _bars(page, "spread-")
    for metric, name in _CHARTS.items():
        told = summary["bands"][metric]["spread"]
        drawn = [sum(row.values()) for row in bars[f"spread-{name}"].values()]
        assert drawn == pytest.approx([s["total_ms"] for s in told], rel=1e-6)
        assert sum(s["count"] for s in told) == summary["bands"][metric]["count"]


def test_the_shares_of_the_wait_add_up_to_all_of_it(run: Any, page: Page) -> None:
    shares: dict[str, float] = defaultdict(float)
    chart = ""
    for tag, attributes in page.elements:
        if tag == "svg" and "chart" in attributes.get("class", "").split():
            chart = attributes["aria-labelledby"]
        if "data-share" in attributes:
            shares[f"{chart}:{attributes['y']}"] += float(attributes["data-share"])
    assert len(shares) == 6
    assert list(shares.values()) == pytest.approx([1.0] * 6, rel=1e-6)


def test_the_page_asks_the_network_for_nothing(page: Page) -> None:
    for tag, attributes in page.elements:
        for name in ("src", "srcset", "href", "xlink:href", "action", "data", "poster", "background"):
            if name in attributes:
                assert re.match(r"(#|data:|[\w.-]+$)", attributes[name]), (tag, attributes)
        assert not [n for n in attributes if n.startswith("on")], (tag, attributes)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page.source))
    assert "@import" not in page.source


def test_the_content_security_policy_lets_only_the_page_s_own_script_run(page: Page) -> None:
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-")
    scripts = re.findall(r"<script>(.*?)</script>", page.source, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 2
    assert re.findall(r"'sha256-([^']+)'", policy) == digests


def test_names_and_errors_from_outside_are_shown_as_text(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "r", count=60, rate=15.0, failures=3, error=EVIL, model=EVIL,
        slos=("ttft p99 <= 500 ms",), evidence={"incomplete": EVIL},
    )  # fmt: skip
    page = _page(folder)
    assert page.source.count("<script>") == 2
    assert not page.all("img")
    assert sum(EVIL in text for text in page.text) >= 6


def test_a_stage_that_nobody_stamped_is_called_unmeasured(page: Page) -> None:
    source = page.source.partition("Every stage")[2]
    row = next(r for r in source.split("<tr>") if "launch gap" in r)
    assert row.count(">unmeasured<") == 6
    assert "0 ms" not in row


def test_an_invalid_run_says_so_across_every_picture_and_table_and_in_the_place_of_the_verdict(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path / "r", count=200, rate=15.0, evidence={"incomplete": "stopped by Ctrl-C"}))
    assert next(a for _, a in page.elements if "data-verdict" in a)["data-verdict"] == "INVALID"
    charts = [a for a in page.all("svg") if a.get("role") == "img"]
    tables = [a for a in page.all("table") if a.get("class") != "legend"]
    figures = page.source.split("<figure>")[1:]
    pictures = [figure.partition("<figcaption")[0].partition("<details")[0] for figure in figures]
    stamps = [picture.count("<span>INVALID</span>") for picture in pictures]
    assert stamps == [picture.count('role="img"') for picture in pictures]
    assert sum(stamps) == len(charts) > 15
    across = [text.partition(">")[2] for text in page.source.split('<div class="across"')[1:]]
    assert len(across) - len(pictures) == len(tables) > 15
    assert all(text.startswith("<span>INVALID</span>") for text in across)
    assert "stopped by Ctrl-C" in page.source


def test_several_objectives_stand_beneath_the_verdict_each_with_its_answer(tmp_path: Path) -> None:
    slos = ("ttft p50 <= 5000 ms", "ttft p50 <= 2 ms")
    shown = _page(write_run(tmp_path / "r", count=400, rate=12.0, slos=slos)).source.partition('class="gauges"')[2]
    told = re.findall(r'<b class="mark (\w+)">(\w+)</b> ([^<]*)<span>([^<]*)</span>', shown.partition("</ul>")[0])
    assert [(css, word, text) for css, word, text, _ in told] == [
        ("met", "met", "ttft p50 &lt;= 5000 ms"), ("missed", "missed", "ttft p50 &lt;= 2 ms"),
    ]  # fmt: skip
    assert len({measured for *_, measured in told}) == 1


@pytest.mark.parametrize(
    ("changes", "word"), [({"late_ms": 4.0}, "refused"), ({"beyond": 150, "sample_ms": None}, "no value")]
)
def test_what_has_no_figure_is_called_beneath_the_verdict_as_in_the_table_where_no_bound_is_known(
    tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    folder = write_run(tmp_path / "r", count=200, rate=15.0, slos=("ttft p50 <= 5000 ms",))
    summary = json.loads(folder.summary.read_text())
    summary["slo"][0] |= changes | {"at_most": None, "value_ms": None, "low_ms": None, "high_ms": None}
    folder.summary.write_text(json.dumps(summary))
    shown = _page(folder).source.partition('class="gauges"')[2].partition("</ul>")[0]
    assert f"<span>{word}</span>" in shown


@pytest.mark.parametrize(("device", "owner"), [("CPU", "CPU forward pass"), ("GPU", "GPU")])
def test_the_owner_of_a_forward_is_named_for_the_device_it_ran_on(tmp_path: Path, device: str, owner: str) -> None:
    folder = write_run(tmp_path / "r", count=200, rate=15.0)
    for file in (folder.manifest, folder.summary):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"device": device}))
    source = _page(folder).source.partition("Repeat it")[0]
    owners = set(re.findall(r"<td>([^<]*)</td><td>(?:measured|transit|estimated)</td>", source))
    assert owner in owners
    assert re.findall(r'<span class="whose">([^<]*)</span>', source).count(owner) > 1
    for shown in (">GPU<", " · GPU · ", "owner GPU,"):
        assert (shown in source) == (device == "GPU")


@pytest.mark.parametrize(
    ("verdict", "slo"),
    [("PASS", "ttft p90 <= 5000 ms"), ("FAIL", "ttft p90 <= 2 ms"), ("INCONCLUSIVE", "ttft p99.9 <= 300 ms")],
)
def test_other_verdicts_stand_in_the_same_place_without_a_stamp(tmp_path: Path, verdict: str, slo: str) -> None:
    page = _page(write_run(tmp_path / "r", count=400, rate=12.0, slos=(slo,)))
    assert next(a for _, a in page.elements if "data-verdict" in a)["data-verdict"] == verdict
    assert not [a for a in page.all("div") if a.get("class") in ("across", "stamped")]


def test_stages_that_only_the_server_knows_are_unmeasured_and_their_time_is_unexplained(tmp_path: Path) -> None:
    unknown = tuple(s.name for s in STAGES if s.name not in ("generator_lag", "connect"))
    page = _page(write_run(tmp_path / "r", count=200, rate=10.0, unmeasured=unknown))
    pieces = {a["data-stage"] for a in page.all("svg") if a.get("class") == "stage"}
    assert pieces == {"generator_lag", "unexplained"}
    table = page.source.partition("Every stage")[2].partition("</section>")[0]
    assert table.count(">unmeasured<") == 6 * len(unknown)
    assert "faster" not in page.source


def test_a_server_without_a_probe_still_gets_all_that_the_client_knows(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path / "r", count=200, rate=10.0, with_ledger=False))
    assert "There is no ledger" in page.source
    assert "Every stage" not in page.source
    assert any(a.get("aria-labelledby", "").startswith("curve-ttft") for a in page.all("svg"))


def test_a_ledger_that_was_refused_is_not_shown(tmp_path: Path) -> None:
    evidence = {"ledger_refused": ("12 of 200 successful requests were not found in every process",)}
    page = _page(write_run(tmp_path / "r", count=200, rate=10.0, evidence=evidence))
    assert "12 of 200 successful requests" in page.source
    assert not [a for _, a in page.elements if "data-stage" in a]


def test_a_run_without_any_success_is_still_reported(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path / "r", count=40, rate=10.0, warmup=0, failures=40, error="HTTP 500"))
    assert next(a for _, a in page.elements if "data-verdict" in a)["data-verdict"] == "INVALID"
    assert len([a for a in page.all("text") if "failed" in a.get("class", "").split()]) == 2 * 40


def test_every_picture_says_where_it_is_from(run: Any, page: Page) -> None:
    line = RunResult.read(run.path).provenance.line()
    figures = page.source.split("<figure")[1:]
    assert len(figures) > 30
    assert all(escape(line) in figure.partition("</figure>")[0] for figure in figures)


def test_every_chart_has_a_name_a_description_and_unique_ids(page: Page) -> None:
    charts = [a for a in page.all("svg") if a.get("role") == "img"]
    assert len(charts) > 15
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    assert all(set(a["aria-labelledby"].split()) <= set(ids) for a in charts)


def test_ten_thousand_requests_stay_below_three_megabytes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", count=10_000, rate=70.0, output=6, failures=50, error="HTTP 500")
    page = _page(folder)
    assert len(page.source.encode()) < 3_000_000
    dots = [a for a in page.all("circle") if a.get("class", "").startswith("dot")]
    assert 1000 < len(dots) <= 2 * (2000 + 260)
    assert len([a for a in page.all("text") if "failed" in a.get("class", "").split()]) == 2 * 50


def _luminance(color: str) -> float:
    """WCAG's relative luminance of #RGB or #RRGGBB."""
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(one: str, other: str) -> float:
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def test_every_text_stands_out_from_its_ground_as_wcag_asks(page: Page) -> None:
    """AA: 4.5 to 1, in the light, in the dark and on paper, and on the bars."""
    modes = [dict(re.findall(r"--([a-z]+): (#\w{3}(?:\w{3})?);", mode)) for mode in page.source.split(":root {")[1:]]
    assert len(modes) == 3
    worst = {
        (text, ground, number): round(_contrast(mode[text], mode[ground]), 2)
        for number, mode in enumerate(modes)
        for text in ("ink", "soft", "faint", "accent", "pass", "fail", "unsure")
        for ground in ("paper", "panel")
    }
    assert {key: ratio for key, ratio in worst.items() if ratio < 4.5} == {}
    labels = set(re.findall(r'fill="(#\w{6})" class="segment"></rect><text [^>]*style="fill:(#\w+)"', page.source))
    assert len(labels) > 2
    assert {pair: ratio for pair in labels if (ratio := round(_contrast(*pair), 2)) < 4.5} == {}
