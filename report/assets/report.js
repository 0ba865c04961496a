// Switches, tables as CSV, and a stage picked out of every picture. Every number is in the page without this script.
(() => {
  "use strict";
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  // --- switches: a panel is seen while every switch that it names stands at its value
  function chosen(name) {
    const item = document.querySelector(`input[name="${name}"]:checked, select[name="${name}"]`);
    return item && item.value;
  }

  function turn(name) {
    for (const panel of all(`[data-panel*="${name}="]`)) {
      panel.hidden = !panel.dataset.panel.split(" ").every((mark) => {
        const at = mark.indexOf("=");
        return chosen(mark.slice(0, at)) === mark.slice(at + 1);
      });
    }
  }

  document.addEventListener("change", (event) => {
    const item = event.target.closest("[data-switch]");
    if (item) turn(item.dataset.switch);
  });
  for (const item of all("[data-switch]")) turn(item.dataset.switch); // a browser may restore what was chosen before

  // --- tables as CSV, with where they are from in front
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

  function csvOf(table) {
    const rows = [...table.rows].map((row) =>
      [...row.cells].map((cell) => quoted(cell.dataset.csv ?? cell.dataset.value ?? cell.textContent.trim())).join(","),
    );
    const from = document.querySelector("meta[name=description]").content;
    return `# ${from}\n${rows.join("\n")}\n`;
  }

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const box = document.createElement("textarea"); // where the page may not use the clipboard by itself
      box.value = text;
      document.body.append(box);
      box.select();
      document.execCommand("copy");
      box.remove();
    }
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    const words = button.textContent;
    await copy(csvOf(button.parentElement.querySelector("table")));
    button.textContent = "copied";
    button.focus();
    setTimeout(() => (button.textContent = words), 1500);
  });

  // --- a stage picked out of every picture, and the slow requests sorted by it
  const list = document.getElementById("slow-requests");
  const original = list ? [...list.children] : [];
  let stage = null;

  function msOf(row) {
    const piece = row.querySelector(`[data-stage="${CSS.escape(stage)}"]`);
    return piece ? Number(piece.dataset.ms) : 0;
  }

  function show() {
    document.body.classList.toggle("focused", stage !== null);
    for (const item of all("[data-stage]")) {
      const on = item.dataset.stage === stage;
      item.classList.toggle("on", on);
      if (item.tagName === "BUTTON") item.setAttribute("aria-pressed", String(on));
    }
    if (!list) return;
    list.append(...(stage === null ? original : [...original].sort((a, b) => msOf(b) - msOf(a))));
    const label = document.getElementById("slow-order");
    const name = document.querySelector(`button[data-stage="${CSS.escape(stage)}"]`)?.textContent ?? stage?.replaceAll("_", " ");
    label.textContent = stage === null ? "slowest first" : `most ${name} first`;
  }

  document.addEventListener("click", (event) => {
    const item = event.target.closest("[data-stage]");
    if (!item || item.closest("summary")) return;
    stage = item.dataset.stage === stage ? null : item.dataset.stage;
    show();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && stage !== null) {
      stage = null;
      show();
    }
  });
})();
