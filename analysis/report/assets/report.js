// Picks a stage out of every picture and sorts the slow requests by it. Everything is there without this script.
(() => {
  "use strict";
  const list = document.getElementById("slow-requests");
  const original = list ? [...list.children] : [];
  let chosen = null;

  function msOf(row) {
    const piece = row.querySelector(`summary [data-stage="${CSS.escape(chosen)}"]`);
    return piece ? Number(piece.dataset.ms) : 0;
  }

  function show() {
    document.body.classList.toggle("focused", chosen !== null);
    for (const item of document.querySelectorAll("[data-stage]")) {
      const on = item.dataset.stage === chosen;
      item.classList.toggle("on", on);
      if (item.tagName === "BUTTON") item.setAttribute("aria-pressed", String(on));
    }
    if (!list) return;
    list.append(...(chosen === null ? original : [...original].sort((a, b) => msOf(b) - msOf(a))));
    const label = document.getElementById("slow-order");
    label.textContent = chosen === null ? "slowest first" : `most ${chosen.replaceAll("_", " ")} first`;
  }

  document.addEventListener("click", (event) => {
    const item = event.target.closest("[data-stage]");
    if (!item || item.closest("summary")) return;
    chosen = item.dataset.stage === chosen ? null : item.dataset.stage;
    show();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chosen !== null) {
      chosen = null;
      show();
    }
  });
})();
