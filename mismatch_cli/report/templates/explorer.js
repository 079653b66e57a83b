// Tokens of a run: coloured, filtered, and linked to a dot, a list, a place in the run, and a link. Python decided what a
// mask blocks and counted it over whole traces: no formula is repeated here.
(() => {
  "use strict";
  const section = document.getElementById("explorer"), source = document.getElementById("explorer-data");
  if (!section || !source || !("DecompressionStream" in window)) return;
  const ui = Object.fromEntries([...section.querySelectorAll("[data-x]")].map(each => [each.dataset.x, each]));
  const CHOICES = ["colour", "list", "sort", "show", "sign", "reward", "step", "trace", "y"];

  function start({ head, column }) {
    const tokens = readTokens({ head, column }), { responses, total, whose } = tokens;
    const masks = explorerMasks(ui, head, tokens, () => refresh());
    const modes = colourModes(head, tokens, masks);
    const theme = themeColours(section);
    const pooled = head.traces.length > 1;
    const wholeTraces = responses.every(response => response.tokens === response.length);
    let here = null;

    // ---- Filters ----
    const SHOW = {
      "": ["all tokens", () => true],
      a: ["blocked by A", t => masks.blocks("a", t)],
      b: ["blocked by B", t => masks.blocks("b", t)],
      ab: ["blocked by both", t => masks.blocks("a", t) && masks.blocks("b", t)],
      "a-b": ["blocked by A, not by B", t => masks.blocks("a", t) && !masks.blocks("b", t)],
      "b-a": ["blocked by B, not by A", t => masks.blocks("b", t) && !masks.blocks("a", t)],
    };
    const chosen = name => ui[name].value;
    const chosenList = () => tokens.lists.find(({ name }) => name === chosen("list"));
    const among = new Uint8Array(responses.length); // responses that pass the filters
    const visible = new Uint8Array(total); // tokens that pass every filter
    const { passageOf, passages, advantage } = tokens;
    const responseShown = response => among[response.n] === 1;
    const counted = t => among[passages[passageOf[t]].response.n] === 1
      && (sign === "" || (sign === ">" ? advantage[t] > 0 : advantage[t] < 0));
    let sign = "";
    // Reads the controls once: a filter is asked for every token.
    function filter() {
      const [reward, when, trace] = ["reward", "step", "trace"].map(chosen);
      for (const each of responses) {
        among[each.n] = (reward === "" || reward === String(each.reward)) && (when === "" || when === String(each.step))
          && (trace === "" || trace === String(each.trace));
      }
      sign = chosen("sign");
      const list = chosenList();
      const blocked = SHOW[chosen("show")][1], passes = t => counted(t) && blocked(t) && plot.holds(t);
      visible.fill(0);
      if (list) for (const t of list.tokens) visible[t] = passes(t);
      else for (let t = 0; t < total; t++) visible[t] = passes(t);
    }
    const shown = t => visible[t] === 1;

    // ---- Colours ----
    const mode = () => modes[chosen("colour")];
    const colour = (t, most) => {
      const strength = mode().strength(t);
      return strength < FAINTEST ? "" : css(theme.colours[mode().hue(t)], opacity(strength, most).toFixed(2));
    };
    function paint(t, span) {
      span.style.backgroundColor = colour(t, theme.shade);
      span.className = `${shown(t) ? "" : "dim"}${t === here ? " here" : ""}`;
    }
    function legend() {
      ui.legend.replaceChildren(...mode().legend().map(([hue, words]) => {
        const item = make("li"), box = make("i");
        box.style.backgroundColor = css(theme.colours[hue], theme.shade);
        item.append(box, words);
        return item;
      }));
    }

    // ---- Parts ----
    const stepped = responses.some(each => each.step);
    const words = response => [
      ...(pooled ? [head.traces[response.trace]] : []),
      ...(stepped ? [`step ${response.step}`] : []),
      `prompt ${response.prompt}`, `sample ${response.sample}`, ...(response.use ? [`use ${response.use + 1}`] : []),
    ].join(" · ");
    const facts = response => [
      words(response),
      ...(response.reward === null ? [] : [`reward ${number(response.reward)}`]),
      response.tokens === response.length ? `${count(response.length)} tokens` : `${count(response.tokens)} of ${count(response.length)} tokens`,
      `Σ|d|${whose} ${number(response.absolute)}`,
    ].join(" · ");
    const drawStrip = (canvas, response) => {
      const inside = here !== null && tokens.response(here) === response;
      drawResponse(sized(canvas), response, profileOf(response, tokens), theme.colours, inside ? tokens.position(here) : null);
    };
    const text = explorerText(ui, tokens, { sideBySide: Boolean(head.runs) && !head.paired, shown, paint, facts, drawStrip });
    const view = {
      get colours() { return theme.colours; },
      get mode() { return mode(); },
      shown, here: () => here, drawn: t => responseShown(tokens.response(t)),
    };
    const plot = explorerPlot(ui.plot, ui.y, tokens, view, { onToken: t => go(t), onFrame: () => { text.restart(); refresh(); } });
    const card = explorerCard(ui, head, tokens, masks);
    const run = runStrip(ui.run, tokens, theme, {
      counted: responseShown, words,
      here: () => (here === null ? null : tokens.response(here)),
      onResponse: response => go(leading(response)),
    });
    // The token of a response to arrive at: its largest shown gap, or its first one.
    function leading({ passages }) {
      let best = passages[0].first, most = -1;
      for (const { first, end } of passages) {
        for (let t = first; t < end; t++) {
          if (shown(t) && Math.abs(tokens.d[t]) > most) [best, most] = [t, Math.abs(tokens.d[t])];
        }
      }
      return best;
    }

    // ---- The order of responses ----
    const byRank = list => {
      const rank = new Map();
      for (const [n, t] of list.tokens.entries()) if (!rank.has(tokens.response(t))) rank.set(tokens.response(t), n);
      return (a, b) => rank.get(a) - rank.get(b);
    };
    const SORTS = {
      "": ["as listed", null],
      absolute: [`Σ|d|${whose}, largest first`, (a, b) => b.absolute - a.absolute],
      signed: [`Σd${whose}, lowest first`, (a, b) => a.signed - b.signed],
      length: ["length, longest first", (a, b) => b.length - a.length],
      reward: ["reward, highest first", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
    };
    function list() {
      const some = new Set();
      let size = 0;
      for (let t = 0; t < total; t++) if (visible[t]) { some.add(tokens.response(t)); size++; }
      const order = responses.filter(response => some.has(response));
      const ranked = chosenList();
      const by = SORTS[chosen("sort")][1] ?? (ranked && byRank(ranked));
      text.list(by ? order.sort(by) : order);
      const shownWords = `${count(size)} of ${count(total)} tokens in ${count(order.length)} of ${count(responses.length)} responses shown`;
      ui.said.textContent = `${shownWords}${ranked ? `: ${ranked.note}` : ""}.`;
    }

    // ---- One token ----
    function go(t) {
      const before = here;
      here = t;
      const span = text.reveal(t);
      for (const each of [before, t]) if (text.spans.has(each)) paint(each, text.spans.get(each));
      card.show(t, span);
      const [name, value] = tokenFacts(t, head, tokens, masks)[0];
      ui.spoken.textContent = `“${tokens.word(t)}”: ${name} ${value}, position ${tokens.position(t)}`;
      ui.picture.disabled = false;
      plot.draw();
      run.draw();
      text.drawStrips();
      link.changed();
    }
    function step(by) {
      let past = here === null;
      for (const t of text.reading(by < 0)) {
        if (past) return go(t);
        past = t === here;
      }
      if (!past) for (const t of text.reading(by < 0)) return go(t); // the token is not among the shown ones
    }
    const KEYS = {
      ArrowRight: () => step(1), ArrowLeft: () => step(-1),
      PageDown: () => text.turn(1), PageUp: () => text.turn(-1),
      Escape: () => card.close(),
    };
    for (const each of [ui.texts, ui.plot]) {
      each.addEventListener("keydown", event => {
        if (!(event.key in KEYS)) return;
        event.preventDefault();
        KEYS[event.key]();
      });
    }
    const tokenOf = event => event.target.closest?.("span[data-t]");
    ui.texts.addEventListener("pointerover", event => {
      const span = tokenOf(event);
      if (span) card.show(Number(span.dataset.t), span);
    });
    // Docked, the card returns to the chosen token; floating, it goes with the pointer.
    ui.texts.addEventListener("pointerleave", () => {
      if (card.docked && here !== null) card.show(here, text.spans.get(here));
      else card.close();
    });
    ui.texts.addEventListener("click", event => { const span = tokenOf(event); if (span) go(Number(span.dataset.t)); });

    // ---- Everything together ----
    function refresh() {
      const filtered = ["reward", "step", "trace"].some(name => chosen(name) !== "");
      filter();
      ui.clear.hidden = !plot.framed();
      masks.say(sign, filtered ? counted : null);
      legend();
      list();
      plot.draw();
      run.draw();
      link.changed();
    }
    const options = (name, pairs) => {
      ui[name].replaceChildren(...pairs.map(([value, label]) => new Option(label, value)));
      ui[name].closest("label").hidden = pairs.length < 2;
    };
    const each = (all, values, unit) => [["", all], ...(values.length > 1 ? values.map(value => [String(value), `${unit} ${number(value)}`]) : [])];
    const titles = entries => entries.map(([value, [label]]) => [value, label]);
    options("colour", Object.entries(modes).map(([value, { title }]) => [value, title]));
    options("list", [["", wholeTraces ? "every token" : "all on this page"], ...tokens.lists.map(({ name, title }) => [name, title])]);
    options("sort", titles(Object.entries(SORTS)));
    options("show", head.algorithms.length ? titles(Object.entries(SHOW)) : [["", ""]]);
    options("sign", tokens.advantage ? [["", "any"], [">", "A > 0"], ["<", "A < 0"]] : [["", ""]]);
    options("reward", each("any", distinct(responses.map(({ reward }) => reward).filter(reward => reward !== null)), "reward"));
    options("step", each("all", distinct(responses.map(({ step: when }) => when)), "step"));
    options("trace", pooled ? [["", "all"], ...head.traces.map((name, n) => [String(n), name])] : [["", ""]]);
    options("y", axesOf(tokens).map(([value, { title }]) => [value, value === "change" ? title : `${title}${whose}`]));
    ui.colour.value = head.colour in modes ? head.colour : "d";

    const select = name => ({ written: () => chosen(name), read(value) { ui[name].value = value; if (ui[name].selectedIndex < 0) ui[name].selectedIndex = 0; } });
    const mask = side => ({ written: () => masks.written(side), read: value => masks.read(side, value) });
    const link = explorerLink({
      ...Object.fromEntries(CHOICES.map(name => [name, select(name)])),
      a: mask("a"), b: mask("b"),
      frame: { written: plot.written, read: value => { plot.clear(); plot.read(value); } },
      token: { written: () => (here === null ? "" : keyOf(tokens, here)), read: value => { here = value ? tokenAt(tokens, value) : null; } },
    });
    function arrive() {
      if (!link.read()) return;
      section.scrollIntoView();
      refresh();
      if (here !== null) go(here);
    }
    for (const name of CHOICES) {
      ui[name].addEventListener("change", () => { if (name === "y") plot.clear(); text.restart(); refresh(); });
    }
    ui.clear.addEventListener("click", () => { plot.clear(); text.restart(); refresh(); });
    const answer = said => { ui.done.textContent = said; };
    ui.link.addEventListener("click", async () => {
      answer(await copyText(link.address()) ? "Link to this view copied." : "Copy the address of this page: it is the link.");
    });
    ui.picture.addEventListener("click", async () => {
      const picture = tokenPicture(here, head, tokens, masks, { ...theme, colour });
      answer(await savePicture(picture, `token-${keyOf(tokens, here)}.png`));
    });
    addEventListener("hashchange", arrive);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { Object.assign(theme, themeColours(section)); refresh(); text.drawStrips(); });

    ui.whose.textContent = whose;
    section.hidden = false;
    for (const anchor of document.querySelectorAll('a[href="#explorer"]')) anchor.hidden = false;
    refresh();
    arrive();
    section.dataset.ready = "1";
  }
  unpack(source.textContent).then(start);
})();
