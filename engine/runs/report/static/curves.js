// The curves of runs by step, tokens or time: one line a run, or one line with a band a group of runs.

const view = { x: "step", smooth: 0, hidden: new Set() };

// The lines of the page: {name, color number, runs}. Runs of one group are one line.
function lines(data) {
  const groups = new Map();
  data.runs.forEach((run, i) => {
    const key = run.group ? `group ${run.group}` : `run ${i}`;
    if (!groups.has(key)) groups.set(key, { name: run.group || run.name, runs: [] });
    groups.get(key).runs.push(run);
  });
  return [...groups.values()].map((line, i) => ({ ...line, color: i }));
}

// The x value of each step of a run.
function positions(run, x) {
  const m = run.metrics;
  if (x === "step") return m.step || [];
  let sum = 0;
  return (m.step || []).map((_, i) => {
    sum += x === "tokens" ? m.tokens[i] : ((m["time/sample_s"] || [])[i] || 0) + ((m["time/train_s"] || [])[i] || 0);
    return sum;
  });
}

const HELD_OUT = "eval/reward";

// The points of a metric of a run. A reward of an evaluation is of the weights after some steps, so its place is
// the number of steps done: 0 is the model that the run began with.
function points(run, metric, x) {
  const at = positions(run, x);
  if (metric === HELD_OUT) {
    const place = (done) => (x === "step" ? done : done > 0 ? at[done - 1] : 0);
    return { x: run.held_out.map(([done]) => place(done)), y: run.held_out.map(([, value]) => value) };
  }
  const values = run.metrics[metric] || [];
  const kept = values.map((v, i) => i).filter((i) => isNumber(values[i]));
  const done = metric.startsWith("eval/") && x === "step" ? 1 : 0;
  return { x: kept.map((i) => at[i] + done), y: kept.map((i) => values[i]) };
}

// An exponential mean whose beginning has no bias; gaps stay gaps.
function smoothed(values, share) {
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (!isNumber(value)) return value === undefined ? null : value;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}

// Columns of one line: x, value, and for a group the least and the largest value as well.
function columnsOf(line, metric, share) {
  const parts = line.runs
    .map((run) => points(run, metric, line.runs.length > 1 ? "step" : view.x))
    .filter((part) => part.x.length);
  if (!parts.length) return null;
  if (parts.length === 1) return { x: parts[0].x, y: smoothed(parts[0].y, share), raw: parts[0].y };
  const at = new Map();
  for (const part of parts) {
    part.x.forEach((x, i) => { if (!at.has(x)) at.set(x, []); at.get(x).push(part.y[i]); });
  }
  const x = [...at.keys()].sort((a, b) => a - b);
  const of = (f) => smoothed(x.map((key) => f(at.get(key))), share);
  return {
    x, y: of((v) => v.reduce((a, b) => a + b, 0) / v.length), low: of((v) => Math.min(...v)), high: of((v) => Math.max(...v)),
    raw: x.map((key) => at.get(key).reduce((a, b) => a + b, 0) / at.get(key).length),
  };
}

const X_NAMES = { step: "step", tokens: "tokens trained on", time: "seconds of training" };

// First and last value of a metric, in words, for those who cannot see the chart.
function inWords(data, metric, title, unit) {
  const parts = lines(data).map((line) => {
    const columns = columnsOf(line, metric, 0);
    if (!columns) return null;
    const y = columns.raw;
    return `${line.name}: from ${number(y[0], unit)} to ${number(y[y.length - 1], unit)}, least ${number(least(y), unit)}, largest ${number(largest(y), unit)}`;
  });
  return `${title} by ${X_NAMES[view.x]}. ${parts.filter(Boolean).join("; ")}`;
}

// The card of one chart of the table that charts.py has.
function chartCard(store, chart) {
  const reading = h("span.reading"), box = h("div.plot");
  const card = h("article.card.chart.third", null,
    h("div.head", null, h("h3", null, chart.title, chart.unit && h("span.hint", null, ` ${chart.unit}`)), reading), box,
    h("p", null, chart.what, " ", h("b", null, "Healthy: "), lower(chart.healthy), " ", h("b", null, "Red flag: "), lower(chart.red_flag)));
  const curves = () => lines(store.data)
    .filter((line) => !view.hidden.has(line.name))
    .map((line) => ({ label: line.name, color: lineColor(line.color), faint: chart.smooth && view.smooth > 0, points: chart.metric === HELD_OUT,
      columns: columnsOf(line, chart.metric, chart.smooth ? view.smooth : 0) }))
    .filter((curve) => curve.columns);
  const show = (index, data) => {
    const list = curves();
    if (list.length !== 1) { reading.textContent = ""; return; }
    const { x, raw } = list[0].columns;
    let i = raw.length - 1;
    if (index !== null && index !== undefined && data[0][index] !== undefined) i = Math.max(0, x.findLastIndex((v) => v <= data[0][index]));
    const format = chart.metric.startsWith("mismatch/") ? exactly : (v) => number(v, chart.unit);
    reading.textContent = i === raw.length - 1 ? `last ${format(raw[i])}` : `${X_NAMES[view.x].split(" ")[0]} ${number(x[i])}: ${format(raw[i])}`;
  };
  // The size of the box is known once the card is on the page.
  queueMicrotask(() => {
    draw(box, () => ({ curves: curves(), height: 190, unit: chart.unit, zero: chart.zero, description: inWords(store.data, chart.metric, chart.title, chart.unit) }), show);
    show(null);
  });
  return card;
}
const lower = (sentence) => sentence.charAt(0).toLowerCase() + sentence.slice(1);

const has = (data, metric) => data.runs.some((run) => points(run, metric, "step").x.length > 0);

// Buttons of the lines: press one to hide or show it everywhere.
function legend(store) {
  const all = lines(store.data);
  if (all.length < 2) return null;
  return h("ul.legend", { "aria-label": "lines of the charts" }, all.map((line) => h("li", null, h("button", {
    type: "button", "aria-pressed": String(!view.hidden.has(line.name)),
    onclick: (event) => {
      const hide = !view.hidden.has(line.name);
      if (hide) view.hidden.add(line.name); else view.hidden.delete(line.name);
      event.currentTarget.setAttribute("aria-pressed", String(!hide));
      redrawCharts();
    },
  }, swatch(lineColor(line.color)), visible(line.name)))));
}

function chartSections(store) {
  const controls = h("div.controls", null,
    h("label", null, "by", h("select", { onchange: (e) => { view.x = e.target.value; redrawCharts(); } },
      Object.entries(X_NAMES).map(([key, name]) => h("option", { value: key }, name)))),
    h("label", { title: "means and rates; a count is drawn as it is" }, "smooth", h("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: String(view.smooth),
      oninput: (e) => { view.smooth = Number(e.target.value); redrawCharts(); } })),
    h("span.hint", null, "Drag over a chart to zoom, double-click to go back."));
  const names = [...new Set(store.data.charts.map((chart) => chart.section))];
  return names.map((name, i) => {
    const own = store.data.charts.filter((chart) => chart.section === name);
    const present = own.filter((chart) => has(store.data, chart.metric));
    const absent = own.filter((chart) => chart.absent && !present.includes(chart));
    return h("section", { id: name.toLowerCase(), "aria-labelledby": `${name}-title` },
      h("header", null, h("h2", { id: `${name}-title` }, name), i === 0 && controls),
      i === 0 && legend(store),
      h("div.grid", null, name === "Speed"
        ? [timeCard(store), h("div.half.stack", null, present.map((chart) => chartCard(store, chart)))]
        : present.map((chart) => chartCard(store, chart))),
      absent.length > 0 && h("ul.absent", null, absent.map((chart) => h("li", null, `${chart.title} is not shown: ${chart.absent}.`))));
  });
}
