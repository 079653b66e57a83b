// Shared by the explorer's scripts: unpacking tokens, and formatting numbers as the report does.
"use strict";
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// The data is a JSON head, then columns.
const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array };
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const column = name => {
    if (!(name in head.columns)) return null;
    const [type, start, count] = head.columns[name];
    return new ARRAYS[type](buffer, 4 + length + start, count);
  };
  return { head, column };
}

function number(value, digits = 3) {
  if (value === null || Number.isNaN(value)) return "—";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-4 || size >= 1e6) ? value.toExponential(digits - 1)
    : value.toFixed(size === 0 ? 0 : Math.max(0, digits - 1 - Math.floor(Math.log10(size))));
  return text.replace("e+", "e").replaceAll("-", "−");
}
const percent = share => `${number(100 * share)} %`;
