// A and B: an algorithm each, with the position of its slider. Python decided at every position what is blocked; a
// token's level is the number of positions that block it, so this script only compares two integers.
"use strict";
const NO_MASK = { level: null, at: 0 };

const blocks = (mask, t, notJudged) => mask.level !== null && mask.level[t] !== notJudged && mask.level[t] > mask.at;

function explorerMasks(ui, head, tokens, onChange) {
  const masks = { a: NO_MASK, b: NO_MASK };

  function choose(side, place, at) {
    const algorithm = head.algorithms[place];
    masks[side] = algorithm
      ? { ...algorithm, place, level: tokens.level(place), at: clamp(at ?? algorithm.published, 0, algorithm.thresholds.length - 1) }
      : NO_MASK;
    const slide = ui[`slide-${side}`];
    slide.max = algorithm ? algorithm.thresholds.length - 1 : 0;
    slide.value = masks[side].at;
    ui[side].value = place;
    slide.closest(".x-mask").classList.toggle("fixed", !algorithm || algorithm.thresholds.length < 2);
  }

  // Judged and blocked tokens: of whole traces as Python counted them, or of those on the page that pass a filter.
  function counts(mask, sign, counted) {
    if (counted) {
      let [judged, blocked] = [0, 0];
      for (let t = 0; t < tokens.total; t++) {
        if (mask.level[t] === head.notJudged || !counted(t)) continue;
        judged++;
        if (mask.level[t] > mask.at) blocked++;
      }
      return { judged, blocked };
    }
    const signs = { "": [0, 1], ">": [0], "<": [1] }[sign];
    const sum = value => signs.map(value).reduce((a, b) => a + b, 0);
    return { judged: sum(n => mask.judged[n]), blocked: sum(n => mask.blocked[n][mask.at]) };
  }

  // `counted` is null where the answer is about whole traces.
  function say(sign, counted) {
    for (const side of ["a", "b"]) {
      const mask = masks[side], out = ui[`share-${side}`];
      const threshold = mask.level ? [mask.thresholds[mask.at], mask.unmoved].filter(Boolean).join(" · ") : "";
      ui[`at-${side}`].textContent = threshold;
      ui[`slide-${side}`].setAttribute("aria-valuetext", threshold); // its value is only a position
      if (!mask.level) { out.textContent = ""; continue; }
      const { judged, blocked } = counts(mask, sign, counted);
      Object.assign(out.dataset, { judged, blocked });
      const whose = counted ? "tokens here" : "tokens";
      out.textContent = judged ? `blocks ${percent(blocked / judged)}: ${count(blocked)} of ${count(judged)} ${whose}`
        : `judges none of these ${whose}`;
    }
  }

  function judgement(mask, t) {
    const level = mask.level[t], positions = mask.thresholds.length;
    if (level === head.notJudged) return tokens.advantage?.[t] === 0 ? "not judged: A = 0" : "not judged";
    const word = blocks(mask, t, head.notJudged) ? "blocked" : "kept";
    if (positions < 2) return word;
    if (level === 0 || level === positions) return `${word} at every threshold`;
    return `${word}; blocked up to ${mask.thresholds[level - 1]}`;
  }

  for (const [side, place] of [["a", 0], ["b", 1]]) {
    ui[side].closest(".x-mask").hidden = head.algorithms.length <= place;
    ui[side].replaceChildren(...head.algorithms.map((algorithm, n) => new Option(algorithm.name, n)));
    choose(side, head.compared[place] ?? place);
    ui[side].addEventListener("change", () => { choose(side, Number(ui[side].value)); onChange(); });
    ui[`slide-${side}`].addEventListener("input", () => { masks[side].at = Number(ui[`slide-${side}`].value); onChange(); });
  }
  return {
    masks, choose, say, judgement,
    blocks: (side, t) => blocks(masks[side], t, head.notJudged),
    // As `grpo-clip-higher`, or `grpo-clip-higher@3`: three positions above its published threshold
    written(side) {
      const { name, at, published, level } = masks[side];
      return level ? `${name}${at === published ? "" : `@${at - published}`}` : "";
    },
    read(side, words) {
      const [name, by = "0"] = words.split("@");
      const place = head.algorithms.findIndex(algorithm => algorithm.name === name);
      if (place >= 0) choose(side, place, head.algorithms[place].published + (Number(by) || 0));
    },
  };
}
