// Opens one request: its wait as a timeline, the engine's steps beneath it, and who shared them.
(() => {
  "use strict";
  const source = document.getElementById("data-requests");
  const view = document.getElementById("request-view");
  if (!source || !view) return;
  const data = JSON.parse(source.textContent);
  const steps = new Map(data.steps.map((row) => [row[0], row]));
  const SVG = "http://www.w3.org/2000/svg";
  let until = "last";
  let current = null;
  let opener = null; // the row or dot from which it was opened, to go back to

  // --- elements: text is always set as text, never as markup
  function make(space, name, attributes, ...children) {
    const item = space ? document.createElementNS(space, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) item.setAttribute(key, value);
    item.append(...children.filter((child) => child !== null));
    return item;
  }
  const svg = (name, attributes = {}, ...children) => make(SVG, name, attributes, ...children);
  const html = (name, attributes = {}, ...children) => make(null, name, attributes, ...children);

  // --- numbers as the rest of the page writes them: three significant digits, the unit that keeps them short
  function significant(value) {
    if (Math.abs(value) >= 999.5) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
    return value && value.toLocaleString("en-US", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });
  }
  function duration(us) {
    const size = Math.abs(us);
    if (size >= 999500) return `${significant(us / 1e6)} s`;
    return size >= 99.5 || size === 0 ? `${significant(us / 1e3)} ms` : `${significant(us)} µs`;
  }
  const round = (us) => duration(us).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " "); // a tick's own digits
  function share(part, whole) {
    const percent = (100 * part) / whole;
    if (percent === 0 || percent > 100 - 1e-9) return percent ? "100 %" : "0 %";
    if (percent < 0.01 || percent >= 99.95) return percent < 1 ? "< 0.01 %" : "> 99.9 %";
    return `${percent.toPrecision(percent < 99.5 ? 2 : 3)} %`;
  }

  // --- one axis for everything that is drawn of a request, in microseconds from due
  function axis(length) {
    const raw = length / 7;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= raw);
    const ticks = [];
    for (let at = 0; at <= length * 1.0001; at += step) ticks.push(at);
    return { x: (us) => `${Math.max(0, Math.min(100, (100 * us) / length)).toFixed(3)}%`, ticks, length };
  }

  function box(scale, from, length, y, height, fill, title, more = {}) {
    const start = Math.max(0, from);
    const end = Math.min(scale.length, from + length);
    if (end <= start) return null;
    const width = `${((100 * (end - start)) / scale.length).toFixed(3)}%`;
    return svg("rect", { x: scale.x(start), width, y, height, fill, ...more }, svg("title", {}, title));
  }

  const said = (text, x, y, css, more = {}) => svg("text", { x, y, class: css, ...more }, text);

  function ledger(scale, request, y) {
    const parts = [];
    let at = 0;
    for (let i = 0; i < request.parts.length; i += 2) {
      const [stage, length] = [request.parts[i], request.parts[i + 1]];
      const title = `${data.words[stage]}: ${duration(length)} from ${duration(at)} on · ${data.owners[stage]} · ${data.kinds[stage]}`;
      const name = data.stages[stage];
      const item = box(scale, at, length, y, 38, data.paints[stage], title, { class: "piece", "data-stage": name });
      if (item) parts.push(item);
      if (length / scale.length > 0.0085 * data.words[stage].length && at < scale.length) {
        const middle = scale.x(at + Math.min(length, scale.length - at) / 2);
        parts.push(said(data.words[stage], middle, y + 23, "middle inside-piece", { style: `fill:${data.inks[stage]}` }));
      }
      at += length;
    }
    return parts;
  }

  function arrivals(scale, request, y) {
    let at = 0, came = 0;
    const parts = [];
    for (const [i, gap] of request.tokens.entries()) {
      at += gap;
      const first = came + 1;
      came += request.together ? request.together[i] : 1;
      if (at > scale.length * 1.0001) break;
      const which = came > first ? `tokens ${first} to ${came}` : `token ${came}`;
      const title = svg("title", {}, `${which} arrived after ${duration(at)}`);
      parts.push(svg("line", { x1: scale.x(at), x2: scale.x(at), y1: y, y2: y + 9, class: "token" }, title));
    }
    return parts;
  }

  // --- the engine's steps: what each held; this request's own are outlined
  function engine(scale, request, y) {
    const [first, last] = request.steps;
    const parts = [];
    for (const [number, start, length, from, to, held, prompt, decode, waiting] of steps.values()) {
      const at = start - request.due;
      if (at + length < 0 || at > scale.length) continue;
      const own = number >= first && number <= last;
      const words = `step ${number}, ${duration(length)}: ${held} request${held === 1 ? "" : "s"}, ${prompt} prompt and ${decode} decode tokens, ${waiting} waiting${own ? "" : " (before this request was in)"}`;
      parts.push(box(scale, at, length, y, 22, "var(--step)", words, { class: own ? "step own" : "step" }));
      if (from !== null) {
        const paint = prompt > 0 ? "#0072B2" : "#009E73";
        parts.push(box(scale, from - request.due, to - from, y + 5, 12, paint, `forward of ${words}`));
      }
    }
    return parts.filter((part) => part !== null);
  }

  // --- who shared them: a lane each, by when they were in the engine's steps
  const edge = (number, which) => {
    const row = steps.get(number);
    return row ? row[1] + (which === "end" ? row[2] : 0) : null;
  };

  function companions(name, request, length) {
    const [first, last] = request.steps;
    const known = [];
    for (const [id, from, token, to] of data.sharing) {
      if (id === name || to < first - 3 || from > last) continue;
      const start = (edge(from, "start") ?? -Infinity) - request.due;
      const middle = (edge(token, "end") ?? (token < first ? -Infinity : Infinity)) - request.due;
      const end = (edge(to, "end") ?? Infinity) - request.due;
      const overlap = Math.min(end, length) - Math.max(start, 0);
      if (overlap > 0) known.push({ id, start, middle, end, overlap });
    }
    return known.sort((a, b) => b.overlap - a.overlap);
  }

  function lanes(scale, others, y) {
    const parts = [];
    others.forEach((other, i) => {
      const top = y + 15 * i;
      const from = Math.max(other.start, 0);
      const cut = Math.min(Math.max(other.middle, from), scale.length);
      const until = Math.min(other.end, scale.length);
      parts.push(said(other.id.slice(-8), -8, top + 10, "tick end"));
      parts.push(box(scale, from, cut - from, top, 11, "#0072B2", `${other.id}: until its first token`, { opacity: 0.75 }));
      parts.push(box(scale, cut, until - cut, top, 11, "#009E73", `${other.id}: later tokens`, { opacity: 0.75 }));
    });
    return parts.filter((part) => part !== null);
  }

  function drawing(name, request) {
    const length = Math.max(until === "first" ? request.first * 1.02 : request.last * 1.005, 1);
    const scale = axis(length);
    const parts = [said("ledger", -8, 33, "tick end"), ...ledger(scale, request, 10)];
    parts.push(said("tokens", -8, 61, "tick end"), ...arrivals(scale, request, 53));
    let bottom = 68;
    if (request.steps) {
      parts.push(said("engine", -8, 92, "tick end"), ...engine(scale, request, 77));
      const others = companions(name, request, length);
      const shown = others.slice(0, 14);
      parts.push(...lanes(scale, shown, 108));
      bottom = 108 + 15 * shown.length;
      if (others.length > shown.length) {
        bottom += 15;
        parts.push(said(`and ${others.length - shown.length} more that shared its steps for less`, 0, bottom - 3, "note"));
      }
    }
    for (const at of scale.ticks) {
      parts.unshift(svg("line", { x1: scale.x(at), x2: scale.x(at), y1: 4, y2: bottom + 4, class: "grid" }));
      const words = at === scale.ticks.at(-1) ? `${round(at)} after due` : round(at);
      parts.push(said(at ? words : "due", scale.x(at), bottom + 20, "tick middle"));
    }
    const title = `Request ${name}: its ledger over time${request.steps ? ", the engine's steps, and who shared them" : ""}`;
    return svg("svg", { class: "chart", width: "100%", height: bottom + 28, role: "img", "aria-label": title }, ...parts);
  }

  function table(request) {
    const sums = request.sums[until === "first" ? 0 : 1];
    const whole = sums.reduce((sum, ns) => sum + (ns ?? 0), 0);
    const rows = sums.map((ns, stage) => {
      const told = ns === null ? "unmeasured" : duration(ns / 1e3);
      return html("tr", {}, html("td", {}, data.words[stage]), html("td", {}, data.owners[stage]), html("td", {}, data.kinds[stage]),
        html("td", { class: "n", "data-value": ns === null ? "" : String(ns / 1e6) }, told),
        html("td", { class: "n" }, ns === null ? "" : share(ns, whole)));
    });
    const head = ["stage", "owner", "kind", "time", "share"].map((word, i) =>
      html("th", { scope: "col", class: i > 2 ? "n" : null, "data-csv": word === "time" ? "time (ms)" : null }, word));
    const grid = html("table", { class: "compact" }, html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...rows));
    const holder = html("div", { class: "table" }, html("div", { class: "wide" }, grid), html("button", { type: "button", class: "copy" }, "copy as CSV"));
    return html("details", {}, html("summary", {}, "as a table"), holder);
  }

  function facts(request) {
    const tokens = `${request.in ?? "an unknown number of"} tokens in, ${request.out ?? "unknown"} out`;
    const told = `Due at ${(request.due / 1e6).toFixed(2)} s; TTFT ${duration(request.first)}, E2E ${duration(request.last)}; ${tokens}.`;
    const outline = request.steps
      ? " Beneath it the engine's steps (outlined: those from its first to its last; blue: with prompts, green: decode only) and the requests that shared them (blue until their first token)."
      : data.recorded
        ? " The steps of the engine are not embedded for it; they are in steps.parquet."
        : " No steps of the engine were recorded.";
    return told + outline;
  }

  function chooser() {
    const radio = (value, words) =>
      html("label", {}, html("input", { type: "radio", name: "request-until", value, ...(until === value ? { checked: "" } : {}) }), html("span", {}, words));
    const field = html("fieldset", { class: "switch" }, html("legend", {}, "show"), radio("last", "the whole request"), radio("first", "to the first token"));
    field.addEventListener("change", (event) => {
      until = event.target.value;
      draw();
      view.querySelector("input:checked").focus();
    });
    return field;
  }

  function draw() {
    const request = data.requests[current];
    document.getElementById("request-name").textContent = current;
    document.getElementById("request-facts").textContent = facts(request);
    const holder = document.getElementById("request-drawing");
    const invalid = document.querySelector("[data-verdict='INVALID']");
    const across = invalid ? [html("div", { class: "across", "aria-hidden": "true" }, html("span", {}, "INVALID"))] : [];
    const stamped = html("div", { class: "stamped" }, drawing(current, request), ...across);
    const plot = html("div", { class: "scroll" }, html("div", { class: "plot levels" }, stamped));
    holder.replaceChildren(chooser(), wayBack(), plot, table(request));
    for (const item of document.querySelectorAll("[data-request]")) item.classList.toggle("current", item.dataset.request === current);
  }

  function back() {
    if (!opener) return;
    opener.scrollIntoView({ block: "center" });
    opener.focus({ preventScroll: true });
  }

  function wayBack() {
    const button = html("button", { type: "button", class: "back" }, "back to where it was opened");
    button.addEventListener("click", back);
    return button;
  }

  view.addEventListener("keydown", (event) => {
    if (event.key === "Escape") back();
  });

  function open(name, from) {
    if (!Object.hasOwn(data.requests, name)) return;
    current = name;
    if (!view.contains(from)) opener = from;
    draw();
    view.scrollIntoView({ block: "nearest" });
    view.focus({ preventScroll: true });
  }

  document.addEventListener("click", (event) => {
    const item = event.target.closest("[data-request]");
    if (item) open(item.dataset.request, item);
    else if (event.target.closest("circle.dot")) tell();
  });

  function tell() {
    document.getElementById("request-name").textContent = "That request is not embedded";
    document.getElementById("request-facts").textContent =
      "Only the larger dots open. The others are in requests.parquet, ledger.parquet and timeline.parquet.";
    document.getElementById("request-drawing").replaceChildren();
    view.scrollIntoView({ block: "nearest" });
  }

  // --- dots by keyboard: one stop of Tab a chart, arrows within, Enter or Space opens
  for (const group of document.querySelectorAll(".dots")) {
    const dots = [...group.querySelectorAll("[data-request]")];
    if (!dots.length) continue;
    dots[0].setAttribute("tabindex", "0");
    group.addEventListener("keydown", (event) => {
      const at = dots.indexOf(document.activeElement);
      if (at < 0) return;
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: dots.length - 1 }[event.key];
      if (event.key === "Enter" || event.key === " ") open(dots[at].dataset.request, dots[at]);
      else if (to === undefined) return;
      else {
        const next = dots[Math.max(0, Math.min(dots.length - 1, to))];
        dots[at].setAttribute("tabindex", "-1");
        next.setAttribute("tabindex", "0");
        next.focus();
      }
      event.preventDefault();
    });
  }
})();
