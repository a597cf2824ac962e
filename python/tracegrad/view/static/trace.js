// One trace: facts, steps, messages, the other traces of its group, tokens.
"use strict";
(() => {
  const tg = window.tracegrad;
  const get = (id) => document.getElementById(id);
  const SCALES = {
    gradient: ["pushed down", "pushed up"], ratio: ["below 1/1.5", "above 1.5"], old: ["below 1/1.5", "above 1.5"],
    weight: ["below 1/1.5", "above 1.5"], advantage: ["negative", "positive"], entropy: ["0 nats", "5 nats"],
    logprob: ["certain", "5 nats of surprise"], source: ["", ""],
  };
  let here = null, chosen = {}, opened = 0;

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

  function link(text, row) {
    return Object.assign(document.createElement("a"), {textContent: text, href: tg.address.to("trace-" + row)});
  }

  async function compare(n) {
    get("beside").innerHTML = await tg.store.group(n);
    for (const each of get("beside").querySelectorAll("a[href^='#']")) each.href = tg.address.to(each.getAttribute("href").slice(1));
    get("beside").scrollIntoView();
  }

  function top(trace) {
    const neighbours = [["← previous", tg.list.neighbour(trace.n, -1)], ["next →", tg.list.neighbour(trace.n, 1)]];
    const links = neighbours.filter(([, row]) => row !== undefined).map(([text, row]) => link(text, row));
    const runs = trace.runs.length > 1 ? trace.runs.map((name) => button("run " + name, () => open(trace.n, {run: name}))) : [];
    get("top").replaceChildren(Object.assign(document.createElement("h1"), {textContent: trace.id}), ...links, " ",
      button("compare its group", () => compare(trace.n).catch(tg.fails)), " ", button("copy as Python", (own) => tg.copy(tg.python(), own)), " ",
      button("copy the command", (own) => tg.copy(trace.shell, own)), " ", ...runs);
  }

  async function open(n, more = {}, token = null) {
    const own = ++opened, trace = await tg.store.trace(n, more);
    if (own !== opened) return; // Another trace was opened meanwhile.
    here = trace;
    chosen = more;
    document.title = trace.id + " · tracegrad view";
    top(trace);
    // The server escapes these pieces, and the page's content policy allows no script in them.
    get("facts").innerHTML = trace.facts + (trace.mismatches && "<h2>Alignment mismatches</h2>" + trace.mismatches);
    history(trace);
    get("words").innerHTML = trace.messages && "<h2>Messages</h2>" + trace.messages;
    get("as-markdown").hidden = !trace.messages;
    tg.markdown.lay();
    get("beside").replaceChildren();
    get("tokens").innerHTML = trace.tokens || `<p>${trace.why}</p>`;
    tg.tokens.show(token);
    modes(trace.steps > 0);
    legend();
    if (token === null && !("step" in more)) scrollTo(0, 0);
  }

  function history(trace) {
    get("history").innerHTML = trace.history && "<h2>Training steps</h2>" + trace.history;
    for (const each of document.querySelectorAll("button.step")) {
      each.setAttribute("aria-pressed", String(Number(each.dataset.step) === trace.step));
      each.disabled = tg.store.local;
      each.addEventListener("click", () => open(trace.n, {...chosen, step: each.dataset.step}, null).catch(tg.fails));
    }
  }

  // Adds new training steps of the open trace. The tokens stay those of the chosen step.
  async function refresh() {
    const trace = here && await tg.store.trace(here.n, {...chosen, step: here.step});
    if (trace && trace.n === here.n) history(trace);
  }

  // Without a run, only overlays from the record are available.
  function modes(trained) {
    const known = trained ? null : ["by-logprob", "by-source"];
    for (const input of document.querySelectorAll("#overlay > input")) {
      input.disabled = known !== null && !known.includes(input.id);
      input.hidden = input.nextElementSibling.hidden = input.disabled;
    }
    if (document.querySelector("#overlay > input:checked").disabled) get("by-logprob").checked = true;
  }

  function legend() {
    const mode = (document.querySelector("#overlay > input:checked") || {id: "by-gradient"}).id.slice(3);
    const [low, high] = SCALES[mode], letter = mode === "gradient" ? "p" : mode[0];  // "g" is the class of prompt tokens.
    const ramp = document.createElement("span");
    ramp.className = "ramp";
    for (let level = 0; level < 17; level++) ramp.append(Object.assign(document.createElement("span"), {className: `t ${letter}${level}`, textContent: " "}));
    const word = (text, kind = "") => Object.assign(document.createElement("span"), {className: kind, textContent: text});
    get("legend").replaceChildren(...(low ? [word(low), ramp, word(high)] : []), word("prompt", "g"), word("template", "p"),
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
    refresh,
    begin() {
      tg.markdown.begin();
      get("words").addEventListener("click", more);
      get("overlay").addEventListener("change", legend);
      addEventListener("keydown", (event) => {
        if (get("trace").hidden || event.target.matches("input[type=search], textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
        const by = {j: 1, n: 1, k: -1, p: -1}[event.key];
        const row = by && here && tg.list.neighbour(here.n, by);
        if (row !== undefined && by) location.hash = tg.address.to("trace-" + row);
        if (event.key >= "1" && event.key <= "8") {
          const mode = document.querySelectorAll("#overlay > input")[Number(event.key) - 1];
          if (mode && !mode.disabled) { mode.checked = true; legend(); }
        }
      });
    },
  };
})();
