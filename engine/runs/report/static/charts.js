// Line charts by step, tokens or time: one line a run, or one line with a band a group of runs.

const view = { x: "step", smooth: 0, hidden: new Set() };
const charts = [];  // of everything that is drawn, to draw it again

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

// What uPlot takes: aligned data, series and bands. curves: [{metric, color, label, dash, columns}].
function aligned(curves, faint) {
  const tables = [], series = [{}], bands = [];
  for (const curve of curves) {
    const { x, y, low, high, raw } = curve.columns;
    const few = x.length <= 40 && curve.points;
    const line = { label: curve.label, stroke: curve.color, width: 2, dash: curve.dash, spanGaps: true,
      points: { show: few || x.length === 1, size: 6, fill: curve.color, stroke: curve.color } };
    if (low) {
      const i = series.length;
      tables.push([x, y, high, low]);
      const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      series.push(line, { ...edge }, { ...edge });
      bands.push({ series: [i + 1, i + 2], fill: translucent(curve.color, 0.16) });
    } else if (faint && curve.smooth) {
      tables.push([x, raw, y]);
      series.push({ stroke: translucent(curve.color, 0.25), width: 1, points: { show: false }, spanGaps: true }, line);
    } else {
      tables.push([x, y]);
      series.push(line);
    }
  }
  return { data: tables.length ? uPlot.join(tables) : [[]], series, bands };
}

// Values at the axis, without the digits that do not differ.
function ticks(values, unit) {
  if (unit === "bytes") return values.map((v) => (v === 0 ? "0" : bytes(v).replace(/\.00? /, " ")));
  return values.map((v) => (v === null ? "" : Math.abs(v) >= 1e4 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(1).replace("e+", "e").replace(".0e", "e") : String(+v.toPrecision(6))));
}

function range(zero, unit) {
  return (_, low, high) => {
    if (low === null || low === undefined) return [0, 1];
    if (low === 0 && high === 0) return [-0.5, 1];  // a line of zeros is seen, off the axis
    if (low === high) { const d = Math.abs(low) * 0.1 || 1; return [zero && low >= 0 ? 0 : low - d, high + d]; }
    const room = (high - low) * 0.07;
    if (zero && low >= 0) return [0, high + high * 0.06];
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  };
}

const POWERS = Array.from({ length: 50 }, (_, i) => 2 ** i);
const X_NAMES = { step: "step", tokens: "tokens trained on", time: "seconds of training" };

// A chart in `box`. make() returns {curves, height, unit, zero, top}; onCursor(index or null, curves, data).
function draw(box, make, onCursor) {
  const entry = { box, plot: null };
  entry.redraw = () => {
    const spec = make();
    const faint = view.smooth > 0;
    const { data, series, bands } = aligned(spec.curves, faint);
    const axis = { stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const y = { ...axis, incrs: spec.unit === "bytes" ? POWERS : undefined, size: spec.unit === "bytes" ? 74 : 54, values: (_, values) => ticks(values, spec.unit) };
    const options = {
      width: Math.max(200, box.clientWidth), height: spec.height, series, bands, legend: { show: false },
      axes: [{ ...axis, size: 30, space: 60, values: (_, v) => ticks(v) }, y],
      scales: { x: { time: false }, y: { range: spec.range || range(spec.zero, spec.unit) } },
      cursor: { sync: { key: "zerokl" }, points: { size: 7 }, drag: { x: true, y: false } },
      padding: [10, 14, 0, 0],
      hooks: { setCursor: [(u) => onCursor && onCursor(u.cursor.idx, u.data)] },
    };
    if (entry.plot) entry.plot.destroy();
    box.replaceChildren();
    entry.plot = new uPlot(options, data, box);
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", spec.description);
  };
  entry.resize = () => {
    if (entry.plot && box.clientWidth > 0 && entry.plot.width !== box.clientWidth) {
      entry.plot.setSize({ width: box.clientWidth, height: entry.plot.height });
    }
  };
  new ResizeObserver(() => entry.resize()).observe(box);
  charts.push(entry);
  entry.redraw();
  return entry;
}

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
const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const largest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

// The card of one chart of the table that charts.py has.
function chartCard(store, chart) {
  const reading = h("span.reading"), box = h("div.plot");
  const card = h("article.card.chart.third", null,
    h("div.head", null, h("h3", null, chart.title, chart.unit && h("span.hint", null, ` ${chart.unit}`)), reading), box,
    h("p", null, chart.what, " ", h("b", null, "Healthy: "), lower(chart.healthy), " ", h("b", null, "Red flag: "), lower(chart.red_flag)));
  const curves = () => lines(store.data)
    .filter((line) => !view.hidden.has(line.name))
    .map((line) => ({ label: line.name, color: lineColor(line.color), smooth: chart.smooth, points: chart.metric === HELD_OUT,
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

function redrawCharts() {
  for (const chart of charts) if (chart.box.isConnected) chart.redraw();
}

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
