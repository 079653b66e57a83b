// Shared by the explorer's scripts: unpacking the payload, and numbers as the report formats them.
"use strict";
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const count = value => value.toLocaleString("en");
const percent = share => `${number(100 * share)} %`;
const distinct = values => [...new Set(values)].sort((a, b) => a - b);

function number(value, digits = 3) {
  if (value === null || Number.isNaN(value)) return "—";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-4 || size >= 1e6) ? value.toExponential(digits - 1)
    : value.toFixed(size === 0 ? 0 : Math.max(0, digits - 1 - Math.floor(Math.log10(size))));
  return text.replace("e+", "e").replaceAll("-", "−");
}

// Half precision keeps 11 bits, so a value is off by at most this share of itself.
const HALF_ERROR = 2 ** -11;
// The float32 of every half-precision pattern.
const HALVES = Float32Array.from({ length: 65536 }, (_, bits) => {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
});
const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array, f2: Uint16Array };

// The payload is the length of a JSON head, the head, then columns.
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const column = name => {
    if (!(name in head.columns)) return null;
    const [type, start, size] = head.columns[name];
    const stored = new ARRAYS[type](buffer, 4 + length + start, size);
    return type === "f2" ? Float32Array.from(stored, bits => HALVES[bits]) : stored;
  };
  return { head, column };
}
