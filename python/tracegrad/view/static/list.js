// The list. Only visible rows are in the page, and their text is loaded when they become visible.
"use strict";
(() => {
  const HEIGHT = 30, MOST_PIXELS = 15_000_000;
  const SHORT = 14, END = 10; // Longer ids are cut in the middle: their last characters are always visible.
  const tg = window.tracegrad;
  const labels = new Map(); // row -> {id, group, head}
  const COLUMNS = ["reward", "advantage", "length", "turns", "calls", "level", "mismatches", "staleness", "gradient", "ratio", "clipped", "masked"];
  const LEVELS = ["T0", "T1", "T2", "T3", "T4", "T5", "T6", "T7"];
  let place, heads, inner, at = 0, waiting = null;

  function element(kind, properties = {}, children = []) {
    const made = Object.assign(document.createElement(kind), properties);
    made.append(...children);
    return made;
  }

  const gridcell = (kind, role, properties, children) => {
    const made = element(kind, properties, children);
    made.setAttribute("role", role);
    return made;
  };

  function used() {
    return COLUMNS.filter((name) => tg.table.columns[name] && tg.table.columns[name].some((value) => value === value));
  }

  function cell(name, row) {
    const value = tg.table.columns[name][row];
    if (value !== value) return gridcell("span", "gridcell", {className: "n"});
    if (name === "level") {
      const isOpen = value === 2 && !tg.aligned;
      const title = isOpen ? tg.meanings.unaligned : tg.meanings["level:" + LEVELS[value]];
      return gridcell("span", "gridcell", {className: "n", textContent: LEVELS[value] + (isOpen ? "–T5" : ""), title});
    }
    const text = name === "clipped" || name === "masked" ? (100 * value).toPrecision(3) + " %" : tg.shown(value);
    const title = name === "mismatches" || name === "staleness" ? tg.meanings[name] : "";
    return gridcell("span", "gridcell", {className: "n", textContent: text, title});
  }

  // An id. A long one is cut in the middle, so that ids with a common start stay distinguishable.
  function identifier(id) {
    const characters = [...id];
    if (characters.length <= SHORT) return element("b", {textContent: id});
    const start = characters.slice(0, -END).join(""), end = characters.slice(-END).join("");
    return element("b", {title: id}, [element("span", {className: "start", textContent: start}), element("span", {className: "end", textContent: end})]);
  }

  function drawHeads(changed) {
    const {name: by, down} = tg.sorted(), names = used();
    const focused = heads.contains(document.activeElement) ? document.activeElement.dataset.sort : null;
    const make = (name, index) => {
      const button = element("button", {textContent: name + (by === name ? (down ? " ↓" : " ↑") : ""), title: `${tg.meanings[name]} Click to sort.`});
      button.type = "button";
      button.tabIndex = name === focused || (focused === null && index === 0) ? 0 : -1;
      button.dataset.sort = name;
      button.addEventListener("click", () => { tg.sortBy(name, by === name ? !down : true); changed(); tg.address.write(true); });
      const head = gridcell("span", "columnheader", {className: "n"}, [button]);
      head.setAttribute("aria-sort", by !== name ? "none" : down ? "descending" : "ascending");
      return head;
    };
    heads.replaceChildren(gridcell("span", "columnheader", {textContent: "trace"}), ...names.map(make));
    const again = focused && heads.querySelector(`[data-sort="${focused}"]`);
    if (again) again.focus({preventScroll: true});
    const widths = names.map((name) => Math.max(3.5, 0.42 * name.length + 0.9).toFixed(2) + "rem");
    place.style.setProperty("--columns", `minmax(9rem,1fr) ${widths.join(" ")}`);
    place.style.setProperty("--narrow", `minmax(0,1fr) ${widths.slice(0, 3).join(" ")}`);
  }

  function draw() {
    const total = tg.table.order.length, pixels = Math.min(total * HEIGHT, MOST_PIXELS), height = visibleHeight();
    inner.style.height = pixels + "px";
    place.setAttribute("aria-rowcount", total + 1);
    const rest = Math.max(1, pixels - height), count = Math.ceil(height / HEIGHT) + 1;
    const isScaled = pixels < total * HEIGHT, share = isScaled ? place.scrollTop / rest : 0;
    const first = Math.max(0, Math.min(total - 1, isScaled ? Math.floor(share * (total - count + 1)) : Math.floor(place.scrollTop / HEIGHT)));
    const last = Math.min(total, first + count), names = used(), lacking = [];
    const lines = [];
    for (let index = first; index < last; index++) {
      const row = tg.table.order[index], label = labels.get(row);
      if (!label) lacking.push(row);
      const link = element("a", {href: tg.address.to("trace-" + row), tabIndex: -1}, [label ? identifier(label.id) : element("b", {textContent: "…"})]);
      if (label) link.setAttribute("aria-label", label.id);
      const head = element("span", {className: "head", textContent: label ? label.head : ""});
      const line = gridcell("div", "row", {className: "row" + (index === at ? " here" : ""), id: "row-" + index}, [
        gridcell("span", "gridcell", {className: "trace"}, [link, head]), ...names.map((name) => cell(name, row))]);
      line.dataset.row = row;
      line.setAttribute("aria-rowindex", index + 2);
      line.setAttribute("aria-selected", String(index === at));
      const top = isScaled ? place.scrollTop + (index - first) * HEIGHT : index * HEIGHT;
      line.style.transform = `translateY(${top}px)`;
      lines.push(line);
    }
    inner.replaceChildren(...lines);
    if (at >= first && at < last) place.setAttribute("aria-activedescendant", "row-" + at);
    else place.removeAttribute("aria-activedescendant");
    if (lacking.length) fetchLabels(lacking);
  }

  // The height of the rows in view, without the column titles above them.
  const visibleHeight = () => Math.max(HEIGHT, place.clientHeight - heads.offsetHeight);

  async function fetchLabels(rows) {
    if (waiting) { waiting = rows; return; }
    waiting = rows;
    try {
      for (const label of await tg.store.rows(rows)) labels.set(label.n, label);
    } finally {
      const more = waiting !== rows;
      waiting = null;
      if (labels.size > 50_000) labels.clear();
      if (more || rows.some((row) => labels.has(row))) draw();
    }
  }

  function select(index) {
    at = Math.max(0, Math.min(tg.table.order.length - 1, index));
    const total = tg.table.order.length * HEIGHT, top = at * HEIGHT, height = visibleHeight();
    if (total > MOST_PIXELS) place.scrollTop = (at / tg.table.order.length) * (MOST_PIXELS - height);
    else if (top < place.scrollTop) place.scrollTop = top;
    else if (top + HEIGHT > place.scrollTop + height) place.scrollTop = top + HEIGHT - height;
    draw();
  }

  // Keys that work from anywhere on the page of the list, except in a field.
  function keys(event) {
    const isInside = place.contains(event.target), page = Math.max(1, Math.floor(visibleHeight() / HEIGHT) - 1);
    const steps = {j: 1, k: -1, ...(isInside ? {ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9} : {})};
    const head = event.target.closest("[data-sort]");
    if (event.key in steps) {
      event.preventDefault();
      if (!isInside || head) place.focus({preventScroll: true});
      select(at + steps[event.key]);
    } else if (head && ["ArrowLeft", "ArrowRight"].includes(event.key)) {
      const all = [...heads.querySelectorAll("button")], next = all[all.indexOf(head) + (event.key === "ArrowRight" ? 1 : -1)];
      if (next) { head.tabIndex = -1; next.tabIndex = 0; next.focus(); }
    } else if (event.key === "Enter" && !event.target.closest("a, button, summary, input, [role=button]") && tg.table.order.length) {
      event.preventDefault();
      location.hash = tg.address.to("trace-" + tg.table.order[at]);
    }
  }

  window.tracegrad.list = {
    begin(rows) {
      place = rows;
      heads = gridcell("div", "row", {id: "heads"});
      heads.setAttribute("aria-rowindex", "1");
      inner = gridcell("div", "rowgroup", {className: "inner"});
      place.append(heads, inner);
      place.addEventListener("scroll", () => requestAnimationFrame(draw), {passive: true});
      addEventListener("resize", draw);
    },
    keys,
    draw(changed) { drawHeads(changed); at = Math.min(at, Math.max(0, tg.table.order.length - 1)); draw(); },
    top() { at = 0; place.scrollTop = 0; },
    focus() { place.focus({preventScroll: true}); },
    // Selects a row, if the list has it.
    choose(row) {
      const index = tg.table.order.indexOf(row);
      if (index >= 0) select(index);
    },
    // The neighbour of a row in the sorted list.
    neighbour(row, by) {
      const index = tg.table.order.indexOf(row);
      return index < 0 ? undefined : tg.table.order[index + by];
    },
  };
})();
