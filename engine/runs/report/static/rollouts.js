// The browser of rollouts: filter, sort, page, and tokens coloured by a figure.

const SORTS = {
  worst: ["worst first", (c) => (a, b) => up(c.reward, a, b) || down(c.step, a, b) || a - b],
  best: ["best first", (c) => (a, b) => down(c.reward, a, b) || down(c.step, a, b) || a - b],
  newest: ["newest first", (c) => (a, b) => down(c.step, a, b) || a - b],
  oldest: ["oldest first", () => (a, b) => a - b],
  longest: ["longest first", (c) => (a, b) => down(c.length, a, b) || down(c.step, a, b)],
  unlikely: ["least likely tokens first", (c) => (a, b) => up(c.logprob, a, b) || a - b],
  advantage: ["lowest advantage first", (c) => (a, b) => up(c.advantage, a, b) || down(c.step, a, b)],
  mismatch: ["largest mismatch first", (c) => (a, b) => down(c.mismatch, a, b) || a - b],
};
// A missing value (null) comes last in both directions.
const up = (column, a, b) => (column[a] ?? Infinity) - (column[b] ?? Infinity) || 0;
const down = (column, a, b) => (column[b] ?? -Infinity) - (column[a] ?? -Infinity) || 0;

const RED = [214, 69, 40], BLUE = [38, 110, 210];
const tint = ([r, g, b], share) => {
  const shade = (most) => `rgba(${r}, ${g}, ${b}, ${(most * Math.min(1, share)).toFixed(3)})`;
  return `light-dark(${shade(0.42)}, ${shade(0.62)})`;
};
const COLORS = {
  probability: { name: "probability of the token", low: "certain", high: "unlikely", ramp: [0, RED],
    of: (t) => (isNumber(t.logprob) ? tint(RED, Math.min(1, -t.logprob / 5)) : "transparent") },
  advantage: { name: "advantage", low: "worse than its group", high: "better", ramp: [RED, BLUE],
    of: (t) => (isNumber(t.advantage) ? tint(t.advantage < 0 ? RED : BLUE, Math.abs(t.advantage) / 2) : "transparent") },
  ratio: { name: "ratio trainer / sampler", low: "below 1", high: "above 1", ramp: [RED, BLUE],
    of: (t) => (t.difference ? tint(t.difference < 0 ? RED : BLUE, 0.15 + Math.abs(t.difference) * 4) : "transparent") },
  mismatch: { name: "mismatch |Δlogp|", low: "0.0", high: "large", ramp: [0, RED],
    of: (t) => (t.difference ? tint(RED, 0.2 + Math.max(0, 5 + Math.log10(Math.abs(t.difference))) / 5) : "transparent") },
};

// How a trajectory ended, in words; see docs/environments.md.
const ENDS = {
  done: "the environment ended it",
  turns: "it had all the turns that it may have",
  tokens: "its last turn was cut before a stop token, or no token was left",
  context: "the context had no room for another turn",
  "time limit": "the environment took too long; it is not trained on",
  error: "it is not trained on",
};

class RolloutBrowser {
  constructor(store) {
    this.store = store;
    this.run = 0;
    this.page = 0;
    this.perPage = 25;
    this.color = "probability";
    this.logs = new Map();
    this.found = [];
    this.turn = 0;  // of the newest search: an older one that is still going gives up
    this.status = h("p.hint", { role: "status", "aria-live": "polite" });
    this.list = h("ol.rows", { "aria-label": "rollouts" });
    this.pager = h("nav.pager", { "aria-label": "pages of rollouts" });
    this.more = h("span");
    this.ramp = h("span.ramp");
    this.element = h("section", { id: "rollouts", "aria-labelledby": "rollouts-title" },
      h("header", null, h("h2", { id: "rollouts-title" }, "Rollouts"), h("p.lead", null, "Every completion, as the tokens that were drawn and trained on. The worst of the last steps come first.")),
      h("div.card", null, this.filters(), h("div.controls", null, this.status, this.more, this.ramp), this.list, this.pager));
    this.showRamp();
    // The rollouts are unpacked when a person comes near them.
    const seen = new IntersectionObserver((entries) => { if (entries.some((e) => e.isIntersecting)) { seen.disconnect(); this.search(); } }, { rootMargin: "600px" });
    seen.observe(this.element);
  }

  get log() {
    if (!this.logs.has(this.run)) this.logs.set(this.run, new Rollouts(this.run));
    return this.logs.get(this.run);
  }

  filters() {
    const changed = () => { this.page = 0; clearTimeout(this.timer); this.timer = setTimeout(() => this.search(), 180); };
    const field = (name, control) => h("label", null, name, control);
    this.fields = {
      sort: h("select", { onchange: changed }, Object.entries(SORTS).map(([key, [name]]) => h("option", { value: key }, name))),
      reward: h("select", { onchange: changed }, [["", "all"], ["low", "lowest possible"], ["middle", "between"], ["high", "highest possible"]].map(([key, name]) => h("option", { value: key }, name))),
      from: h("input", { type: "number", min: "0", oninput: changed }),
      to: h("input", { type: "number", min: "0", oninput: changed }),
      finish: h("select", { onchange: changed }, [["", "all"], ["0", "with a stop token"], ["1", "cut short"]].map(([key, name]) => h("option", { value: key }, name))),
      text: h("input", { type: "search", placeholder: "in prompt or completion", oninput: changed }),
      color: h("select", { onchange: (e) => { this.color = e.target.value; this.showRamp(); this.show(); } }, Object.entries(COLORS).map(([key, { name }]) => h("option", { value: key }, name))),
    };
    const f = this.fields;
    const run = runChooser(this.store.data, (number_) => { this.run = number_; this.page = 0; this.search(); });
    return h("form.filters", { onsubmit: (e) => e.preventDefault(), role: "search", "aria-label": "filter rollouts" },
      run && field("run", run), field("order", f.sort), field("reward", f.reward), field("from step", f.from), field("to step", f.to), field("finish", f.finish), field("text", f.text), field("colour tokens by", f.color));
  }

  showRamp() {
    const { low, high, ramp } = COLORS[this.color];
    const bar = h("i");
    bar.style.background = `linear-gradient(to right, ${ramp[0] ? tint(ramp[0], 1) : "transparent"}, ${ramp[0] ? "transparent, " : ""}${tint(ramp[1], 1)})`;
    fill(this.ramp, low, bar, high);
  }

  // Find the rows that fit, sort them, and show a page of them.
  async search() {
    const turn = (this.turn += 1);
    const wanted = this.store.data.runs[this.run].rollouts.rows;
    const log = this.log;
    this.status.textContent = "reading …";
    await log.read(wanted, (share) => { if (turn === this.turn) this.status.textContent = `reading ${Math.round(100 * share)} % …`; });
    if (turn !== this.turn) return;
    const c = log.columns, f = this.fields;
    const low = log.rows ? least(c.reward) : 0, high = log.rows ? largest(c.reward) : 0;
    const reward = { "": () => true, low: (r) => r <= low, middle: (r) => r > low && r < high, high: (r) => r >= high }[f.reward.value];
    const from = f.from.value === "" ? -Infinity : Number(f.from.value), to = f.to.value === "" ? Infinity : Number(f.to.value);
    const finish = f.finish.value;
    let rows = [];
    for (let i = 0; i < log.rows; i += 1) {
      if (c.step[i] >= from && c.step[i] <= to && reward(c.reward[i]) && (finish === "" || String(c.cut[i]) === finish)) rows.push(i);
    }
    if (f.text.value) rows = await this.withText(rows, f.text.value.toLowerCase(), turn);
    if (turn !== this.turn) return;
    rows.sort(SORTS[f.sort.value][1](c));
    this.found = rows;
    this.page = Math.min(this.page, Math.max(0, Math.ceil(rows.length / this.perPage) - 1));
    const note = this.store.data.runs[this.run].rollouts;
    this.status.textContent = `${plural(rows.length, "rollout")} of ${log.rows.toLocaleString("en")}`
      + (note.left_out ? `; ${note.left_out.toLocaleString("en")} others, of steps between these, are left out of this page` : "")
      + (note.damage ? `; ${visible(note.damage)}` : "");
    await this.show();
  }

  // The rows whose prompt or completion has the word. Blocks are read one after the other, with pauses.
  async withText(rows, word, turn) {
    const kept = [];
    let began = performance.now();
    for (let k = 0; k < rows.length; k += 1) {
      const [texts, i] = await this.log.text(rows[k]);
      if (texts.text[i].toLowerCase().includes(word) || texts.prompts[texts.prompt[i]].toLowerCase().includes(word)) kept.push(rows[k]);
      if (performance.now() - began > 40) {
        this.status.textContent = `searching ${Math.round((100 * k) / rows.length)} % …`;
        await pause();
        if (turn !== this.turn) return [];
        began = performance.now();
      }
    }
    return kept;
  }

  async show() {
    const log = this.log;
    const rows = this.found.slice(this.page * this.perPage, (this.page + 1) * this.perPage);
    const turn = this.turn;
    const items = [];
    for (const row of rows) items.push(this.row(row, ...(await log.text(row))));
    if (turn !== this.turn) return;
    fill(this.list, items.length ? items : h("li.hint", null, log.rows ? "No rollout fits." : "There are no rollouts yet."));
    this.showPager();
  }

  showPager() {
    const pages = Math.max(1, Math.ceil(this.found.length / this.perPage));
    const go = (page, name) => h("button", { type: "button", disabled: page < 0 || page >= pages || page === this.page, onclick: async () => {
      this.page = page;
      await this.show();
      this.element.scrollIntoView({ block: "start" });
      (this.pager.querySelector(`button[data-name="${name}"]:not(:disabled)`) || this.pager.querySelector("button:not(:disabled)"))?.focus({ preventScroll: true });
    }, "data-name": name }, name);
    fill(this.pager, go(0, "first"), go(this.page - 1, "previous"), h("span", null, `page ${(this.page + 1).toLocaleString("en")} of ${pages.toLocaleString("en")}`), go(this.page + 1, "next"), go(pages - 1, "last"),
      h("label", null, "rows ", h("select", { value: String(this.perPage), onchange: (e) => { this.perPage = Number(e.target.value); this.page = 0; this.show(); } },
        [25, 50, 100].map((n) => h("option", { value: String(n), selected: n === this.perPage }, String(n))))));
  }

  row(row, texts, i) {
    const c = this.log.columns;
    const item = h("li.row", null,
      h("div.where", null, `step ${c.step[row]}`, h("br"), `prompt ${c.prompt[row]} · ${c.sample[row]}`),
      h("div.said.strip", null, h("span.prompt", null, visible(clip(texts.prompts[texts.prompt[i]], 400))), this.strip(row, texts, i)),
      h("div.facts", null, score(c.reward[row] ?? NaN), h("span", null, `advantage ${number(c.advantage[row])}`), h("span", null, plural(c.length[row], "token")),
        texts.turns[i] ? h("span", null, `${plural(texts.turns[i].length, "turn")}, ended: ${visible(texts.finish[i])}`) : c.cut[row] ? h("span.score.mid", null, "cut short") : null,
        h("button", { type: "button", "aria-expanded": "false", "aria-label": `more about step ${c.step[row]}, prompt ${c.prompt[row]}, sample ${c.sample[row]}`,
          onclick: (e) => this.toggle(e.currentTarget, item, row, texts, i) }, "more")));
    return item;
  }

  piece(id) {
    return this.store.data.runs[this.run].pieces[id] ?? `⟨${id}⟩`;
  }

  token(row, texts, i, k) {
    return { id: texts.ids[i][k], logprob: fromJson(texts.logprobs[i][k]), advantage: this.log.columns.advantage[row], difference: texts.differences[i] ? fromJson(texts.differences[i][k]) : 0 };
  }

  // The completion's tokens, each with its colour. A long one is cut here; "more" has all of it.
  strip(row, texts, i, limit = 400) {
    const color = COLORS[this.color].of;
    const marks = texts.ids[i].slice(0, limit).map((id, k) => {
      const token = this.token(row, texts, i, k);
      const piece = this.piece(id);
      if (token.logprob === null) return h("span.between", { title: `token ${id}, not drawn by the model` }, visible(piece));
      const mark = h(/^<.*>$/.test(piece) ? "mark.special" : "mark", { title: `token ${id}, probability ${isNumber(token.logprob) ? number(Math.exp(token.logprob)) : "–"}, log-probability ${number(token.logprob)}${token.difference ? `, trainer − sampler ${number(token.difference)}` : ""}` }, visible(piece));
      mark.style.setProperty("--tint", color(token));
      return mark;
    });
    if (texts.ids[i].length > limit) marks.push(h("span.hint", null, ` … ${plural(texts.ids[i].length - limit, "more token")}`));
    return marks;
  }

  async toggle(button, item, row, texts, i) {
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    button.textContent = open ? "more" : "less";
    if (open) { item.querySelector(".detail").remove(); return; }
    item.append(h("div.detail", null, this.turnTable(row, texts, i), this.tokenTable(row, texts, i), await this.group(row)));
  }

  // Turn by turn what the environment said and what the model drew; null for a completion.
  turnTable(row, texts, i) {
    if (!texts.turns[i]) return null;
    const drawn = (k) => texts.logprobs[i][k] !== null, between = (from, to) => visible(texts.ids[i].slice(from, to).map((id) => this.piece(id)).join(""));
    let read = 0;
    const rows = texts.turns[i].map(([start, reward], turn) => {
      let end = start;
      while (end < texts.ids[i].length && drawn(end) && (end === start || !texts.turns[i].some(([other]) => other === end))) end += 1;
      const cells = [String(turn + 1), turn ? between(read, start) : visible(clip(texts.prompts[texts.prompt[i]], 400)), between(start, end), number(fromJson(reward)), String(end - start)];
      read = end;
      return h("tr", null, cells.map((cell, n) => h(n === 1 || n === 2 ? "td" : "td.num", null, n === 1 || n === 2 ? h("span.said", null, cell) : cell)));
    });
    const why = [texts.error[i], ENDS[texts.finish[i]]].filter(Boolean).map(visible).join("; ");
    return scrolled("turns",
      h("p.hint", null, `What the environment said, and what the model drew. The end: ${visible(texts.finish[i])}${why ? ` (${why})` : ""}.`), h("table.turns", null,
      h("thead", null, h("tr", null, h("th.num", null, "turn"), h("th", null, "environment"), h("th", null, "model"), h("th.num", null, "reward"), h("th.num", null, "tokens"))), h("tbody", null, rows)));
  }

  tokenTable(row, texts, i) {
    const run = this.store.data.runs[this.run];
    const rows = texts.ids[i].slice(0, 2000).map((id, k) => {
      const token = this.token(row, texts, i, k);
      return h(token.logprob === null ? "tr.between" : "tr", null, h("td.num", null, String(k)), h("td.num", null, String(id)), h("td", null, h("span.said", null, visible(this.piece(id)))),
        h("td.num", null, token.logprob === null ? "not drawn" : number(token.logprob)), h("td.num", null, isNumber(token.logprob) ? number(Math.exp(token.logprob)) : "–"),
        h("td.num", null, token.logprob === null ? "–" : texts.differences[i] ? exactly(token.difference) : run.exact ? "0.0" : "not recorded"));
    });
    return scrolled("tokens", h("p.hint", null, `Problem ${visible(texts.problem[i])}. Tokens:`), h("table", null,
      h("thead", null, h("tr", null, ["position", "id"].map((n) => h("th.num", null, n)), h("th", null, "token"), ["log-probability", "probability", "trainer − sampler"].map((n) => h("th.num", null, n)))), h("tbody", null, rows)));
  }

  // The other completions of the same prompt in the same step.
  async group(row) {
    const c = this.log.columns;
    const same = (i) => c.step[i] === c.step[row] && c.prompt[i] === c.prompt[row];
    let first = row, last = row;
    while (first > 0 && same(first - 1)) first -= 1;
    while (last + 1 < this.log.rows && same(last + 1)) last += 1;
    const items = [];
    for (let i = first; i <= last; i += 1) {
      if (i === row) continue;
      const [texts, k] = await this.log.text(i);
      items.push(h("li.row", null, h("div.where", null, `sample ${c.sample[i]}`), h("div.said.strip", null, this.strip(i, texts, k, 120)), h("div.facts", null, score(c.reward[i] ?? NaN), h("span", null, `advantage ${number(c.advantage[i])}`))));
    }
    return items.length ? [h("p.hint", null, "The other completions of its group:"), h("ol.rows", null, items)] : null;
  }

  // The run has gone on: say so, and let the person choose when the list changes.
  grown() {
    const wanted = this.store.data.runs[this.run].rollouts.rows;
    const news = wanted - this.log.rows;
    if (news > 0 && this.log.rows) fill(this.more, h("button", { type: "button", onclick: () => { fill(this.more); this.search(); } }, `show ${plural(news, "new rollout")}`));
    else if (news > 0) this.search();
  }
}
