// The text: passages cut into pieces, pieces gathered into slices, one slice at a time in the panel, so that a long run
// costs no more elements than a short one.
"use strict";
const PIECE = 512; // tokens
const SLICE = { tokens: 2000, articles: 40 };

// `shown(t)` says which tokens pass the filters, `paint(t, span)` colours one, `facts(response)` is its heading.
function explorerText(ui, tokens, { sideBySide, shown, paint, facts, drawStrip }) {
  let slices = [], at = 0, rendered = null;
  const spans = new Map();

  // ---- Pieces with a shown token, in the order of responses ----
  function piecesOf(response) {
    const pieces = [];
    for (const passage of response.passages) {
      for (let first = passage.first; first < passage.end; first += PIECE) {
        const end = Math.min(first + PIECE, passage.end);
        for (let t = first; t < end; t++) {
          if (!shown(t)) continue;
          pieces.push({ response, first, end, start: passage.start + first - passage.first });
          break;
        }
      }
    }
    return pieces;
  }
  // Rows of one piece; of two runs side by side, the same part of a sample of A and of B.
  function rowsOf(order) {
    if (!sideBySide) return order.flatMap(response => piecesOf(response).map(piece => [piece]));
    const rows = [];
    for (const [a, b] of samplesSideBySide(order)) {
      const [left, right] = [a ? piecesOf(a) : [], b ? piecesOf(b) : []];
      for (let n = 0; n < Math.max(left.length, right.length); n++) rows.push([left[n] ?? null, right[n] ?? null]);
    }
    return rows;
  }
  function list(order) {
    slices = [];
    let size = 0, articles = 0, before = null;
    for (const row of rowsOf(order)) {
      const length = row.reduce((sum, piece) => sum + (piece ? piece.end - piece.first : 0), 0);
      const owner = (row[0] ?? row[1]).response, same = owner === before;
      if (!slices.length || size + length > SLICE.tokens || articles + !same > SLICE.articles) {
        slices.push([]);
        [size, articles] = [0, 0];
      }
      slices.at(-1).push(row);
      size += length;
      articles += !same;
      before = owner;
    }
    at = Math.min(at, Math.max(0, slices.length - 1));
    render();
  }

  // ---- One slice ----
  const keyOfRow = row => row.map(piece => (piece ? `${piece.first}-${piece.end}` : "")).join(" ");
  function render() {
    ui.pager.hidden = slices.length < 2;
    ui.slice.textContent = `${at + 1} of ${slices.length}`;
    [ui.earlier.disabled, ui.later.disabled] = [at === 0, at >= slices.length - 1];
    const rows = slices[at] ?? [], key = rows.map(keyOfRow).join("\n");
    if (key === rendered) { // a slider changes colours, seldom the text
      for (const [t, span] of spans) paint(t, span);
      return;
    }
    rendered = key;
    spans.clear();
    const parts = sideBySide ? pairsOf(rows) : articlesOf(rows.map(([piece]) => piece));
    ui.texts.replaceChildren(...(parts.length ? parts : [make("p", { class: "none" }, "No token matches: relax the filters above.")]));
    drawStrips();
  }
  function drawStrips() {
    for (const strip of ui.texts.querySelectorAll("canvas")) drawStrip(strip, tokens.responses[strip.dataset.n]);
  }
  // Consecutive rows of the same two samples share their headings.
  function pairsOf(rows) {
    const pairs = [];
    for (const row of rows) {
      const same = pairs.length && pairs.at(-1).some((side, n) => row[n] && side.at(-1)?.response === row[n].response);
      if (!same) pairs.push([[], []]);
      row.forEach((piece, n) => { if (piece) pairs.at(-1)[n].push(piece); });
    }
    return pairs.map(sides => {
      const line = make("div", { class: "x-pair" });
      line.append(...sides.map(pieces => (pieces.length ? article(pieces) : make("article"))));
      return line;
    });
  }
  function articlesOf(pieces) {
    const groups = [];
    for (const piece of pieces) {
      if (groups.at(-1)?.[0].response === piece.response) groups.at(-1).push(piece);
      else groups.push([piece]);
    }
    return groups.map(article);
  }
  function article(pieces) {
    const element = make("article"), { response } = pieces[0];
    element.append(make("h3", {}, facts(response)));
    if (response.tokens < response.length || response.length > PIECE) element.append(strip(response));
    if (response.words) {
      const prompt = element.appendChild(make("details"));
      prompt.append(make("summary", {}, "prompt"), make("p", {}, response.words));
    }
    let paragraph = null, end = 0;
    for (const piece of pieces) {
      if (!paragraph || piece.start !== end) {
        if (piece.start > end) element.append(gap(piece.start - end));
        paragraph = element.appendChild(make("p", { class: "x-tokens" }));
      }
      fill(paragraph, piece);
      end = piece.start + piece.end - piece.first;
    }
    if (end < response.length) element.append(gap(response.length - end));
    return element;
  }
  const gap = size => make("p", { class: "x-gap" }, `… ${count(size)} ${size === 1 ? "token" : "tokens"} …`);
  function strip(response) {
    const canvas = make("canvas", { class: "x-strip" });
    canvas.dataset.n = response.n;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Where in the response |d|${tokens.whose} is large, up to ${number(response.largest)}`);
    return canvas;
  }
  function fill(paragraph, { first, end }) {
    for (let t = first; t < end; t++) {
      const span = make("span", {}, tokens.word(t));
      span.dataset.t = t;
      spans.set(t, span);
      paint(t, span);
      paragraph.append(span);
    }
  }

  function turn(by) {
    at = clamp(at + by, 0, Math.max(0, slices.length - 1));
    render();
    ui.texts.scrollTop = 0;
  }
  ui.earlier.addEventListener("click", () => turn(-1));
  ui.later.addEventListener("click", () => turn(1));

  // The token's element, after turning to its slice; null if no slice has it.
  function reveal(t) {
    if (!spans.has(t)) {
      const place = slices.findIndex(rows => rows.some(row => row.some(piece => piece && piece.first <= t && t < piece.end)));
      if (place < 0) return null;
      at = place;
      render();
    }
    const span = spans.get(t), box = span.getBoundingClientRect(), around = ui.texts.getBoundingClientRect();
    if (box.top < around.top || box.bottom > around.bottom) ui.texts.scrollTop += box.top - around.top - ui.texts.clientHeight / 2;
    return span;
  }
  // Shown tokens in the order in which they are read.
  function* reading(backwards) {
    const turned = items => (backwards ? [...items].reverse() : items);
    for (const rows of turned(slices)) {
      for (const row of turned(rows)) {
        for (const piece of turned(row.filter(Boolean))) {
          const [from, to, by] = backwards ? [piece.end - 1, piece.first - 1, -1] : [piece.first, piece.end, 1];
          for (let t = from; t !== to; t += by) if (shown(t)) yield t;
        }
      }
    }
  }
  return {
    list, turn, reveal, reading, spans,
    restart() { at = 0; },
    drawStrips,
  };
}

// The samples of each prompt that two runs have, one of A beside one of B.
function samplesSideBySide(order) {
  const prompts = new Map();
  for (const response of order) {
    if (!prompts.has(response.prompt)) prompts.set(response.prompt, [[], []]);
    prompts.get(response.prompt)[response.trace].push(response);
  }
  const pairs = [];
  for (const [a, b] of prompts.values()) {
    for (let n = 0; n < Math.max(a.length, b.length); n++) pairs.push([a[n] ?? null, b[n] ?? null]);
  }
  return pairs;
}
