"use strict";
const byId = (id) => document.getElementById(id);

const make = (tag, className, text) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  // Text of samples is written by a policy: it only ever becomes a text node.
  if (text !== undefined && text !== null) node.textContent = String(text);
  return node;
};

const part = (tag, attributes, text) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
};

// Shows what the server has, again and again; while it doesn't answer, the page says so.
const poll = async (source, show, interval) => {
  if (!document.hidden) {
    const found = await fetch(source()).then((answer) => (answer.ok ? answer.json() : null), () => null);
    document.body.classList.toggle("gone", !found);
    if (found) show(found);
  }
  setTimeout(poll, interval, source, show, interval);
};

// What outlives a reload. A link within the page starts a new entry of the history, which gets it too.
const kept = { ...history.state };
const keep = (more) => history.replaceState(Object.assign(kept, more), "");
window.addEventListener("hashchange", () => keep({}));
