// Histograms of the numbers. A click on a bar, or Enter or Space on it, filters by it. The arrow keys move between bars.
"use strict";
(() => {
  const BINS = 24, HEIGHT = 44;
  const tg = window.tracegrad;
  const SVG = "http://www.w3.org/2000/svg";

  function shown(value) {
    if (Number.isInteger(value)) return value.toLocaleString("en");
    if (Math.abs(value) < 0.001) return value.toExponential(1);
    return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
  }

  function range(column) {
    let low = Infinity, high = -Infinity;
    for (const value of column) if (value < low || value > high) { low = Math.min(low, value); high = Math.max(high, value); }
    for (const value of column) if (value === value) { low = Math.min(low, value); high = Math.max(high, value); }
    return [low, high];
  }

  function counts(column, low, high, rows) {
    const bins = new Uint32Array(BINS), width = (high - low) / BINS;
    for (const row of rows) {
      const value = column[row];
      if (value === value) bins[Math.min(BINS - 1, Math.max(0, Math.floor((value - low) / width)))]++;
    }
    return bins;
  }

  function one(name, changed) {
    const column = tg.table.columns[name], [low, high] = range(column);
    if (!(high > low)) return null;
    const bins = counts(column, low, high, tg.passing(name)), most = Math.max(...bins, 1), width = (high - low) / BINS;
    const box = document.createElement("figure");
    box.dataset.name = name;
    const chosen = tg.filters.get(name);
    const text = chosen ? `${shown(chosen[0])} to ${shown(chosen[1])}` : `${shown(low)} to ${shown(high)}`;
    const caption = document.createElement("figcaption");
    caption.title = tg.meanings[name] || "";
    caption.append(Object.assign(document.createElement("b"), {textContent: name.replaceAll("_", " ")}), Object.assign(document.createElement("small"), {textContent: text}));
    const drawing = document.createElementNS(SVG, "svg");
    drawing.setAttribute("viewBox", `0 0 ${BINS * 10} ${HEIGHT}`);
    drawing.setAttribute("preserveAspectRatio", "none");
    bins.forEach((count, bin) => {
      const from = low + bin * width, to = bin === BINS - 1 ? high : from + width;
      const bar = document.createElementNS(SVG, "g");
      const height = count ? Math.max(2, Math.sqrt(count / most) * HEIGHT) : 0;
      const inside = chosen && to > chosen[0] && from < chosen[1];
      for (const [y, tall, kind] of [[0, HEIGHT, "hit"], [HEIGHT - height, height, inside || !chosen ? "bar" : "bar out"]]) {
        const rect = document.createElementNS(SVG, "rect");
        for (const [key, value] of Object.entries({x: bin * 10, y, width: 9, height: tall, class: kind})) rect.setAttribute(key, value);
        bar.append(rect);
      }
      const label = `${name} ${shown(from)} to ${shown(to)}: ${count.toLocaleString("en")} trace${count === 1 ? "" : "s"}`;
      bar.append(Object.assign(document.createElementNS(SVG, "title"), {textContent: label}));
      if (count) {
        bar.setAttribute("tabindex", drawing.querySelector("[tabindex]") ? "-1" : "0");
        bar.dataset.bin = bin;
        bar.setAttribute("role", "button");
        bar.setAttribute("aria-label", label);
      }
      const pick = (wider) => {
        const before = tg.filters.get(name);
        if (wider && before) tg.filters.set(name, [Math.min(before[0], from), Math.max(before[1], to)]);
        else if (before && before[0] === from && before[1] === to) tg.filters.delete(name);
        else tg.filters.set(name, [from, to]);
        changed();
      };
      bar.addEventListener("click", (event) => pick(event.shiftKey));
      bar.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(event.shiftKey); }
        if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
          const bars = [...drawing.querySelectorAll("[tabindex]")], next = bars[bars.indexOf(bar) + (event.key === "ArrowRight" ? 1 : -1)];
          if (next) { event.preventDefault(); focus(next); }
        }
      });
      drawing.append(bar);
    });
    box.append(caption, drawing);
    return box;
  }

  // Each histogram is one stop of the Tab key.
  function focus(bar) {
    for (const each of bar.parentElement.querySelectorAll("[tabindex]")) each.setAttribute("tabindex", "-1");
    bar.setAttribute("tabindex", "0");
    bar.focus();
  }

  window.tracegrad.shown = shown;
  window.tracegrad.histograms = (place, changed) => {
    const focused = place.contains(document.activeElement) ? document.activeElement.closest("[data-bin]") : null;
    const name = focused && focused.closest("figure").dataset.name;
    const names = tg.table.names.filter((name) => name !== "group" && (name !== "source" || tg.sources > 1));
    place.replaceChildren(...names.map((name) => one(name, changed)).filter(Boolean));
    const again = focused && place.querySelector(`figure[data-name="${name}"] [data-bin="${focused.dataset.bin}"]`);
    if (again) focus(again);
  };
})();
