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
    .map((line) => ({ label: line.name, color: lineColor(line.color), faint: chart.smooth && view.smooth > 0, points: chart.metric === HELD_OUT,
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
  const order = Object.keys(kinds);
  const columns = [
    { name: "factor", key: (e) => e.factor, cell: (e) => h("code", null, visible(e.factor)) },
    { name: "values", key: (e) => `${e.second} ${e.first}`, cell: (e) => visible(`${e.second} against ${e.first}`) },
    { name: "figure", key: (e) => e.name, cell: (e) => e.name },
    { name: "difference", key: (e) => e.difference, cell: (e) => `${e.difference > 0 ? "+" : ""}${exactly(e.difference)}`, num: true },
    { name: "above", key: (e) => e.higher, cell: (e) => `${e.higher} of ${e.places}`, num: true, title: "comparisons in which every seed of the first value lies above every seed of the second" },
    { name: "below", key: (e) => e.lower, cell: (e) => `${e.lower} of ${e.places}`, num: true, title: "comparisons in which every seed of the first value lies below every seed of the second" },
    { name: "verdict", key: (e) => order.indexOf(e.verdict), cell: (e) => h(kinds[e.verdict], null, names[e.verdict] || tooFew(e.least_seeds)) },
  ];
  return h("article.card", null, h("h3", null, "Which differences exceed the seeds' spread?"),
    h("p.hint", null, "Two values of a factor are compared wherever all other settings are equal. The difference exceeds the seeds' spread where the ranges over the seeds do not overlap. With two seeds that happens by chance in one of three comparisons, which is too often to tell; with three in one of ten, with four in one of 35."),
    sortedTable("differences between the values of each factor", columns, effects));
}

// The sampler's figure and the trainer's of the problems that a policy is judged by.
const POLICIES = [["training problems", "reward_last10", "training_last"], ["held-out problems", "sampler_held_out_last", "held_out_last"]];

// A row for each combination: a small mark for each seed's figure, and a large one for their mean.
function policyChart(combinations, [title, sampler, trainer]) {
  const box = h("div.plot"), rows = combinations.map((c) => visible(c.name));
  const seeds = largest(combinations.map((c) => c.runs.length));
  const marksOf = (figure, kind, i) => {
    const x = combinations.map((_, row) => row + (i ? 0.13 : -0.13));
    const marks = (size, share, value) => ({ label: figure, kind, size, share, color: lineColor(i), columns: { x, y: combinations.map(value) } });
    return [...Array.from({ length: seeds }, (_, seed) => marks(4, 0.45, (c) => c.runs[seed]?.[figure] ?? null)), marks(9, 1, (c) => c.mean[figure])];
  };
  const words = combinations.map((c) => `${visible(c.name)}: sampler's policy ${fixed(c.mean[sampler])}, trainer's ${fixed(c.mean[trainer])}`);
  queueMicrotask(() => draw(box, () => ({ curves: [...marksOf(sampler, "hollow", 0), ...marksOf(trainer, "marks", 1)], rows, height: 60 + 30 * rows.length,
    description: `Reward, ${title}. ${words.join("; ")}` })));
  return h("div.half", null, h("p.hint", null, `reward, ${title}`), box);
}

function policiesCard(combinations) {
  return h("article.card", null, h("h3", null, "Rewards at the end"),
    h("ul.key", null, h("li", null, h("span.swatch.ring.l0"), "the sampler's policy"), h("li", null, h("span.swatch.l1"), "the trainer's policy, which is saved")),
    h("div.grid", null, POLICIES.map((policy) => policyChart(combinations, policy))));
}

const MOST_MAPS = 12;

// A field for each combination, with its reward: the last axis to the right, the one before upwards, and a panel
// for each label of those before them. Where the sampler differs, the field has k3 a sequence, too.
function mapCard(combinations) {
  const axes = Object.keys(combinations[0].settings);
  const labels = axes.map((axis) => [...new Set(combinations.map((c) => c.settings[axis]))]);
  const titles = labels.slice(0, -2).reduce((before, next) => before.flatMap((title) => next.map((label) => [...title, label])), [[]]);
  if (axes.length < 2 || titles.length > MOST_MAPS) return null;
  const [rows, columns] = labels.slice(-2), means = combinations.map((c) => c.mean.reward_last10).filter(isNumber);
  const low = Math.min(0, ...means), high = Math.max(1, ...means);  // a reward may lie outside
  const field = (place) => {
    const c = combinations.find(({ settings }) => axes.every((axis, i) => settings[axis] === place[i]));
    if (!c || !isNumber(c.mean.reward_last10)) return h("td");
    const k3 = c.mean.mismatch_k3_sequence_mean;
    const cell = h("td", null, c.mean.reward_last10.toFixed(2), k3 ? h("div", null, `${k3.toPrecision(2)} nats`) : null);
    cell.style.background = `color-mix(in srgb, var(--accent) ${Math.round((45 * (c.mean.reward_last10 - low)) / (high - low))}%, transparent)`;
    return cell;
  };
  const panel = (title) => h("div.third.scroll", { tabindex: "0", role: "region", "aria-label": `map of rewards ${visible(title.join(", "))}` }, h("table.map", null,
    title.length ? h("caption", null, visible(title.join(", "))) : null,
    h("thead", null, h("tr", null, h("th", { scope: "col" }, visible(axes.at(-2))), columns.map((label) => h("th", { scope: "col" }, visible(label))))),
    h("tbody", null, [...rows].reverse().map((row) => h("tr", null, h("th", { scope: "row" }, visible(row)), columns.map((column) => field([...title, row, column])))))));
  return h("article.card", null, h("h3", null, "Map of rewards"),
    h("p.hint", null, "The mean reward of the last ten steps, and below it the mismatch, k3 a sequence, where there is one. To the right: ", h("code", null, visible(axes.at(-1))), "."),
    h("div.grid", null, titles.map(panel)));
}

// Null for a page that is not about an ablation.
function factorsSection(store) {
  const { combinations, effects } = store.data;
  if (!combinations.length) return null;
  return h("section", { id: "factors", "aria-labelledby": "factors-title" },
    h("header", null, h("h2", { id: "factors-title" }, "Factors")),
    h("div.stack", null, effects.length ? effectsCard(effects) : null, factorCharts(store), policiesCard(combinations), mapCard(combinations)));
}

// A chart for each combination of the other settings, of the factor and the metric that are chosen.
function factorCharts(store) {
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
  return [h("div.controls", null,
    h("label", null, "values of", choose("factor", factorView.factor, factors.map((f) => [f, f]))),
    h("label", null, "chart", choose("metric", factorView.metric, present.map((c) => [c.metric, c.title]))), key),
  h("p.hint", null, "A chart for each combination of the other settings, all with the same axes. A line is the mean over the seeds, its band goes from the least to the most."),
  grid, more];
}
