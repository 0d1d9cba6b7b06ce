// The table of all runs: sorted, filtered and grouped here, fetched anew every few seconds.
(() => {
  const COLUMNS = ["run", "state", "step", "reward", "curve", "changed", "verb", "alert"];
  let data = { rows: [], settings: [], now: 0 };
  let order = kept.order || { column: "changed", down: true };

  const ago = (seconds) => {
    const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([one]) => seconds >= one) || [1, "s"];
    return Math.max(0, Math.floor(seconds / size)) + " " + unit + " ago";
  };
  const numberOr = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);
  const valueOf = (row, column) => {
    const own = { run: row.key, state: row.state, step: row.step, reward: row.last, curve: row.last, changed: row.changed, verb: row.verb, alert: row.alerts };
    return column in own ? own[column] : numberOr(row.settings[data.settings.indexOf(column)] ?? "");
  };
  const textOf = (row) => [row.key, row.state, row.verdict, row.verb, row.alert ? row.alert.symptom : "", ...row.settings].join(" ").toLowerCase();

  function compare(one, other) {
    const [a, b] = [one, other].map((row) => valueOf(row, order.column));
    // Unknown values come last either way.
    if (a === null || b === null) return (a === null) - (b === null);
    const sign = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    return order.down ? -sign : sign;
  }

  function curve(values) {
    const svg = part("svg", { class: "curve", viewBox: "0 0 100 24", preserveAspectRatio: "none" });
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const at = (value, place) => [(place / Math.max(1, values.length - 1)) * 100, 22 - ((value - low) / (high - low || 1)) * 20].map((one) => one.toFixed(1)).join(" ");
    if (values.length > 1) svg.append(part("path", { class: "line k0", d: "M" + values.map(at).join("L") }));
    return svg;
  }

  function line(row) {
    const cells = COLUMNS.map(() => make("td"));
    const [name, state, step, reward, drawn, changed, verb, alert] = cells;
    const link = make("a", "", row.key);
    link.href = "run/" + encodeURIComponent(row.key) + "/";
    name.append(link);
    state.append(make("span", "verdict " + ({ done: "good", failed: "bad", stalled: "bad" }[row.state] || "open"), row.state));
    step.textContent = row.step;
    if (row.last !== null) reward.append(Number(row.last.toPrecision(4)), row.measure === "reward" ? "" : make("small", "", " " + row.measure));
    drawn.append(curve(row.curve));
    changed.textContent = row.changed ? ago(data.now - row.changed) : "";
    verb.textContent = row.verb;
    if (row.alert) {
      alert.append(make("b", "bad", row.alert.symptom), " step " + row.alert.step + (row.alerts > 1 ? ", " + row.alerts + " alerts" : ""));
      alert.title = row.alert.text;
    }
    const tr = make("tr");
    tr.append(...cells, ...row.settings.map((value) => make("td", "", value)));
    return tr;
  }

  function draw() {
    const words = byId("filter").value.toLowerCase().split(" ").filter(Boolean);
    const found = data.rows.filter((row) => words.every((word) => textOf(row).includes(word))).sort(compare);
    const group = byId("group").value;
    const groups = new Map();
    for (const row of found) {
      const value = group in row ? row[group] : row.settings[data.settings.indexOf(group)];
      groups.set(value, [...(groups.get(value) || []), row]);
    }
    const lines = [...groups].flatMap(([value, rows]) => {
      const head = make("tr", "group");
      const cell = make("th", "", group + ": " + value + " (" + rows.length + ")");
      cell.colSpan = COLUMNS.length + data.settings.length;
      head.append(cell);
      return [...(group ? [head] : []), ...rows.map(line)];
    });
    const heads = [...COLUMNS, ...data.settings].map((column) => {
      const button = make("button", column === order.column ? "on" : "", column + (column === order.column ? (order.down ? " ↓" : " ↑") : ""));
      button.dataset.column = column;
      const cell = make("th");
      cell.append(button);
      return cell;
    });
    byId("runs").tHead.rows[0].replaceChildren(...heads);
    byId("runs").tBodies[0].replaceChildren(...lines);
    byId("count").textContent = found.length + " of " + data.rows.length + " runs";
  }

  function show(found) {
    data = found;
    const select = byId("group");
    const chosen = select.value || kept.group || "";
    select.replaceChildren(new Option("nothing", ""), ...["state", "verb", ...data.settings].map((name) => new Option(name, name)));
    select.value = [...select.options].some((one) => one.value === chosen) ? chosen : "";
    draw();
  }

  byId("runs").tHead.addEventListener("click", (event) => {
    const column = event.target.dataset.column;
    if (!column) return;
    order = { column, down: column === order.column ? !order.down : column !== "run" };
    keep({ order });
    draw();
  });
  byId("filter").value = kept.filter || "";
  byId("filter").addEventListener("input", () => { keep({ filter: byId("filter").value }); draw(); });
  byId("group").addEventListener("input", () => { keep({ group: byId("group").value }); draw(); });
  poll(() => document.body.dataset.live, show, 5000);
})();
