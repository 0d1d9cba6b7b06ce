"use strict";
const byId = (id) => document.getElementById(id);

const make = (tag, className, text) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  // Text of samples is written by a policy: it only ever becomes a text node.
  if (text !== undefined && text !== null) node.textContent = String(text);
  return node;
};

// What outlives a reload. A link within the page starts a new entry of the history, which gets it too.
const kept = { ...history.state };
const keep = (more) => history.replaceState(Object.assign(kept, more), "");
window.addEventListener("hashchange", () => keep({}));
