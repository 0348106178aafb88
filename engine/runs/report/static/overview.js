// The top of the page: did it learn, is the mismatch zero, what did it write, how to do it again.

function masthead(data) {
  const one = data.runs.length === 1 ? data.runs[0] : null;
  return h("div.masthead", null,
    h("h1", null, visible(data.title)),
    one ? h(`span.pill.${one.status.state}`, null, visible(one.status.text)) : h("span.pill.done", null, plural(data.runs.length, "run")),
    one && one.figures.seconds ? h("span.hint", null, duration(one.figures.seconds)) : null,
    one && h("p.facts", null, visible([...one.facts, one.path].join("  ·  "))));
}

function overview(store) {
  const data = store.data;
  return data.runs.length === 1 ? overviewOfOne(store, data.runs[0]) : overviewOfSeveral(store);
}

function overviewOfOne(store, run) {
  return h("section", { id: "overview", "aria-labelledby": "overview-title" }, h("h2.unseen", { id: "overview-title" }, "Overview"),
    h("div.grid", null, figures(run), learntCard(store, "seven"), writesCard(run, "five"), commandsCard(run)));
}

function figure(kind, name, value, note) {
  return h(`article.card.figure.quarter${kind ? `.${kind}` : ""}`, null, h("div.name", null, name), h("div.value", null, value), h("div.note", null, note));
}

const arrow = (first, last) => [isNumber(first) ? [h("small", null, fixed(first)), h("small", null, " → ")] : null, fixed(last)];

function figures(run) {
  const f = run.figures;
  const collapsed = isNumber(f.collapse_step) && run.steps - f.collapse_step >= 5;
  return [
    figure(collapsed || (run.steps && f.no_signal === run.steps) ? "bad" : "", "Training reward", arrow(f.reward_first, f.reward_last),
      [collapsed ? `it fell below 0.8 of its peak at step ${f.collapse_step}` : `first step → mean of ${run.steps < 5 ? "all" : "the last five"}`,
        f.no_signal ? `; no signal in ${f.no_signal} of ${plural(run.steps, "step")}: their gradient was exactly 0` : ""]),
    figure("", f.held_out_is_accuracy ? "Held-out accuracy" : "Held-out mean reward", isNumber(f.held_out_last) ? arrow(f.held_out_first, f.held_out_last) : "–",
      isNumber(f.sampler_held_out_last) ? `what is saved; the sampler's policy has ${fixed(f.sampler_held_out_last)}`
      : isNumber(f.held_out_last) ? (isNumber(f.held_out_first) ? `${run.held_out[0][0] === 0 ? "before the first step" : "first evaluation"} → last evaluation` : "the last evaluation") : "no evaluation"),
    mismatchFigure(run),
    figure("", "Speed", [number(f.tokens_per_s), h("small", null, " tokens/s")],
      [plural(run.steps, "step"), f.skipped ? `, ${plural(f.skipped, "update")} skipped` : "", isNumber(f.step_s) ? `, ${number(f.step_s)} s each` : ""]),
  ];
}

function mismatchFigure(run) {
  const f = run.figures, tokens = f.tokens.toLocaleString("en");
  if (f.max_abs === null) {
    const stopped = run.status.state === "stopped";
    return figure(stopped ? "bad" : "", "Mismatch, trainer − sampler", stopped ? "found" : "–", stopped ? "the first step was stopped" : "no step is done yet");
  }
  if (run.status.text.startsWith("stopped before")) return figure("bad", "Mismatch, trainer − sampler", "found", `after ${tokens} equal tokens; the run has stopped`);
  if (f.unequal === 0 && f.max_abs === 0) return figure("good", "Mismatch, trainer − sampler", "0.0", `all ${tokens} tokens equal to the bit`);
  return figure(run.exact ? "bad" : "", "Mismatch, trainer − sampler", [number(f.k3), h("small", null, " nats a token (k3)")],
    `${f.unequal.toLocaleString("en")} of ${tokens} tokens unequal, by up to ${number(f.max_abs)}`);
}

// Reward and held-out reward in one chart.
function learntCard(store, width) {
  const box = h("div.plot.tall");
  const reading = h("span.reading");
  const several = lines(store.data).length > 1;
  const curves = () => lines(store.data).filter((line) => !view.hidden.has(line.name)).flatMap((line) => {
    const reward = columnsOf(line, "reward/mean", view.smooth), heldOut = columnsOf(line, HELD_OUT, 0);
    const color = lineColor(line.color);
    return [
      reward && { label: `${line.name} reward`, color, columns: reward, faint: view.smooth > 0 },
      heldOut && { label: `${line.name} held-out`, color: several ? color : lineColor(1), columns: heldOut, points: true, dash: [7, 4] },
    ].filter(Boolean);
  });
  const describe = () => `${inWords(store.data, "reward/mean", "Reward")}. ${has(store.data, HELD_OUT) ? inWords(store.data, HELD_OUT, "Held-out reward") : ""}`;
  const show = (index, data) => {
    const list = curves();
    if (several || index === null || index === undefined || !list.length) { reading.textContent = ""; return; }
    const x = data[0][index];
    const at = (columns) => columns.raw[Math.max(0, columns.x.findLastIndex((v) => v <= x))];
    reading.textContent = `step ${number(x)}: ${list.map((c) => `${c.points ? "held-out" : "reward"} ${fixed(at(c.columns))}`).join(", ")}`;
  };
  queueMicrotask(() => draw(box, () => ({ curves: curves(), height: 250, zero: true, description: describe() }), show));
  const keys = several
    ? [h("li", null, "solid: training reward"), h("li", null, "dashed: held-out reward")]
    : [h("li", null, swatch(lineColor(0)), "training reward"), has(store.data, HELD_OUT) && h("li", null, swatch(lineColor(1)), "held-out reward, dashed")];
  return h(`article.card.chart.${width}`, null,
    h("div.head", null, h("h3", null, several ? "Who learnt?" : "Did it learn?"), reading), box, h("ul.key", null, keys));
}

// A reward as a badge: green is the best reward that the run's examples have, red the worst.
function score(reward) {
  const kind = reward >= 0.999 ? "good" : reward <= 0 ? "bad" : "mid";
  return h(`span.score.${kind}`, { title: "reward" }, Number.isInteger(reward) ? reward.toFixed(1) : number(reward));
}

// A row for each prompt that occurs again: what was written early, and beside it what was written late.
function writesCard(run, width) {
  const { same_prompts: same, prompts, rose, fell, again } = run.examples;
  const written = (prompt, w) => h("li", null,
    h("span.said", null, h("span.prompt", null, visible(clip(prompt, 160))), h("b", null, visible(clip(w.text, 220))), w.finish === "length" ? h("span.prompt", null, " …") : null),
    score(w.reward),
    h("span.hint", null, `step ${w.step}`, w.n > 1 ? `, mean of ${w.n}: ${fixed(w.mean)}` : ""));
  const note = same
    ? `The same prompts early and late: the first completion of the step, its reward, and the mean of its group. Of ${plural(again, "prompt")} that came again the mean rose in ${rose} and fell in ${fell}; those that rose come first. `
    : "No prompt occurs in two steps, so these are other prompts: the first ones of the first and of the last step. ";
  return h(`article.card.${width}`, null,
    h("div.head", null, h("h3", null, "What the model wrote")),
    prompts.length ? h(same ? "ul.writes.pairs" : "ul.writes", null, prompts.map((e) => e.written.map((w) => written(e.prompt_text, w)))) : h("p.hint", null, "No rollouts yet."),
    prompts.length > 0 && h("p.hint", null, note, h("a", { href: "#rollouts" }, "All completions"), "."));
}
const clip = (text, length) => (text.length > length ? `${text.slice(0, length)} …` : text);

function commandsCard(run) {
  return h("article.card", null,
    h("h3", null, "Do it again"),
    h("div.commands", null, run.commands.map(({ what, command }) => h("div.command", null,
      h("div", null, h("span", null, what), h("code", { tabindex: "0" }, visible(command))), copyButton(command, `command: ${what}`))),
    run.ledger.fingerprint ? h("div.command", null,
      h("div", null, h("span", null, run.status.state === "done" ? "The fingerprint that an equal run ends with" : "The fingerprint so far"), h("code.hash", { tabindex: "0" }, run.ledger.fingerprint)),
      copyButton(run.ledger.fingerprint, "fingerprint")) : null));
}

function overviewOfSeveral(store) {
  const data = store.data;
  return h("section", { id: "overview", "aria-labelledby": "overview-title" }, h("h2.unseen", { id: "overview-title" }, "Overview"),
    h("div.grid", null, learntCard(store, "seven"), h("div.card.five", null, h("h3", null, "Differences"), differences(data)), runsCard(store)));
}

function differences(data) {
  const differing = data.settings.filter((row) => row.differs);
  const equal = data.comparisons.every((c) => c.equal);
  return [
    data.comparisons.length ? h("p", null, h(`span.pill.${equal ? "good" : "warn"}`, null, equal ? "equal to the bit" : "the runs differ")) : null,
    data.comparisons.length === 1 ? h("p.wide", null, visible(data.comparisons[0].text)) : null,
    differing.length
      ? scrolled("settings that differ", h("table", null,
        h("thead", null, h("tr", null, h("th", null, "setting"), h("th", null, "values"))),
        h("tbody", null, differing.slice(0, 8).map((row) => h("tr", null, h("td", null, h("code", null, row.key)), h("td.wide", null, [...new Set(row.values)].map(visible).join(", ")))))))
      : h("p.hint", null, "All settings are equal."),
    h("p.hint", null, h("a", { href: "#ledger" }, "The ledgers"), " and ", h("a", { href: "#settings" }, "all settings"), "."),
  ];
}

// How the runs of a line ended, and how many of them collapsed.
function states(line) {
  const words = { done: "finished", stopped: "stopped", open: "open" };
  const many = line.runs.length > 1;
  const pills = Object.keys(words).map((state) => {
    const runs = line.runs.filter((run) => run.status.state === state);
    return runs.length ? h(`span.pill.${state}`, { title: visible(runs[0].status.text) }, many ? `${runs.length} ${words[state]}` : words[state]) : null;
  });
  const collapsed = line.runs.filter((run) => isNumber(run.figures.collapse_step) && run.steps - run.figures.collapse_step >= 5).length;
  return [...pills, collapsed ? h("span.pill.bad", null, many ? `${collapsed} collapsed` : "collapsed") : null];
}

const tooFew = (seeds) => `${plural(seeds, "seed")}: too few to tell`;

// Runs, or groups of runs, as a table that sorts by each column.
function runsCard(store) {
  const mean = (values) => { const kept = values.filter(isNumber); return kept.length ? kept.reduce((a, b) => a + b, 0) / kept.length : null; };
  const valuesOfRuns = (line, f) => line.runs.map((run) => f(run)).filter(isNumber);
  const spread = (values, format) => {
    if (!values.length) return "–";
    const low = Math.min(...values), high = Math.max(...values);
    return low === high ? format(low) : [format(mean(values)), h("br"), h("span.hint", null, `${format(low)} to ${format(high)}`)];
  };
  const figures = [
    ["reward", (r) => r.figures.reward_last, fixed, "mean of the last five steps"],
    ["held-out", (r) => r.figures.held_out_last, fixed, "the last evaluation"],
    ["mismatch k3", (r) => r.figures.k3, exactly, "mean over steps, nats a token"],
    ["max |Δlogp|", (r) => r.figures.max_abs, exactly, "nats"],
    ["tokens/s", (r) => r.figures.tokens_per_s, number, ""],
    ["steps", (r) => r.steps, number, ""],
  ];
  const all = lines(store.data), rewards = (line) => valuesOfRuns(line, figures[0][1]);
  // Whether the seeds of a combination are all below, or all above, those of the combination with the best mean.
  const seeds = all.some((line) => line.runs.length > 1);
  const best = all.reduce((a, b) => ((mean(rewards(b)) ?? -Infinity) > (mean(rewards(a)) ?? -Infinity) ? b : a));
  const verdict = (line) => {
    if (line === best) return "the best mean";
    if (!rewards(line).length) return "–";
    const seeds = Math.min(rewards(line).length, rewards(best).length);
    if (seeds < store.data.least_seeds) return tooFew(seeds);
    return largest(rewards(line)) < least(rewards(best)) ? h("span.score.bad", null, "below it with every seed") : "within the seeds' spread of it";
  };
  const columns = [
    { name: "run", cell: (line) => [swatch(lineColor(line.color)), " ", visible(line.name)] },
    { name: "state", cell: states },
    ...(seeds ? [{ name: "reward against the best", cell: verdict }] : []),
    ...figures.map(([name, f, format, title]) => ({ name, title, num: true, highFirst: true,
      key: (line) => mean(valuesOfRuns(line, f)) ?? -Infinity, cell: (line) => spread(valuesOfRuns(line, f), format) })),
  ];
  return h("article.card", null, h("h3", null, "Runs"), sortedTable("table of runs", columns, all));
}
