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
const HALF_ERROR = 2 ** -11, GAP_ERROR = 2 ** -9; // a gap keeps 9
// The float32 of every half-precision pattern.
const HALVES = Float32Array.from({ length: 65536 }, (_, bits) => {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
});
const ARRAYS = { u1: Uint8Array, u4: Uint32Array, f4: Float32Array };

// Numbers of 16 bits, whose low bytes are all before the high ones.
function halves(buffer, start, size) {
  const low = new Uint8Array(buffer, start, size), high = new Uint8Array(buffer, start + size, size);
  const values = new Uint16Array(size);
  for (let n = 0; n < size; n++) values[n] = low[n] | high[n] << 8;
  return values;
}

// Four bytes are five letters of base 85; the last bytes have fewer.
const LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%.()*+-;,=/?@^_`{|}~";
function bytesOf(text) {
  const values = new Uint8Array(128), words = new DataView(new ArrayBuffer(4 * Math.ceil(text.length / 5)));
  for (const [value, letter] of [...LETTERS].entries()) values[letter.charCodeAt(0)] = value;
  const valueAt = n => (n < text.length ? values[text.charCodeAt(n)] : 84);
  for (let n = 0; n < text.length; n += 5) {
    let word = 0;
    for (let k = 0; k < 5; k++) word = 85 * word + valueAt(n + k);
    words.setUint32(4 * n / 5, word);
  }
  return words.buffer.slice(0, Math.floor(4 * text.length / 5));
}

// The payload is the length of a JSON head, the head, then columns.
async function unpack(text) {
  const stream = new Blob([bytesOf(text.trim())]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const column = name => {
    if (!(name in head.columns)) return null;
    const [type, start, size] = head.columns[name];
    const place = 4 + length + start;
    if (type in ARRAYS) return new ARRAYS[type](buffer, place, size);
    const stored = halves(buffer, place, size);
    return type === "f2" ? Float32Array.from(stored, bits => HALVES[bits]) : stored;
  };
  return { head, column };
}
