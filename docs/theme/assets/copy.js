// Of a session, the copy button takes what is typed and leaves prompts and outputs.
"use strict";
document.addEventListener("click", event => {
  const button = event.target.closest("[data-md-type=copy]"), block = button?.closest(".language-console");
  if (!block) return;
  const typed = block.querySelector("code").textContent.split("\n").filter(line => line.startsWith("$ ")).map(line => line.slice(2));
  if (!typed.length) return;
  event.stopImmediatePropagation();
  navigator.clipboard.writeText(typed.join("\n"));
}, true);
