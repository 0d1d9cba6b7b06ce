// The viewer of samples: filters, orders, one prompt over the steps, and two numbers of each sample against each other.
const samples = (() => {
  const ORDERS = {
    "as written": null, "best first": (a, b) => b.reward - a.reward, "worst first": (a, b) => a.reward - b.reward,
    "longest first": (a, b) => b.length - a.length, "most repeated first": (a, b) => b.repeats - a.repeats,
  };
  const NUMBERS = ["step", "reward", "length", "repeats", "advantage", "mismatch"];
  const ROLE = /<\|im_start\|>(\w+)\n|<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*|<start_of_turn>(\w+)\n|<\|(system|user|assistant|tool)\|>\n?/g;
  const END = /(<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\|end\|>)\s*$/;
  let all = [];
  let shown = 20;
  const cards = new Map();

  const valueOf = (sample, name) => (name in sample.parts ? sample.parts[name] : sample[name]);
  const bubble = (role, text) => {
    const box = make("div", "bubble " + role);
    box.append(make("h4", "", role), make("pre", "", text));
    return box;
  };

  // A prompt in a chat template by its roles; another one as it is.
  function promptTexts(text) {
    const marks = [...text.matchAll(ROLE)];
    if (!marks.length) return make("pre", "", text);
    const box = make("div");
    if (marks[0].index > 0) box.append(make("pre", "", text.slice(0, marks[0].index)));
    marks.forEach((mark, at) => {
      const role = mark.slice(1).find(Boolean);
      const content = text.slice(mark.index + mark[0].length, at + 1 < marks.length ? marks[at + 1].index : undefined).replace(END, "");
      if (content.trim()) box.append(bubble({ model: "assistant" }[role] || role, content.trimEnd()));
    });
    return box;
  }

  // The conversation behind the prompt by its roles. The environment's parts, which aren't learnt, are grey.
  function turnTexts(turns) {
    const box = make("div");
    for (const turn of turns) {
      for (const [place, role] of ["assistant", "environment"].entries()) {
        if (turn[place] !== "") box.append(bubble(role, turn[place]));
      }
    }
    return box;
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
    if (sample.kind !== "training") fact("", sample.kind);
    for (const [name, value] of Object.entries(sample.parts)) fact(name, value);
    for (const name of ["length", "repeats", "advantage", "mismatch", "version"]) fact(name, sample[name]);
    const texts = make("div", "texts");
    const columns = ["prompt", "response", "answer"].filter((name) => sample[name] !== null);
    if (columns.length === 1) texts.classList.add("single");
    for (const name of columns) {
      const column = make("div");
      const text = name === "prompt" ? promptTexts(sample.prompt) : make("pre", "", sample[name]);
      column.append(make("h3", "", name), name === "response" && sample.turns ? turnTexts(sample.turns) : text);
      texts.append(column);
    }
    card.append(facts, texts);
    if (sample.tokens.length) card.append(tokenList(sample.tokens));
    return card;
  }

  // Responses of one step to the same prompt stand side by side, below the prompt that they share.
  function groupCard(group) {
    if (group.length === 1) return sampleCard(group[0]);
    const card = make("article", "sample");
    const title = "step " + group[0].step + ", " + group.length + " responses to one prompt";
    card.append(make("h3", "", title), promptTexts(group[0].prompt), make("h3", "", "answer"), make("pre", "", group[0].answer));
    const row = make("div", "side-by-side");
    row.append(...group.map((sample) => sampleCard({ ...sample, prompt: null, answer: null })));
    card.append(row);
    return card;
  }

  function groupsOf(found, isOrdered) {
    const groups = new Map();
    found.forEach((sample, at) => {
      const key = isOrdered ? at : sample.step + " " + sample.prompt;
      groups.set(key, [...(groups.get(key) || []), sample]);
    });
    return [...groups.values()];
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

  // A dot per sample, and the correlation of the two numbers.
  function plot(found) {
    const names = ["x", "y"].map((axis) => byId("plot-" + axis).value);
    const points = found.map((sample) => [...names.map((name) => valueOf(sample, name)), sample]).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
    const svg = part("svg", { viewBox: "0 0 440 210", role: "img", "aria-label": names[1] + " by " + names[0] });
    const [xs, ys] = [0, 1].map((axis) => points.map((point) => point[axis]));
    const scale = (values, from, to) => {
      const [low, high] = [Math.min(...values), Math.max(...values)];
      return (value) => from + (high > low ? (value - low) / (high - low) : 0.5) * (to - from);
    };
    const [px, py] = [scale(xs, 60, 425), scale(ys, 180, 12)];
    for (const [x, y, sample] of points.slice(-2000)) {
      const dot = part("circle", { class: "dot k0", cx: px(x).toFixed(1), cy: py(y).toFixed(1), r: 3 });
      dot.append(part("title", {}, `step ${sample.step}, row ${sample.row}: ${names[0]} ${x}, ${names[1]} ${y}`));
      svg.append(dot);
    }
    if (points.length) {
      for (const value of new Set([Math.min(...ys), Math.max(...ys)])) svg.prepend(part("line", { class: "grid", x1: 60, x2: 425, y1: py(value), y2: py(value) }), part("text", { class: "ty", x: 52, y: py(value) }, Number(value.toPrecision(4))));
      for (const value of new Set([Math.min(...xs), Math.max(...xs)])) svg.append(part("text", { class: "tx", x: px(value), y: 202 }, Number(value.toPrecision(4))));
    }
    byId("plot").replaceChildren(svg);
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const [mx, my] = [mean(xs), mean(ys)];
    const moment = (one, other) => mean(points.map((point) => (point[one] - [mx, my][one]) * (point[other] - [mx, my][other])));
    const r = moment(0, 1) / Math.sqrt(moment(0, 0) * moment(1, 1));
    byId("plot-r").textContent = points.length + " samples" + (Number.isFinite(r) ? ", correlation " + r.toFixed(2) : "");
  }

  const input = (name) => byId("sample-" + name);
  const NAMES = ["step", "prompt", "verdict", "min", "max", "text", "order"];

  function matches(sample) {
    const [step, prompt, verdict, min, max, text] = NAMES.map((name) => input(name).value);
    const inRange = (bound, sign) => bound === "" || (sample.reward !== null && sign * (sample.reward - Number(bound)) >= 0);
    return (
      (step === "" || sample.step === Number(step)) && (prompt === "" || sample.prompt === prompt) &&
      (verdict === "" || sample.verdict === verdict) && inRange(min, 1) && inRange(max, -1) &&
      (text === "" || [sample.prompt, sample.response, sample.answer].some((one) => one.toLowerCase().includes(text.toLowerCase())))
    );
  }

  function draw() {
    const compare = ORDERS[input("order").value];
    const found = all.filter(matches);
    const ordered = compare ? found.filter((one) => one.reward !== null).sort(compare) : found;
    const groups = groupsOf(ordered, Boolean(compare));
    // Cards that are there already stay as they are, with their open parts.
    const wanted = groups.slice(0, shown).map((group) => [group.map((one) => [one.kind, one.step, one.row, one.response.length]).join(), group]);
    const nodes = wanted.map(([key, group]) => cards.get(key) || groupCard(group));
    cards.clear();
    wanted.forEach(([key], at) => cards.set(key, nodes[at]));
    const list = byId("sample-list");
    if (nodes.length !== list.children.length || nodes.some((node, at) => node !== list.children[at])) list.replaceChildren(...nodes);
    byId("sample-count").textContent = found.length + " of " + all.length + " samples";
    byId("sample-more").hidden = groups.length <= shown;
    plot(found);
  }

  // Fills a choice anew and keeps what is chosen, if it is still there.
  function fill(select, options, chosen) {
    select.replaceChildren(...options.map(([text, value]) => new Option(text, value)));
    select.value = options.some(([, value]) => String(value) === chosen) ? chosen : options[0][1];
  }

  function bind() {
    for (const name of NAMES) input(name).addEventListener("input", () => {
      shown = 20;
      if (name === "prompt" && input("prompt").value) [input("step").value, byId("plot-x").value] = ["", "step"];
      draw();
    });
    for (const axis of ["x", "y"]) byId("plot-" + axis).addEventListener("input", draw);
    input("more").addEventListener("click", () => { shown += 50; draw(); });
    fill(input("order"), Object.keys(ORDERS).map((name) => [name, name]));
  }

  return (found, note) => {
    const isFirst = !all.length;
    const stepsOf = (some) => [...new Set(some.map((sample) => sample.step))].sort((a, b) => a - b);
    const isAtEnd = isFirst || Number(input("step").value || NaN) === stepsOf(all).pop();
    all = found;
    if (note !== undefined) byId("sample-note").textContent = note;
    if (isFirst) bind();
    const steps = stepsOf(all);
    fill(input("step"), [["all", ""], ...steps.map((step) => [step, step])], isAtEnd ? String(steps[steps.length - 1]) : input("step").value);
    const times = new Map();
    for (const sample of all) times.set(sample.prompt, (times.get(sample.prompt) || new Set()).add(sample.step));
    const prompts = [...times].filter(([, at]) => at.size > 1).sort((a, b) => b[1].size - a[1].size);
    fill(input("prompt"), [["all", ""], ...prompts.map(([prompt, at]) => [prompt.replace(/\s+/g, " ").slice(-60) + " (" + at.size + " steps)", prompt])], input("prompt").value);
    fill(input("verdict"), [["all", ""], ...[...new Set(all.map((sample) => sample.verdict).filter(Boolean))].sort().map((one) => [one, one])], input("verdict").value);
    const numbers = [...NUMBERS, ...new Set(all.flatMap((sample) => Object.keys(sample.parts)))];
    for (const [axis, chosen] of [["x", "length"], ["y", "reward"]]) {
      const select = byId("plot-" + axis);
      fill(select, numbers.map((name) => [name, name]), select.value || chosen);
    }
    draw();
  };
})();
