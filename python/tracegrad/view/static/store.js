// The source of data: the server, or an exported page itself.
"use strict";
(() => {
  const data = document.getElementById("data");
  const embedded = data ? JSON.parse(data.textContent) : null;
  const versions = new Map(); // name of a resource -> {path, tag} of its last answer, which the page shows

  async function request(path, parameters = {}, kind = "json", version = null) {
    const query = new URLSearchParams(parameters).toString();
    const headers = version === null ? {} : {"If-None-Match": version};
    const answer = await fetch(path + (query ? "?" + query : ""), {credentials: "omit", headers});
    if (answer.status === 304) return null;
    if (version !== null) versions.set(path.split("?")[0], {path, tag: answer.ok ? answer.headers.get("etag") : ""});
    if (!answer.ok) {
      const error = await answer.json().catch(() => ({error: "the server has ended; start tracegrad view again"}));
      throw new Error(error.error);
    }
    return kind === "json" ? answer.json() : answer.arrayBuffer();
  }

  // The content of a path, or null if it has not changed since the last call.
  function changed(path) {
    const last = versions.get(path.split("?")[0]);
    return request(path, {}, "json", last && last.path === path ? last.tag : "");
  }

  const served = {
    local: false,
    state: () => changed("state"),
    async columns(names) {
      const numbers = new Float32Array(await request("columns", {}, "bytes"));
      const rows = numbers.length / names.length;
      return Object.fromEntries(names.map((name, at) => [name, numbers.subarray(at * rows, (at + 1) * rows)]));
    },
    rows: (wanted) => request("rows", {n: wanted.join(",")}),
    tag: async (name) => new Int32Array(await request("tag", {name}, "bytes")),
    search: (q, regex, start) => request("search", {q, regex: regex ? "1" : "0", start}),
    trace: (n, more = {}) => request("trace/" + n, more),
    message: async (n, message, start) => (await request("message/" + n, {message, start})).html,
    group: async (n) => (await request("group/" + n)).html,
    async runs(chosen) {
      const answer = await changed("runs?" + new URLSearchParams(chosen.map((name) => ["run", name])));
      return answer && answer.html;
    },
  };

  const exported = {
    local: true,
    state: async () => embedded.state,
    columns: async (names) => Object.fromEntries(
      names.map((name) => [name, Float32Array.from(embedded.columns[name], (value) => (value === null ? NaN : value))])),
    rows: async (wanted) => wanted.map((n) => embedded.rows[n]),
    tag: async (name) => Int32Array.from(embedded.tagged[name] || []),
    async search(q, regex) {
      const expression = regex ? new RegExp(q) : null, folded = q.toLowerCase();
      const has = (text) => (expression ? expression.test(text) : text.toLowerCase().includes(folded));
      return {rows: embedded.texts.flatMap((text, n) => (has(text) || has(embedded.rows[n].id) ? [n] : [])), next: null};
    },
    trace: async (n) => JSON.parse(document.getElementById("trace-data-" + n).textContent),
    message: async () => "The rest is not in this file.",
    group: async (n) => embedded.groups[embedded.rows[n].group] || "",
    runs: async () => embedded.runs,
  };

  window.tracegrad = {store: embedded ? exported : served};
})();
