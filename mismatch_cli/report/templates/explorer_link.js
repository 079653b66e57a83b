// A view is a link: what differs from the page as it opens is in the URL's fragment, as `#view?list=gap&a=ppo@3`.
"use strict";
const VIEW = "#view?";
const PAUSE = 200; // milliseconds after the last change until the address follows; browsers limit how often it may

// `parts` has for each name how to read it from words and how to write it; words that are empty are left out.
function explorerLink(parts) {
  let timer = 0;
  const initial = new Map(Object.entries(parts).map(([name, part]) => [name, part.written()]));
  function fragment() {
    const words = new URLSearchParams();
    for (const [name, part] of Object.entries(parts)) {
      if (part.written() !== initial.get(name)) words.set(name, part.written());
    }
    return words.size ? `${VIEW}${words}` : "";
  }
  function write() {
    clearTimeout(timer);
    const now = fragment();
    if (now) history.replaceState(null, "", now);
    else if (location.hash.startsWith(VIEW)) history.replaceState(null, "", location.href.split("#")[0]);
  }
  return {
    changed() { clearTimeout(timer); timer = setTimeout(write, PAUSE); },
    // Applies the address to the page; false if it names no view.
    read() {
      if (!location.hash.startsWith(VIEW)) return false;
      const words = new URLSearchParams(location.hash.slice(VIEW.length));
      for (const [name, part] of Object.entries(parts)) part.read(words.get(name) ?? initial.get(name));
      return true;
    },
    address() { write(); return location.href.replace(/#$/, ""); },
  };
}
