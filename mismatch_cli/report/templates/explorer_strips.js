// Two strips: where in a response, and where in the run, one is.
"use strict";
const LEAST_BAR = 0.06; // of the height, so that small values are visible

function sized(canvas) {
  const scale = devicePixelRatio || 1, { clientWidth: width, clientHeight: height } = canvas;
  [canvas.width, canvas.height] = [width * scale, height * scale];
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return { pen, width, height };
}

// Bars of the largest |d| along a response; parts that are on the page have a ground, and a line marks a position.
function drawResponse({ pen, width, height }, response, profile, colours, position) {
  const across = token => token / response.length * width;
  pen.fillStyle = css(colours.line, 0.7);
  for (const { start, first, end } of response.passages) pen.fillRect(across(start), 0, Math.max(1, across(end - first)), height);
  const most = Math.max(response.largest, 1e-9);
  pen.fillStyle = css(colours.up, 0.9);
  profile.forEach((size, part) => {
    if (Number.isNaN(size)) return;
    const tall = height * clamp(Math.sqrt(size / most), LEAST_BAR, 1), left = part / profile.length * width;
    pen.fillRect(left, height - tall, Math.max(1, width / profile.length - 0.5), tall);
  });
  if (position !== null) {
    pen.fillStyle = css(colours.ink);
    pen.fillRect(clamp(across(position + 0.5) - 1, 0, width - 2), 0, 2, height);
  }
}

// A bar for each response of the run, by its mean |d|: solid if it is whole on the page, lighter if in windows, pale if it
// has no token there. A click, or ← and →, goes to a response.
function runStrip(canvas, tokens, theme, { here, counted, onResponse, words }) {
  const { responses } = tokens;
  const mean = responses.map(({ absolute, length }) => absolute / Math.max(1, length));
  const most = Math.max(...mean.filter(Number.isFinite), 1e-9);
  const at = event => {
    const box = canvas.getBoundingClientRect();
    return clamp(Math.floor((event.clientX - box.left) / box.width * responses.length), 0, responses.length - 1);
  };
  // The nearest response with a token on the page, in one direction or both.
  function nearest(n, directions) {
    for (let away = 0; away < responses.length; away++) {
      for (const by of directions) if (responses[n + by * away]?.tokens && counted(responses[n + by * away])) return responses[n + by * away];
    }
    return null;
  }
  function draw() {
    if (!canvas.clientWidth) return;
    const { pen, width, height } = sized(canvas), one = width / responses.length, { colours } = theme;
    let step = null, odd = false;
    for (const [n, response] of responses.entries()) {
      if (response.step !== step) [step, odd] = [response.step, !odd];
      if (odd) { pen.fillStyle = css(colours.line, 0.5); pen.fillRect(n * one, 0, one, height); }
      const share = response.tokens === response.length ? 0.95 : response.tokens ? 0.6 : 0.25;
      const tall = height * clamp(Math.sqrt(mean[n] / most) || 0, LEAST_BAR, 1);
      pen.fillStyle = css(colours.down, counted(response) ? share : 0.1);
      pen.fillRect(n * one, height - tall, Math.max(1, one - (one > 3)), tall);
    }
    const current = here();
    canvas.setAttribute("aria-valuenow", current ? current.n : 0);
    canvas.setAttribute("aria-valuetext", current ? words(current) : "none chosen");
    if (!current) return;
    pen.fillStyle = css(colours.ink);
    pen.fillRect(clamp((current.n + 0.5) * one - 1, 0, width - 2), 0, 2, height);
  }
  canvas.setAttribute("aria-valuemin", 0);
  canvas.setAttribute("aria-valuemax", responses.length - 1);
  canvas.closest(".x-run").hidden = responses.length < 2;
  canvas.addEventListener("click", event => {
    const response = nearest(at(event), [1, -1]);
    if (response) onResponse(response);
  });
  canvas.addEventListener("keydown", event => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const response = nearest((here()?.n ?? (by > 0 ? -1 : responses.length)) + by, [by]);
    if (response) onResponse(response);
  });
  new ResizeObserver(draw).observe(canvas);
  return { draw };
}
