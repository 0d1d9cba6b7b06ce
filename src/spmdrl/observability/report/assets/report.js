(() => {
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
      column.append(make("h3", "", name), name === "response" && sample.turns ? turnTexts(sample.turns) : make("pre", "", sample[name]));
      texts.append(column);
    }
    card.append(facts, texts);
    if (sample.tokens.length) card.append(tokenList(sample.tokens));
    return card;
  }

  // The conversation behind the prompt by its roles. The environment's parts, which aren't learnt, are grey.
  function turnTexts(turns) {
    const box = make("div");
    for (const turn of turns) {
      for (const [place, role] of ["model", "environment"].entries()) {
        if (turn[place] !== "") box.append(make("h4", "", role), make("pre", role, turn[place]));
      }
    }
    return box;
  }

  function groupsOf(samples) {
    const groups = new Map();
    for (const sample of samples) {
      const key = sample.step + " " + sample.prompt;
      groups.set(key, [...(groups.get(key) || []), sample]);
    }
    return [...groups.values()];
  }

  // Responses of one step to the same prompt stand side by side, below the prompt that they share.
  function sampleCards(groups) {
    return groups.map((group) => {
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
      const groups = groupsOf(found);
      byId("sample-list").replaceChildren(...sampleCards(groups.slice(0, shown)));
      byId("sample-count").textContent = found.length + " of " + samples.length + " samples";
      byId("sample-more").hidden = groups.length <= shown;
    };
    for (const input of inputs) input.addEventListener("input", () => { shown = 20; draw(); });
    byId("sample-more").addEventListener("click", () => { shown += 50; draw(); });
    draw();
  }

  function live() {
    const box = byId("live");
    box.checked = Boolean(kept.live);
    let timer = null;
    const plan = () => {
      clearTimeout(timer);
      if (box.checked) timer = setTimeout(() => location.reload(), 10000);
    };
    box.addEventListener("change", () => {
      keep({ live: box.checked });
      plan();
    });
    plan();
  }

  live();
  charts();
  viewChoices();
  sampleViewer();
})();
