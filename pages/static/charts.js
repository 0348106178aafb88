// Charts by uPlot: lines with bands, marks and bars, on a linear or a logarithmic axis.

const charts = [];  // of everything that is drawn, to draw it again

function redrawCharts() {
  for (const chart of charts) if (chart.box.isConnected) chart.redraw();
}

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const largest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

// A series as uPlot takes it. kind: line; both, which is a line with its marks; marks; hollow; or bars.
function seriesOf({ label, kind = "line", dash, points, columns, size = 6 }, color) {
  const marks = kind === "marks" || kind === "hollow";
  const few = points && columns.x.length <= 40;
  const shown = marks || kind === "both" || few || columns.x.length === 1;
  const series = { label, stroke: color, width: 2, dash, spanGaps: true,
    points: { show: shown && kind !== "bars", size, width: 1.5, stroke: color, fill: kind === "hollow" ? resolved("var(--card)") : color } };
  if (marks) series.paths = () => null;
  if (kind === "bars") Object.assign(series, { fill: color, width: 0, paths: uPlot.paths.bars({ size: [0.92, Infinity] }) });
  return series;
}

// What uPlot takes: aligned data, series and bands. curves: [{label, color, columns, faint, ...}]; columns has x
// and y, and may have low and high, which make a band, and raw, which a faint line shows behind a smoothed one.
function aligned(curves) {
  const tables = [], series = [{}], bands = [];
  const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
  for (const curve of curves) {
    const { x, y, low, high, raw } = curve.columns;
    const line = seriesOf(curve, resolved(curve.color, curve.share));
    if (low) {
      const i = series.length;
      tables.push([x, y, high, low]);
      series.push(line, { ...edge }, { ...edge });
      bands.push({ series: [i + 1, i + 2], fill: resolved(curve.color, 0.16) });
    } else if (curve.faint) {
      tables.push([x, raw, y]);
      series.push({ stroke: resolved(curve.color, 0.25), width: 1, points: { show: false }, spanGaps: true }, line);
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

// Whole powers of ten about the values, and at most seven of them as ticks.
function powers(low, high) {
  if (!(low > 0)) return [0.1, 1];
  const first = Math.floor(Math.log10(low));
  return [10 ** first, 10 ** Math.max(Math.ceil(Math.log10(high)), first + 1)];
}
function powerTicks(_, axis, low, high) {
  const first = Math.round(Math.log10(low)), last = Math.round(Math.log10(high));
  const stride = Math.max(1, Math.ceil((last - first) / 6));
  return Array.from({ length: Math.floor((last - first) / stride) + 1 }, (_unused, i) => 10 ** (first + i * stride));
}

// Those of the places with words whose words do not touch the words before.
function fitting(u, places, low, high) {
  let end = -Infinity;
  return places.filter(([x, words]) => {
    const middle = ((x - low) / (high - low)) * (u.width - 70), half = 3.4 * words.length + 4;
    if (x < low || x > high || middle - half < end) return false;
    end = middle + half;
    return true;
  });
}

// Vertical lines with words above the chart, on the side of the line that has more room.
function drawFlags(u, flags) {
  const { ctx, bbox } = u, scale = devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = resolved("var(--text)");
  ctx.font = `600 ${12 * scale}px system-ui, sans-serif`;
  flags.forEach(([place, words], row) => {
    const x = Math.round(u.valToPos(place, "x", true)), y = bbox.top + (18 * row - 28) * scale;
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    const left = x > bbox.left + bbox.width / 2;
    ctx.setLineDash(row ? [] : [4 * scale, 3 * scale]);
    ctx.beginPath();
    ctx.moveTo(x, y - 8 * scale);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.textAlign = left ? "right" : "left";
    ctx.fillText(words, x + (left ? -5 : 5) * scale, y, left ? x - bbox.left : bbox.left + bbox.width - x);
  });
  ctx.restore();
}

// The card behind the chart, which a saved picture has too.
function fillBack({ ctx }) {
  ctx.fillStyle = resolved("var(--card)");
  ctx.fillRect(0, 0, ctx.canvas.width, ctx.canvas.height);
}

const POWERS = Array.from({ length: 50 }, (_, i) => 2 ** i);

// A chart in `box`. make() returns {curves, height, description} and of unit, zero, range, ticks (places with words
// below the axis), flags, log (a factor on the least value, for room below it) and rows (names of the places of a chart that lies on its side) what it needs.
// onCursor(index or null, data) is called where a person points.
function draw(box, make, onCursor) {
  const entry = { box, plot: null };
  entry.redraw = () => {
    const spec = make();
    const { data, series, bands } = aligned(spec.curves);
    const options = {
      ...axesOf(spec, box.clientWidth), series, bands, width: Math.max(200, box.clientWidth), height: spec.height, legend: { show: false },
      cursor: { ...(spec.ticks || spec.rows ? {} : { sync: { key: "zerokl" } }), points: { size: 7 }, drag: { x: !spec.rows, y: false } },
      padding: [spec.flags?.length ? 44 : 10, 14, 0, 0],
      hooks: { setCursor: [(u) => onCursor && onCursor(u.cursor.idx, u.data)], drawClear: [fillBack], draw: [(u) => drawFlags(u, spec.flags || [])] },
    };
    if (entry.plot) entry.plot.destroy();
    box.replaceChildren();
    entry.plot = new uPlot(options, data, box);
    // A right click is one on the picture, which the browser can save, and not on what lies over it.
    entry.plot.over.addEventListener("mousedown", ({ button, target }) => {
      if (button !== 2) return;
      target.style.pointerEvents = "none";
      setTimeout(() => { target.style.pointerEvents = ""; }, 500);
    });
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

// Axes and scales of a chart.
function axesOf(spec, width) {
  const axis = { stroke: resolved("var(--soft)"), grid: { stroke: resolved("var(--grid)"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const x = { ...axis, size: 30, space: 60, values: (_, v) => ticks(v) }, isBytes = spec.unit === "bytes";
  const y = { ...axis, incrs: isBytes ? POWERS : undefined, size: isBytes ? 74 : 54, values: (_, values) => ticks(values, spec.unit) };
  const scales = { x: { time: false }, y: { range: spec.range || range(spec.zero, spec.unit) } };
  if (spec.log) {
    Object.assign(scales.y, { distr: 3, log: 10, range: (_, low, high) => powers(low * spec.log, high) });
    Object.assign(y, { splits: powerTicks, filter: (_, values) => values, values: (_, values) => values.map((v) => `1e${Math.round(Math.log10(v))}`) });
  }
  if (spec.ticks) {
    x.splits = (u, _, low, high) => fitting(u, spec.ticks, low, high).map(([place]) => place);
    x.values = (_, places) => places.map((place) => spec.ticks.find(([other]) => other === place)[1]);
  }
  if (spec.rows) {
    const size = Math.min(0.42 * width, 12 + 6.6 * largest(spec.rows.map((name) => name.length)));
    // Names differ least at their ends, so a long one is cut in its middle.
    const most = Math.floor((size - 12) / 6.6), half = Math.floor((most - 1) / 2);
    const cut = (name) => (name.length > most ? `${name.slice(0, half)}…${name.slice(half - most + 1)}` : name);
    Object.assign(scales.x, { ori: 1, dir: -1, range: [-0.5, spec.rows.length - 0.5] });
    Object.assign(scales.y, { ori: 0 });
    Object.assign(x, { side: 3, size, splits: () => spec.rows.map((_, i) => i), values: () => spec.rows.map(cut) });
    Object.assign(y, { side: 2, size: 30, space: 50 });
  }
  return { axes: [x, y], scales };
}

// The charts that pages/charts.py has put on the page.
for (const box of document.querySelectorAll("[data-chart]")) {
  const given = JSON.parse(box.dataset.chart), reading = box.parentElement.querySelector(".reading");
  // Half a place of room at both ends.
  const room = given.x.length > 1 ? (given.x[1] - given.x[0]) / 2 : 0.5;
  const x = [given.x[0] - room, ...given.x, given.x[given.x.length - 1] + room];
  const curves = given.series.map(({ name, kind, y }, i) => ({ label: name, kind, color: lineColor(i), columns: { x, y: [null, ...y, null] } }));
  const show = (index) => {
    const i = (index ?? 0) - 1;
    reading.textContent = i < 0 || i >= given.x.length ? "" : `${given.names[i] ?? given.x[i]}: ${given.series.map(({ name, y }) => `${name} ${number(y[i])}`).join(", ")}`;
  };
  // Below the least bar there is room, so that a bar of one is seen.
  const bars = given.series.some(({ kind }) => kind === "bars");
  draw(box, () => ({ curves, height: 250, log: bars ? 0.5 : 1, ticks: given.ticks, flags: given.flags, description: given.label }), show);
}
