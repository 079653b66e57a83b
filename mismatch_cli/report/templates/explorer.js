// Every token of the first responses: coloured, filtered, and linked to a dot. Python decides what a mask blocks at
// each position of its slider; this script only compares a token's level with that position: no formula is duplicated.
(() => {
  "use strict";
  const section = document.getElementById("explorer"), source = document.getElementById("explorer-data");
  if (!section || !source || !("DecompressionStream" in window)) return;
  const make = (tag, name = "", text = "") => {
    const element = document.createElement(tag);
    if (name) element.className = name;
    element.textContent = text;
    return element;
  };
  const ui = Object.fromEntries([...section.querySelectorAll("[data-x]")].map(each => [each.dataset.x, each]));

  function start({ head, column }) {
    const text = column("text"), logq = column("logq"), d = column("d"), total = text.length;
    const entropy = column("entropy"), advantage = column("advantage");
    const mu = logq.map(Math.exp), ratio = d.map(Math.exp), dp = mu.map((value, t) => value * Math.expm1(d[t]));
    const responses = head.responses.map(([step, prompt, sample, reward, length, tokens, words, trace]) => (
      { step, prompt, sample, reward: reward === null ? null : Number(reward), length, tokens, words, trace }));
    const pooled = head.traces.length > 1;
    const owner = new Uint32Array(total);
    let first = 0;
    for (const [n, response] of responses.entries()) {
      response.first = first;
      owner.fill(n, first, first += response.tokens);
      response.end = first;
      response.signed = 0, response.absolute = 0;
      for (let t = response.first; t < response.end; t++) {
        if (!Number.isFinite(d[t])) continue; // not measured, or out of support
        response.signed += d[t];
        response.absolute += Math.abs(d[t]);
      }
    }
    const ranksOf = new Map([...(column("rank_token") ?? [])].map((token, row) => [token, row]));
    const [rankText, rankLogq, rankLogp] = ["rank_text", "rank_logq", "rank_logp"].map(column);

    // ---- Masks ----
    const NONE = { level: null, at: 0 };
    const masks = { a: NONE, b: NONE };
    const blocks = (mask, t) => mask.level !== null && mask.level[t] !== head.notJudged && mask.level[t] > mask.at;
    function choose(side, place) {
      const algorithm = head.algorithms[place];
      masks[side] = algorithm ? { ...algorithm, level: column(`level${place}`), at: algorithm.published } : NONE;
      const slide = ui[`slide-${side}`];
      slide.max = algorithm ? algorithm.thresholds.length - 1 : 0;
      slide.value = masks[side].at;
      slide.closest(".x-mask").classList.toggle("fixed", !algorithm || algorithm.thresholds.length < 2);
    }

    // ---- Filters ----
    const SHOW = {
      "": ["all tokens", () => true],
      a: ["blocked by A", t => blocks(masks.a, t)],
      b: ["blocked by B", t => blocks(masks.b, t)],
      ab: ["blocked by both", t => blocks(masks.a, t) && blocks(masks.b, t)],
      "a-b": ["blocked by A, not by B", t => blocks(masks.a, t) && !blocks(masks.b, t)],
      "b-a": ["blocked by B, not by A", t => blocks(masks.b, t) && !blocks(masks.a, t)],
    };
    const responseShown = response => (ui.reward.value === "" || String(response.reward) === ui.reward.value)
      && (ui.step.value === "" || String(response.step) === ui.step.value)
      && (ui.trace.value === "" || String(response.trace) === ui.trace.value);
    const signShown = t => ui.sign.value === "" || (ui.sign.value === ">" ? advantage[t] > 0 : advantage[t] < 0);
    const counted = t => responseShown(responses[owner[t]]) && signShown(t);
    const shown = t => counted(t) && SHOW[ui.show.value][1](t) && plot.holds(t);

    // ---- Colours ----
    const colours = {};
    let shade = 0; // the darkest background of a token: its letters stay legible
    function readColours() {
      const style = getComputedStyle(section);
      for (const name of ["up", "down", "both", "ink", "muted", "line", "page"]) colours[name] = rgb(style.getPropertyValue(`--${name}`));
      shade = Number(style.getPropertyValue("--shade"));
    }
    const rgb = hex => { // from `#0b63b5`, as in the theme
      const digits = hex.trim().slice(1), wide = digits.length === 3 ? [...digits].map(each => each + each).join("") : digits;
      return [0, 2, 4].map(place => parseInt(wide.slice(place, place + 2), 16)).join(" ");
    };
    function largest(values) { // the value with the full colour; the top 1 % share it
      const sizes = values.filter(Number.isFinite).map(Math.abs).sort();
      return sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(0.99 * sizes.length))] || 1 : 1;
    }
    const scaled = (values, title, low, high) => {
      const most = largest(values);
      const part = t => Number.isNaN(values[t]) ? 0 : clamp(values[t] / most, -1, 1);
      return {
        title,
        strength: t => Math.sqrt(Math.abs(part(t))),
        hue: t => part(t) < 0 ? "down" : "up",
        legend: () => [["down", low && `${low} (to ${number(-most, 2)})`], ["up", `${high} (to ${number(most, 2)})`]].filter(([, words]) => words),
      };
    };
    const MODES = {
      blocked: {
        title: "blocked by A, B",
        strength: t => blocks(masks.a, t) || blocks(masks.b, t) ? 1 : 0,
        hue: t => blocks(masks.a, t) ? (blocks(masks.b, t) ? "both" : "down") : "up",
        legend: () => [["down", "only by A"], ["up", "only by B"], ["both", "by both"]],
      },
      d: scaled(d, head.gap, "π below μ", "π above μ"),
      dp: scaled(dp, "π − μ", "π below μ", "π above μ"),
      ratio: scaled(d, "ratio π/μ, log scale", "below 1", "above 1"),
      ...(entropy && { entropy: scaled(entropy, "entropy of π", "", "high entropy") }),
      ...(advantage && { advantage: scaled(advantage, "advantage", "A < 0", "A > 0") }),
    };
    if (!head.algorithms.length) delete MODES.blocked;
    const colour = (t, most) => {
      const mode = MODES[ui.colour.value], strength = mode.strength(t);
      return strength < 0.04 ? "" : `rgb(${colours[mode.hue(t)]} / ${(0.1 + (most - 0.1) * strength).toFixed(2)})`;
    };

    // ---- The text: responses are filled when scrolled near ----
    const spans = new Map();
    const byElement = new Map();
    const articles = responses.map((response, n) => {
      const article = make("article");
      const facts = [`prompt ${response.prompt}`, `sample ${response.sample}`];
      if (responses.some(each => each.step)) facts.unshift(`step ${response.step}`);
      if (pooled) facts.unshift(head.traces[response.trace]);
      if (response.reward !== null) facts.push(`reward ${number(response.reward)}`);
      facts.push(`${response.length} tokens${response.tokens < response.length ? `, first ${response.tokens} shown` : ""}`);
      facts.push(`Σ|d| ${number(response.absolute)}`);
      article.append(make("h3", "", facts.join(" · ")));
      if (response.words) {
        const prompt = article.appendChild(make("details"));
        prompt.append(make("summary", "", "prompt"), make("p", "", response.words));
      }
      byElement.set(article, n);
      return article;
    });
    function fill(n) {
      const article = articles[n], response = responses[n];
      if (article.lastChild.dataset?.tokens) return;
      const paragraph = make("p");
      paragraph.dataset.tokens = "1";
      for (let t = response.first; t < response.end; t++) {
        const span = make("span", "", head.texts[text[t]]);
        span.dataset.t = t;
        spans.set(t, span);
        paragraph.append(span);
        paint(t, span);
      }
      article.append(paragraph);
    }
    const near = new IntersectionObserver(entries => {
      for (const { target, isIntersecting } of entries) if (isIntersecting) fill(byElement.get(target));
    }, { root: ui.texts, rootMargin: "400px" });
    articles.forEach(article => near.observe(article));
    function paint(t, span) {
      span.style.backgroundColor = colour(t, shade);
      span.classList.toggle("dim", !shown(t));
    }
    const SORTS = {
      "": ["trace order", (a, b) => a - b],
      absolute: ["Σ|d|, largest first", (a, b) => responses[b].absolute - responses[a].absolute],
      signed: ["Σd, lowest first", (a, b) => responses[a].signed - responses[b].signed],
      length: ["length, longest first", (a, b) => responses[b].length - responses[a].length],
      reward: ["reward, highest first", (a, b) => (responses[b].reward ?? -Infinity) - (responses[a].reward ?? -Infinity)],
    };
    function list() {
      const some = new Uint8Array(responses.length);
      let count = 0;
      for (let t = 0; t < total; t++) {
        if (!shown(t)) continue;
        some[owner[t]] = 1;
        count++;
      }
      const order = responses.map((_, n) => n).filter(n => some[n]).sort(SORTS[ui.sort.value][1]);
      const now = order.length ? order.map(n => articles[n]) : [make("p", "none", "No token matches: relax the filters above.")];
      const same = now.length === ui.texts.children.length && now.every((each, n) => each === ui.texts.children[n]);
      if (!same) ui.texts.replaceChildren(...now); // replacing them scrolls to the top
      ui.said.textContent = `${count.toLocaleString("en")} of ${total.toLocaleString("en")} tokens in ${order.length} of ${responses.length} responses shown.`;
    }

    // ---- The plot ----
    let here = null;
    const tokens = {
      total, logq, ratio, dp, colours, shown, here: () => here,
      colour: t => colour(t, 0.75), drawn: t => responseShown(responses[owner[t]]),
    };
    const plot = explorerPlot(ui.plot, ui.y, tokens, { onToken: t => go(t), onFrame: () => refresh() });
    ui.clear.addEventListener("click", () => { plot.clear(); refresh(); });

    // ---- One token ----
    function go(t) {
      spans.get(here)?.classList.remove("here");
      here = t;
      const n = owner[t];
      fill(n);
      if (!articles[n].isConnected) ui.texts.prepend(articles[n]);
      const span = spans.get(t);
      span.classList.add("here");
      ui.texts.scrollTop += span.getBoundingClientRect().top - ui.texts.getBoundingClientRect().top - ui.texts.clientHeight / 2;
      history.replaceState(null, "", `#token-${t}`);
      plot.draw();
      card(t, span);
    }
    function step(by) {
      let t = here === null ? (by > 0 ? -1 : total) : here;
      do t += by; while (t >= 0 && t < total && !shown(t));
      if (t >= 0 && t < total) go(t);
    }
    ui.texts.addEventListener("keydown", event => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") close();
      if (!by) return;
      event.preventDefault();
      step(by);
    });
    ui.plot.addEventListener("keydown", event => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by) { event.preventDefault(); step(by); }
    });
    function card(t, span) {
      const response = responses[owner[t]], list = make("dl");
      const row = (name, value) => list.append(make("dt", "", name), make("dd", "", value));
      row("μ → π", `${number(mu[t])} → ${number(mu[t] + dp[t])}`);
      row("π/μ", number(ratio[t]));
      row(head.gap, number(d[t]));
      if (advantage) row("advantage", number(advantage[t]));
      if (entropy) row("entropy of π", number(entropy[t]));
      for (const side of ["a", "b"]) if (masks[side].level) row(masks[side].name, judgement(masks[side], t));
      row("position", `${t - response.first} of ${response.length}`);
      row("step", String(response.step));
      if (pooled) row("trace", head.traces[response.trace]);
      if (response.reward !== null) row("reward", number(response.reward));
      ui.card.replaceChildren(make("h4", "", `“${head.texts[text[t]]}”`), list);
      if (ranksOf.has(t)) ui.card.append(rankTable(ranksOf.get(t)));
      carded = span;
      follow();
    }
    let carded = null; // the token that the card describes
    function close() {
      carded = null;
      ui.card.hidden = true;
    }
    function follow() { // keeps the card beside its token, or hides it with the token
      if (!carded) return;
      const box = carded.getBoundingClientRect(), around = ui.texts.getBoundingClientRect();
      ui.card.hidden = box.bottom < around.top || box.top > around.bottom;
      const size = ui.card.getBoundingClientRect();
      ui.card.style.left = `${clamp(box.left, 8, Math.max(8, innerWidth - size.width - 8))}px`;
      const below = box.bottom + size.height + 12 < innerHeight;
      // On a narrow window the text, and so the token of a dot, is below the window
      const top = below ? box.bottom + 6 : box.top - size.height - 6;
      ui.card.style.top = `${clamp(top, 6, Math.max(6, innerHeight - size.height - 6))}px`;
    }
    function judgement(mask, t) {
      if (mask.level[t] === head.notJudged) return advantage?.[t] === 0 ? "not judged: A = 0" : "not judged";
      const level = mask.level[t], positions = mask.thresholds.length, word = blocks(mask, t) ? "blocked" : "kept";
      if (positions < 2) return word;
      if (level === 0 || level === positions) return `${word} at every threshold`;
      return `${word}; blocked up to ${mask.thresholds[level - 1]}`;
    }
    function rankTable(row) {
      const table = make("table"), headings = table.createTHead().insertRow(), body = table.createTBody();
      for (const name of ["engine’s top K", "μ", "π"]) headings.append(make("th", "", name));
      for (let k = 0; k < head.ranks; k++) {
        const at = row * head.ranks + k;
        if (!Number.isFinite(rankLogq[at])) continue;
        const line = body.insertRow();
        for (const value of [head.texts[rankText[at]], number(Math.exp(rankLogq[at])), number(Math.exp(rankLogp[at]))]) line.insertCell().textContent = value;
      }
      return table;
    }
    const token = event => event.target.closest?.("span[data-t]");
    ui.texts.addEventListener("pointerover", event => { const span = token(event); if (span) card(Number(span.dataset.t), span); });
    ui.texts.addEventListener("pointerleave", close);
    ui.texts.addEventListener("click", event => { const span = token(event); if (span) go(Number(span.dataset.t)); });
    addEventListener("scroll", follow, { passive: true, capture: true });

    // ---- Everything together ----
    function share(side) {
      const mask = masks[side], out = ui[`share-${side}`];
      const threshold = mask.level ? [mask.thresholds[mask.at], mask.unmoved].filter(Boolean).join(" · ") : "";
      ui[`at-${side}`].textContent = threshold;
      ui[`slide-${side}`].setAttribute("aria-valuetext", threshold); // its value is only a position
      if (!mask.level) { out.textContent = ""; return; }
      let judged = 0, blocked = 0;
      for (let t = 0; t < total; t++) {
        if (mask.level[t] === head.notJudged || !counted(t)) continue;
        judged++;
        if (mask.level[t] > mask.at) blocked++;
      }
      Object.assign(out.dataset, { judged, blocked });
      out.textContent = judged ? `blocks ${percent(blocked / judged)}: ${blocked.toLocaleString("en")} of ${judged.toLocaleString("en")} tokens` : "judges none of these tokens";
    }
    function legend() {
      ui.legend.replaceChildren(...MODES[ui.colour.value].legend().map(([hue, words]) => {
        const item = make("li"), box = make("i");
        box.style.backgroundColor = `rgb(${colours[hue]} / ${shade})`;
        item.append(box, words);
        return item;
      }));
    }
    function refresh() {
      ui.clear.hidden = !plot.framed();
      for (const side of ["a", "b"]) share(side);
      for (const [t, span] of spans) paint(t, span);
      legend();
      list();
      plot.draw();
    }
    const options = (select, pairs) => {
      select.replaceChildren(...pairs.map(([value, words]) => { const option = make("option", "", words); option.value = value; return option; }));
      select.closest("label").hidden = pairs.length < 2;
    };
    const distinct = values => [...new Set(values)].sort((a, b) => a - b);
    const each = (all, values, words) => [["", all], ...(values.length > 1 ? values.map(value => [String(value), `${words} ${number(value)}`]) : [])];
    options(ui.colour, Object.entries(MODES).map(([value, mode]) => [value, mode.title]));
    options(ui.sort, Object.entries(SORTS).map(([value, [words]]) => [value, words]));
    options(ui.show, head.algorithms.length ? Object.entries(SHOW).map(([value, [words]]) => [value, words]) : [["", ""]]);
    options(ui.sign, advantage ? [["", "any"], [">", "A > 0"], ["<", "A < 0"]] : [["", ""]]);
    options(ui.reward, each("any", distinct(responses.map(response => response.reward).filter(reward => reward !== null)), "reward"));
    options(ui.step, each("all", distinct(responses.map(response => response.step)), "step"));
    options(ui.trace, pooled ? [["", "all"], ...head.traces.map((name, n) => [String(n), name])] : [["", ""]]);
    options(ui.y, Object.entries(AXES).map(([value, axis]) => [value, axis.title]));
    for (const [side, place] of [["a", 0], ["b", 1]]) {
      options(ui[side], head.algorithms.map((algorithm, n) => [n, algorithm.name]));
      ui[side].closest(".x-mask").hidden = head.algorithms.length <= place;
      ui[side].value = head.compared[place] ?? place;
      choose(side, Number(ui[side].value));
      ui[side].addEventListener("change", () => { choose(side, Number(ui[side].value)); refresh(); });
      ui[`slide-${side}`].addEventListener("input", () => { masks[side].at = Number(ui[`slide-${side}`].value); refresh(); });
    }
    ui.colour.value = head.colour in MODES ? head.colour : "d";
    for (const name of ["colour", "sort", "show", "sign", "reward", "step", "trace", "y"]) {
      ui[name].addEventListener("change", () => { if (name === "y") plot.clear(); refresh(); });
    }
    section.hidden = false;
    document.querySelector('nav a[href="#explorer"]').hidden = false;
    readColours();
    refresh();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); refresh(); });
    const named = /^#token-(\d+)$/.exec(location.hash);
    if (named && Number(named[1]) < total) { section.scrollIntoView(); go(Number(named[1])); }
    section.dataset.ready = "1";
  }
  unpack(source.textContent).then(start);
})();
