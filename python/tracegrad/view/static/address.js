// The address has the page and the list: `#trace-3?q=amber&sort=length:up&filter=reward:0..1&tag=tool:price`.
// It is in the fragment, so that it also works in an exported file and is never sent to a server.
"use strict";
(() => {
  const tg = window.tracegrad;

  // The page of the address, such as "list", "trace-3" or "trace-3-token-7".
  const page = () => location.hash.slice(1).split("?")[0] || "list";

  // The parameters of the address. Invalid ones are left out.
  function read() {
    const query = new URLSearchParams(location.hash.split("?").slice(1).join("?"));
    const [name, direction] = (query.get("sort") || "").split(":");
    const filters = query.getAll("filter").map((text) => /^(\w+):(.+)\.\.(.+)$/.exec(text)).filter(Boolean)
      .map(([, column, low, high]) => [column, [Number(low), Number(high)]])
      .filter(([column, [low, high]]) => tg.table.columns[column] && low <= high);
    return {
      q: query.get("q") || "",
      regex: query.get("regex") === "1",
      sort: {name: tg.table.columns[name] ? name : "", down: direction !== "up"},
      filters,
      tags: query.getAll("tag"),
      histograms: query.get("histograms") === "1",
      runs: query.getAll("run").slice(0, 2),
    };
  }

  function parameters(list) {
    const query = new URLSearchParams();
    if (list.q) query.set("q", list.q);
    if (list.regex) query.set("regex", "1");
    if (list.sort.name) query.set("sort", list.sort.name + (list.sort.down ? "" : ":up"));
    for (const [name, [low, high]] of list.filters) query.append("filter", `${name}:${low}..${high}`);
    for (const tag of list.tags) query.append("tag", tag);
    if (list.histograms) query.set("histograms", "1");
    for (const run of list.runs) query.append("run", run);
    return query.toString().replaceAll("%3A", ":");
  }

  // The address of a page with the current list.
  function to(name) {
    const query = parameters(tg.current());
    return "#" + name + (query ? "?" + query : "");
  }

  // Puts the current list into the address: as a new entry of the history, or in place of the current one.
  function write(isNew) {
    const next = to(page());
    if (next !== location.hash) history[isNew ? "pushState" : "replaceState"](null, "", next);
  }

  tg.address = {page, read, to, write, parameters};
})();
