// A token as a picture of 1200 × 630, as posts and chats show them: the subject, the verdict, the token in its sentence,
// μ and π, and where it is. Drawn from the data, in the colours of the page.
"use strict";
const PICTURE = { width: 1200, height: 630, margin: 56 };
const FONTS = { text: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", mono: "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace" };
const SENTENCE = { before: 60, after: 30, lines: 5, size: 28, leading: 44 };

function tokenPicture(t, head, tokens, masks, { colours, shade, colour }) {
  const canvas = make("canvas"), pen = canvas.getContext("2d"), { width, height, margin } = PICTURE;
  [canvas.width, canvas.height] = [width, height];
  const write = (words, x, y, font, fill) => {
    pen.font = font;
    pen.fillStyle = css(fill);
    pen.fillText(cut(pen, words, width - margin - x), x, y);
  };
  pen.fillStyle = css(colours.page);
  pen.fillRect(0, 0, width, height);
  const words = selector => document.querySelector(selector)?.textContent.trim() ?? "";
  write(words("h1"), margin, 78, `600 30px ${FONTS.text}`, colours.ink);
  write(words(".subject"), margin, 112, `20px ${FONTS.text}`, colours.muted);
  write(words(".verdict"), margin, 158, `500 22px ${FONTS.text}`, colours.ink);
  sentence(pen, t, tokens, colours, colour, shade);
  const facts = tokenFacts(t, head, tokens, masks).slice(0, 4), wide = (width - 2 * margin) / facts.length;
  facts.forEach(([name, value], n) => {
    write(name, margin + n * wide, 468, `18px ${FONTS.text}`, colours.muted);
    write(value, margin + n * wide, 502, `500 26px ${FONTS.text}`, colours.ink);
  });
  const response = tokens.response(t);
  pen.save();
  pen.translate(margin, 528);
  drawResponse({ pen, width: width - 2 * margin, height: 26 }, response, profileOf(response, tokens), colours, tokens.position(t));
  pen.restore();
  const place = `step ${response.step} · prompt ${response.prompt} · sample ${response.sample} · token ${count(tokens.position(t))} of ${count(response.length)}`;
  write(`${place} · mismatch-cli`, margin, 594, `18px ${FONTS.text}`, colours.muted);
  return canvas;
}

function cut(pen, words, room) {
  if (pen.measureText(words).width <= room) return words;
  let end = words.length;
  while (end > 0 && pen.measureText(`${words.slice(0, end)}…`).width > room) end--;
  return `${words.slice(0, end)}…`;
}

// The token among its neighbours, wrapped; each token keeps the colour that it has on the page.
function sentence(pen, t, tokens, colours, colour, shade) {
  const { margin, width } = PICTURE, { first, end } = tokens.passage(t);
  pen.font = `${SENTENCE.size}px ${FONTS.mono}`;
  const room = Math.floor((width - 2 * margin) / pen.measureText("0").width);
  const lines = wrapped(tokens, Math.max(first, t - SENTENCE.before), Math.min(end, t + SENTENCE.after + 1), room);
  const here = lines.findIndex(line => line.some(part => part.t === t));
  const from = clamp(here - Math.floor(SENTENCE.lines / 2), 0, Math.max(0, lines.length - SENTENCE.lines));
  lines.slice(from, from + SENTENCE.lines).forEach((line, n) => {
    let x = margin;
    const y = 218 + n * SENTENCE.leading;
    for (const part of line) {
      const wide = pen.measureText(part.text).width, painted = colour(part.t, shade);
      if (painted) { pen.fillStyle = painted; pen.fillRect(x, y - SENTENCE.size, wide, SENTENCE.size + 10); }
      if (part.t === t) { pen.strokeStyle = css(colours.ink); pen.lineWidth = 3; pen.strokeRect(x - 2, y - SENTENCE.size - 2, wide + 4, SENTENCE.size + 14); }
      pen.fillStyle = css(colours.ink);
      pen.fillText(part.text, x, y);
      x += wide;
    }
  });
}

// Tokens as lines of at most so many characters; a line break in a token ends its line, a long token is cut.
function wrapped(tokens, from, to, room) {
  const lines = [[]];
  let used = 0;
  for (let t = from; t < to; t++) {
    const [text, ...more] = tokens.word(t).split("\n"), part = { t, text: text.length > room ? `${text.slice(0, room - 1)}…` : text };
    if (used + part.text.length > room) { lines.push([]); used = 0; }
    lines.at(-1).push(part);
    used += part.text.length;
    if (more.length) { lines.push([]); used = 0; }
  }
  return lines.filter(line => line.length);
}

// Saves the picture, and copies it where the browser allows that; the answer says what happened.
async function savePicture(canvas, name) {
  const link = make("a");
  link.download = name;
  link.href = canvas.toDataURL("image/png");
  link.click();
  try {
    const blob = await new Promise(done => { canvas.toBlob(done, "image/png"); });
    await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
    return `Saved ${name}, and copied.`;
  } catch {
    return `Saved ${name}.`;
  }
}
