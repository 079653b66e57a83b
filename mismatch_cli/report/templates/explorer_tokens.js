// What the payload holds, as responses, passages and tokens. A passage is a run of consecutive tokens of one response:
// all of it, or a window. Tokens are numbered in the order of passages.
"use strict";
const PROFILE_BINS = 48;

function readTokens({ head, column }) {
  const text = column("text"), logq = column("logq"), d = column("d"), total = text.length;
  const responses = readResponses(head, column);
  const passages = [], passageOf = new Uint32Array(total);
  const [owner, starts, sizes] = ["passage_response", "passage_start", "passage_tokens"].map(column);
  let first = 0;
  for (let n = 0; n < sizes.length; n++) {
    const passage = { n, response: responses[owner[n]], start: starts[n], first, end: first + sizes[n] };
    passageOf.fill(n, first, passage.end);
    first = passage.end;
    passages.push(passage);
    passage.response.passages.push(passage);
    passage.response.tokens += sizes[n];
  }
  const mu = logq.map(Math.exp), dp = mu.map((value, t) => value * Math.expm1(d[t]));
  const logqB = column("logq_b"), dB = column("d_b");
  const ranks = ["rank_text", "rank_logq", "rank_logp"].map(column);
  return {
    total, text, logq, d, mu, dp, responses, passages, passageOf, logqB, dB,
    ratio: d.map(Math.exp),
    whose: head.paired ? ` in ${head.runs[0]}` : "", // numbers of two runs on the same tokens that are those of the first
    change: dB && dB.map((value, t) => value - d[t]),
    entropy: column("entropy"),
    advantage: column("advantage") ?? spread(column("response_advantage"), passages, total),
    ranksOf: new Map([...(column("rank_token") ?? [])].map((t, row) => [t, row])),
    ranks: { text: ranks[0], logq: ranks[1], logp: ranks[2] },
    lists: head.lists.map(list => ({ ...list, tokens: column(`list_${list.name}`) })),
    level: n => levelOf(n, head, column),
    word: t => head.texts[text[t]],
    passage: t => passages[passageOf[t]],
    response: t => passages[passageOf[t]].response,
    position: t => t - passages[passageOf[t]].first + passages[passageOf[t]].start,
  };
}

function readResponses(head, column) {
  const recorded = head.responses, profiles = column("profile");
  const [absolute, signed, largest] = ["response_absolute", "response_signed", "response_largest"].map(column);
  const uses = new Map(); // a training step uses a response once in every epoch
  const responses = recorded.length.map((length, n) => ({
    n, length, trace: recorded.trace[n], step: recorded.step[n], prompt: recorded.prompt[n], sample: recorded.sample[n],
    reward: recorded.reward[n] === null ? null : Number(recorded.reward[n]),
    words: recorded.words[n] < 0 ? "" : head.prompts[recorded.words[n]],
    absolute: absolute[n], signed: signed[n], largest: largest[n],
    passages: [], tokens: 0, profile: null,
  }));
  for (const response of responses) {
    const key = [response.trace, response.step, response.prompt, response.sample].join(".");
    response.use = uses.get(key) ?? 0;
    uses.set(key, response.use + 1);
  }
  for (const [row, n] of [...(column("profile_response") ?? [])].entries()) {
    responses[n].profile = profiles.subarray(row * PROFILE_BINS, (row + 1) * PROFILE_BINS);
  }
  return responses;
}

// The level of each token under an algorithm; those whose thresholds stay have the rows of one table.
function levelOf(n, head, column) {
  const place = head.fixed.indexOf(n);
  if (place < 0) return column(`level${n}`);
  const table = column("fixed_rows"), wide = head.fixed.length;
  return Uint8Array.from(column("fixed"), row => table[row * wide + place]);
}

// A value of each response as a column over tokens.
function spread(values, passages, total) {
  if (!values) return null;
  const column = new Float32Array(total);
  for (const { response, first, end } of passages) column.fill(values[response.n], first, end);
  return column;
}

// The largest |d| in each part of a response, NaN where nothing was measured; short responses have a part per token.
function profileOf(response, tokens) {
  if (response.profile) return response.profile; // recorded, or made before
  const parts = new Float32Array(Math.min(response.length, 4 * PROFILE_BINS)).fill(NaN);
  for (const { start, first, end } of response.passages) {
    for (let t = first; t < end; t++) {
      const part = Math.floor((start + t - first) * parts.length / response.length), size = Math.abs(tokens.d[t]);
      if (!(parts[part] >= size)) parts[part] = size;
    }
  }
  response.profile = parts;
  return parts;
}

// The words of where a token is, as a link and a card say them.
const keyOf = (tokens, t) => {
  const { step, prompt, sample, trace, use } = tokens.response(t);
  return [step, prompt, sample, tokens.position(t), trace, ...(use ? [use] : [])].join(".");
};
function tokenAt(tokens, key) {
  const [step, prompt, sample, position, trace, use = "0"] = key.split(".");
  const same = each => String(each.step) === step && String(each.prompt) === prompt
    && String(each.sample) === sample && String(each.trace) === trace && String(each.use) === use;
  const passage = tokens.responses.find(same)?.passages
    .find(({ start, first, end }) => position >= start && position < start + end - first);
  return passage ? passage.first + Number(position) - passage.start : null;
}
