// One trace: facts, steps, messages, the other traces of its group, tokens.
"use strict";
(() => {
  const tg = window.tracegrad;
  const get = (id) => document.getElementById(id);
  const SAYS = {
    pull: ["pushed down", "pushed up"], ratio: ["below 1/1.5", "above 1.5"], old: ["below 1/1.5", "above 1.5"],
    weight: ["below 1/1.5", "above 1.5"], advantage: ["negative", "positive"], entropy: ["0 nats", "5 nats"],
    logprob: ["certain", "5 nats of surprise"], source: ["", ""],
  };
  let here = null;

  tg.copy = async (text, button) => {
    const before = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      const area = Object.assign(document.createElement("textarea"), {value: text});
      document.body.append(area);
      area.select();
      button.textContent = document.execCommand("copy") ? "copied" : "not copied";
      area.remove();
    }
    setTimeout(() => { button.textContent = before; }, 1200);
  };
  tg.python = (token) => (token === undefined ? here.python : here.python_token.replaceAll("987654321", String(token)));

  function button(text, work) {
    const made = Object.assign(document.createElement("button"), {textContent: text});
    made.addEventListener("click", () => work(made));
    return made;
  }

  function top(found) {
    const steps = [["← before", tg.list.beside(found.n, -1)], ["after →", tg.list.beside(found.n, 1)]];
    const links = steps.filter(([, row]) => row !== undefined).map(([text, row]) => Object.assign(document.createElement("a"), {textContent: text, href: "#trace-" + row}));
    const runs = found.runs.length > 1 ? found.runs.map((name) => button("run " + name, () => open(found.n, {run: name}))) : [];
    const group = button("its group side by side", async () => { get("beside").innerHTML = await tg.store.group(found.n); get("beside").scrollIntoView(); });
    get("top").replaceChildren(Object.assign(document.createElement("h1"), {textContent: found.id}), ...links, " ",
      group, " ", button("copy as Python", (own) => tg.copy(tg.python(), own)), " ",
      button("copy the command", (own) => tg.copy(found.shell, own)), " ", ...runs);
  }

  async function open(n, more = {}, token = null) {
    const found = await tg.store.trace(n, more);
    here = found;
    document.title = found.id + " · tracegrad view";
    top(found);
    // The server escapes these pieces, and the page's content policy allows no script in them.
    get("facts").innerHTML = found.facts + found.drift;
    get("history").innerHTML = found.history && "<h2>What became of it, step by step</h2>" + found.history;
    get("words").innerHTML = found.messages && "<h2>Messages</h2>" + found.messages;
    get("as-markdown").hidden = !found.messages;
    tg.markdown.lay();
    get("beside").replaceChildren();
    get("tokens").innerHTML = found.tokens || `<p>${found.why}</p>`;
    for (const each of document.querySelectorAll("button.step")) {
      const mine = Number(each.dataset.step) === found.step;
      each.setAttribute("aria-pressed", String(mine));
      each.disabled = tg.store.local;
      each.addEventListener("click", () => open(n, {...more, step: each.dataset.step}, null));
    }
    tg.tokens.show(token);
    modes(found.steps > 0);
    legend();
    if (token === null && !("step" in more)) scrollTo(0, 0);
  }

  // Without a run, only overlays from the record are available.
  function modes(trained) {
    const known = trained ? null : ["by-logprob", "by-source"];
    for (const input of document.querySelectorAll("#overlay > input")) {
      input.disabled = known !== null && !known.includes(input.id);
      input.nextElementSibling.hidden = input.disabled;
    }
    if (document.querySelector("#overlay > input:checked").disabled) get("by-logprob").checked = true;
  }

  function legend() {
    const mode = (document.querySelector("#overlay > input:checked") || {id: "by-pull"}).id.slice(3);
    const [low, high] = SAYS[mode];
    const ramp = document.createElement("span");
    ramp.className = "ramp";
    for (let level = 0; level < 17; level++) ramp.append(Object.assign(document.createElement("span"), {className: `t ${mode[0]}${level}`, textContent: " "}));
    const word = (text, kind = "") => Object.assign(document.createElement("span"), {className: kind, textContent: text});
    get("legend").replaceChildren(...(low ? [word(low), ramp, word(high)] : []), word("given", "g"), word("template", "p"),
      word("sampled, not trained", "s"), word("trained", "t"), word("masked", "t m"), word("clipped", "t c"));
  }

  async function more(event) {
    const own = event.target.closest("button.more");
    if (!own) return;
    const piece = document.createElement("span");
    piece.innerHTML = await tg.store.message(here.n, own.dataset.message, own.dataset.start);
    own.replaceWith(piece);
    tg.markdown.lay();
  }

  window.tracegrad.trace = {
    open,
    begin() {
      tg.markdown.begin();
      get("words").addEventListener("click", more);
      get("overlay").addEventListener("change", legend);
      addEventListener("keydown", (event) => {
        if (get("trace").hidden || event.target.matches("input, textarea")) return;
        const by = {j: 1, n: 1, k: -1, p: -1}[event.key];
        const row = by && here && tg.list.beside(here.n, by);
        if (row !== undefined && by) location.hash = "#trace-" + row;
        if (event.key === "Escape") location.hash = "#list";
        if (event.key >= "1" && event.key <= "8") {
          const mode = document.querySelectorAll("#overlay > input")[Number(event.key) - 1];
          if (mode && !mode.disabled) { mode.checked = true; legend(); }
        }
      });
    },
  };
})();
