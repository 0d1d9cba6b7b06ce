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

  // The topmost visible title or card, which must not move while the page is updated; none at the page's top.
  function place() {
    const titles = [...document.querySelectorAll("main h2, main h3, main figcaption, main article")];
    const one = window.scrollY > 0 && titles.find((title) => title.getBoundingClientRect().bottom > 60);
    return one ? { one, id: one.closest("section").id, text: one.textContent, top: one.getBoundingClientRect().top } : null;
  }

  function restore({ one, id, text, top }) {
    const same = one.isConnected ? one : [...byId(id).querySelectorAll(one.tagName)].find((title) => title.textContent === text);
    if (same) window.scrollBy(0, same.getBoundingClientRect().top - top);
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
    if (before) restore(before);
  }

  let source = document.body.dataset.live;
  const chartData = JSON.parse(byId("chart-data").textContent);
  charts(chartData);
  if (byId("sample-data")) samples(JSON.parse(byId("sample-data").textContent));
  if (source) poll(() => source, update, 3000);
})();
