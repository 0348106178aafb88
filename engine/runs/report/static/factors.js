// An ablation by its factors: small charts of one factor's values side by side, and which differences count.

const factorView = { factor: null, metric: "reward/mean" };
const MOST_PANELS = 24;

// The values of a factor in the order of the grid.
const valuesOf = (runs, factor) => [...new Set(runs.map((run) => run.factors[factor]))];

// A panel for each combination of the other settings: {title, lines}. A line has the runs of one value.
function panels(data, factor) {
  const values = valuesOf(data.runs, factor), places = new Map();
  for (const run of data.runs) {
    const others = Object.entries(run.factors).filter(([key]) => key !== factor);
    const title = others.map(([key, value]) => `${key.split(".").pop()} ${value}`).join(", ") || "all runs";
    if (!places.has(title)) places.set(title, values.map((value, color) => ({ name: value, color, runs: [] })));
    places.get(title)[values.indexOf(run.factors[factor])].runs.push(run);
  }
  return [...places].map(([title, all]) => ({ title, lines: all.filter((line) => line.runs.length) }));
}

function panelCurves(panel, chart) {
  return panel.lines
    .map((line) => ({ label: line.name, color: lineColor(line.color), smooth: chart.smooth, points: chart.metric === HELD_OUT,
      columns: columnsOf(line, chart.metric, chart.smooth ? view.smooth : 0) }))
    .filter((curve) => curve.columns);
}

// Least and largest value of all panels, so that all have one axis.
function commonRange(all, chart) {
  const values = all.flatMap((panel) => panelCurves(panel, chart)).flatMap(({ columns }) => [...(columns.low || columns.y), ...(columns.high || columns.y)]).filter(isNumber);
  return range(chart.zero, chart.unit)(null, values.length ? least(values) : null, values.length ? largest(values) : null);
}

function panelCard(panel, chart, shared) {
  const box = h("div.plot.small");
  queueMicrotask(() => draw(box, () => ({
    curves: panelCurves(panel, chart), height: 150, unit: chart.unit, range: () => shared,
    description: `${chart.title}, ${panel.title}. ${panelCurves(panel, chart).map((c) => `${c.label}: last ${number(c.columns.raw[c.columns.raw.length - 1], chart.unit)}`).join("; ")}`,
  })));
  return h("article.card.chart.third", null, h("h3", null, visible(panel.title)), box);
}

function effectsCard(effects) {
  const kinds = { exceeds: "span.pill.good", partly: "span.pill.warn", within: "span.hint", unknown: "span.hint" };
  const names = { exceeds: "exceeds the seeds' spread", partly: "in some places", within: "within the seeds' spread" };
  const columns = [
    ["factor", (e) => e.factor, (e) => h("td", null, h("code", null, visible(e.factor)))],
    ["values", (e) => `${e.second} ${e.first}`, (e) => h("td.wide", null, visible(`${e.second} against ${e.first}`))],
    ["figure", (e) => e.name, (e) => h("td", null, e.name)],
    ["difference", (e) => e.difference, (e) => h("td.num", null, `${e.difference > 0 ? "+" : ""}${exactly(e.difference)}`)],
    ["above", (e) => e.higher, (e) => h("td.num", null, `${e.higher} of ${e.places}`), "comparisons in which every seed of the first value lies above every seed of the second"],
    ["below", (e) => e.lower, (e) => h("td.num", null, `${e.lower} of ${e.places}`), "comparisons in which every seed of the first value lies below every seed of the second"],
    ["verdict", (e) => Object.keys(kinds).indexOf(e.verdict), (e) => h("td", null, h(kinds[e.verdict], null, names[e.verdict] || tooFew(e.least_seeds)))],
  ];
  const body = h("tbody"), all = [...effects];
  let sorted = null;
  const show = () => fill(body, all.map((e) => h("tr", null, columns.map(([, , cell]) => cell(e)))));
  const heads = columns.map(([name, key, , title], i) => h(i >= 3 && i <= 5 ? "th.num" : "th", null, h("button", {
    type: "button", title: title || null,
    onclick: () => {
      sorted = sorted === i ? ~i : i;
      const sign = sorted < 0 ? -1 : 1;
      all.sort((a, b) => sign * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
      heads.forEach((head, j) => head.setAttribute("aria-sort", j !== i ? "none" : sign > 0 ? "ascending" : "descending"));
      show();
    },
  }, name)));
  show();
  return h("article.card", null, h("h3", null, "Which differences exceed the seeds' spread?"),
    h("p.hint", null, "Two values of a factor are compared wherever all other settings are equal. The difference exceeds the seeds' spread where the ranges over the seeds do not overlap. With two seeds that happens by chance in one of three comparisons, which is too often to tell; with three in one of ten, with four in one of 35."),
    h("div.scroll", { tabindex: "0", role: "region", "aria-label": "differences between the values of each factor" }, h("table", null, h("thead", null, h("tr", null, heads)), body)));
}

// Null for a page that is not about an ablation.
function factorsSection(store) {
  const data = store.data, factors = data.factors;
  if (!factors.length) return null;
  if (!factors.includes(factorView.factor)) factorView.factor = factors[0];
  const present = data.charts.filter((chart) => has(data, chart.metric));
  if (!present.length) return null;
  if (!present.some((chart) => chart.metric === factorView.metric)) factorView.metric = present[0].metric;
  const key = h("ul.key"), grid = h("div.grid"), more = h("p.hint");
  const show = () => {
    const chart = present.find((c) => c.metric === factorView.metric);
    const all = panels(data, factorView.factor), shown = all.slice(0, MOST_PANELS), shared = commonRange(shown, chart);
    fill(key, valuesOf(data.runs, factorView.factor).map((value, i) => h("li", null, swatch(lineColor(i)), visible(value))));
    fill(grid, shown.map((panel) => panelCard(panel, chart, shared)));
    more.textContent = all.length > shown.length ? `The first ${shown.length} of ${all.length} combinations of the other settings.` : "";
  };
  const choose = (name, chosen, options) => h("select", { onchange: (e) => { factorView[name] = e.target.value; show(); } },
    options.map(([value, text]) => h("option", { value, selected: value === chosen }, visible(text))));
  show();
  return h("section", { id: "factors", "aria-labelledby": "factors-title" },
    h("header", null, h("h2", { id: "factors-title" }, "Factors")),
    h("div.stack", null, data.effects.length ? effectsCard(data.effects) : null,
      h("div.controls", null,
        h("label", null, "values of", choose("factor", factorView.factor, factors.map((f) => [f, f]))),
        h("label", null, "chart", choose("metric", factorView.metric, present.map((c) => [c.metric, c.title]))), key),
      h("p.hint", null, "A chart for each combination of the other settings, all with the same axes. A line is the mean over the seeds, its band goes from the least to the most."),
      grid, more));
}
