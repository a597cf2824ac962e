// The numbers of all traces. The browser filters and sorts them without requests to the server.
"use strict";
(() => {
  const table = {names: [], columns: {}, rows: 0, order: new Uint32Array(0)};
  const filters = new Map(); // name -> [low, high]
  const tags = new Map(); // tag -> Uint8Array mask
  let matches = null; // Uint8Array mask of the search
  let sort = {name: "", down: true};

  function mask(rows, size) {
    const out = new Uint8Array(size);
    for (const row of rows) if (row < size) out[row] = 1;
    return out;
  }

  // Rows that pass every filter except that of `but`, so that a histogram also shows the rows that its own filter excludes.
  function passing(but) {
    const ranges = [...filters].filter(([name]) => name !== but).map(([name, [low, high]]) => [table.columns[name], low, high]);
    const masks = [...tags.values(), ...(matches ? [matches] : [])];
    const out = new Uint32Array(table.rows);
    let count = 0;
    next: for (let row = 0; row < table.rows; row++) {
      for (const [column, low, high] of ranges) {
        const value = column[row];
        if (!(value >= low && value <= high)) continue next;
      }
      for (const one of masks) if (!one[row]) continue next;
      out[count++] = row;
    }
    return out.subarray(0, count);
  }

  function apply() {
    const rows = passing(null).slice();
    const column = table.columns[sort.name];
    if (column) {
      const sign = sort.down ? -1 : 1;
      rows.sort((a, b) => {
        const x = column[a], y = column[b];
        if (x !== x || y !== y) return (x !== x) - (y !== y) || a - b; // unknown values are last in both directions
        return sign * (x - y) || a - b;
      });
    }
    table.order = rows;
  }

  Object.assign(window.tracegrad, {
    table, filters, tags, passing, apply,
    set(names, columns) {
      table.names = names;
      table.columns = columns;
      table.rows = columns[names[0]].length;
      for (const [tag, before] of tags) if (before.length < table.rows) tags.set(tag, mask(ones(before), table.rows));
      if (matches && matches.length < table.rows) matches = mask(ones(matches), table.rows);
    },
    setTag(tag, rows) { rows ? tags.set(tag, mask(rows, table.rows)) : tags.delete(tag); },
    setMatches(rows) { matches = rows && mask(rows, table.rows); },
    sortBy(name, down) { sort = {name, down}; },
    sorted: () => sort,
  });

  function* ones(marks) {
    for (let row = 0; row < marks.length; row++) if (marks[row]) yield row;
  }
})();
