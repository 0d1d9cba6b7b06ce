"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const make = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    // Text of samples is written by a policy: it only ever becomes a text node.
    if (text !== undefined && text !== null) node.textContent = String(text);
    return node;
  };

  function chartHover() {
    const charts = JSON.parse(byId("chart-data").textContent);
    const box = byId("hover");
    const nearest = (xs, x) => xs.reduce((best, value, at) => (Math.abs(value - x) < Math.abs(xs[best] - x) ? at : best), 0);

    for (const figure of document.querySelectorAll("[data-chart]")) {
      const series = charts[figure.dataset.chart].filter((one) => one.x.length);
      const [firstStep, lastStep] = figure.dataset.steps.split(" ").map(Number);
      const [left, right, width] = figure.dataset.pixels.split(" ").map(Number);
      const svg = figure.querySelector("svg");
      const cross = svg.querySelector(".cross");
      const hide = () => {
        box.hidden = true;
        cross.style.visibility = "hidden";
      };
      svg.addEventListener("pointerleave", hide);
      svg.addEventListener("pointermove", (event) => {
        const area = svg.getBoundingClientRect();
        const pixel = ((event.clientX - area.left) / area.width) * width;
        const wanted = firstStep + ((pixel - left) / (right - left)) * (lastStep - firstStep);
        const steps = series.map((one) => one.x[nearest(one.x, wanted)]);
        const step = steps[nearest(steps, wanted)];
        box.replaceChildren(make("b", "", "step " + step));
        for (const one of series) {
          const at = nearest(one.x, step);
          const line = make("div", "key " + one.color);
          const name = series.length > 1 ? one.label + " " : "";
          line.append(make("i"), document.createTextNode(name + one.y[at] + (one.x[at] === step ? "" : " (step " + one.x[at] + ")")));
          box.append(line);
        }
        const x = left + ((step - firstStep) / (lastStep - firstStep)) * (right - left);
        cross.setAttribute("x1", x);
        cross.setAttribute("x2", x);
        cross.style.visibility = "visible";
        box.hidden = false;
        const beside = event.clientX + 16 + box.offsetWidth > window.innerWidth ? -16 - box.offsetWidth : 16;
        box.style.left = Math.max(4, event.clientX + beside) + "px";
        box.style.top = Math.min(event.clientY + 12, window.innerHeight - box.offsetHeight - 8) + "px";
      });
    }
  }

  function viewChoices() {
    for (const group of document.querySelectorAll("[data-choices]")) {
      const buttons = [...group.querySelectorAll("button[data-view]")];
      for (const button of buttons) {
        button.addEventListener("click", () => {
          for (const other of buttons) other.classList.toggle("on", other === button);
          for (const pane of group.querySelectorAll("[data-pane]")) pane.hidden = pane.dataset.pane !== button.dataset.view;
        });
      }
    }
  }

  function sampleCard(sample) {
    const card = make("article", "sample");
    const facts = make("div", "facts");
    const fact = (name, value) => {
      if (value === null || value === undefined || value === "") return;
      const item = make("span", "", name + " ");
      item.append(make("b", "", value));
      facts.append(item);
    };
    for (const name of ["step", "row", "reward", "verdict"]) fact(name, sample[name]);
    for (const [name, value] of Object.entries(sample.parts)) fact(name, value);
    for (const name of ["advantage", "mismatch", "version"]) fact(name, sample[name]);
    const texts = make("div", "texts");
    const shown = ["prompt", "response", "answer"].filter((name) => sample[name] !== null);
    if (shown.length === 1) texts.classList.add("single");
    for (const name of shown) {
      const column = make("div");
      column.append(make("h3", "", name), make("pre", "", sample[name]));
      texts.append(column);
    }
    card.append(facts, texts);
    if (sample.tokens.length) card.append(tokenList(sample.tokens));
    return card;
  }

  // Responses of one step to the same prompt stand side by side, below the prompt that they share.
  function sampleCards(samples) {
    const groups = new Map();
    for (const sample of samples) {
      const key = sample.step + " " + sample.prompt;
      groups.set(key, [...(groups.get(key) || []), sample]);
    }
    return [...groups.values()].map((group) => {
      if (group.length === 1) return sampleCard(group[0]);
      const card = make("article", "sample");
      const title = "step " + group[0].step + ", " + group.length + " responses to one prompt";
      card.append(make("h3", "", title), make("pre", "", group[0].prompt), make("h3", "", "answer"), make("pre", "", group[0].answer));
      const row = make("div", "side-by-side");
      for (const sample of group) {
        const one = sampleCard({ ...sample, prompt: null, answer: null });
        row.append(one);
      }
      card.append(row);
      return card;
    });
  }

  // Each token in turn, the darker the further the two log-probs lie apart, in steps of ten.
  function tokenList(tokens) {
    const box = make("details", "tokens");
    box.append(make("summary", "", "tokens: advantage and mismatch"));
    const line = make("div");
    for (const [text, advantage, mismatch] of tokens) {
      const distance = Math.abs(mismatch || 0);
      const depth = distance ? Math.max(0, Math.min(5, Math.ceil(Math.log10(distance)) + 6)) : 0;
      const piece = make("span", "depth-" + depth, text);
      piece.title = "advantage " + (advantage ?? "unknown") + ", mismatch " + (mismatch ?? "unknown");
      line.append(piece);
    }
    box.append(line);
    return box;
  }

  function sampleViewer() {
    if (!byId("sample-data")) return;
    const samples = JSON.parse(byId("sample-data").textContent);
    const inputs = ["step", "verdict", "min", "max", "text"].map((name) => byId("sample-" + name));
    const [stepInput, verdictInput, minInput, maxInput, textInput] = inputs;
    const fill = (select, all, values) => {
      select.append(new Option(all, ""));
      for (const value of values) select.append(new Option(value, value));
    };
    const steps = [...new Set(samples.map((sample) => sample.step))].sort((a, b) => a - b);
    fill(stepInput, "all", steps);
    fill(verdictInput, "all", [...new Set(samples.map((sample) => sample.verdict).filter(Boolean))].sort());
    stepInput.value = steps[steps.length - 1];

    const matches = (sample) => {
      const text = textInput.value.toLowerCase();
      const inRange = (input, sign) => input.value === "" || (sample.reward !== null && sign * (sample.reward - Number(input.value)) >= 0);
      return (
        (stepInput.value === "" || sample.step === Number(stepInput.value)) &&
        (verdictInput.value === "" || sample.verdict === verdictInput.value) &&
        inRange(minInput, 1) && inRange(maxInput, -1) &&
        (text === "" || [sample.prompt, sample.response, sample.answer].some((part) => part.toLowerCase().includes(text)))
      );
    };
    let shown = 20;
    const draw = () => {
      const found = samples.filter(matches);
      byId("sample-list").replaceChildren(...sampleCards(found.slice(0, shown)));
      byId("sample-count").textContent = found.length + " of " + samples.length + " samples";
      byId("sample-more").hidden = found.length <= shown;
    };
    for (const input of inputs) input.addEventListener("input", () => { shown = 20; draw(); });
    byId("sample-more").addEventListener("click", () => { shown += 50; draw(); });
    draw();
  }

  // The address remembers it, so that it outlives the reload.
  function live() {
    const box = byId("live");
    box.checked = location.hash === "#live";
    let timer = null;
    const plan = () => {
      clearTimeout(timer);
      if (box.checked) timer = setTimeout(() => location.reload(), 10000);
    };
    box.addEventListener("change", () => {
      location.hash = box.checked ? "live" : "";
      plan();
    });
    plan();
  }

  live();
  chartHover();
  viewChoices();
  sampleViewer();
})();
