// Runs. The server renders the tables and the curves. This script selects up to two runs.
"use strict";
(() => {
  const tg = window.tracegrad;
  let chosen = [];

  // Shows the runs, if they have changed since the last call.
  async function open(place) {
    const wanted = chosen, html = await tg.store.runs(wanted);
    if (html === null || wanted !== chosen) return;
    const focused = place.contains(document.activeElement) ? document.activeElement.dataset.run : null;
    place.innerHTML = html; // The server escapes it, and the page's content policy allows no script in it.
    for (const box of place.querySelectorAll("input[data-run]")) {
      if (box.dataset.run === focused) box.focus({preventScroll: true});
      box.addEventListener("change", () => {
        chosen = [...place.querySelectorAll("input[data-run]:checked")].map((each) => each.dataset.run).slice(-2);
        tg.address.write(true);
        open(place).catch(tg.fails);
      });
    }
  }

  window.tracegrad.runs = {
    open,
    chosen: () => chosen,
    choose(names) { if (names.join("\n") !== chosen.join("\n")) chosen = names; },
  };
})();
