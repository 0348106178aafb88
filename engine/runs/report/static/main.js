// Begins here: reads the data, builds the page, and follows a run that goes on.

const app = document.querySelector("main");
const store = { data: null, browser: null };
const pulse = source.live ? h("span.hint", { id: "pulse", role: "status" }, "live") : null;
if (pulse) bar.lastChild.before(pulse);

// The whole page. The browser of rollouts is kept, with what a person has chosen there.
function build() {
  for (const chart of charts.splice(0)) if (chart.plot) chart.plot.destroy();
  const data = store.data;
  store.browser ||= new RolloutBrowser(store);
  document.querySelector(".bar a[href='#factors']").hidden = !data.combinations.length;
  fill(app, masthead(data), overview(store), factorsSection(store), chartSections(store), store.browser.element, settingsSection(data), ledgerSection(data),
    h("footer", null, source.live ? "Served by zerokl watch from the run's files; it changes nothing." : `Written by zerokl report on ${data.made}. One file, without a network.`));
}

function failed(text) {
  fill(app, h("section", { role: "alert" }, h("h1", null, "This page cannot be shown"), h("p", null, text)));
}

// Replace the parts that new steps change. A part that a person is using is left until they are done.
function update() {
  if (document.querySelector(".masthead") === null) { build(); return; }
  const data = store.data;
  const replace = (old, make) => { if (old && !old.contains(document.activeElement)) old.replaceWith(make()); };
  for (let i = charts.length - 1; i >= 0; i -= 1) {
    const inside = charts[i].box.closest("#overview");
    if (inside && !inside.contains(document.activeElement)) { charts[i].plot.destroy(); charts.splice(i, 1); }
  }
  replace(document.querySelector(".masthead"), () => masthead(data));
  replace(document.getElementById("overview"), () => overview(store));
  replace(document.getElementById("ledger"), () => ledgerSection(data));
  redrawCharts();
  store.browser.grown();
}

function pulseText(data, open) {
  if (data.planned > data.runs.length) return `live: ${data.runs.length} of ${data.planned} runs have begun`;
  return open ? "live" : "all runs have ended";
}

// Ask the server for what is new, some seconds after the last answer.
async function follow() {
  let missed = 0;
  for (;;) {
    await new Promise((resolve) => { setTimeout(resolve, document.hidden ? 10000 : 2000); });
    try {
      const data = await source.get("payload");
      if (!data) throw new Error("refused");
      missed = 0;
      const before = JSON.stringify(store.data.runs.map((run) => [run.steps, run.status, run.rollouts.rows]));
      const begun = data.runs.length !== store.data.runs.length;
      const charted = store.data.charts.filter((chart) => has(store.data, chart.metric)).length;
      store.data = data;
      const changed = before !== JSON.stringify(data.runs.map((run) => [run.steps, run.status, run.rollouts.rows]));
      // A metric that appears for the first time needs a chart of its own.
      // Another cell of an ablation has begun: the parts that list the runs are made again.
      if (begun) { store.browser = null; build(); }
      else if (charted !== data.charts.filter((chart) => has(data, chart.metric)).length) build();
      else if (changed) update();
      const open = data.runs.filter((run) => run.status.state === "open").length;
      pulse.textContent = pulseText(data, open);
    } catch {
      missed += 1;
      if (missed > 1) pulse.textContent = "the server does not answer; this is what it said last";
    }
  }
}

async function begin() {
  try {
    store.data = await source.get("payload");
  } catch (error) {
    failed(`Its data cannot be read (${error.message}). A browser of 2024 or later is needed.`);
    return;
  }
  if (!store.data) { failed("The server refuses the data. Open the address that zerokl watch has printed, with its token."); return; }
  const longest = Math.max(...store.data.runs.map((run) => run.steps));
  view.smooth = longest > 60 ? 0.8 : 0;
  build();
  if (source.live) follow();
}

begin();
