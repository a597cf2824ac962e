// The page shows what the address selects. The list follows an index that is still growing.
"use strict";
(() => {
  const tg = window.tracegrad;
  const get = (id) => document.getElementById(id);
  const QUIET_MS = 2000, READING_MS = 700;
  let state = {rows: -1, steps: -1, problems: [], tags: []}, searches = 0, lost = "", refused = "", shown = null;
  const search = {q: "", regex: false, rows: [], next: null}; // next: the row to continue from, null at the end

  function tell() { get("problem").textContent = [lost, refused, ...state.problems].filter(Boolean).join("\n"); }
  function fails(error) { refused = error.message || String(error); tell(); }
  tg.fails = fails;

  // The list that the address stores.
  tg.current = () => ({
    q: get("query").value,
    regex: get("regex").checked,
    sort: tg.sorted(),
    filters: [...tg.filters],
    tags: [...tg.tags.keys()],
    histograms: get("filters").open,
    runs: tg.runs.chosen(),
  });

  function changed() {
    tg.apply();
    if (get("filters").open) tg.histograms(get("histograms"), filtered);
    tg.list.draw(changed);
    counted();
  }

  // After a click on a filter.
  function filtered() {
    tg.list.top();
    changed();
    tg.address.write(true);
  }

  function counted() {
    const all = tg.table.rows.toLocaleString("en"), count = tg.table.order.length.toLocaleString("en");
    get("state").textContent = (count === all ? all : `${count} of ${all}`) + (tg.table.rows === 1 ? " trace" : " traces") + (state.done ? "" : ", reading …");
    const names = [...[...tg.filters].map(([name, [low, high]]) => `${name} ${tg.shown(low)} to ${tg.shown(high)}`), ...tg.tags.keys()];
    get("active").textContent = names.join(" · ").replaceAll("_", " ");
    get("clear").hidden = !names.length && !get("query").value;
  }

  function tags() {
    const chips = state.tags.filter(([name, count]) => count < state.rows || tg.tags.has(name)).slice(0, 60).map(([name, count]) => {
      const chip = document.createElement("button");
      chip.textContent = `${name.replaceAll("_", " ")} ${count.toLocaleString("en")}`;
      chip.title = tg.meanings[name] || "";
      chip.setAttribute("aria-pressed", String(tg.tags.has(name)));
      chip.dataset.tag = name;
      chip.addEventListener("click", async () => {
        tg.setTag(name, tg.tags.has(name) ? null : await tg.store.tag(name));
        chip.setAttribute("aria-pressed", String(tg.tags.has(name)));
        filtered();
      });
      return chip;
    });
    get("tags").replaceChildren(...chips);
  }

  async function look() {
    const before = state, next = await tg.store.state();
    if (next !== null) {
      state = next;
      tg.sources = state.sources.length;
      tg.aligned = state.aligned;
      tg.meanings = state.meanings;
      if (state.rows !== before.rows || state.steps !== before.steps) {
        tg.set(state.names, await tg.store.columns(state.names));
        for (const name of tg.tags.keys()) tg.setTag(name, await tg.store.tag(name));
        if (search.q) await find(search.next === null ? before.rows : search.next); // only new rows
        tags();
        changed();
        if (before.steps >= 0 && state.steps !== before.steps && !get("trace").hidden) await tg.trace.refresh();
      }
      counted();
    }
    lost = "";
    tell();
    if (!get("runs-page").hidden) await tg.runs.open(get("runs-page"));
  }

  async function follow() {
    try {
      if (!document.hidden || state.rows < 0) await look();
    } catch (error) {
      lost = error.message || String(error);
      tell();
    }
    if (!tg.store.local) setTimeout(follow, state.done ? QUIET_MS : READING_MS);
  }

  // Searches the rows from `start` on. Returns whether it was not replaced by another search.
  async function find(start) {
    const own = ++searches;
    if (start === 0) search.rows = [];
    search.next = start;
    while (start !== null) {
      const answer = await tg.store.search(search.q, search.regex, start);
      if (own !== searches) return false;
      search.rows = search.rows.concat(answer.rows);
      start = search.next = answer.next;
      tg.setMatches(search.rows);
      tg.apply();
      tg.list.draw(changed);
      counted();
      if (start !== null) get("state").textContent += `, searched ${start.toLocaleString("en")} …`;
    }
    return true;
  }

  async function searched() {
    search.q = get("query").value;
    search.regex = get("regex").checked;
    refused = "";
    tell();
    if (!search.q) { searches++; tg.setMatches(null); }
    if (!search.q || await find(0)) { tg.list.top(); changed(); }
  }

  // Sets the list to that of the address.
  async function restore() {
    const wanted = tg.address.read();
    if (tg.address.parameters(wanted) === tg.address.parameters(tg.current())) return;
    const isSearch = wanted.q !== search.q || wanted.regex !== search.regex;
    tg.runs.choose(wanted.runs);
    tg.sortBy(wanted.sort.name, wanted.sort.down);
    tg.filters.clear();
    for (const [name, span] of wanted.filters) tg.filters.set(name, span);
    for (const name of [...tg.tags.keys()]) if (!wanted.tags.includes(name)) tg.setTag(name, null);
    for (const name of wanted.tags) if (!tg.tags.has(name)) tg.setTag(name, await tg.store.tag(name));
    get("filters").open = wanted.histograms;
    get("query").value = wanted.q;
    get("regex").checked = wanted.regex;
    tags();
    if (isSearch) await searched().catch(fails);
    else { tg.list.top(); changed(); }
  }

  async function route() {
    await restore();
    const page = tg.address.page(), match = /^trace-(\d+)(?:-token-(\d+))?$/.exec(page), isRuns = page === "runs";
    const left = shown;
    shown = match ? Number(match[1]) : null;
    get("list").hidden = Boolean(match) || isRuns;
    get("trace").hidden = !match;
    get("runs-page").hidden = !isRuns;
    for (const [id, name, isCurrent] of [["to-list", "list", !match && !isRuns], ["to-runs", "runs", isRuns]]) {
      if (isCurrent) { get(id).removeAttribute("href"); get(id).setAttribute("aria-current", "page"); }
      else { get(id).href = tg.address.to(name); get(id).removeAttribute("aria-current"); }
    }
    if (match) await tg.trace.open(shown, {}, match[2] === undefined ? null : Number(match[2]));
    else document.title = isRuns ? "runs · tracegrad view" : "tracegrad view";
    if (isRuns) await tg.runs.open(get("runs-page"));
    if (!match && !isRuns && tg.table.rows) {
      tg.list.draw(changed);
      if (left !== null) { tg.list.choose(left); tg.list.focus(); }
    }
  }

  function keys(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const isField = event.target.matches("input[type=search], textarea"), isList = !get("list").hidden;
    if (event.key === "Escape" && isField) {
      event.preventDefault(); // The browser would clear the field.
      tg.list.focus();
    } else if (!isField && event.key === "/") {
      event.preventDefault();
      if (!isList) location.hash = tg.address.to("list");
      get("list").hidden = false;
      get("query").focus();
    } else if (!isField && isList) {
      tg.list.keys(event);
    } else if (!isField && event.key === "Escape") {
      location.hash = tg.address.to("list");
    }
  }

  function begin() {
    tg.list.begin(get("rows"));
    tg.tokens.begin(get("tokens"), get("token"));
    tg.trace.begin();
    let late = 0, isTyping = false;
    // The first letter of a search is a new entry of the history, and the others replace it.
    const typed = (wait) => {
      clearTimeout(late);
      late = setTimeout(() => {
        tg.address.write(!isTyping);
        isTyping = true;
        // Enter after typing: the search is shown or under way, and the selected trace stays.
        const isSame = get("query").value === search.q && get("regex").checked === search.regex;
        if (!isSame || refused) searched().catch(fails);
      }, wait);
    };
    get("query").addEventListener("input", () => typed(120));
    get("query").addEventListener("blur", () => { isTyping = false; });
    get("regex").addEventListener("change", () => { isTyping = false; typed(0); });
    get("ask").addEventListener("submit", (event) => { event.preventDefault(); typed(0); tg.list.focus(); });
    get("filters").addEventListener("toggle", () => { if (tg.table.rows) changed(); tg.address.write(false); });
    get("clear").addEventListener("click", () => {
      tg.filters.clear();
      for (const tag of [...tg.tags.keys()]) tg.setTag(tag, null);
      get("query").value = "";
      tags();
      tg.address.write(true);
      searched().catch(fails);
      tg.list.focus();
    });
    get("export").hidden = tg.store.local;
    get("export").addEventListener("click", () => { location.href = "export?n=" + [...tg.table.order.slice(0, 2000)].join(","); });
    addEventListener("hashchange", () => route().catch(fails));
    addEventListener("keydown", keys);
    document.addEventListener("visibilitychange", () => { if (!document.hidden && !tg.store.local) look().catch(() => {}); });
    follow().then(route).catch(fails);
  }

  begin();
})();
