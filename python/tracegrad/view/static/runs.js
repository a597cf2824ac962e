// Runs. The server renders the table and the curves. This script selects up to two runs.
"use strict";
(() => {
  const tg = window.tracegrad;
  let chosen = [];

  async function open(place) {
    const html = await tg.store.runs(chosen);
    if (place.dataset.html !== html) {
      place.dataset.html = "";
      place.innerHTML = html;
      place.dataset.html = html;
    }
    for (const box of place.querySelectorAll("input[data-run]")) {
      box.addEventListener("change", () => {
        chosen = [...place.querySelectorAll("input[data-run]:checked")].map((each) => each.dataset.run).slice(-2);
        open(place);
      });
    }
  }

  window.tracegrad.runs = {open};
})();
