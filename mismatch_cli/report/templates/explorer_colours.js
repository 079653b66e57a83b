// How a token is coloured: by a measured value, or by what A and B block.
"use strict";
const FAINTEST = 0.04; // of the full strength; below it a token has no colour
const IN_FULL = 0.99; // of the values; those above share the full colour

function largest(values) {
  const sizes = values.filter(Number.isFinite).map(Math.abs).sort();
  return sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(IN_FULL * sizes.length))] || 1 : 1;
}

function scaled(values, title, low, high) {
  const most = largest(values);
  const part = t => (Number.isNaN(values[t]) ? 0 : clamp(values[t] / most, -1, 1));
  return {
    title,
    strength: t => Math.sqrt(Math.abs(part(t))),
    hue: t => (part(t) < 0 ? "down" : "up"),
    legend: () => [["down", low && `${low} (to ${number(-most, 2)})`], ["up", `${high} (to ${number(most, 2)})`]]
      .filter(([, words]) => words),
  };
}

function colourModes(head, tokens, masks) {
  const { d, dB, dp, change, entropy, advantage, whose } = tokens, [, nameB] = head.runs ?? [];
  const blocked = {
    title: "blocked by A, B",
    strength: t => (masks.blocks("a", t) || masks.blocks("b", t) ? 1 : 0),
    hue: t => (masks.blocks("a", t) ? (masks.blocks("b", t) ? "both" : "down") : "up"),
    legend: () => [["down", "only by A"], ["up", "only by B"], ["both", "by both"]],
  };
  return {
    ...(head.algorithms.length && { blocked }),
    ...(change && { change: scaled(change, `change of ${head.gap}`, `lower in ${nameB}`, `higher in ${nameB}`) }),
    d: scaled(d, `${head.gap}${whose}`, "π below μ", "π above μ"),
    ...(dB && { d_b: scaled(dB, `${head.gap} in ${nameB}`, "π below μ", "π above μ") }),
    dp: scaled(dp, `π − μ${whose}`, "π below μ", "π above μ"),
    ratio: scaled(d, `ratio π/μ${whose}, log scale`, "below 1", "above 1"),
    ...(entropy && { entropy: scaled(entropy, `entropy of π${whose}`, "", "high entropy") }),
    ...(advantage && { advantage: scaled(advantage, "advantage", "A < 0", "A > 0") }),
  };
}

// The page's colours in this theme: [red, green, blue] by name, and the darkest background on which letters stay legible.
function themeColours(section) {
  const style = getComputedStyle(section), colours = {};
  for (const name of ["up", "down", "both", "ink", "muted", "line", "page"]) colours[name] = channels(style.getPropertyValue(`--${name}`));
  return { colours, shade: Number(style.getPropertyValue("--shade")) };
}
function channels(hex) { // of `#0b63b5`, as in the theme
  const digits = hex.trim().slice(1), wide = digits.length === 3 ? [...digits].map(each => each + each).join("") : digits;
  return [0, 2, 4].map(place => parseInt(wide.slice(place, place + 2), 16));
}
const css = ([red, green, blue], alpha = 1) => `rgb(${red} ${green} ${blue} / ${alpha})`;
// The opacity of a colour between the faintest and the strongest that may be drawn
const opacity = (strength, most) => 0.1 + (most - 0.1) * strength;
