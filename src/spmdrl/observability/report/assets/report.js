(() => {
  const chosen = new Map();

  // One of several drawings is shown; the choice stays while the page is updated.
  function choose(group, title) {
    const buttons = [...group.querySelectorAll("button[data-view]")];
    const wanted = buttons.find((button) => button.textContent === title) || buttons[0];
    for (const button of buttons) button.classList.toggle("on", button === wanted);
    for (const pane of group.querySelectorAll("[data-pane]")) pane.hidden = pane.dataset.pane !== wanted.dataset.view;
  }
  document.addEventListener("click", (event) => {
    const group = event.target.closest("button[data-view]") && event.target.closest("[data-choices]");
    if (!group) return;
    chosen.set(group.dataset.choices, event.target.textContent);
    choose(group, event.target.textContent);
  });

  // The topmost visible part of the page, and its distance from the window's top.
  function place() {
    const parts = [...document.querySelectorAll("main section, main figure, main article, main h3")];
    const top = parts.findIndex((one) => one.getBoundingClientRect().bottom > 60);
    return top < 0 ? null : [top, parts.length, parts[top].getBoundingClientRect().top];
  }

  // Puts what changed in its place, while scroll position, choices, open parts and filters stay.
  function update(news) {
    source = source.replace(/\d+$/, news.version);
    if (!Object.keys(news.sections).length && !news.header) return;
    const before = place();
    if (news.header) document.querySelector("header").innerHTML = news.header;
    for (const [anchor, body] of Object.entries(news.sections)) {
      const section = byId(anchor);
      for (const one of [section, document.querySelector(`nav a[href="#${anchor}"]`)]) one.hidden = !body.trim();
      if (anchor === "samples" && byId("sample-list")) continue;
      section.querySelector(".body").innerHTML = body;
      for (const group of section.querySelectorAll("[data-choices]")) choose(group, chosen.get(group.dataset.choices));
    }
    Object.assign(chartData, news.charts);
    charts(chartData);
    if (news.samples) samples(news.samples, news.note);
    const after = before && place();
    const same = before && document.querySelectorAll("main section, main figure, main article, main h3")[before[0]];
    if (after && before[1] && same) window.scrollBy(0, same.getBoundingClientRect().top - before[2]);
  }

  // A served page fetches what is new; a file is loaded again.
  function live() {
    const box = byId("live");
    if (source) {
      box.parentNode.hidden = true;
      poll(() => source, (news) => update(news), 3000);
      return;
    }
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

  let source = document.body.dataset.live;
  const chartData = JSON.parse(byId("chart-data").textContent);
  charts(chartData);
  if (byId("sample-data")) samples(JSON.parse(byId("sample-data").textContent));
  live();
})();
