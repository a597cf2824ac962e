// Tokens. The token under the pointer, or selected by keys, shows its numbers. Each token has an address.
"use strict";
(() => {
  const tg = window.tracegrad;
  let panel, place, chosen = null;

  const sampled = () => [...place.querySelectorAll("[data-t]")];

  function choose(token, scroll) {
    if (chosen) chosen.classList.remove("chosen");
    chosen = token;
    if (!token) { panel.replaceChildren(); return; }
    token.classList.add("chosen");
    if (scroll) token.scrollIntoView({block: "center"});
    const link = Object.assign(document.createElement("a"), {textContent: "link", href: address(token)});
    const copy = Object.assign(document.createElement("button"), {textContent: "copy as Python"});
    copy.addEventListener("click", () => tg.copy(tg.python(token.dataset.t), copy));
    panel.replaceChildren(Object.assign(document.createElement("span"), {textContent: `token ${token.dataset.t}  ·  ${token.dataset.n}`}), " ", link, " ", copy);
  }

  const address = (token) => tg.address.to(tg.address.page().replace(/-token-\d+$/, "") + "-token-" + token.dataset.t);

  function keys(event) {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key) || event.target.matches("input, textarea")) return;
    if (!chosen || !place.contains(chosen)) { choose(sampled()[0] || null, true); return; }
    const all = sampled(), index = all.indexOf(chosen) + (event.key === "ArrowRight" ? 1 : -1);
    if (all[index]) { event.preventDefault(); choose(all[index], true); history.replaceState(null, "", address(all[index])); }
  }

  window.tracegrad.tokens = {
    begin(tokens, output) {
      place = tokens;
      panel = output;
      place.addEventListener("click", (event) => {
        const token = event.target.closest("[data-t]");
        if (token) { choose(token, false); history.replaceState(null, "", address(token)); }
      });
      addEventListener("keydown", (event) => { if (!document.getElementById("trace").hidden) keys(event); });
    },
    show(number) { choose(number === null ? null : place.querySelector(`[data-t="${number}"]`), true); },
  };
})();
