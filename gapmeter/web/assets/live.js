"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const NS = "http://www.w3.org/2000/svg";
  let dots = [], state = {};

  const figure = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumSignificantDigits: 3 }));
  const time = (ms) => (ms === null || ms === undefined ? "–" : ms >= 999.5 ? figure(ms / 1000) + " s" : figure(ms) + " ms");
  const share = (value) => (value === null || value === undefined ? "–" : figure(100 * value) + " %");
  const clock = (s) => `${Math.floor(s / 60)}:${String(Math.floor(s % 60)).padStart(2, "0")}`;

  function row(cells) {
    const made = document.createElement("tr");
    cells.forEach((text, number) => {
      const cell = document.createElement(number ? "td" : "th");
      if (number && number < 3) cell.className = "n";
      if (!number) cell.scope = "row";
      cell.textContent = text;
      made.append(cell);
    });
    return made;
  }

  function sloRow(slo) {
    const errors = "limit_share" in slo;
    const value = errors ? slo.value_share : slo.value_ms, limit = errors ? slo.limit_share : slo.limit_ms;
    const show = errors ? share : time;
    const known = value !== null && value !== undefined;
    return row([slo.text, show(value), show(limit), known ? (value <= limit ? "within" : "beyond") : "nothing yet"]);
  }

  function show() {
    const failed = Object.entries(state.failed || {}).filter(([, count]) => count);
    at("phase").textContent = state.phase;
    if (state.elapsed_s === undefined) return;
    at("clock").textContent = clock(Math.max(0, state.elapsed_s)) + (state.end_s ? ` of ${clock(state.end_s)}` : "") +
      (state.behind_s >= 1 ? ` (as of ${Math.round(state.behind_s)} s ago)` : "");
    at("in-flight").textContent = state.in_flight.toLocaleString("en");
    at("asked").textContent = state.asked_per_s === null ? "–" : figure(state.asked_per_s) + " /s";
    at("sent").textContent = `${figure(state.sent_per_s)} /s, ${state.issued.toLocaleString("en")} in all`;
    at("done").textContent = `${figure(state.done_per_s)} /s, ${state.done.toLocaleString("en")} in all` +
      (state.unread ? `, ${state.unread.toLocaleString("en")} of them only counted` : "");
    at("failed").textContent = failed.reduce((sum, [, count]) => sum + count, 0).toLocaleString("en");
    at("errors").textContent = failed.map(([name, count]) => `${count.toLocaleString("en")} ${name.replaceAll("_", " ")}`).join(", ");
    at("lag").textContent = time(state.lag_p99_ms);
    at("metrics").replaceChildren(...Object.entries(state.metrics).map(([name, found]) =>
      row([name === "ttft" ? "TTFT" : name === "itl" ? "ITL" : "E2E", time(found.p50), time(found.p99)])));
    at("slos").replaceChildren(...state.slo.map(sloRow));
    draw();
  }

  function make(name, attributes, text) {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function ticks(most) {
    const rough = most / 5, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, n) => n * step);
  }

  function draw() {
    const svg = at("dots"), wide = svg.clientWidth || 800, high = 260, left = 62, low = high - 26, top = 12;
    const limit = (state.slo.find((slo) => slo.text.startsWith("ttft") && "limit_ms" in slo) || {}).limit_ms;
    const known = dots.filter((dot) => dot[1] !== null).map((dot) => dot[1]);
    const slowest = Math.max(1, ...known);
    const most = 1.05 * (limit && limit < 3 * slowest ? Math.max(slowest, limit) : slowest);
    const span = Math.max(5, state.elapsed_s, state.end_s || 0);
    const x = (s) => left + (s / span) * (wide - left - 12), y = (ms) => low - (ms / most) * (low - top);
    const parts = [];
    for (const tick of ticks(most)) {
      parts.push(make("line", { class: "grid", x1: left, x2: wide - 12, y1: y(tick), y2: y(tick) }));
      parts.push(make("text", { class: "tick end", x: left - 6, y: y(tick) + 4 }, time(tick)));
    }
    for (const tick of ticks(span)) parts.push(make("text", { class: "tick middle", x: x(tick), y: high - 6 }, figure(tick) + " s"));
    if (limit && limit <= most) {
      parts.push(make("line", { class: "limit", x1: left, x2: wide - 12, y1: y(limit), y2: y(limit) }));
      parts.push(make("text", { class: "limit end", x: wide - 14, y: y(limit) - 4 }, `SLO ${time(limit)}`));
    }
    for (const [s, ms, outcome] of dots) {
      if (ms === null) parts.push(make("text", { class: "middle live-failed", x: x(s), y: top + 6 }, "×"));
      else parts.push(make("circle", { class: "live-dot", cx: x(s), cy: y(ms), r: 2 }));
      parts[parts.length - 1].append(make("title", {}, `${figure(s)} s: ${ms === null ? outcome : time(ms)}`));
    }
    svg.replaceChildren(...parts);
  }

  // Failures and the slowest tenth stay, of the others every second one.
  function thinned(all) {
    const waits = all.map((dot) => dot[1]).filter((ms) => ms !== null).sort((a, b) => a - b);
    const slow = waits[Math.floor(0.9 * waits.length)] ?? 0;
    let others = 0;
    return all.filter((dot) => dot[1] === null || dot[1] >= slow || others++ % 2).slice(-4000);
  }

  const source = new EventSource("events");
  let first = true;
  source.addEventListener("message", (event) => {
    const told = JSON.parse(event.data);
    if (told.phase === "over") {
      source.close();
      at("phase").textContent = "over";
      if (told.report) location.replace("report.html");
      return;
    }
    dots = first ? told.dots : dots.concat(told.dots);
    first = false;
    if (dots.length > 4000) dots = thinned(dots);
    state = told;
    show();
  });
  source.addEventListener("open", () => { first = true; });
  source.addEventListener("error", () => { at("clock").textContent = "the run's page does not answer any more"; });
  addEventListener("resize", () => { if (state.slo) draw(); });
})();
