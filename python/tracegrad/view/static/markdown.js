// Messages as markdown, on request: headings, code, lists, quotes, emphasis. Each piece is an element with text in it.
// A message is never parsed as HTML, a link is shown as its text and address, and nothing is loaded.
"use strict";
(() => {
  const tg = window.tracegrad;
  const get = (id) => document.getElementById(id);
  const MOST = 200000;
  const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/g;

  // Append one by one: a call accepts about 65,000 arguments, and a message can have more lines or marks.
  function made(kind, inside) {
    const element = document.createElement(kind);
    for (const each of inside) element.append(each);
    return element;
  }

  // Emphasis and code within a line, one level deep.
  function inline(text) {
    const out = [];
    let at = 0;
    for (const match of text.matchAll(INLINE)) {
      out.push(text.slice(at, match.index));
      const [whole, code, strong, weak] = match;
      out.push(code !== undefined ? made("code", [code]) : strong !== undefined ? made("strong", [strong]) : made("em", [weak]));
      at = match.index + whole.length;
    }
    out.push(text.slice(at));
    return out;
  }

  // Blocks of lines, in one pass. Each line is read once, and blocks do not nest.
  function blocks(text) {
    const out = document.createElement("div"), lines = text.split("\n");
    let list = null, paragraph = [];
    const flush = () => {
      if (paragraph.length) out.append(made("p", paragraph.flatMap((line, n) => [...(n ? [document.createElement("br")] : []), ...inline(line)])));
      paragraph = [];
    };
    for (let at = 0; at < lines.length; at++) {
      const line = lines[at];
      const fence = /^ {0,3}(```|~~~)([^`]*)$/.exec(line), head = /^(#{1,6}) +(.*)/.exec(line);
      const item = /^\s*(?:([-*+])|\d{1,9}[.)])\s(.*)/.exec(line), quote = /^> ?(.*)/.exec(line);
      if (!item && list) list = null;
      if (fence || head || item || quote || !line.trim()) flush();
      if (fence) {
        const code = [];
        while (++at < lines.length && !lines[at].trimStart().startsWith(fence[1])) code.push(lines[at]);
        out.append(made("pre", [made("code", [code.join("\n")])]));
        out.lastChild.title = fence[2].trim();
      } else if (head) {
        const title = made("p", inline(head[2]));
        title.className = "head h" + head[1].length;
        title.setAttribute("role", "heading");
        title.setAttribute("aria-level", String(Math.min(head[1].length + 3, 9)));
        out.append(title);
      } else if (item) {
        const kind = item[1] ? "UL" : "OL";
        if (!list || list.tagName !== kind) out.append(list = document.createElement(kind));
        list.append(made("li", inline(item[2])));
      } else if (quote) {
        out.append(made("blockquote", inline(quote[1])));
      } else if (line.trim()) {
        paragraph.push(line);
      }
    }
    flush();
    return out;
  }

  // The content of a message in order: text with images in between.
  function sent(message) {
    const out = [];
    for (const node of message.childNodes) {
      const span = node.nodeName === "SPAN", picture = span && node.classList.contains("picture");
      const own = node.nodeName === "BUTTON" ? [] : picture ? [node] : span ? sent(node) : [node.textContent];
      for (const each of own) out.push(typeof each === "string" && typeof out.at(-1) === "string" ? out.pop() + each : each);
    }
    return out;
  }

  // A rendered message, with the button that loads the rest of it.
  function laid(message, parts) {
    const shown = document.createElement("div"), more = message.querySelector("button.more");
    for (const part of parts) {
      if (typeof part === "string") for (const block of [...blocks(part).childNodes]) shown.append(block);
      else shown.append(part.cloneNode(true));
    }
    shown.className = "rendered";
    if (more) {
      const button = made("button", [more.textContent]);
      button.addEventListener("click", () => more.click());
      shown.append(button);
    }
    return shown;
  }

  // Renders the visible messages as markdown or as text. The original stays in the page, hidden, and is shown if
  // rendering fails.
  function lay() {
    const on = get("markdown").checked;
    for (const old of document.querySelectorAll("#words .rendered")) old.remove();
    for (const message of document.querySelectorAll("#words .content")) {
      message.hidden = false;
      const parts = on ? sent(message) : [];
      if (!on || parts.reduce((sum, part) => sum + (part.length || 0), 0) > MOST) continue;
      try {
        message.after(laid(message, parts));
        message.hidden = true;
      } catch (error) {
        console.warn("a message is shown as it was sent:", error);
      }
    }
  }

  window.tracegrad.markdown = {
    lay,
    begin() {
      get("markdown").addEventListener("change", lay);
      addEventListener("keydown", (event) => {
        if (event.key !== "m" || get("trace").hidden || event.target.matches("input[type=search], textarea") || event.ctrlKey || event.metaKey) return;
        get("markdown").checked = !get("markdown").checked;
        lay();
      });
    },
  };
})();
