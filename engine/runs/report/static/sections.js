// Where the time goes, the settings, and the ledger.

// Parts of a step: shades of one colour for sampling, of another for training.
const SHADES = {
  sample: ["#0b3d7a", "#1f6fd1", "#5b9bea", "#a9cdf7"],
  train: ["#7a2e04", "#c4500c", "#e88a4c", "#f5b98e", "#9a6a4a", "#d9c3b3"],
};

// Seconds of each part of a step, sampling before training.
function timeParts(data, run) {
  const mean = (name) => {
    const values = (run.metrics[name] || []).filter(isNumber);
    return values.length ? values.reduce((a, b) => a + b, 0) / values.length : 0;
  };
  const parts = data.stations.map(([metric, name, half]) => ({ name, half, seconds: mean(metric) }));
  const rest = (half) => mean(`time/${half}_s`) - parts.filter((p) => p.half === half).reduce((a, p) => a + p.seconds, 0);
  parts.push({ name: "the rest of sampling", half: "sample", seconds: Math.max(0, rest("sample")) });
  parts.push({ name: "the rest of training", half: "train", seconds: Math.max(0, rest("train")) });
  const count = { sample: 0, train: 0 };
  return parts
    .map((part) => ({ ...part, color: SHADES[part.half][(count[part.half]++) % SHADES[part.half].length] }))
    .filter((part) => part.seconds > 0)
    .sort((a, b) => (a.half === b.half ? b.seconds - a.seconds : a.half === "sample" ? -1 : 1));
}

function timeCard(store) {
  const body = h("div");
  const show = (number_) => {
    const run = store.data.runs[number_];
    const parts = timeParts(store.data, run);
    const sum = parts.reduce((a, part) => a + part.seconds, 0);
    if (!sum) { fill(body, h("p.hint", null, "No step is done yet.")); return; }
    const bar = h("div.share", { "aria-hidden": "true" });
    for (const part of parts) {
      const piece = h("span", { title: `${part.name}: ${number(part.seconds)} s` });
      piece.style.flexGrow = 100 * part.seconds / sum; // below a sum of 1 flexbox leaves room
      piece.style.background = part.color;
      bar.append(piece);
    }
    fill(body, bar, scrolled("parts of a step", h("table", null,
      h("thead", null, h("tr", null, h("th", null, "part"), h("th", null, "of"), h("th.num", null, "seconds"), h("th.num", null, "share"))),
      h("tbody", null, parts.map((part) => h("tr", null, h("td", null, swatch(part.color), " ", part.name), h("td", null, part.half === "sample" ? "sampling" : "training"),
        h("td.num", null, number(part.seconds)), h("td.num", null, `${(100 * part.seconds / sum).toFixed(1)} %`)))))));
  };
  const chooser = runChooser(store.data, show);
  show(0);
  return h("article.card.half", null,
    h("div.head", null, h("h3", null, "Where a step's time goes"), chooser), body,
    h("p.hint", null, "Means over all steps. Evaluation and checkpoints are in none of them."));
}

function runChooser(data, onChange, more) {
  if (data.runs.length < 2 && !more) return null;
  return h("select", { "aria-label": "run", onchange: (event) => onChange(Number(event.target.value)) },
    data.runs.map((run, i) => h("option", { value: String(i) }, visible(run.group ? `${run.group} · ${run.name}` : run.name))));
}

function settingsSection(data) {
  const several = data.runs.length > 1;
  const body = h("tbody");
  const search = h("input", { type: "search", placeholder: "part of a key or value", oninput: () => show() });
  const only = h("input", { type: "checkbox", onchange: () => show() });
  // Of several runs, what differs between them; of one run, what differs from the defaults.
  const stands = (row) => (several ? row.differs : row.changed);
  only.checked = data.settings.some(stands);
  const shownRuns = data.runs.slice(0, 12);
  const show = () => {
    const word = search.value.toLowerCase();
    const rows = data.settings.filter((row) => (!only.checked || stands(row)) && (!word || row.key.includes(word) || row.values.some((v) => v.toLowerCase().includes(word))));
    fill(body, rows.length ? rows.map((row) => h(row.differs ? "tr.differs" : "tr", null, h("th", { scope: "row" }, h("code", null, row.key)),
      row.values.slice(0, 12).map((value) => h("td.wide", null, visible(value))), h("td", null, row.decides ? "decides bits" : "free")))
      : h("tr", null, h("td", { colspan: String(shownRuns.length + 2) }, "No setting fits.")));
  };
  show();
  return h("section", { id: "settings", "aria-labelledby": "settings-title" },
    h("header", null, h("h2", { id: "settings-title" }, "Settings"),
      h("div.controls", null, h("label", null, "search", search), h("label", null, only, several ? "only those that differ" : "only those that are not the default"))),
    h("div.card.scroll", { tabindex: "0", role: "region", "aria-label": "table of settings" }, h("table", null,
      h("thead", null, h("tr", null, h("th", null, "setting"), shownRuns.map((run) => h("th", null, visible(run.name))), h("th", null, "by the law"))), body)),
    data.runs.length > shownRuns.length && h("p.hint", null, `The first ${shownRuns.length} of ${data.runs.length} runs.`));
}

function ledgerSection(data) {
  return h("section", { id: "ledger", "aria-labelledby": "ledger-title" },
    h("header", null, h("h2", { id: "ledger-title" }, "Ledger"),
      h("p.lead", null, "Each line holds the hashes of all that a step computed, chained to the line before. Two runs with one fingerprint are equal to the bit.")),
    data.comparisons.length ? h("article.card", null, h("h3", null, "First difference from ", visible(data.runs[0].name)),
      scrolled("first differences", h("table", null, h("tbody", null, data.comparisons.map((c) => h("tr", null,
        h("th", { scope: "row" }, visible(c.runs[1])),
        h("td", null, h(`span.pill.${c.equal ? "good" : "warn"}`, null, c.equal ? "equal" : "differs")),
        h("td.wide", null, visible(c.text), c.place ? h("div.hint", null, visible(c.place)) : null, c.explains.map((line) => h("div.hint", null, "may explain it: ", visible(line)))))))))) : null,
    h("div.grid", null, data.runs.slice(0, 12).map((run) => ledgerCard(run, data.runs.length))));
}

function ledgerCard(run, runs) {
  const ledger = run.ledger;
  const row = (name, value) => (value ? h("tr", null, h("th", { scope: "row" }, name), h("td.wide", null, value)) : null);
  return h(`article.card${runs > 1 ? ".half" : ""}`, null,
    h("div.head", null, h("h3", null, visible(run.name)),
      ledger.damage ? h("span.pill.bad", null, "chain broken") : h("span.pill.good", null, `chain checked, ${plural(ledger.steps, "step")}`)),
    scrolled(`ledger of ${visible(run.name)}`, h("table", null, h("tbody", null,
      row("damage", ledger.damage && visible(ledger.damage)),
      row("fingerprint", h("span.hash", null, ledger.fingerprint)),
      row("final weights", ledger.weights && h("span.hash", null, ledger.weights)),
      row("first weights", ledger.first_weights && h("span.hash", null, ledger.first_weights)),
      row("data", ledger.data && h("span.hash", null, ledger.data)),
      row("resumed at", (ledger.resumed || []).length ? `step ${ledger.resumed.join(", ")}, in another environment` : null)))),
    h("details", null, h("summary", null, "environment, which no hash covers"),
      h("table", null, h("tbody", null, Object.entries(ledger.environment).map(([key, value]) => row(key, visible(value)))))));
}
