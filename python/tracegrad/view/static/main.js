// The page shows what the address selects. The list follows an index that is still growing.
"use strict";
(() => {
  const tg = window.tracegrad;
  const get = (id) => document.getElementById(id);
  let state = {rows: -1, steps: -1, problems: []}, asking = 0, lost = "", refused = "";

  function say() { get("problem").textContent = [lost, refused, ...state.problems].filter(Boolean).join("\n"); }
  function fails(error) { refused = error.message || String(error); say(); }

  function changed() {
    tg.apply();
    tg.histograms(get("histograms"), changed);
    tg.list.draw(changed);
    counted();
  }

  function counted() {
    const all = tg.table.rows.toLocaleString("en"), shown = tg.table.order.length.toLocaleString("en");
    get("state").textContent = (shown === all ? `${all} traces` : `${shown} of ${all} traces`) + (state.done ? "" : ", reading …");
  }

  function tags() {
    const chips = state.tags.filter(([, count]) => count < state.rows).slice(0, 60).map(([name, count]) => {
      const chip = document.createElement("button");
      chip.textContent = `${name.replaceAll("_", " ")} ${count.toLocaleString("en")}`;
      chip.setAttribute("aria-pressed", String(tg.tags.has(name)));
      chip.dataset.tag = name;
      chip.addEventListener("click", async () => {
        tg.setTag(name, tg.tags.has(name) ? null : await tg.store.tag(name));
        chip.setAttribute("aria-pressed", String(tg.tags.has(name)));
        tg.list.top();
        changed();
      });
      return chip;
    });
    get("tags").replaceChildren(...chips);
  }

  async function look() {
    const before = state;
    state = await tg.store.state();
    tg.sources = state.sources.length;
    tg.aligned = state.aligned;
    if (state.rows !== before.rows || state.steps !== before.steps) {
      tg.set(state.names, await tg.store.columns(state.names));
      tags();
      changed();
    }
    counted();
    lost = "";
    say();
    if (!get("runs-page").hidden) await tg.runs.open(get("runs-page"));
  }

  async function follow() {
    try {
      await look();
    } catch (error) {
      lost = error.message || String(error);
      say();
    }
    if (!tg.store.local) setTimeout(follow, state.done ? 2000 : 700);
  }

  async function search() {
    const own = ++asking, query = get("query").value, regex = get("regex").checked;
    let rows = [], start = query ? 0 : null;
    refused = "";
    say();
    if (!query) tg.setFound(null);
    while (start !== null && own === asking) {
      const found = await tg.store.search(query, regex, start);
      if (own !== asking) return;
      rows = rows.concat(found.rows);
      start = found.next;
      tg.setFound(rows);
      tg.apply();
      tg.list.draw(changed);
      counted();
      if (start !== null) get("state").textContent += `, searched ${start.toLocaleString("en")} …`;
    }
    if (own === asking) { tg.list.top(); changed(); }
  }

  function route() {
    const told = /^#trace-(\d+)(?:-token-(\d+))?$/.exec(location.hash);
    const runs = location.hash === "#runs";
    get("list").hidden = Boolean(told) || runs;
    get("trace").hidden = !told;
    get("runs-page").hidden = !runs;
    if (told) tg.trace.open(Number(told[1]), {}, told[2] === undefined ? null : Number(told[2])).catch(fails);
    else if (runs) tg.runs.open(get("runs-page")).catch(fails);
    else if (tg.table.rows) tg.list.draw(changed);
    if (!told) document.title = "tracegrad view";
  }

  function begin() {
    tg.list.begin(get("rows"), get("heads"));
    tg.tokens.begin(get("tokens"), get("token"));
    tg.trace.begin();
    let late = 0;
    const typed = () => { clearTimeout(late); late = setTimeout(() => search().catch(fails), 120); };
    get("query").addEventListener("input", typed);
    get("regex").addEventListener("change", typed);
    get("ask").addEventListener("submit", (event) => { event.preventDefault(); typed(); });
    get("clear").addEventListener("click", () => {
      tg.filters.clear();
      for (const tag of [...tg.tags.keys()]) tg.setTag(tag, null);
      get("query").value = "";
      tags();
      search().catch(fails);
    });
    get("export").hidden = tg.store.local;
    get("export").addEventListener("click", () => { location.href = "export?n=" + [...tg.table.order.slice(0, 2000)].join(","); });
    addEventListener("hashchange", route);
    addEventListener("keydown", (event) => {
      if (event.key === "/" && !event.target.matches("input")) { event.preventDefault(); location.hash = "#list"; get("query").focus(); }
    });
    follow().then(route);
  }

  begin();
})();
