// The list. Only visible rows are in the page, and their text is loaded when they become visible.
"use strict";
(() => {
  const HEIGHT = 30, MOST_PIXELS = 15_000_000;
  const tg = window.tracegrad;
  const words = new Map(); // row -> {id, group, head}
  const COLUMNS = ["reward", "advantage", "length", "turns", "calls", "tier", "drift", "lag", "pull", "ratio", "clipped", "masked"];
  const TIERS = ["T0", "T1", "T2", "T3", "T4", "T5", "T6"];
  let place, heads, inner, at = 0, waiting = null;

  function used() {
    return COLUMNS.filter((name) => tg.table.columns[name] && tg.table.columns[name].some((value) => value === value));
  }

  function cell(name, row) {
    const value = tg.table.columns[name][row];
    if (value !== value) return "";
    if (name === "tier") return TIERS[value] + (value === 2 && !tg.aligned ? "–T5" : "");
    if (name === "clipped" || name === "masked") return (100 * value).toPrecision(3) + " %";
    return tg.shown(value);
  }

  function drawHeads(changed) {
    const {name: by, down} = tg.sorted();
    const make = (name) => {
      const button = document.createElement("button");
      button.textContent = name + (by === name ? (down ? " ↓" : " ↑") : "");
      button.setAttribute("aria-pressed", String(by === name));
      button.dataset.sort = name;
      button.addEventListener("click", () => { tg.sortBy(name, by === name ? !down : true); changed(); });
      return button;
    };
    heads.replaceChildren(Object.assign(document.createElement("span"), {textContent: "trace"}), ...used().map(make));
    const columns = `minmax(9rem,1fr) repeat(${used().length},minmax(3.6rem,5.4rem))`;
    heads.style.gridTemplateColumns = columns;
    inner.style.setProperty("--columns", columns);
  }

  function draw() {
    const total = tg.table.order.length, pixels = Math.min(total * HEIGHT, MOST_PIXELS);
    inner.style.height = pixels + "px";
    const room = Math.max(1, pixels - place.clientHeight), sight = Math.ceil(place.clientHeight / HEIGHT) + 1;
    const share = pixels < total * HEIGHT ? place.scrollTop / room : 0;
    const first = Math.max(0, Math.min(total - 1, pixels < total * HEIGHT ? Math.floor(share * (total - sight + 1)) : Math.floor(place.scrollTop / HEIGHT)));
    const last = Math.min(total, first + sight), names = used(), lacking = [];
    const lines = [];
    for (let index = first; index < last; index++) {
      const row = tg.table.order[index], line = document.createElement("a");
      line.className = "row" + (index === at ? " here" : "");
      line.href = "#trace-" + row;
      line.dataset.row = row;
      const top = pixels < total * HEIGHT ? place.scrollTop + (index - first) * HEIGHT : index * HEIGHT;
      line.style.transform = `translateY(${top}px)`;
      const known = words.get(row), name = document.createElement("span");
      name.append(Object.assign(document.createElement("b"), {textContent: known ? known.id : "…"}), " ", known ? known.head : "");
      if (!known) lacking.push(row);
      line.append(name, ...names.map((column) => Object.assign(document.createElement("span"), {className: "n", textContent: cell(column, row)})));
      lines.push(line);
    }
    inner.replaceChildren(...lines);
    if (lacking.length) fetchWords(lacking);
  }

  async function fetchWords(rows) {
    if (waiting) { waiting = rows; return; }
    waiting = rows;
    try {
      for (const one of await tg.store.rows(rows)) words.set(one.n, one);
    } finally {
      const more = waiting !== rows;
      waiting = null;
      if (words.size > 50_000) words.clear();
      if (more || rows.some((row) => words.has(row))) draw();
    }
  }

  function move(by) {
    at = Math.max(0, Math.min(tg.table.order.length - 1, at + by));
    const top = at * HEIGHT;
    if (top < place.scrollTop) place.scrollTop = top;
    if (top + HEIGHT > place.scrollTop + place.clientHeight) place.scrollTop = top + HEIGHT - place.clientHeight;
    draw();
  }

  function keys(event) {
    const page = Math.max(1, Math.floor(place.clientHeight / HEIGHT) - 1);
    const steps = {ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity};
    if (event.key in steps) { event.preventDefault(); move(Math.max(-1e9, Math.min(1e9, steps[event.key]))); }
    if (event.key === "Enter" && tg.table.order.length) location.hash = "#trace-" + tg.table.order[at];
  }

  window.tracegrad.list = {
    begin(rows, titles) {
      place = rows;
      heads = titles;
      inner = document.createElement("div");
      inner.className = "inner";
      place.append(inner);
      place.addEventListener("scroll", () => requestAnimationFrame(draw), {passive: true});
      place.addEventListener("keydown", keys);
      addEventListener("resize", draw);
    },
    draw(changed) { drawHeads(changed); at = Math.min(at, Math.max(0, tg.table.order.length - 1)); draw(); },
    top() { at = 0; place.scrollTop = 0; },
    // The neighbour of a row in the sorted list.
    beside(row, by) {
      const index = tg.table.order.indexOf(row);
      return index < 0 ? undefined : tg.table.order[index + by];
    },
  };
})();
