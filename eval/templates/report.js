"use strict";
// The trace viewer: pointing at, tapping or tabbing to a token shows its round and both models'
// most probable tokens. Without JavaScript the coloured text remains.
const traces = JSON.parse(document.getElementById("traces").textContent);
const peek = document.createElement("div");
peek.id = "peek";
peek.hidden = true;
peek.setAttribute("role", "status");
document.body.append(peek);

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

function column(name, tokens) {
  const box = element("div");
  box.append(element("div", name, "head"));
  for (const [text, probability] of tokens) {
    const row = element("div");
    row.append(element("code", text), element("span", (100 * probability).toFixed(0) + " %"));
    box.append(row);
  }
  if (!tokens.length) box.append(element("div", "n/a"));
  return box;
}

function show(node) {
  const trace = traces[node.closest(".trace").dataset.trace];
  const token = trace.tokens[node.dataset.token];
  const round = trace.rounds[token.round];
  const kinds = { first: "first token, from the prefill", accepted: "drafted and kept",
    corrected: "the target's correction", bonus: "bonus: the whole draft was kept",
    plain: "no draft in this round" };
  peek.replaceChildren(element("b", kinds[token.kind]));
  if (round) {
    const ms = (seconds) => (1000 * seconds).toFixed(1);
    peek.append(element("div", `round ${token.round + 1}: ${round.accepted} of ${round.drafted} kept; ` +
      `draft ${ms(round.draft_s)} ms, verify ${ms(round.verify_s)} ms, ` +
      `rest ${ms(round.other_s)} ms`, "timing"));
  }
  const pair = element("div", undefined, "pair");
  pair.append(column("target", token.target), column("draft", token.draft));
  peek.append(pair);
  peek.hidden = false;
  const at = node.getClientRects()[0];
  const below = at.bottom + 10 + peek.offsetHeight < innerHeight;
  const left = Math.min(Math.max(12, at.left), innerWidth - peek.offsetWidth - 12);
  peek.style.left = left + "px";
  peek.style.top = (below ? at.bottom + 10 : Math.max(8, at.top - peek.offsetHeight - 10)) + "px";
}

let chosen = null;
function choose(node) {
  if (chosen) chosen.classList.remove("chosen");
  chosen = node;
  if (node) { node.classList.add("chosen"); show(node); } else peek.hidden = true;
}

const tokenOf = (event) => event.target.closest ? event.target.closest("[data-token]") : null;
document.addEventListener("pointerover", (event) => {
  const node = tokenOf(event);
  if (node) choose(node); else if (event.pointerType === "mouse") choose(null);
});
document.addEventListener("click", (event) => choose(tokenOf(event)));
document.addEventListener("focusin", (event) => { if (tokenOf(event)) choose(tokenOf(event)); });
document.addEventListener("scroll", () => choose(null), { passive: true });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return choose(null);
  if (!chosen || (event.key !== "ArrowRight" && event.key !== "ArrowLeft")) return;
  const next = event.key === "ArrowRight" ? chosen.nextElementSibling : chosen.previousElementSibling;
  if (next) { event.preventDefault(); choose(next); }
});
