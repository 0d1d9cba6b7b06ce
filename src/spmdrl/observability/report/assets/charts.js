// The values under the pointer, and one range of steps for all charts of the page.
const charts = (() => {
  const nearest = (xs, x) => xs.reduce((best, value, at) => (Math.abs(value - x) < Math.abs(xs[best] - x) ? at : best), 0);
  const numbers = (text) => text.split(" ").map(Number);
  // The same as ticks in charts.py.
  function ticks(low, high) {
    const rough = (high - low) / 5;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => power * factor >= rough * (1 - 1e-9));
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at <= high / step + 1e-9; at += 1) found.push(Number((at * step).toPrecision(12)));
    return found;
  }

  class Chart {
    constructor(figure, series) {
      this.svg = figure.querySelector("svg");
      this.series = series.filter((one) => one.x.length);
      this.whole = { x: numbers(this.svg.dataset.steps), y: numbers(this.svg.dataset.values) };
      this.view = this.whole;
      [this.left, this.right, this.top, this.bottom, this.width] = numbers(this.svg.dataset.pixels);
      this.cross = this.svg.querySelector(".cross");
      this.chosen = this.svg.appendChild(part("rect", { class: "chosen", y: this.top, height: this.bottom - this.top, width: 0 }));
      this.axes = this.svg.querySelector(".axes");
      this.wholeAxes = [...this.axes.childNodes];
      this.plot = this.svg.querySelector(".plot");
    }

    px(step) {
      const [from, to] = this.view.x;
      return this.left + ((step - from) / (to - from)) * (this.right - this.left);
    }

    py(value) {
      const [low, high] = this.view.y;
      return this.bottom - ((value - low) / (high - low)) * (this.bottom - this.top);
    }

    stepAt(clientX) {
      const area = this.svg.getBoundingClientRect();
      const share = (((clientX - area.left) / area.width) * this.width - this.left) / (this.right - this.left);
      const [from, to] = this.view.x;
      return from + Math.min(1, Math.max(0, share)) * (to - from);
    }

    // What lies in the range fills the height, but isn't stretched more than twentyfold.
    valuesIn([from, to]) {
      const [lowest, highest] = this.whole.y;
      const seen = this.series.flatMap((one) => one.y.filter((_, at) => one.x[at] >= from && one.x[at] <= to));
      if (!seen.length) return this.whole.y;
      const [low, high] = [Math.max(lowest, Math.min(...seen)), Math.min(highest, Math.max(...seen))];
      const half = Math.max(0.55 * (high - low), (highest - lowest) / 40);
      return [Math.max(lowest, (low + high) / 2 - half), Math.min(highest, (low + high) / 2 + half)];
    }

    // The lines are stretched, which keeps their means and bands; the axes are drawn anew. Null shows all steps.
    show(range) {
      const { x, y } = this.whole;
      this.view = range ? { x: range, y: this.valuesIn(range) } : this.whole;
      const [across, up] = [x, y].map(([low, high], axis) => {
        const [from, to] = axis ? this.view.y : this.view.x;
        return (high - low) / (to - from);
      });
      const shift = [this.px(x[0]) - across * this.left, this.py(y[0]) - up * this.bottom];
      this.plot.firstElementChild.setAttribute("transform", `matrix(${across} 0 0 ${up} ${shift.join(" ")})`);
      this.plot.classList.toggle("cut", Boolean(range));
      this.axes.replaceChildren(...(range ? this.newAxes() : this.wholeAxes));
    }

    newAxes() {
      const rows = ticks(...this.view.y).flatMap((value) => {
        const y = this.py(value);
        const size = Math.abs(value);
        const text = size >= 1e6 || (size > 0 && size < 1e-4) ? value.toExponential() : String(Number(value.toPrecision(6)));
        return [part("line", { class: "grid", x1: this.left, x2: this.right, y1: y, y2: y }), part("text", { class: "ty", x: this.left - 6, y }, text)];
      });
      const steps = ticks(...this.view.x).filter(Number.isInteger);
      return [...rows, ...steps.map((step) => part("text", { class: "tx", x: this.px(step), y: this.bottom + 16 }, step))];
    }

    // Marks the steps from `start` to `end`; without them nothing.
    mark(start, end = start) {
      const [from, to] = start === undefined ? [this.left, this.left] : [start, end].map((step) => this.px(step)).sort((a, b) => a - b);
      this.chosen.setAttribute("x", from);
      this.chosen.setAttribute("width", to - from);
    }
  }

  function hover(chart) {
    const box = byId("hover");
    const hide = () => {
      box.hidden = true;
      chart.cross.style.visibility = "hidden";
    };
    for (const ended of ["pointerleave", "pointerup"]) chart.svg.addEventListener(ended, hide);
    chart.svg.addEventListener("pointermove", (event) => {
      const wanted = chart.stepAt(event.clientX);
      const [from, to] = chart.view.x;
      const steps = chart.series.map((one) => one.x[nearest(one.x, wanted)]);
      const step = steps[nearest(steps, wanted)];
      if (step < from || step > to) return hide();
      box.replaceChildren(make("b", "", "step " + step));
      for (const one of chart.series) {
        const at = nearest(one.x, step);
        const line = make("div", "key " + one.color);
        const name = chart.series.length > 1 ? one.label + " " : "";
        line.append(make("i"), document.createTextNode(name + one.y[at] + (one.x[at] === step ? "" : " (step " + one.x[at] + ")")));
        box.append(line);
      }
      chart.cross.setAttribute("x1", chart.px(step));
      chart.cross.setAttribute("x2", chart.px(step));
      chart.cross.style.visibility = "visible";
      box.hidden = false;
      const beside = event.clientX + 16 + box.offsetWidth > window.innerWidth ? -16 - box.offsetWidth : 16;
      box.style.left = Math.max(4, event.clientX + beside) + "px";
      box.style.top = Math.min(event.clientY + 12, window.innerHeight - box.offsetHeight - 8) + "px";
    });
  }

  // Calls `choose` with the two steps between which the pointer was drawn over a chart.
  function drag(chart, choose) {
    let start = null;
    const end = () => {
      start = null;
      chart.mark();
    };
    chart.svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      chart.svg.setPointerCapture(event.pointerId);
      start = { step: chart.stepAt(event.clientX), x: event.clientX };
    });
    chart.svg.addEventListener("pointermove", (event) => start && chart.mark(start.step, chart.stepAt(event.clientX)));
    chart.svg.addEventListener("pointercancel", end);
    chart.svg.addEventListener("pointerup", (event) => {
      const from = start;
      end();
      if (from && Math.abs(event.clientX - from.x) > 5) choose(from.step, chart.stepAt(event.clientX));
    });
  }

  const known = new WeakMap();
  let all = [];
  let range = kept.zoom || null;
  const first = () => Math.min(...all.map((one) => one.whole.x[0]));
  const last = () => Math.max(...all.map((one) => one.whole.x[1]));
  const [fromInput, toInput] = [byId("zoom-from"), byId("zoom-to")];

  function zoom(one, other) {
    const [from, to] = [one, other].map(Math.round).sort((a, b) => a - b);
    range = from > first() || to < last() ? [from, Math.max(to, from + 1)] : null;
    for (const chart of all) chart.show(range);
    [fromInput.value, toInput.value] = range || [Math.ceil(first()), Math.floor(last())];
    byId("zoom-reset").disabled = !range;
    keep({ zoom: range });
  }
  const reset = () => zoom(first(), last());
  const typed = (input, otherwise) => (input.value === "" ? otherwise : Number(input.value));
  for (const input of [fromInput, toInput]) input.addEventListener("change", () => zoom(typed(fromInput, first()), typed(toInput, last())));
  byId("zoom-reset").addEventListener("click", reset);
  document.addEventListener("keydown", (event) => event.key === "Escape" && reset());

  function made(figure, series) {
    const chart = new Chart(figure, series);
    hover(chart);
    drag(chart, zoom);
    chart.svg.addEventListener("dblclick", reset);
    known.set(figure, chart);
    return chart;
  }

  // Takes the figures of the page, of which some may be new; `data` has their series by section.
  return (data) => {
    const figures = [...document.querySelectorAll("section")].flatMap((section) =>
      [...section.querySelectorAll(".chart")].map((figure, at) => [figure, (data[section.id] || [])[at]]));
    all = figures.map(([figure, series]) => known.get(figure) || made(figure, series));
    byId("zoom").hidden = !all.length;
    if (all.length) zoom(...(range || [first(), last()]));
  };
})();
