// Every token of the first responses: coloured, filtered, and linked to a dot. What a mask blocks was decided in Python
// for each position of its slider: here a token's level is compared with that position, and no formula stands twice.
(() => {
  "use strict";
  const section = document.getElementById("explorer"), source = document.getElementById("explorer-data");
  if (!section || !source || !("DecompressionStream" in window)) return;
  const ui = Object.fromEntries([...section.querySelectorAll("[data-x]")].map(each => [each.dataset.x, each]));
  const make = (tag, name = "", text = "") => {
    const element = document.createElement(tag);
    if (name) element.className = name;
    element.textContent = text;
    return element;
  };
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

  // ---- The data: a head in JSON, then columns ----
  const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };
  function halves(buffer, start, count) {
    const bits = new Uint16Array(buffer, start, count), values = new Float32Array(count);
    for (let n = 0; n < count; n++) {
      const sign = bits[n] & 0x8000 ? -1 : 1, exponent = (bits[n] >> 10) & 31, fraction = bits[n] & 1023;
      values[n] = exponent === 0 ? sign * fraction * 2 ** -24
        : exponent === 31 ? (fraction ? NaN : sign * Infinity)
        : sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
    }
    return values;
  }
  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text.trim()), letter => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const buffer = await new Response(stream).arrayBuffer();
    const length = new DataView(buffer).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    const column = name => {
      if (!(name in head.columns)) return null;
      const [type, start, count] = head.columns[name];
      return type === "f2" ? halves(buffer, 4 + length + start, count) : new ARRAYS[type](buffer, 4 + length + start, count);
    };
    return { head, column };
  }

  // ---- Numbers as the report writes them ----
  function number(value, digits = 3) {
    if (value === null || Number.isNaN(value)) return "—";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    const size = Math.abs(value);
    const text = size !== 0 && (size < 1e-4 || size >= 1e6) ? value.toExponential(digits - 1)
      : value.toFixed(size === 0 ? 0 : Math.max(0, digits - 1 - Math.floor(Math.log10(size))));
    return text.replace("e+", "e").replaceAll("-", "−");
  }
  const percent = share => `${number(100 * share)} %`;

  function start({ head, column }) {
    const text = column("text"), logq = column("logq"), d = column("d"), total = text.length;
    const entropy = column("entropy"), advantage = column("advantage");
    const mu = logq.map(Math.exp), ratio = d.map(Math.exp), dp = mu.map((value, t) => value * Math.expm1(d[t]));
    const responses = head.responses.map(([step, prompt, sample, reward, length, tokens, words]) => (
      { step, prompt, sample, reward, length, tokens, words }));
    const owner = new Uint32Array(total);
    let first = 0;
    for (const [n, response] of responses.entries()) {
      response.first = first;
      owner.fill(n, first, first += response.tokens);
      response.end = first;
      response.signed = 0, response.absolute = 0;
      for (let t = response.first; t < response.end; t++) {
        if (Number.isNaN(d[t])) continue;
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
      ab: ["by both", t => blocks(masks.a, t) && blocks(masks.b, t)],
      "a-b": ["by A and not by B", t => blocks(masks.a, t) && !blocks(masks.b, t)],
      "b-a": ["by B and not by A", t => blocks(masks.b, t) && !blocks(masks.a, t)],
    };
    let frame = null; // in the units of the plot
    const inFrame = t => frame === null || (xOf(t) >= frame.x[0] && xOf(t) <= frame.x[1] && yOf(t) >= frame.y[0] && yOf(t) <= frame.y[1]);
    const responseShown = response => (ui.reward.value === "" || String(response.reward) === ui.reward.value)
      && (ui.step.value === "" || String(response.step) === ui.step.value);
    const signShown = t => ui.sign.value === "" || (ui.sign.value === ">" ? advantage[t] > 0 : advantage[t] < 0);
    const counted = t => responseShown(responses[owner[t]]) && signShown(t);
    const shown = t => counted(t) && SHOW[ui.show.value][1](t) && inFrame(t);

    // ---- Colours ----
    const colours = {};
    function readColours() {
      const style = getComputedStyle(section);
      for (const name of ["up", "down", "both", "ink", "muted", "line", "page"]) colours[name] = rgb(style.getPropertyValue(`--${name}`));
    }
    const rgb = hex => { // `#0b63b5`, as the theme has them
      const digits = hex.trim().slice(1), wide = digits.length === 3 ? [...digits].map(each => each + each).join("") : digits;
      return [0, 2, 4].map(place => parseInt(wide.slice(place, place + 2), 16)).join(" ");
    };
    function largest(values) { // that colours reach: a few tokens beyond are as dark
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
        title: "blocked by A, by B",
        strength: t => blocks(masks.a, t) || blocks(masks.b, t) ? 1 : 0,
        hue: t => blocks(masks.a, t) ? (blocks(masks.b, t) ? "both" : "down") : "up",
        legend: () => [["down", "by A alone"], ["up", "by B alone"], ["both", "by both"]],
      },
      d: scaled(d, head.gap, "π below μ", "π above μ"),
      dp: scaled(dp, "π − μ", "π below μ", "π above μ"),
      ratio: scaled(d, "ratio π/μ, by its logarithm", "below 1", "above 1"),
      ...(entropy && { entropy: scaled(entropy, "entropy of π", "", "uncertain") }),
      ...(advantage && { advantage: scaled(advantage, "advantage", "A < 0", "A > 0") }),
    };
    if (!head.algorithms.length) delete MODES.blocked;
    const colour = t => {
      const mode = MODES[ui.colour.value], strength = mode.strength(t);
      return strength < 0.04 ? "" : `rgb(${colours[mode.hue(t)]} / ${(0.1 + 0.65 * strength).toFixed(2)})`;
    };

    // ---- The text: responses are filled when they come near ----
    const spans = new Map();
    const byElement = new Map();
    const articles = responses.map((response, n) => {
      const article = make("article");
      const told = [`prompt ${response.prompt}`, `sample ${response.sample}`];
      if (responses.some(each => each.step)) told.unshift(`step ${response.step}`);
      if (response.reward !== null) told.push(`reward ${number(response.reward)}`);
      told.push(`${response.length} tokens${response.tokens < response.length ? `, the first ${response.tokens} here` : ""}`);
      told.push(`Σ|d| ${number(response.absolute)}`);
      article.append(make("h3", "", told.join(" · ")));
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
      span.style.backgroundColor = colour(t);
      span.classList.toggle("dim", !shown(t));
    }
    const SORTS = {
      "": ["order of the trace", (a, b) => a - b],
      absolute: ["Σ|d|, largest first", (a, b) => responses[b].absolute - responses[a].absolute],
      signed: ["Σd, lowest first", (a, b) => responses[a].signed - responses[b].signed],
      length: ["length, longest first", (a, b) => responses[b].length - responses[a].length],
      reward: ["reward, highest first", (a, b) => (responses[b].reward ?? -Infinity) - (responses[a].reward ?? -Infinity)],
    };
    function list() {
      const some = new Uint8Array(responses.length);
      for (let t = 0; t < total; t++) if (!some[owner[t]] && shown(t)) some[owner[t]] = 1;
      const order = responses.map((_, n) => n).filter(n => some[n]).sort(SORTS[ui.sort.value][1]);
      ui.texts.replaceChildren(...order.map(n => articles[n]));
      if (!order.length) ui.texts.append(make("p", "none", "No token is left: show more above."));
      const tokens = Array.from({ length: total }, (_, t) => t).filter(shown).length;
      ui.said.textContent = `${tokens.toLocaleString("en")} of ${total.toLocaleString("en")} tokens in ${order.length} of ${responses.length} responses are shown.`;
    }

    // ---- The plot: μ from 0 to 1, stretched towards both ends; what is far from agreement pressed together ----
    const AXES = {
      ratio: {
        title: "ratio π/μ", at: t => Math.asinh(d[t] / 0.1),
        ticks: [0.01, 0.1, 0.3, 0.6, 0.8, 0.9, 1, 1.1, 1.25, 1.6, 3, 10, 100].map(value => [value, Math.asinh(Math.log(value) / 0.1)]),
      },
      dp: {
        title: "π − μ", at: t => Math.asinh(dp[t] / 0.02),
        ticks: [-0.8, -0.4, -0.2, -0.1, -0.05, -0.02, 0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8].map(value => [value, Math.asinh(value / 0.02)]),
      },
    };
    const TICKS = [1e-6, 1e-5, 1e-4, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999];
    const plot = { left: 46, right: 8, top: 8, bottom: 34 };
    const logit = value => Math.log(value / (1 - value));
    const x = logq.map(value => value - Math.log(-Math.expm1(value)));
    const xOf = t => x[t];
    const yOf = t => AXES[ui.y.value].at(t);
    let view = null;
    function limits() {
      let [low, most] = [logit(0.01), 1];
      for (let t = 0; t < total; t++) {
        if (Number.isFinite(x[t])) low = Math.min(low, x[t]);
        if (Number.isFinite(yOf(t))) most = Math.max(most, Math.abs(yOf(t)));
      }
      return { x: [Math.max(low, logit(1e-6)) - 0.3, logit(0.99995)], y: [-1.06 * most, 1.06 * most] };
    }
    const toX = value => plot.left + (clamp(value, ...view.x) - view.x[0]) / (view.x[1] - view.x[0]) * view.width;
    const toY = value => plot.top + (view.y[1] - clamp(value, ...view.y)) / (view.y[1] - view.y[0]) * view.height;
    const fromX = x => view.x[0] + (x - plot.left) / view.width * (view.x[1] - view.x[0]);
    const fromY = y => view.y[1] - (y - plot.top) / view.height * (view.y[1] - view.y[0]);
    function draw() {
      const canvas = ui.plot, scale = devicePixelRatio || 1, { clientWidth: width, clientHeight: height } = canvas;
      if (!width) return;
      [canvas.width, canvas.height] = [width * scale, height * scale];
      view = { ...limits(), width: width - plot.left - plot.right, height: height - plot.top - plot.bottom };
      const pen = canvas.getContext("2d");
      pen.scale(scale, scale);
      axes(pen, width, height);
      const dots = [[], []]; // those that are shown lie above
      for (let t = 0; t < total; t++) if (!Number.isNaN(yOf(t)) && responseShown(responses[owner[t]])) dots[shown(t) ? 1 : 0].push(t);
      for (const [kind, tokens] of dots.entries()) {
        for (const t of tokens) {
          const painted = kind && colour(t), size = painted ? 3 : 2;
          pen.fillStyle = kind ? painted || `rgb(${colours.muted} / .45)` : `rgb(${colours.muted} / .13)`;
          pen.fillRect(toX(xOf(t)) - size / 2, toY(yOf(t)) - size / 2, size, size);
        }
      }
      if (here !== null && !Number.isNaN(yOf(here))) {
        pen.strokeStyle = `rgb(${colours.ink})`;
        pen.lineWidth = 2;
        pen.beginPath();
        pen.arc(toX(xOf(here)), toY(yOf(here)), 6, 0, 7);
        pen.stroke();
      }
      if (frame) {
        pen.strokeStyle = `rgb(${colours.ink})`;
        pen.lineWidth = 1;
        pen.strokeRect(toX(frame.x[0]), toY(frame.y[1]), toX(frame.x[1]) - toX(frame.x[0]), toY(frame.y[0]) - toY(frame.y[1]));
      }
    }
    function axes(pen, width, height) {
      pen.font = "11px system-ui, sans-serif";
      pen.lineWidth = 1;
      pen.fillStyle = `rgb(${colours.muted})`;
      pen.strokeStyle = `rgb(${colours.line})`;
      pen.textAlign = "center";
      let last = -Infinity;
      for (const value of TICKS.filter(tick => logit(tick) > view.x[0])) {
        const across = toX(logit(value));
        stroke(pen, across, plot.top, across, height - plot.bottom);
        if (across - last < 34) continue;
        last = across;
        pen.fillText(value < 1e-3 ? number(value, 1) : String(value), across, height - plot.bottom + 13);
      }
      pen.fillText("rollout probability μ", plot.left + view.width / 2, height - 5);
      pen.textAlign = "right";
      for (const [value, at] of AXES[ui.y.value].ticks.filter(([, up]) => Math.abs(up) < view.y[1])) {
        stroke(pen, plot.left, toY(at), width - plot.right, toY(at));
        pen.fillText(String(value).replace("-", "−"), plot.left - 5, toY(at) + 4);
      }
    }
    function stroke(pen, x0, y0, x1, y1) {
      pen.beginPath();
      pen.moveTo(x0, y0);
      pen.lineTo(x1, y1);
      pen.stroke();
    }
    function nearest(x, y) {
      let best = null, least = 12 ** 2;
      for (let t = 0; t < total; t++) {
        if (Number.isNaN(yOf(t)) || !shown(t)) continue;
        const away = (toX(xOf(t)) - x) ** 2 + (toY(yOf(t)) - y) ** 2;
        if (away < least) [best, least] = [t, away];
      }
      return best;
    }
    let pressed = null;
    const place = event => {
      const box = ui.plot.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    ui.plot.addEventListener("pointerdown", event => { pressed = place(event); });
    ui.plot.addEventListener("pointermove", event => {
      if (!pressed || event.pointerType === "touch") return;
      const [x, y] = place(event);
      if (Math.hypot(x - pressed[0], y - pressed[1]) < 4) return;
      const between = (from, a, b) => [from(a), from(b)].sort((one, other) => one - other);
      frame = { x: between(fromX, pressed[0], x), y: between(fromY, pressed[1], y) };
      draw();
    });
    addEventListener("pointerup", event => {
      if (!pressed) return;
      const [x, y] = place(event), moved = Math.hypot(x - pressed[0], y - pressed[1]) >= 4;
      pressed = null;
      if (moved && frame) return refresh();
      const token = nearest(x, y);
      if (token !== null) go(token);
    });
    ui.clear.addEventListener("click", () => { frame = null; refresh(); });

    // ---- One token ----
    let here = null;
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
      draw();
      card(t, span);
    }
    function step(by) {
      let t = here === null ? (by > 0 ? -1 : total) : here;
      do t += by; while (t >= 0 && t < total && !shown(t));
      if (t >= 0 && t < total) go(t);
    }
    ui.texts.addEventListener("keydown", event => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") ui.card.hidden = true;
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
      for (const side of ["a", "b"]) if (masks[side].level) row(side.toUpperCase(), judgement(masks[side], t));
      row("position", `${t - response.first} of ${response.length}${response.reward === null ? "" : `, reward ${number(response.reward)}`}`);
      ui.card.replaceChildren(make("h4", "", `“${head.texts[text[t]]}”`), list);
      if (ranksOf.has(t)) ui.card.append(rankTable(ranksOf.get(t)));
      ui.card.hidden = false;
      const box = span.getBoundingClientRect(), own = ui.card.getBoundingClientRect();
      ui.card.style.left = `${clamp(box.left, 8, innerWidth - own.width - 8)}px`;
      ui.card.style.top = `${box.bottom + own.height + 12 < innerHeight ? box.bottom + 6 : Math.max(6, box.top - own.height - 6)}px`;
    }
    function judgement(mask, t) {
      if (mask.level[t] === head.notJudged) return "not judged: no advantage";
      const kept = mask.thresholds[mask.level[t]], word = blocks(mask, t) ? "blocked" : "kept";
      if (mask.thresholds.length < 2) return `${word} by ${mask.name}`;
      if (mask.level[t] === 0) return `${word} by ${mask.name}, at any threshold here`;
      return kept ? `${word} by ${mask.name}; kept from ${kept} on` : `${word} by ${mask.name} at every threshold here`;
    }
    function rankTable(row) {
      const table = make("table"), headings = table.createTHead().insertRow(), body = table.createTBody();
      for (const name of ["engine’s first", "μ", "π"]) headings.append(make("th", "", name));
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
    ui.texts.addEventListener("pointerleave", () => { ui.card.hidden = true; });
    ui.texts.addEventListener("scroll", () => { if (here === null) ui.card.hidden = true; });
    ui.texts.addEventListener("click", event => { const span = token(event); if (span) go(Number(span.dataset.t)); });
    addEventListener("scroll", () => { ui.card.hidden = true; }, { passive: true });

    // ---- All together ----
    function share(side) {
      const mask = masks[side], out = ui[`share-${side}`];
      ui[`at-${side}`].textContent = mask.level ? mask.thresholds[mask.at] : "";
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
        box.style.backgroundColor = `rgb(${colours[hue]} / .75)`;
        item.append(box, words);
        return item;
      }));
    }
    function refresh() {
      ui.clear.hidden = frame === null;
      for (const side of ["a", "b"]) share(side);
      for (const [t, span] of spans) paint(t, span);
      legend();
      list();
      draw();
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
    for (const name of ["colour", "sort", "show", "sign", "reward", "step", "y"]) {
      ui[name].addEventListener("change", () => { if (name === "y") frame = null; refresh(); });
    }
    section.hidden = false;
    document.querySelector('nav a[href="#explorer"]').hidden = false;
    readColours();
    refresh();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); refresh(); });
    new ResizeObserver(draw).observe(ui.plot);
    const named = /^#token-(\d+)$/.exec(location.hash);
    if (named && Number(named[1]) < total) { section.scrollIntoView(); go(Number(named[1])); }
    section.dataset.ready = "1";
  }
  unpack(source.textContent).then(start);
})();
