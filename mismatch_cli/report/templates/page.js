// Makes the page easier to browse: folded lists, sortable tables, a menu for many folds, commands to copy, and the
// current section in the navigation.
"use strict";

function make(tag, attributes = {}, text = "") {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

// Whether the text is on the clipboard now; the focus stays where it is.
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // not allowed here: the old way, from a selected field
    const field = document.createElement("textarea"), focused = document.activeElement;
    field.className = "unseen";
    field.value = text;
    document.body.append(field);
    field.focus({ preventScroll: true });
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    focused?.focus({ preventScroll: true });
    return copied;
  }
}

(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  const BOXES = ".scroll, .tokens, pre"; // that may scroll

  // A list shows its first entries until the user asks for all; call `fold` again after the order changes.
  const itemsOf = list => (list.tBodies ? all("tbody tr:not(.group)", list) : [...list.children]);
  function fold(list) {
    const items = itemsOf(list);
    const first = list.classList.contains("whole-list") ? items.length : Number(list.dataset.first);
    items.forEach((item, n) => item.classList.toggle("beyond", n >= first));
    for (const group of all("tr.group", list)) {
      const rows = all("tr:not(.group)", group.parentElement);
      group.classList.toggle("beyond", rows.every(row => row.classList.contains("beyond")));
    }
  }
  for (const list of all("[data-first]")) {
    const count = itemsOf(list).length, first = Number(list.dataset.first);
    if (count <= first) continue;
    const button = make("button", { type: "button", class: "more", "aria-expanded": "false", "data-paper": `The first ${first} of ${count}.` }, `Show all ${count}`);
    button.addEventListener("click", () => {
      const whole = list.classList.toggle("whole-list");
      button.textContent = whole ? `Show the first ${first}` : `Show all ${count}`;
      button.setAttribute("aria-expanded", String(whole));
      fold(list);
      if (!whole) button.scrollIntoView({ block: "nearest" });
    });
    (list.closest(".scroll") ?? list).after(button);
    fold(list);
  }

  // Numbers as the report writes them: `−3.1e−5 ± 2e−6`, `12,300`, `28 ×`, `0.42 %`, `0.06 – 0.1`, `< 1e−7`.
  const NUMBER = /^[<>≤≥≈\s]*([+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[+-]?\d+)?)/;
  const said = cell => cell.textContent.trim();
  const missing = text => text === "" || text === "—";
  function numberIn(text) {
    const found = NUMBER.exec(text.replace(/−/g, "-"));
    return found ? Number(found[1].replace(/,/g, "")) : NaN;
  }
  function compare(a, b) {
    const [x, y] = [numberIn(a), numberIn(b)];
    if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
    return a.localeCompare(b, undefined, { numeric: true });
  }

  // Descending, ascending, original order; each group of rows separately, with missing values last.
  const NEXT = { none: "descending", descending: "ascending", ascending: "none" };
  const NEXT_OF_TEXT = { none: "ascending", ascending: "descending", descending: "none" };
  function sort(table, column, order) {
    const sign = order === "descending" ? -1 : 1;
    const key = row => said(row.cells[column]);
    for (const body of table.tBodies) {
      const rows = all("tr:not(.group)", body);
      if (order === "none") rows.sort((a, b) => a.dataset.place - b.dataset.place);
      else {
        rows.sort((a, b) => missing(key(a)) - missing(key(b)) || sign * (missing(key(a)) ? 0 : compare(key(a), key(b))));
      }
      body.append(...rows);
    }
    if (table.dataset.first) fold(table);
  }
  for (const table of all("table.grid, table.metrics")) {
    const rows = all("tbody tr:not(.group)", table), heads = all("thead th", table);
    if (rows.length < 3 || heads.some(head => !said(head))) continue;
    rows.forEach((row, n) => { row.dataset.place = n; });
    heads.forEach((head, column) => {
      const textual = head.matches(".text, .token") || (column === 0 && table.matches(".metrics"));
      const button = make("button", { type: "button", class: "sort", "aria-label": `Sort by ${said(head).replace(/^by /, "")}` });
      head.append("\u2060", button); // stays on the line of the last word
      head.classList.add("sortable");
      head.setAttribute("aria-sort", "none");
      head.addEventListener("click", event => {
        if (event.target.closest("a")) return;
        const order = (textual ? NEXT_OF_TEXT : NEXT)[head.getAttribute("aria-sort")];
        for (const other of heads) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", order);
        sort(table, column, order);
      });
    });
  }

  // Many folds on one subject get a menu that opens one of them.
  for (const choice of all(".choice")) {
    const folds = all(":scope > details", choice), about = choice.dataset.about;
    const label = make("label", { class: "chooser" }, `${about[0].toUpperCase()}${about.slice(1)} `);
    const select = label.appendChild(make("select"));
    select.append(make("option", { value: "" }, `choose one of ${folds.length}`));
    folds.forEach((each, n) => {
      const name = said(each.querySelector("summary"));
      select.append(make("option", { value: n }, name.slice(0, name.length - about.length - 2)));
    });
    select.addEventListener("change", () => {
      folds.forEach((each, n) => { each.open = String(n) === select.value; });
    });
    choice.prepend(label);
    choice.classList.add("chosen");
  }

  // A button beside each command copies it; where that is not allowed, it selects it.
  const COPIED = 2000; // milliseconds
  const spoken = make("p", { class: "unseen", "aria-live": "polite" });
  for (const command of all(".command")) {
    const code = command.querySelector("code"), button = make("button", { type: "button", class: "copy" });
    const say = (words, name) => { button.textContent = words; button.setAttribute("aria-label", name); };
    const rest = () => { say("Copy", `Copy: ${said(code)}`); spoken.textContent = ""; };
    let timer = 0;
    button.addEventListener("click", async () => {
      const copied = await copyText(said(code));
      if (!copied) getSelection().selectAllChildren(code);
      const words = copied ? "Copied" : "Selected";
      say(words, words);
      spoken.textContent = words;
      clearTimeout(timer);
      timer = setTimeout(rest, COPIED);
    });
    rest();
    command.append(button);
  }
  document.body.append(spoken);

  // The keyboard stops at boxes that really scroll, and at no others.
  const sizes = new ResizeObserver(entries => {
    const boxes = new Set(entries.map(({ target }) => target.closest(BOXES)));
    for (const box of boxes) {
      const scrolls = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
      box[scrolls ? "setAttribute" : "removeAttribute"]("tabindex", "0");
    }
  });
  for (const each of all(`${BOXES}, .scroll > table`)) sizes.observe(each);

  // Highlights the current section in the navigation.
  const links = new Map(all("nav a").map(link => [link.hash.slice(1), link]));
  const seen = new Set();
  const sections = all("main > section").filter(section => links.has(section.id));
  const watch = new IntersectionObserver(entries => {
    for (const { target, isIntersecting } of entries) seen[isIntersecting ? "add" : "delete"](target);
    const current = sections.find(section => seen.has(section));
    if (!current) return;
    for (const [id, link] of links) {
      if (id !== current.id) link.removeAttribute("aria-current");
      else if (!link.hasAttribute("aria-current")) {
        link.setAttribute("aria-current", "true");
        const bar = link.parentElement; // a row on a phone, a column on a desk
        bar.scrollTo({ left: link.offsetLeft - bar.clientWidth / 3, top: link.offsetTop - bar.clientHeight / 3 });
      }
    }
  }, { rootMargin: "-10% 0px -60% 0px" });
  sections.forEach(section => watch.observe(section));

  // Opens folds around the target of a link.
  const open = element => {
    for (let each = element; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
  };
  const arrive = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    open(target);
    target.scrollIntoView();
  };
  addEventListener("hashchange", arrive);
  if (location.hash) arrive();
})();
