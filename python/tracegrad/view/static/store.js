// The source of data: the server, or an exported page itself.
"use strict";
(() => {
  const data = document.getElementById("data");
  const told = data ? JSON.parse(data.textContent) : null;

  async function asked(path, parameters = {}, kind = "json") {
    const query = new URLSearchParams(parameters).toString();
    const answer = await fetch(path + (query ? "?" + query : ""), {credentials: "omit"});
    if (!answer.ok) {
      const error = await answer.json().catch(() => ({error: "the server has ended; start tracegrad view again"}));
      throw new Error(error.error);
    }
    return kind === "json" ? answer.json() : answer.arrayBuffer();
  }

  const served = {
    local: false,
    state: () => asked("state"),
    async columns(names) {
      const numbers = new Float32Array(await asked("columns", {}, "bytes"));
      const rows = numbers.length / names.length;
      return Object.fromEntries(names.map((name, at) => [name, numbers.subarray(at * rows, (at + 1) * rows)]));
    },
    rows: (wanted) => asked("rows", {n: wanted.join(",")}),
    tag: async (name) => new Int32Array(await asked("tag", {name}, "bytes")),
    search: (q, regex, start) => asked("search", {q, regex: regex ? "1" : "0", start}),
    trace: (n, more = {}) => asked("trace/" + n, more),
    message: async (n, message, start) => (await asked("message/" + n, {message, start})).html,
    group: async (n) => (await asked("group/" + n)).html,
    runs: async (chosen) => (await asked("runs?" + new URLSearchParams(chosen.map((name) => ["run", name])))).html,
  };

  const exported = {
    local: true,
    state: async () => told.state,
    columns: async (names) => Object.fromEntries(
      names.map((name) => [name, Float32Array.from(told.columns[name], (value) => (value === null ? NaN : value))])),
    rows: async (wanted) => wanted.map((n) => told.rows[n]),
    tag: async (name) => Int32Array.from(told.tagged[name] || []),
    async search(q, regex) {
      const looked = regex ? new RegExp(q) : null, folded = q.toLowerCase();
      const has = (text) => (looked ? looked.test(text) : text.toLowerCase().includes(folded));
      return {rows: told.texts.flatMap((text, n) => (has(text) ? [n] : [])), next: null};
    },
    trace: async (n) => JSON.parse(document.getElementById("trace-data-" + n).textContent),
    message: async () => "the rest is not in this file",
    group: async (n) => told.groups[told.rows[n].group] || "",
    runs: async () => told.runs,
  };

  window.tracegrad = {store: told ? exported : served};
})();
