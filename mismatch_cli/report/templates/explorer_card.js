// What is known about one token: docked beside the text on a wide window, next to the token on a narrow one.
"use strict";
const BESIDE = 6; // pixels between a token and its card

// Digits that their precision leaves of a number whose logarithm is the sum of a log-probability and a gap, at most three.
const digitsOf = (log, gap = 0) => clamp(Math.floor(-Math.log10(HALF_ERROR * Math.abs(log) + GAP_ERROR * Math.abs(gap))), 1, 3);

// What a card and a picture say: rows of a name and words, the most telling first.
function tokenFacts(t, head, tokens, masks) {
  const { logq, d, ratio, logqB, dB, change, advantage, entropy, whose } = tokens, response = tokens.response(t);
  const rows = [];
  const sides = (logs, gap) => `${number(Math.exp(logs), digitsOf(logs))} → ${number(Math.exp(logs + gap), digitsOf(logs, gap))}`;
  if (dB) {
    const [a, b] = head.runs;
    rows.push([`${a}: μ → π`, sides(logq[t], d[t])], [`${b}: μ → π`, sides(logqB[t], dB[t])]);
    rows.push([head.gap, `${number(d[t])} → ${number(dB[t])}`], ["change", number(change[t])]);
  } else {
    rows.push(["μ → π", sides(logq[t], d[t])]);
    rows.push(["π/μ", number(ratio[t], digitsOf(0, d[t]))], [head.gap, number(d[t])]);
  }
  for (const side of ["a", "b"]) {
    const mask = masks.masks[side];
    if (mask.level) rows.push([mask.name, masks.judgement(mask, t)]);
  }
  if (advantage) rows.push(["advantage", number(advantage[t])]);
  if (entropy) rows.push([`entropy of π${whose}`, number(entropy[t], 2)]);
  rows.push(["position", `${count(tokens.position(t))} of ${count(response.length)}`], ["step", String(response.step)]);
  if (head.traces.length > 1) rows.push(["trace", head.traces[response.trace]]);
  if (response.reward !== null) rows.push(["reward", number(response.reward)]);
  return rows;
}

function explorerCard(ui, head, tokens, masks) {
  const docked = matchMedia("(min-width: 1100px)");
  let anchor = null; // the element of the token that the card describes

  function show(t, span) {
    const list = make("dl");
    for (const [name, words] of tokenFacts(t, head, tokens, masks)) list.append(make("dt", {}, name), make("dd", {}, words));
    ui.card.replaceChildren(make("h4", {}, `“${tokens.word(t)}”`), list);
    if (tokens.ranksOf.has(t)) ui.card.append(rankTable(tokens.ranksOf.get(t)));
    ui.card.append(make("p", { class: "small" }, `log μ is shown to ± ${percent(HALF_ERROR)}, its gap to ± ${percent(GAP_ERROR)}${head.algorithms.length ? "; masks judged the recorded ones" : ""}.`));
    anchor = span;
    ui.card.hidden = !span && !docked.matches;
    follow();
  }
  function rankTable(row) {
    const table = make("table"), headings = table.createTHead().insertRow(), body = table.createTBody();
    const { dB, ranks: { text, logq, logp } } = tokens;
    for (const name of [dB ? `top K, ${head.runs[0]}` : "engine’s top K", "μ", "π"]) headings.append(make("th", {}, name));
    for (let k = 0; k < head.ranks; k++) {
      const at = row * head.ranks + k;
      if (!Number.isFinite(logq[at])) continue;
      const line = body.insertRow(), probability = log => number(Math.exp(log), digitsOf(log));
      for (const words of [head.texts[text[at]], probability(logq[at]), probability(logp[at])]) line.insertCell().textContent = words;
    }
    return table;
  }
  function close() {
    anchor = null;
    ui.card.hidden = !docked.matches;
    ui.card.replaceChildren(make("p", { class: "small" }, "Point at a token, or step through them with ← and →."));
    follow();
  }
  // Keeps a floating card beside its token and within the window, or hides it with the token.
  function follow() {
    if (docked.matches || !anchor) { ui.card.removeAttribute("style"); return; }
    const box = anchor.getBoundingClientRect(), around = ui.texts.getBoundingClientRect();
    ui.card.hidden = !anchor.isConnected || box.bottom < around.top || box.top > around.bottom;
    const size = ui.card.getBoundingClientRect();
    const below = box.bottom + size.height + 2 * BESIDE < innerHeight;
    const top = below ? box.bottom + BESIDE : box.top - size.height - BESIDE;
    ui.card.style.left = `${clamp(box.left, 8, Math.max(8, innerWidth - size.width - 8))}px`;
    ui.card.style.top = `${clamp(top, BESIDE, Math.max(BESIDE, innerHeight - size.height - BESIDE))}px`;
  }
  addEventListener("scroll", follow, { passive: true, capture: true });
  docked.addEventListener("change", close);
  close();
  return { show, close, get docked() { return docked.matches; } };
}
