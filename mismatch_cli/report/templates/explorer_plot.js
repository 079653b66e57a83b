// The explorer's plot: a dot per token, clicks that select a token, and a frame that selects several. Axes are not
// linear: μ is stretched towards 0 and 1, and values far from agreement are compressed.
"use strict";
const WIDEST_TAP = 12; // pixels from a dot
const MARGIN = { left: 46, right: 20, top: 8, bottom: 34 };
const MU_TICKS = [1e-6, 1e-5, 1e-4, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999];
const AXES = {
  ratio: {
    title: "ratio π/μ", bend: value => Math.asinh(Math.log(value) / 0.1),
    ticks: [0.01, 0.1, 0.3, 0.6, 0.8, 0.9, 1, 1.1, 1.25, 1.6, 3, 10, 100],
  },
  dp: {
    title: "π − μ", bend: value => Math.asinh(value / 0.02),
    ticks: [-0.8, -0.4, -0.2, -0.1, -0.05, -0.02, 0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8],
  },
  change: {
    title: "change of log π − log μ", bend: value => Math.asinh(value / 0.1),
    ticks: [-5, -2, -1, -0.5, -0.2, -0.1, 0, 0.1, 0.2, 0.5, 1, 2, 5],
  },
};
const axesOf = tokens => Object.entries(AXES).filter(([name]) => tokens[name]);

// `paint` has the page's view of a token: whether it is `drawn` and `shown`, its `mode` of colour, the token `here` and the
// theme's `colours`; `onToken` gets the clicked token, `onFrame` is called when the frame has changed.
function explorerPlot(canvas, axis, tokens, paint, { onToken, onFrame }) {
  const logit = value => Math.log(value / (1 - value)), { total, logq } = tokens;
  const x = logq.map(value => value - Math.log(-Math.expm1(value)));
  const bent = Object.fromEntries(axesOf(tokens).map(([name, { bend }]) => [name, tokens[name].map(bend)]));
  const pixel = new Int32Array(total);
  let frame = null, view = null, placed = "";

  function limits() {
    const y = bent[axis.value];
    let [low, most] = [logit(0.01), 1];
    for (let t = 0; t < total; t++) {
      if (Number.isFinite(x[t])) low = Math.min(low, x[t]);
      if (Number.isFinite(y[t])) most = Math.max(most, Math.abs(y[t]));
    }
    return { x: [Math.max(low, logit(1e-6)) - 0.3, logit(0.99995)], y: [-1.06 * most, 1.06 * most] };
  }
  const across = value => MARGIN.left + (clamp(value, ...view.x) - view.x[0]) / (view.x[1] - view.x[0]) * view.width;
  const down = value => MARGIN.top + (view.y[1] - clamp(value, ...view.y)) / (view.y[1] - view.y[0]) * view.height;
  const fromX = pixel => clamp(view.x[0] + (pixel - MARGIN.left) / view.width * (view.x[1] - view.x[0]), ...view.x);
  const fromY = pixel => clamp(view.y[1] - (pixel - MARGIN.top) / view.height * (view.y[1] - view.y[0]), ...view.y);
  const measured = t => !Number.isNaN(x[t]) && !Number.isNaN(bent[axis.value][t]);
  const within = (value, [low, high], ends) => clamp(value, ...ends) >= low && clamp(value, ...ends) <= high;
  const holds = t => frame === null || (within(x[t], frame.x, view.x) && within(bent[axis.value][t], frame.y, view.y));

  function draw() {
    if (!canvas.clientWidth) return;
    const { pen, width, height } = sized(canvas), size = `${axis.value} ${canvas.width} ${canvas.height}`;
    if (size !== placed) locate(width, height);
    placed = size;
    axes(pen, width, height);
    dots(pen);
    marks(pen);
  }
  // The pixel of every token, so that a slider only changes colours; −1 where it was not measured.
  function locate(width, height) {
    view = { ...limits(), width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
    const scale = devicePixelRatio || 1, y = bent[axis.value];
    for (let t = 0; t < total; t++) {
      pixel[t] = measured(t) ? Math.round(down(y[t]) * scale) * canvas.width + Math.round(across(x[t]) * scale) : -1;
    }
  }

  // Dots are written into pixels, because a run has 200,000: first those that filters hide, then the shown ones, then
  // those with a colour on top.
  function dots(pen) {
    const scale = devicePixelRatio || 1, image = new ImageData(canvas.width, canvas.height), row = canvas.width;
    const pixels = new Uint32Array(image.data.buffer), { colours, mode } = paint;
    const ink = ([red, green, blue], alpha) => ((alpha * 255) << 24 | blue << 16 | green << 8 | red) >>> 0;
    const put = (t, colour, size) => {
      const wide = Math.round(size * scale), first = pixel[t] - Math.floor(wide / 2) * (row + 1);
      for (let down = 0; down < wide; down++) for (let right = 0; right < wide; right++) pixels[first + down * row + right] = colour;
    };
    const [hidden, plain] = [ink(colours.muted, 0.13), ink(colours.muted, 0.45)];
    const later = [];
    for (let t = 0; t < total; t++) {
      if (pixel[t] < 0 || !paint.drawn(t)) continue;
      if (!paint.shown(t)) put(t, hidden, 2);
      else later.push(t);
    }
    const coloured = [];
    for (const t of later) {
      if (mode.strength(t) < FAINTEST) put(t, plain, 2);
      else coloured.push(t);
    }
    for (const t of coloured) put(t, ink(colours[mode.hue(t)], opacity(mode.strength(t), 0.75)), 3);
    const layer = new OffscreenCanvas(canvas.width, canvas.height);
    layer.getContext("2d").putImageData(image, 0, 0);
    pen.drawImage(layer, 0, 0, canvas.width / scale, canvas.height / scale);
  }
  function marks(pen) {
    pen.strokeStyle = css(paint.colours.ink);
    const here = paint.here();
    if (here !== null && measured(here)) {
      pen.lineWidth = 2;
      pen.beginPath();
      pen.arc(across(x[here]), down(bent[axis.value][here]), 6, 0, 7);
      pen.stroke();
    }
    if (!frame) return;
    const [left, right, bottom, top] = [...frame.x.map(across), ...frame.y.map(down)];
    pen.lineWidth = 1;
    pen.strokeRect(left, top, right - left, bottom - top);
  }

  function axes(pen, width, height) {
    pen.font = "11px system-ui, sans-serif";
    pen.lineWidth = 1;
    pen.fillStyle = css(paint.colours.muted);
    pen.strokeStyle = css(paint.colours.line);
    pen.textAlign = "center";
    let last = -Infinity;
    for (const value of MU_TICKS.filter(tick => logit(tick) > view.x[0])) {
      const at = across(logit(value));
      line(pen, at, MARGIN.top, at, height - MARGIN.bottom);
      const words = value < 1e-3 ? number(value, 1) : String(value), half = pen.measureText(words).width / 2;
      if (at - half < last + 6) continue;
      last = at + half;
      pen.fillText(words, at, height - MARGIN.bottom + 13);
    }
    pen.fillText(`probability μ${tokens.whose}`, MARGIN.left + view.width / 2, height - 5);
    pen.textAlign = "right";
    const { bend, ticks } = AXES[axis.value];
    for (const value of ticks.filter(tick => Math.abs(bend(tick)) < view.y[1])) {
      const at = down(bend(value));
      line(pen, MARGIN.left, at, width - MARGIN.right, at);
      pen.fillText(String(value).replace("-", "−"), MARGIN.left - 5, at + 4);
    }
  }
  function line(pen, x0, y0, x1, y1) {
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  }

  function nearest([left, top]) {
    let best = null, least = WIDEST_TAP ** 2;
    for (let t = 0; t < total; t++) {
      if (!measured(t) || !paint.shown(t)) continue;
      const away = (across(x[t]) - left) ** 2 + (down(bent[axis.value][t]) - top) ** 2;
      if (away < least) [best, least] = [t, away];
    }
    return best;
  }
  let pressed = null;
  const place = event => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const moved = at => Math.hypot(at[0] - pressed[0], at[1] - pressed[1]) >= 4;
  const between = (from, a, b) => [from(a), from(b)].sort((p, q) => p - q);
  canvas.addEventListener("pointerdown", event => { pressed = place(event); });
  addEventListener("pointermove", event => {
    if (!pressed || event.pointerType === "touch" || !moved(place(event))) return; // a finger scrolls the page
    const at = place(event);
    frame = { x: between(fromX, pressed[0], at[0]), y: between(fromY, pressed[1], at[1]) };
    draw();
  });
  addEventListener("pointerup", event => {
    if (!pressed) return;
    const at = place(event), framed = event.pointerType !== "touch" && moved(at);
    pressed = null;
    if (framed) return onFrame();
    const token = nearest(at);
    if (token !== null) onToken(token);
  });
  addEventListener("pointercancel", () => { pressed = null; });
  new ResizeObserver(draw).observe(canvas);
  return {
    draw, holds,
    framed: () => frame !== null,
    clear() { frame = null; },
    // The frame as text for a link: its edges on the bent axes
    written: () => (frame ? [...frame.x, ...frame.y].map(value => value.toPrecision(4)).join(",") : ""),
    read(words) {
      const edges = words.split(",").map(Number);
      if (edges.length === 4 && edges.every(Number.isFinite)) frame = { x: edges.slice(0, 2), y: edges.slice(2) };
    },
  };
}
